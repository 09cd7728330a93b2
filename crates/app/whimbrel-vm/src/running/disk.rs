//! A disk of a running machine: its overlay over a base that never changes, with every write tracked.
//!
//! All offsets are bytes of the disk. Alignment matters in two places: for a stored image beneath the
//! overlay, and in the view through which the store reads the disk. Other consumers read it as it is.

use super::{
    DiskBase, MachineDirs, MachineSetup, RemoteDisk, RunningError, Stall,
    capsule_images::overlay_key,
    error::Cause,
    missing_pages::{DiskPageStore, MissingDiskPages},
    runtime_dir::{self, RuntimeDir},
    tpm_disk::{TpmDisk, save_left},
};
use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Arc, Weak},
};
use whimbrel_alignment::PageAlignment;
use whimbrel_block::{
    AlignedPageView, AlignedPages, AlignmentMismatch, Cow, Device, DiskPages, FileDevice, MirrorLayer,
    OverlayDir, OverlayError, OverlayFiles, OverlayKey, OverlayState, Padded, RawDisk, TrackedDevice,
    WriteThrottle, ZeroDevice,
};
use whimbrel_capture::{Consumer, DirtyLog};
use whimbrel_core::{Digest, PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::PageArray;
use whimbrel_migrate::postcopy::page_fetcher::PageStore;
use whimbrel_store::{Store, StoredDisk};

/// Disk of a running machine.
pub struct RunningDisk {
    name: String,
    cow: Arc<Cow>,
    tracked: Arc<TrackedDevice>,
    /// Above that: may send writes of the machine to another host too.
    mirrored: Arc<MirrorLayer>,
    /// On top: the machine writes here.
    throttle: Arc<WriteThrottle>,
    /// Alignment in which the store reads it, that of its next image.
    alignment: Option<PageAlignment>,
    /// The base, if some of its pages are on other hosts.
    remote: Option<Arc<RemoteDisk>>,
    /// The base, if that is a file of the host.
    base_file: Option<BaseFile>,
    /// The TPM whose state it has, if it is no disk of the guest.
    tpm: Option<TpmDisk>,
}

/// A base that is a file of the host, open. It passes to another process as it is: what lies at its path may
/// have changed meanwhile.
#[derive(Debug, Clone)]
pub(crate) struct BaseFile {
    file: Arc<File>,
    /// Name of its content.
    pub(crate) id: Digest,
}

impl BaseFile {
    /// Opens the file and names its content without reading it: another inode, length or modification time is
    /// other content.
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        let stamp = (meta.dev(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec());
        Ok(Self { file: Arc::new(file), id: Digest::of(format!("{stamp:?}").as_bytes()) })
    }

    /// The file that another process had open, with the content that it named `id`.
    pub(crate) fn passed(file: File, id: Digest) -> Self {
        Self { file: Arc::new(file), id }
    }

    /// Copy of its descriptor.
    pub(crate) fn descriptor(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    fn device(&self, size: u64) -> Result<Arc<dyn Device>, Cause> {
        let device = FileDevice::new(self.descriptor()?, true)?;
        Ok(Arc::new(Padded::new(Arc::new(device), size)?))
    }
}

pub(super) type RemoteDisks = Vec<(String, Arc<RemoteDisk>)>;

/// Content beneath the overlay of a disk.
pub(super) struct BaseDisk {
    device: Arc<dyn Device>,
    id: Digest,
    remote: Option<Arc<RemoteDisk>>,
    file: Option<BaseFile>,
}

impl BaseDisk {
    /// Opens the base of disk `index`, which `passed` is if it is a file that another process had open.
    pub(super) fn open(
        setup: &MachineSetup,
        stall: &Arc<Stall>,
        (index, passed): (usize, Option<BaseFile>),
    ) -> Result<Self, RunningError> {
        let name = format!("disk{index}");
        let size = setup.config.disks[index].size.0;
        let mut remote = None;
        let over = |root, pages| {
            let image = setup.images.image(&name, Some(root), pages);
            let elsewhere = image.fetches_missing();
            let disk: Arc<dyn Device> = Arc::new(StoredDisk::new(image));
            if !elsewhere {
                return disk;
            }
            remote.insert(Arc::new(RemoteDisk::new(disk, stall.clone()))).clone()
        };
        let failed = |source| RunningError::Disk { disk: name.clone(), source };
        let file = match (&setup.bases[index], passed) {
            (DiskBase::File { path }, None) => {
                Some(BaseFile::open(path).map_err(|source| failed(source.into()))?)
            }
            (_, passed) => passed,
        };
        let opened = match &file {
            Some(file) => file.device(size).map(|device| (device, file.id)),
            None => open_base(over, &setup.bases[index], size),
        };
        let (mut device, id) = opened.map_err(failed)?;
        if let Some(fetcher) = &setup.fetcher {
            // Memory is the first array. The base has its former content again once the missing pages have
            // arrived.
            let missing = Arc::new(MissingDiskPages::new(device, fetcher.clone(), index + 1));
            device = remote.insert(Arc::new(RemoteDisk::new(missing, stall.clone()))).clone();
        }
        Ok(Self { device, id, remote, file })
    }
}

/// Whether the overlay starts empty or exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlay {
    /// New overlay, which reads as the base.
    New,
    /// Overlay that is there, with what was written.
    Existing,
}

impl RunningDisk {
    /// Opens disk `index` of the machine and serves it in the runtime directory.
    pub(super) fn open(
        setup: &MachineSetup,
        stall: &Arc<Stall>,
        index: usize,
        overlay: Overlay,
        slot: &RuntimeDir,
    ) -> Result<Self, RunningError> {
        let name = format!("disk{index}");
        let failed = |source| RunningError::Disk { disk: name.clone(), source };
        let place = setup.dirs.overlay(&name);
        let BaseDisk { device: base, id, remote, file } = BaseDisk::open(setup, stall, (index, None))?;
        let key = setup.images.overlay_key();
        let cow = match overlay {
            Overlay::New => Cow::create_with_key(&place, base, id, key.as_ref()),
            Overlay::Existing => open_grown(&place, (base, id), key.as_ref()),
        };
        let cow = cow.map_err(|source| failed(source.into()))?;
        Self::over((setup, index), cow, (remote, file), slot)
    }

    /// Disk `index` of a machine of which another process has passed the overlay, with its state if that
    /// process told it.
    pub(super) fn passed(
        setup: &MachineSetup,
        (index, base): (usize, BaseDisk),
        (files, state): (OverlayFiles, Option<&OverlayState>),
        slot: &RuntimeDir,
    ) -> Result<Self, RunningError> {
        let failed = |source| RunningError::Disk { disk: format!("disk{index}"), source };
        let key = setup.images.overlay_key();
        let cow = Cow::from_parts(files, state, base.device, base.id, key.as_ref());
        let cow = cow.map_err(|source| failed(source.into()))?;
        Self::over((setup, index), cow, (base.remote, base.file), slot)
    }

    fn over(
        (setup, index): (&MachineSetup, usize),
        cow: Cow,
        (remote, base_file): (Option<Arc<RemoteDisk>>, Option<BaseFile>),
        slot: &RuntimeDir,
    ) -> Result<Self, RunningError> {
        let name = format!("disk{index}");
        let cow = Arc::new(cow);
        let tracked = Arc::new(TrackedDevice::new(cow.clone()));
        let mirrored = Arc::new(MirrorLayer::new(tracked.clone()));
        let throttle = Arc::new(WriteThrottle::new(mirrored.clone()));
        let served = slot.swappable_disk(index).set(throttle.clone());
        served.map_err(|source| RunningError::Disk { disk: name.clone(), source: source.into() })?;
        let has_tpm = setup.config.tpm == u32::try_from(index).ok();
        let tpm = has_tpm.then(|| TpmDisk::new(throttle.clone(), slot.tpm_dir()));
        Ok(Self { name, cow, tracked, mirrored, throttle, alignment: None, remote, base_file, tpm })
    }

    /// Gives its state to a TPM that is about to start, if it is the disk of one.
    pub(super) fn write_tpm_file(&self, slot: &RuntimeDir) -> Result<(), RunningError> {
        let Some(tpm) = &self.tpm else { return Ok(()) };
        let written = tpm.write_file(slot.user()?);
        written.map_err(|source| RunningError::Disk { disk: self.name.clone(), source: source.into() })
    }

    /// Keeps what its TPM has written by now.
    pub(super) fn save_tpm(&self) {
        self.tpm.iter().for_each(TpmDisk::save_now);
    }

    /// Keeps what its TPM writes from now on.
    pub(crate) fn watch_tpm(&self) {
        self.tpm.iter().for_each(TpmDisk::watch);
    }

    /// Copies of the open files of the overlay, for another process.
    pub(crate) fn files(&self) -> std::io::Result<OverlayFiles> {
        self.cow.files()
    }

    /// The base, if that is a file of the host.
    pub(crate) fn base_file(&self) -> Option<&BaseFile> {
        self.base_file.as_ref()
    }

    /// State that goes with the files, once nobody uses the disk.
    pub(crate) fn state(&self) -> Result<OverlayState, RunningError> {
        self.tpm.iter().for_each(TpmDisk::end_watch);
        let failed = |source: whimbrel_block::BlockError| RunningError::Disk {
            disk: self.name.clone(),
            source: source.into(),
        };
        self.cow.state().map_err(failed)
    }

    /// Sets the alignment in which the store reads the disk. After a change the store is no longer a
    /// consumer.
    pub(super) fn set_alignment(
        &mut self,
        ledger: &mut DirtyLog,
        cuts: Option<PageAlignment>,
    ) -> Result<(), RunningError> {
        if self.alignment == cuts {
            return Ok(());
        }
        let view = |cuts: &PageAlignment| {
            AlignedPageView::new(self.name.clone(), self.tracked.clone(), cuts.clone())
        };
        let view = cuts.as_ref().map(view).transpose();
        let failed =
            |source: AlignmentMismatch| RunningError::Disk { disk: self.name.clone(), source: source.into() };
        ledger.set_view(Consumer::Store, view.map_err(failed)?.map(|view| Box::new(view) as Box<_>));
        self.alignment = cuts;
        Ok(())
    }

    /// Alignment in which the store reads it.
    pub fn alignment(&self) -> Option<&PageAlignment> {
        self.alignment.as_ref()
    }

    /// Name of the disk: `disk0` and so on.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The disk as an array of its own pages, not aligned.
    pub fn pages(&self) -> Box<dyn PageArray> {
        Box::new(DiskPages { name: self.name.clone(), device: self.tracked.clone() })
    }

    /// Makes all writes durable. The guest learns of a failure at its own next flush.
    pub fn sync(&self) {
        if let Err(error) = self.tracked.flush() {
            tracing::warn!(
                disk = self.name,
                error = &error as &dyn std::error::Error,
                "could not flush a disk"
            );
        }
    }

    pub(super) fn store(&self) -> Arc<dyn PageStore> {
        Arc::new(DiskPageStore(self.cow.clone()))
    }

    /// Removes pages from the overlay, so that the base is read again. The disk is not in use yet.
    pub(super) fn discard_pages(&self, run: PageRun) -> Result<(), RunningError> {
        let failed = |source: whimbrel_block::BlockError| RunningError::Disk {
            disk: self.name.clone(),
            source: source.into(),
        };
        self.cow.deallocate(run).map_err(failed)
    }

    pub(super) fn remote(&self) -> Option<(String, Arc<RemoteDisk>)> {
        self.remote.as_ref().map(|patient| (self.name.clone(), patient.clone()))
    }

    /// Layer that tracks what is written.
    pub fn device(&self) -> &Arc<TrackedDevice> {
        &self.tracked
    }

    /// Name of the disk, and the layer that counts what the machine reads and writes.
    pub(super) fn traffic(&self) -> (String, Weak<WriteThrottle>) {
        (self.name.clone(), Arc::downgrade(&self.throttle))
    }

    /// Layer that slows down what the machine writes.
    pub fn throttle(&self) -> &WriteThrottle {
        &self.throttle
    }

    /// Layer that may send writes to another host too.
    pub fn mirrored(&self) -> &MirrorLayer {
        &self.mirrored
    }

    /// Pages of the disk that may differ from its base.
    pub fn allocated_pages(&self) -> PageSet {
        self.cow.allocated()
    }

    /// Bytes of the disk that may differ from its base.
    pub fn allocated_bytes(&self) -> u64 {
        self.cow.allocated().count() * PAGE_SIZE as u64
    }
}

/// A disk of a machine that does not run.
pub struct StoppedDisk {
    name: String,
    cow: Arc<Cow>,
    tracked: Arc<TrackedDevice>,
}

impl StoppedDisk {
    /// Opens disk `index` of the machine.
    pub fn open(
        (dirs, store): (&MachineDirs, &Store),
        (index, size): (usize, u64),
        base: &DiskBase,
    ) -> Result<Self, RunningError> {
        let name = format!("disk{index}");
        let failed = |source| RunningError::Disk { disk: name.clone(), source };
        let (base, base_id) = open_base(stored_in(store), base, size).map_err(failed)?;
        let cow = open_grown(&dirs.overlay(&name), (base, base_id), overlay_key(store).as_ref());
        let cow = Arc::new(cow.map_err(|source| failed(source.into()))?);
        let tracked = Arc::new(TrackedDevice::new(cow.clone()));
        Ok(Self { name, cow, tracked })
    }

    /// Makes disk `index` of `size` bytes, which reads as its base, durably. What is in its place belongs to
    /// no disk: it was left when a change was interrupted.
    pub fn create(
        (dirs, store): (&MachineDirs, &Store),
        (index, size): (usize, u64),
        base: &DiskBase,
    ) -> Result<(), RunningError> {
        let name = format!("disk{index}");
        let failed = |source| RunningError::Disk { disk: name.clone(), source };
        let place = dirs.overlay(&name);
        let (base, id) = open_base(stored_in(store), base, size).map_err(failed)?;
        place.remove().map_err(|source| failed(source.into()))?;
        let made = Cow::create_with_key(&place, base, id, overlay_key(store).as_ref());
        made.map(drop).map_err(|source| failed(source.into()))
    }

    /// Pages of the disk that may differ from its base.
    pub fn allocated_pages(&self) -> PageSet {
        self.cow.allocated()
    }

    /// Pages of the disk in this alignment.
    pub fn pages(&self, cuts: Option<&PageAlignment>) -> Result<Box<dyn PageArray>, RunningError> {
        let (name, device) = (self.name.clone(), self.tracked.clone());
        let failed =
            |source: AlignmentMismatch| RunningError::Disk { disk: self.name.clone(), source: source.into() };
        Ok(match cuts {
            None => Box::new(DiskPages { name, device }),
            Some(cuts) => Box::new(AlignedPages::new(name, device, cuts.clone()).map_err(failed)?),
        })
    }

    /// Content of the disk.
    pub fn device(&self) -> &dyn Device {
        &*self.tracked
    }

    /// Keeps the state that its TPM left in the runtime directory of a machine that has ended by itself.
    pub fn save_tpm(&self, slot: &Path) -> Result<(), RunningError> {
        let kept = save_left(self.tracked.clone(), &runtime_dir::tpm_dir(slot));
        kept.map_err(|source| RunningError::Disk { disk: self.name.clone(), source })
    }
}

/// Opens an overlay that nobody uses. If its disk has become larger meanwhile, it grows first.
fn open_grown(
    place: &OverlayDir,
    (base, id): (Arc<dyn Device>, Digest),
    key: Option<&OverlayKey>,
) -> Result<Cow, OverlayError> {
    Cow::grow(place, base.size(), id, key)?;
    Cow::open_with_key(place, base, id, key)
}

/// Opener of images that are wholly in a store.
fn stored_in(store: &Store) -> impl FnOnce(Digest, u64) -> Arc<dyn Device> {
    |root, pages| Arc::new(StoredDisk::new(store.image(Some(root), pages).with_remote_fetch(None)))
}

/// Removes the overlays in the folder of a machine, with their bitmaps in memory. Overlays that remain are
/// only garbage.
pub fn remove_overlays(live_bitmaps: &Path, folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let place = OverlayDir { dir: entry.path(), live_dir: live_bitmaps.to_owned() };
        // Nothing else that is there is removed.
        let is_disk = entry.file_name().as_encoded_bytes().starts_with(b"disk");
        if is_disk
            && place.dir.is_dir()
            && let Err(error) = place.remove()
        {
            tracing::warn!(
                folder = %folder.display(),
                error = &error as &dyn std::error::Error,
                "could not remove a disk overlay"
            );
        }
    }
}

