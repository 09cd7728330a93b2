//! Directories of the daemon: durable data and runtime files.
//!
//! ```text
//! DATA/key/            identity of the host       DATA/trust.toml     trust list
//! DATA/store/          capsules                   DATA/boot/DIGEST    kernels and initial RAM disks
//! DATA/page-cache      hash cache                 DATA/working-sets/  prefetch lists of capsules
//! DATA/pooled/         partial capsules of pools  DATA/pool-secret    secret that encrypts chunks
//! DATA/buckets.json    partial capsules of buckets
//! DATA/tunnels/        tunnels of machines whose network is here while they run elsewhere
//! DATA/machines/NAME/  machine.json (until it is saved, `starting`), disk0/ …, console.log
//! DATA/imports/        files of container images while they become disks
//! DATA/trash/          folders of machines that are gone, until they are removed
//! DATA/migrations/     past migrations from this host
//! DATA/events/         what happened on this host
//! DATA/protections/    protections with this host as primary or standby; DATA/leases/ with it as witness
//! DATA/handovers.json  pending handovers to other hosts
//! DATA/networks/       records of managed networks
//! DATA/schedules/      records of schedules, with their last runs
//! RUN/networks/NAME/   files of a network's DHCP server
//! DATA/api-tokens.json digests of tokens              DATA/audit/         audit log of the API
//! RUN/started          made once the machines were started that start with the host
//! RUN/slots/ID/        runtime directory of one QEMU: sockets, memory file, live bitmaps; on a tmpfs
//! RUN/slots/ID/machine-process  names who has the machine while no daemon runs; the socket is `swap`
//! ```
//!
//! Files under DATA survive a reboot; files under RUN survive the daemon. Both belong to the user of the
//! daemon alone: mode 0700, and in no place where another user could put a directory of their own instead.

use crate::core::error::DaemonError;
use std::{
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};
use whimbrel_core::{CapsuleId, Digest, MachineName};
use whimbrel_vm::{MachineDirs, QemuDirs};
use whimbrel_wire::{atomic_file, private_dir};

#[derive(Debug, Clone)]
pub(crate) struct Directories {
    data: PathBuf,
    run: PathBuf,
}

/// `f_type` of a tmpfs (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

impl Directories {
    /// Creates missing directories. RUN must be on a tmpfs, as it holds guest memory. Directories of earlier
    /// versions, which everybody could read, are closed.
    pub(crate) fn create(data: &Path, run: &Path) -> Result<Self, DaemonError> {
        let layout = Self { data: absolute(data)?, run: absolute(run)? };
        for dir in [&layout.data, &layout.run] {
            private_dir::restrict(dir).map_err(|source| DaemonError::NotPrivate { source })?;
        }
        let dirs = [
            layout.key_dir(),
            layout.boot_dir(),
            layout.machines(),
            layout.trash(),
            layout.runtime_dirs(),
            layout.prefetch_lists(),
        ];
        for dir in dirs {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
            made.map_err(|source| DaemonError::io("create", &dir, source))?;
        }
        for dir in [Some(&*layout.data), layout.data.parent()].into_iter().flatten() {
            atomic_file::sync_dir(dir).map_err(|source| DaemonError::io("sync", dir, source))?;
        }
        let slots = layout.runtime_dirs();
        let kind = rustix::fs::statfs(&slots).map_err(|e| DaemonError::io("examine", &slots, e.into()))?;
        if kind.f_type as i64 != TMPFS_MAGIC {
            return Err(DaemonError::NotTmpfs { path: layout.run });
        }
        Ok(layout)
    }

    /// The places in a data directory that is not to be changed.
    pub(crate) fn of_data(data: &Path) -> Self {
        Self { data: data.to_owned(), run: PathBuf::new() }
    }

    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    pub(crate) fn boot_file(&self, digest: &Digest) -> PathBuf {
        self.boot_dir().join(digest.to_string())
    }

    pub(crate) fn machine(&self, name: &MachineName) -> PathBuf {
        self.machines().join(name.as_str())
    }

    /// Serial output of a machine since its start.
    pub(crate) fn console_log(&self, name: &MachineName) -> PathBuf {
        self.machine(name).join("console.log")
    }

