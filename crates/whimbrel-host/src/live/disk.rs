//! A disk of a running machine: an overlay of its own over something that never changes, every write tracked.

use super::{Patient, Stall};
use crate::{
    error::HostError,
    host::Host,
    layout::Layout,
    record::{DiskBase, Record},
    slot::Slot,
};
use std::{os::unix::fs::MetadataExt, path::Path, sync::Arc};
use whimbrel_block::{Cow, Device, DiskPages, FileDevice, OverlayPlace, Padded, Tracked, ZeroDevice};
use whimbrel_core::{Digest, MachineName, PAGE_SIZE, PageSet};
use whimbrel_machine::PageArray;
use whimbrel_store::{Store, StoredDisk};

/// One disk.
pub(crate) struct LiveDisk {
    name: String,
    cow: Arc<Cow>,
    tracked: Arc<Tracked>,
    /// Its base, if a part of that lies on other hosts.
    patient: Option<Arc<Patient>>,
}

/// Disks of a machine of which a part lies on other hosts.
pub(super) type Patients = Vec<(String, Arc<Patient>)>;

/// Whether the overlay begins empty or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overlay {
    New,
    Existing,
}

impl LiveDisk {
    /// Opens disk `index` of the machine and lets the slot serve it.
    pub(crate) fn open(
        (host, stall): (&Host, &Arc<Stall>),
        record: &Record,
        index: usize,
        overlay: Overlay,
        slot: &Slot,
    ) -> Result<Self, HostError> {
        let name = format!("disk{index}");
        let (layout, machine, base) = (&host.layout, &record.name, &record.bases[index]);
        let size = record.config.disks[index].size.0;
        let mut patient = None;
        let over = |root, pages| {
            let image = host.image(record.origin, (&name, Some(root), pages));
            let elsewhere = image.is_elsewhere();
            let disk: Arc<dyn Device> = Arc::new(StoredDisk::new(image));
            if !elsewhere {
                return disk;
            }
            patient.insert(Arc::new(Patient::new(disk, stall.clone()))).clone()
        };
        let failed = |source| HostError::Disk { disk: name.clone(), source };
        let place =
            OverlayPlace { dir: layout.machine(machine).join(&name), live_dir: layout.live_bitmaps() };
        let (base, base_id) = open_base(over, base, size).map_err(failed)?;
        let cow = match overlay {
            Overlay::New => {
                place.remove().map_err(|source| failed(source.into()))?;
                Cow::create(&place, base, base_id)
            }
            Overlay::Existing => Cow::open(&place, base, base_id),
        };
        let cow = Arc::new(cow.map_err(|source| failed(source.into()))?);
        let tracked = Arc::new(Tracked::new(cow.clone()));
        slot.switch(index).set(tracked.clone()).map_err(|source| failed(source.into()))?;
        Ok(Self { name, cow, tracked, patient })
    }

    /// The disk as a page array.
    pub(crate) fn pages(&self) -> Box<dyn PageArray> {
        Box::new(DiskPages { name: self.name.clone(), device: self.tracked.clone() })
    }

    /// Makes what was written durable. A failure is the guest's to hear, at its own next flush.
    pub(crate) fn settle(&self) {
        if let Err(error) = self.tracked.flush() {
            tracing::warn!(
                disk = self.name,
                error = &error as &dyn std::error::Error,
                "a disk could not be flushed"
            );
        }
    }

    pub(super) fn patient(&self) -> Option<(String, Arc<Patient>)> {
        self.patient.as_ref().map(|patient| (self.name.clone(), patient.clone()))
    }

    /// The disk as a device.
    pub(crate) fn device(&self) -> &Arc<Tracked> {
        &self.tracked
    }

    /// The pages that may differ from its base.
    pub(crate) fn owned(&self) -> PageSet {
        self.cow.owned()
    }

    /// Bytes that belong to this machine alone.
    pub(crate) fn owned_bytes(&self) -> u64 {
        self.cow.owned().count() * PAGE_SIZE as u64
    }
}

/// A disk of a machine that does not run.
pub(crate) struct RestingDisk {
    cow: Arc<Cow>,
    pages: DiskPages,
}

impl RestingDisk {
    /// Opens disk `index` of the machine.
    pub(crate) fn open(
        (layout, store): (&Layout, &Store),
        machine: &MachineName,
        (index, size): (usize, u64),
        base: &DiskBase,
    ) -> Result<Self, HostError> {
        let name = format!("disk{index}");
        let failed = |source| HostError::Disk { disk: name.clone(), source };
        let place =
            OverlayPlace { dir: layout.machine(machine).join(&name), live_dir: layout.live_bitmaps() };
        let over = |root, pages| -> Arc<dyn Device> {
            Arc::new(StoredDisk::new(store.image(Some(root), pages).or_elsewhere(None)))
        };
        let (base, base_id) = open_base(over, base, size).map_err(failed)?;
        let cow = Cow::open(&place, base, base_id).map_err(|source| failed(source.into()))?;
        let cow = Arc::new(cow);
        let pages = DiskPages { name, device: Arc::new(Tracked::new(cow.clone())) };
        Ok(Self { cow, pages })
    }

    /// The pages that may differ from its base.
    pub(crate) fn owned(&self) -> PageSet {
        self.cow.owned()
    }

    /// The disk as a page array.
    pub(crate) fn pages(&mut self) -> &mut dyn PageArray {
        &mut self.pages
    }
}

/// Removes the overlays of a machine, their bitmaps in memory included. What cannot be removed is only garbage.
pub(crate) fn remove_overlays(layout: &Layout, machine: &MachineName) {
    for entry in std::fs::read_dir(layout.machine(machine)).into_iter().flatten().flatten() {
        let place = OverlayPlace { dir: entry.path(), live_dir: layout.live_bitmaps() };
        if place.dir.is_dir()
            && let Err(error) = place.remove()
        {
            tracing::warn!(%machine, error = &error as &dyn std::error::Error, "a disk overlay is left over");
        }
    }
}

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The unchanging device under an overlay, and a digest that names its content.
fn open_base(
    over: impl FnOnce(Digest, u64) -> Arc<dyn Device>,
    base: &DiskBase,
    size: u64,
) -> Result<(Arc<dyn Device>, Digest), Cause> {
    Ok(match base {
        DiskBase::Blank => (Arc::new(ZeroDevice { size }), Digest::of(b"blank")),
        DiskBase::File { path } => {
            let file = FileDevice::open_read_only(path)?;
            (Arc::new(Padded::new(Arc::new(file), size)?), file_id(path)?)
        }
        DiskBase::Image { root } => (over(*root, size / PAGE_SIZE as u64), *root),
    })
}

/// Names the content of a file without reading it: another inode, length or time of change is another content.
fn file_id(path: &Path) -> std::io::Result<Digest> {
    let meta = std::fs::metadata(path)?;
    let stamp = (meta.dev(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec());
    Ok(Digest::of(format!("{stamp:?}").as_bytes()))
}