/// Opens the base of an overlay. Returns it with a digest that names its content.
pub(super) fn open_base(
    over: impl FnOnce(Digest, u64) -> Arc<dyn Device>,
    base: &DiskBase,
    size: u64,
) -> Result<(Arc<dyn Device>, Digest), Cause> {
    Ok(match base {
        DiskBase::Blank => (Arc::new(ZeroDevice { size }), Digest::of(b"blank")),
        DiskBase::File { path } => {
            let file = BaseFile::open(path)?;
            (file.device(size)?, file.id)
        }
        DiskBase::Image { root, cuts, size: smaller } => {
            let (image, id) = open_image(over, (root, cuts.as_ref()), smaller.unwrap_or(size))?;
            (if smaller.is_some() { Arc::new(Padded::new(image, size)?) } else { image }, id)
        }
    })
}

/// Opens an image of `size` bytes as a disk. Returns it with a digest that names its content.
fn open_image(
    over: impl FnOnce(Digest, u64) -> Arc<dyn Device>,
    (root, cuts): (&Digest, Option<&PageAlignment>),
    size: u64,
) -> Result<(Arc<dyn Device>, Digest), Cause> {
    let Some(cuts) = cuts else { return Ok((over(*root, size / PAGE_SIZE as u64), *root)) };
    // Alignment and size come from a manifest, which may be forged.
    if cuts.size() != size {
        return Err(AlignmentMismatch { expected: cuts.size(), found: size }.into());
    }
    let pages = over(*root, cuts.page_count());
    Ok((Arc::new(RawDisk::new(pages, cuts.clone())?), content_id(root, cuts)))
}

/// Names the content of an aligned disk: the pages alone do not tell where their bytes are on it.
fn content_id(root: &Digest, cuts: &PageAlignment) -> Digest {
    Digest::of(&[&root.0[..], &cuts.encode()].concat())
}