    /// Prefetch list of a capsule, from its last resume here.
    pub(crate) fn prefetch_list(&self, capsule: &CapsuleId) -> PathBuf {
        self.prefetch_lists().join(capsule.to_string())
    }

    /// Folders in which a QEMU starts.
    pub(crate) fn qemu_dirs(&self) -> QemuDirs {
        QemuDirs { runtime_dirs: self.runtime_dirs(), boot_files: self.boot_dir() }
    }

    /// Folders of a machine.
    pub(crate) fn machine_dirs(&self, name: &MachineName) -> MachineDirs {
        MachineDirs {
            qemu: self.qemu_dirs(),
            store: self.store(),
            folder: self.machine(name),
            live_bitmaps: self.live_bitmaps(),
            console_log: self.console_log(name),
        }
    }

    pub(crate) fn runtime_dir(&self, id: &str) -> PathBuf {
        self.runtime_dirs().join(id)
    }
}

/// Defines a method for each file and folder of a fixed name.
macro_rules! places {
    ($($(#[$doc:meta])* $name:ident = $root:ident / $file:literal;)*) => {
        /// Root and name of each place.
        #[cfg(test)]
        pub(crate) const PLACES: &[(&str, &str)] = &[$((stringify!($root), $file)),*];

        impl Directories {
            $($(#[$doc])*
            pub(crate) fn $name(&self) -> PathBuf {
                self.$root.join($file)
            })*
        }
    };
}

places! {
    key_dir = data / "key";
    store = data / "store";
    boot_dir = data / "boot";
    tunnels = data / "tunnels";
    migrations = data / "migrations";
    protections = data / "protections";
    /// Leases that this host decides about as witness.
    leases = data / "leases";
    machines = data / "machines";
    /// Records of managed networks.
    networks = data / "networks";
    /// Records of schedules.
    schedules = data / "schedules";
    /// Files of the networks' DHCP servers.
    network_servers = run / "networks";
    /// Folders of machines that are gone.
    trash = data / "trash";
    /// Files of container images while they become disks; removed at the next start.
    imports = data / "imports";
    /// Bitmaps of overlays, as of the last acknowledged write.
    live_bitmaps = run / "bitmaps";
    /// Events of this host.
    events = data / "events";
    /// Audit log of the API.
    audit = data / "audit";
    /// Tokens of the API, by their digests.
    api_tokens = data / "api-tokens.json";
    hash_cache = data / "page-cache";
    uploads = data / "following.json";
    /// Handovers that this host began and a target may still wait for.
    handovers = data / "handovers.json";
    partial_capsules = data / "pooled";
    /// Partial capsules whose other pages are in buckets.
    buckets = data / "buckets.json";
    /// The secret that encrypts chunks in pools; may be absent.
    pool_secret = data / "pool-secret";
    prefetch_lists = data / "working-sets";
    runtime_dirs = run / "slots";
    /// Mark that machines were started with the host. A restart of the host removes it with the tmpfs.
    autostarted = run / "started";
}

fn absolute(path: &Path) -> Result<PathBuf, DaemonError> {
    std::path::absolute(path).map_err(|source| DaemonError::io("resolve", path, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn directories_that_everybody_could_read_are_closed_and_squatted_ones_are_refused() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let (data, run) = (dir.path().join("data"), dir.path().join("run"));
        for old in [&data, &run] {
            fs::create_dir(old).expect("a directory of an earlier version");
            fs::set_permissions(old, fs::Permissions::from_mode(0o755)).expect("its mode");
        }
        let layout = Directories::create(&data, &run).expect("directories");
        for made in [&data, &run, &layout.store().with_file_name("machines"), &layout.runtime_dirs()] {
            let mode = fs::metadata(made).expect("a directory").permissions().mode();
            assert_eq!(mode & 0o7777, 0o700, "{}", made.display());
        }
        chown(&run, Some(65_534), None).expect("a directory of another user");
        let refused = Directories::create(&data, &run).expect_err("a squatted directory").to_api();
        let said = refused.causes.join(" ") + &refused.hint.unwrap_or_default();
        assert!(said.contains("user 65534") && said.contains("--run-dir"), "{said}");
    }
}
