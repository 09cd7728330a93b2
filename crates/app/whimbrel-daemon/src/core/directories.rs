//! Where things lie.
//!
//! ```text
//! DATA/key/            the host's identity          DATA/trust.toml     whom it trusts
//! DATA/store/          capsules                     DATA/boot/DIGEST    kernels and initial RAM disks
//! DATA/page-cache      where pages of files lie      DATA/working-sets/  what capsules touch first
//! DATA/pooled/         which capsules lie in a pool, and where            DATA/pool-secret  what seals them there
//! DATA/tunnels/        machines whose network is here while they run elsewhere
//! DATA/machines/NAME/  machine.json, disk0/ …, console.log
//! DATA/trash/          folders of machines that have gone, while they are removed
//! DATA/migrations/     how machines moved away from here
//! DATA/protections/    standbys of machines, here and of here     DATA/leases/  those that this host is the witness of
//! DATA/handovers.json  machines that are on their way to other hosts
//! RUN/slots/ID/        sockets, RAM file, live bitmaps of one QEMU; RUN is on a tmpfs
//! ```
//!
//! What lies under DATA survives a reboot; what lies under RUN survives the daemon.

use crate::core::error::DaemonError;
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_core::{CapsuleId, Digest, MachineName};

/// The directories of one host.
#[derive(Debug, Clone)]
pub(crate) struct Directories {
    data: PathBuf,
    run: PathBuf,
}

/// `f_type` of a tmpfs (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

impl Directories {
    /// Makes the directories that are missing. RUN must be on a tmpfs: guest memory lies there.
    pub(crate) fn create(data: &Path, run: &Path) -> Result<Self, DaemonError> {
        let layout = Self { data: absolute(data)?, run: absolute(run)? };
        let dirs = [
            layout.key_dir(),
            layout.boot_dir(),
            layout.machines(),
            layout.trash(),
            layout.slots(),
            layout.working_sets(),
        ];
        for dir in dirs {
            fs::create_dir_all(&dir).map_err(|source| DaemonError::io("create", &dir, source))?;
        }
        let slots = layout.slots();
        let kind = rustix::fs::statfs(&slots).map_err(|e| DaemonError::io("examine", &slots, e.into()))?;
        if kind.f_type as i64 != TMPFS_MAGIC {
            return Err(DaemonError::NotTmpfs { path: layout.run });
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

    /// Notes about tunnels.
    pub(crate) fn tunnels(&self) -> PathBuf {
        self.data.join("tunnels")
    }

    /// Records of migrations that have ended.
    pub(crate) fn migrations(&self) -> PathBuf {
        self.data.join("migrations")
    }

    /// Protections that this host takes part in.
    pub(crate) fn protections(&self) -> PathBuf {
        self.data.join("protections")
    }

    /// Protections of others that this host decides about.
    pub(crate) fn leases(&self) -> PathBuf {
        self.data.join("leases")
    }

    pub(crate) fn machines(&self) -> PathBuf {
        self.data.join("machines")
    }

    /// Folders of machines that have gone.
    pub(crate) fn trash(&self) -> PathBuf {
        self.data.join("trash")
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

    /// Where the pages of this host's files lie.
    pub(crate) fn page_cache(&self) -> PathBuf {
        self.data.join("page-cache")
    }

    /// Machines whose capsules are uploaded.
    pub(crate) fn uploads(&self) -> PathBuf {
        self.data.join("following.json")
    }

    /// Notes of capsules that are in part in a pool.
    pub(crate) fn pooled(&self) -> PathBuf {
        self.data.join("pooled")
    }

    /// The secret of those who use pools sealed; there need not be one.
    pub(crate) fn pool_secret(&self) -> PathBuf {
        self.data.join("pool-secret")
    }

    pub(crate) fn working_sets(&self) -> PathBuf {
        self.data.join("working-sets")
    }

    /// What the machine of a capsule touched first at its last resume here.
    pub(crate) fn working_set(&self, capsule: &CapsuleId) -> PathBuf {
        self.working_sets().join(capsule.to_string())
    }

    pub(crate) fn slots(&self) -> PathBuf {
        self.run.join("slots")
    }

    pub(crate) fn slot(&self, id: &str) -> PathBuf {
        self.slots().join(id)
    }
}

fn absolute(path: &Path) -> Result<PathBuf, DaemonError> {
    std::path::absolute(path).map_err(|source| DaemonError::io("resolve", path, source))
}
