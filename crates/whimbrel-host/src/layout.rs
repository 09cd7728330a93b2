//! Where things lie.
//!
//! ```text
//! DATA/key/            the host's identity          DATA/trust.toml     whom it trusts
//! DATA/store/          capsules                     DATA/boot/DIGEST    kernels and initial RAM disks
//! DATA/machines/NAME/  machine.json, disk0/ …, console.log
//! RUN/slots/ID/        sockets, RAM file, live bitmaps of one QEMU; RUN is on a tmpfs
//! ```
//!
//! What lies under DATA survives a reboot; what lies under RUN survives the daemon.

use crate::error::HostError;
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_core::{Digest, MachineName};

/// The directories of one host.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    data: PathBuf,
    run: PathBuf,
}

/// `f_type` of a tmpfs (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

impl Layout {
    /// Makes the directories that are missing. RUN must be on a tmpfs: guest memory lies there.
    pub(crate) fn create(data: &Path, run: &Path) -> Result<Self, HostError> {
        let layout = Self { data: absolute(data)?, run: absolute(run)? };
        for dir in [layout.key_dir(), layout.boot_dir(), layout.machines(), layout.slots()] {
            fs::create_dir_all(&dir).map_err(|source| HostError::io("create", &dir, source))?;
        }
        let slots = layout.slots();
        let kind = rustix::fs::statfs(&slots).map_err(|e| HostError::io("examine", &slots, e.into()))?;
        if kind.f_type as i64 != TMPFS_MAGIC {
            return Err(HostError::NotTmpfs { path: layout.run });
        }
        Ok(layout)
    }

    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    pub(crate) fn key_dir(&self) -> PathBuf {
        self.data.join("key")
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.data.join("store")
    }

    pub(crate) fn boot_dir(&self) -> PathBuf {
        self.data.join("boot")
    }

    pub(crate) fn boot_file(&self, digest: &Digest) -> PathBuf {
        self.boot_dir().join(digest.to_string())
    }

    pub(crate) fn machines(&self) -> PathBuf {
        self.data.join("machines")
    }

    pub(crate) fn machine(&self, name: &MachineName) -> PathBuf {
        self.machines().join(name.as_str())
    }

    /// Bitmaps of overlays, as of the last acknowledged write.
    pub(crate) fn live_bitmaps(&self) -> PathBuf {
        self.run.join("bitmaps")
    }

    /// What the machine printed on its serial port since it was started.
    pub(crate) fn console_log(&self, name: &MachineName) -> PathBuf {
        self.machine(name).join("console.log")
    }

    pub(crate) fn slots(&self) -> PathBuf {
        self.run.join("slots")
    }

    pub(crate) fn slot(&self, id: &str) -> PathBuf {
        self.slots().join(id)
    }
}

fn absolute(path: &Path) -> Result<PathBuf, HostError> {
    std::path::absolute(path).map_err(|source| HostError::io("resolve", path, source))
}
