//! Directories of a machine on its host, and the paths in them. Values, which a process gets once.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use whimbrel_block::OverlayDir;
use whimbrel_core::Digest;

/// Folders in which a QEMU starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuDirs {
    /// Folder of all runtime directories, on a tmpfs.
    pub runtime_dirs: PathBuf,
    /// Folder of kernels and initial RAM disks, each named by its digest.
    pub boot_files: PathBuf,
}

impl QemuDirs {
    /// Path of a kernel or initial RAM disk.
    pub fn boot_file(&self, digest: &Digest) -> PathBuf {
        self.boot_files.join(digest.to_string())
    }
}

/// Folders of one machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineDirs {
    /// Folders in which its QEMU starts.
    pub qemu: QemuDirs,
    /// Store of the host.
    pub store: PathBuf,
    /// Folder with its disks.
    pub folder: PathBuf,
    /// Folder of the bitmaps of overlays, as of the last acknowledged write.
    pub live_bitmaps: PathBuf,
    /// File with its serial output since its start.
    pub console_log: PathBuf,
}

impl MachineDirs {
    /// Place of the overlay of a disk, which is named `disk0` and so on.
    pub fn overlay(&self, disk: &str) -> OverlayDir {
        OverlayDir { dir: self.folder.join(disk), live_dir: self.live_bitmaps.clone() }
    }
}
