//! Stored images of a running machine: the base images of its next capsule, their alignment, and pins on
//! their capsules.
//!
//! Invariant: an array has a base here only while a pin holds the capsule of that base.

use super::{RunningError, RunningMachine};
use std::collections::BTreeMap;
use whimbrel_alignment::PageAlignment;
use whimbrel_block::Device;
use whimbrel_capture::{Consumer, DirtyLog};
use whimbrel_core::Digest;
use whimbrel_image::ImageRef;
use whimbrel_store::Pin;

/// The arrays of a machine that go into a capsule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapturedArrays {
    /// Memory and disks: a capsule that can be resumed.
    All,
    /// Disks only: a disk-only capsule, from which a machine boots.
    Disks,
}

impl CapturedArrays {
    /// Dirty logs of these arrays.
    pub fn of(self, logs: &mut [DirtyLog]) -> &mut [DirtyLog] {
        match self {
            Self::All => logs,
            // Memory is the first array.
            Self::Disks => logs.get_mut(1..).unwrap_or_default(),
        }
    }
}

impl RunningMachine {
    /// Makes these images the bases of the next capsule: they equal the arrays, so it holds only changes.
    pub fn set_stored_bases(&mut self, images: &[ImageRef]) -> Result<(), RunningError> {
        if self.origin.is_none() {
            // Without a pin on the images nothing may be written against them.
            return Ok(());
        }
        for (index, ledger) in self.dirty_logs.iter_mut().enumerate() {
            let Some(image) = images.iter().find(|image| image.name == ledger.name()) else { continue };
            // Memory is the first array and is not aligned.
            let disk = index.checked_sub(1).and_then(|index| self.disks.get_mut(index));
            match disk {
                Some(disk) => disk.set_alignment(ledger, image.cuts.clone())?,
                None if image.cuts.is_some() => continue,
                None => {}
            }
            if image.pages == ledger.page_count_for(Consumer::Store) {
                ledger.attach_new(Consumer::Store);
                self.bases.insert(image.name.clone(), image.root);
            }
        }
        Ok(())
    }

    /// Sets the alignment in which the store reads each disk to that of its next image, as `alignment` says
    /// of a disk and its content.
    pub fn align_disks(
        &mut self,
        mut alignment: impl FnMut(usize, &dyn Device) -> Option<PageAlignment>,
    ) -> Result<(), RunningError> {
        for (index, disk) in self.disks.iter_mut().enumerate() {
            // An image has the alignment of its base.
            if self.bases.get(disk.name()).is_some_and(Option::is_some) {
                continue;
            }
            let cuts = alignment(index, &**disk.device());
            if let Some(ledger) = self.dirty_logs.get_mut(index + 1) {
                disk.set_alignment(ledger, cuts)?;
            }
        }
        Ok(())
    }

    /// Removes the store from the consumers: its next capsule reads every page.
    pub fn detach_store(&mut self) {
        self.dirty_logs.iter_mut().for_each(|ledger| ledger.detach(Consumer::Store));
        self.bases.clear();
    }

    /// Pins the capsule whose images the next one is written against, whatever becomes of its refs.
    pub fn pin_base(
        &mut self,
        capsule: whimbrel_store::Result<Pin>,
        arrays: CapturedArrays,
        images: BTreeMap<String, Option<Digest>>,
    ) {
        match capsule {
            Ok(capsule) => {
                match arrays {
                    CapturedArrays::All => self.base_pins = [Some(capsule), None],
                    // Memory stays relative to the last capsule that has it.
                    CapturedArrays::Disks => self.base_pins[1] = Some(capsule),
                }
                self.bases.extend(images);
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "could not pin a capsule");
                self.detach_store();
            }
        }
    }
}
