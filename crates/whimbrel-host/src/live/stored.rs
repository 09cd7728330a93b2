//! What of a machine the store has: the images that its next capsule is written against, how disks are cut for it, and
//! the capsules that must stay for that.
//!
//! Invariant: an array has a base here only while something keeps the capsule of that base.

use super::Live;
use crate::{capture::Arrays, error::HostError, host::Host, record::Record};
use std::collections::BTreeMap;
use whimbrel_capture::Follower;
use whimbrel_core::Digest;
use whimbrel_image::ImageRef;
use whimbrel_store::Pin;

impl Live {
    /// From now on the store's next capsule holds only what changes: these arrays are exactly those of its origin.
    pub(crate) fn is_as_stored(&mut self, images: &[ImageRef]) -> Result<(), HostError> {
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
            if image.pages == ledger.page_count_for(Follower::Store) {
                ledger.follow_from_new(Follower::Store);
                self.bases.insert(image.name.clone(), image.root);
            }
        }
        Ok(())
    }

    /// Sees to it that the store sees each disk cut like its next image.
    pub(crate) fn cut_disks(&mut self, host: &Host, record: &Record) -> Result<(), HostError> {
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
        self.ledgers.iter_mut().for_each(|ledger| ledger.unfollow(Follower::Store));
        self.bases.clear();
    }

    /// Keeps the capsule whose images the next one is written against, whatever becomes of its refs.
    pub(crate) fn hold_base(
        &mut self,
        capsule: whimbrel_store::Result<Pin>,
        arrays: Arrays,
        images: BTreeMap<String, Option<Digest>>,
    ) {
        match capsule {
            Ok(capsule) => {
                match arrays {
                    Arrays::All => self._bases = [Some(capsule), None],
                    // Memory stays relative to the last capsule that has it.
                    Arrays::Disks => self._bases[1] = Some(capsule),
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
