//! Places of a machine on its host: folders and the paths in them. Values, which a process gets once.

use std::path::PathBuf;
use whimbrel_block::OverlayDir;
use whimbrel_core::Digest;

/// Folders in which a QEMU starts.
#[derive(Debug, Clone)]
pub(crate) struct QemuPlaces {
    /// Folder of all runtime directories, on a tmpfs.
    pub(crate) runtime_dirs: PathBuf,
    /// Folder of kernels and initial RAM disks, each named by its digest.
    pub(crate) boot_files: PathBuf,
}

impl QemuPlaces {
    /// Path of a kernel or initial RAM disk.
    pub(crate) fn boot_file(&self, digest: &Digest) -> PathBuf {
        self.boot_files.join(digest.to_string())
    }
}

/// Folders of one machine.
#[derive(Debug, Clone)]
pub(crate) struct MachinePlaces {
    /// Folders in which its QEMU starts.
    pub(crate) qemu: QemuPlaces,
    /// Folder with its disks.
    pub(crate) folder: PathBuf,
    /// Folder of the bitmaps of overlays, as of the last acknowledged write.
    pub(crate) live_bitmaps: PathBuf,
    /// File with its serial output since its start.
    pub(crate) console_log: PathBuf,
}

impl MachinePlaces {
    /// Place of the overlay of a disk, which is named `disk0` and so on.
    pub(crate) fn overlay(&self, disk: &str) -> OverlayDir {
        OverlayDir { dir: self.folder.join(disk), live_dir: self.live_bitmaps.clone() }
    }
}
