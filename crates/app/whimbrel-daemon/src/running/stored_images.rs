//! What of a machine the store has: the images that its next capsule is written against, how disks are cut
//! for it, and the capsules that must stay for that.
//!
//! Invariant: an array has a base here only while something keeps the capsule of that base.

use super::RunningMachine;
use crate::{
    capsule::checkpoint::CapturedArrays, core::error::DaemonError, daemon::Daemon, machine::record::Record,
};
use std::collections::BTreeMap;
use whimbrel_capture::Consumer;
use whimbrel_core::Digest;
use whimbrel_image::ImageRef;
use whimbrel_store::Pin;

impl RunningMachine {
    /// From now on the store's next capsule holds only what changes: these arrays are exactly those of its
    /// origin.
    pub(crate) fn is_as_stored(&mut self, images: &[ImageRef]) -> Result<(), DaemonError> {
        if self._origin.is_none() {
            // Nothing keeps the images, so nothing may be written against them.
            return Ok(());
        }
        for (index, ledger) in self.ledgers.iter_mut().enumerate() {
            let Some(image) = images.iter().find(|image| image.name == ledger.name()) else { continue };
            // Memory is the first, and is not cut.
            let disk = index.checked_sub(1).and_then(|index| self.disks.get_mut(index));
            match disk {
                Some(disk) => disk.cut(ledger, image.cuts.clone())?,
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

    /// Sees to it that the store sees each disk cut like its next image.
    pub(crate) fn cut_disks(&mut self, host: &Daemon, record: &Record) -> Result<(), DaemonError> {
        for (index, disk) in self.disks.iter_mut().enumerate() {
            // What is written against an image is cut like it.
            if self.bases.get(disk.name()).is_some_and(Option::is_some) {
                continue;
            }
            let cuts = host.cuts_for(record, index, &**disk.device());
            if let Some(ledger) = self.ledgers.get_mut(index + 1) {
                disk.cut(ledger, cuts)?;
            }
        }
        Ok(())
    }

    /// The store no longer knows what it has of the machine: its next capsule looks at everything.
    pub(crate) fn unfollow_store(&mut self) {
        self.ledgers.iter_mut().for_each(|ledger| ledger.unfollow(Consumer::Store));
        self.bases.clear();
    }

    /// Keeps the capsule whose images the next one is written against, whatever becomes of its refs.
    pub(crate) fn hold_base(
        &mut self,
        capsule: whimbrel_store::Result<Pin>,
        arrays: CapturedArrays,
        images: BTreeMap<String, Option<Digest>>,
    ) {
        match capsule {
            Ok(capsule) => {
                match arrays {
                    CapturedArrays::All => self._bases = [Some(capsule), None],
                    // Memory stays relative to the last capsule that has it.
                    CapturedArrays::Disks => self._bases[1] = Some(capsule),
                }
                self.bases.extend(images);
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the next capsule begins anew");
                self.unfollow_store();
            }
        }
    }
}
