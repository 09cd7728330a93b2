//! Media of CD-ROM drives that change while the machine runs. They are its last disks.

use super::{DiskBase, Overlay, RunningError, RunningMachine};
use whimbrel_core::DiskConfig;
use whimbrel_qemu::HotplugError;

/// Medium of a drive: its size, and what it has on it.
pub type Medium = (DiskConfig, DiskBase);

impl RunningMachine {
    /// Puts other media into the CD-ROM drives of the machine, one into each. Its guest sees the trays open
    /// and close; unless by `force`, it has to let go of what is in them.
    ///
    /// On failure the media of before are in the drives again. A drive whose medium cannot be read any more
    /// is none of the machine's afterwards.
    pub fn change_media(&mut self, media: Vec<Medium>, force: bool) -> Result<(), RunningError> {
        let first = self.disks.len().saturating_sub(media.len());
        for drive in first..self.disks.len() {
            if let Err(source) = self.qemu.open_tray(drive, force) {
                (first..drive).for_each(|opened| drop(self.qemu.close_tray(opened)));
                return Err(failed(source));
            }
        }
        let before = self.remove_media(first).inspect_err(|_| {
            for drive in first..self.disks.len() {
                // The first fails for a drive that has its medium still.
                drop(self.qemu.insert_medium(drive));
                drop(self.qemu.close_tray(drive));
            }
        })?;
        self.insert_media(media).inspect_err(|_| {
            // Trays with their new medium are closed already.
            (first..self.disks.len()).for_each(|drive| drop(self.qemu.open_tray(drive, true)));
            let back = self.remove_media(first).and_then(|_| self.insert_media(before));
            if let Err(error) = back {
                let error = &error as &dyn std::error::Error;
                tracing::error!(machine = %self.setup.name, error, "the media of before are gone");
                let left = self.disks.len() as u32;
                self.setup.config.cdroms.disks.retain(|disk| *disk < left);
            }
        })
    }

    /// Takes the media from disk `first` on out of their open trays.
    fn remove_media(&mut self, first: usize) -> Result<Vec<Medium>, RunningError> {
        (first..self.disks.len()).try_for_each(|drive| self.qemu.remove_medium(drive)).map_err(failed)?;
        let setup = &self.setup;
        let disks = setup.config.disks[first..].iter().cloned();
        let media = disks.zip(setup.bases[first..].iter().cloned()).collect();
        (first..self.disks.len()).rev().for_each(|drive| self.forget_disk(drive));
        Ok(media)
    }

    fn insert_media(&mut self, media: Vec<Medium>) -> Result<(), RunningError> {
        media.into_iter().try_for_each(|medium| self.insert_medium(medium))
    }

    fn insert_medium(&mut self, (disk, base): Medium) -> Result<(), RunningError> {
        let index = self.disks.len();
        self.setup.config.disks.push(disk);
        self.setup.bases.push(base);
        let inserted = self.serve_medium(index);
        inserted.inspect_err(|_| self.forget_disk(index))
    }

    fn serve_medium(&mut self, index: usize) -> Result<(), RunningError> {
        // A medium is never written: what lies there is over the one before.
        let overlay = self.setup.dirs.overlay(&format!("disk{index}"));
        let removed = overlay.remove();
        removed
            .map_err(|source| RunningError::Disk { disk: format!("disk{index}"), source: source.into() })?;
        let disk = self.open_added_disk(index, Overlay::New)?;
        self.qemu.insert_medium(index).map_err(failed)?;
        self.keep_added_disk(disk);
        Ok(())
    }
}

fn failed(source: HotplugError) -> RunningError {
    RunningError::qemu("change the medium of a CD-ROM drive", source)
}
