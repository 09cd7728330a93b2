//! What the host writes down about a machine: enough to find it again after the daemon was killed.
//!
//! One JSON file a machine, replaced whole. The phase decides who may run the machine, so it is made durable
//! before anything acts on it.

use crate::{
    core::{directories::Directories, error::DaemonError},
    machine::commit_mark::CommitMark,
    migrate::target::missing_pages::MissingPagesRecord,
    running::remove_overlays,
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_alignment::PageAlignment;
use whimbrel_api::SelfService;
use whimbrel_core::{ByteSize, CapsuleId, Digest, HostName, MachineConfig, MachineName};
use whimbrel_migrate::protocol::{HandoverId, HomeNetwork};
use whimbrel_protect::protocol::ProtectionId;
use whimbrel_wire::atomic_file;

const FORMAT: u32 = 1;
const FILE: &str = "machine.json";

/// One machine of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    format: u32,
    pub(crate) name: MachineName,
    pub(crate) config: MachineConfig,
    /// The capsule it was resumed from.
    pub(crate) origin: Option<CapsuleId>,
    /// The capsule taken from it last: the base of the next one.
    pub(crate) last: Option<CapsuleId>,
    /// What each disk's overlay lies over.
    pub(crate) bases: Vec<DiskBase>,
    pub(crate) vmgenid: Option<String>,
    pub(crate) phase: Phase,
    pub(crate) process: Option<ProcessRecord>,
    pub(crate) since_ms: u64,
    /// What its guest had before it was squeezed, until it has it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) squeezed_from: Option<ByteSize>,
    /// What it may ask for from inside.
    #[serde(default, skip_serializing_if = "SelfService::is_empty")]
    pub(crate) self_service: SelfService,
    /// Memory that its user left it; all of it if not said.
    #[serde(default)]
    pub(crate) ballooned: Option<ByteSize>,
    /// Where its network is, if not on the host that runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tunnel: Option<HomeNetwork>,
    /// How it came here: its old host may not have heard yet that it did, and asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) arrived_by: Option<HandoverId>,
    /// Who keeps pages of it that are not here yet, if anybody does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owed: Option<MissingPagesRecord>,
    /// The protection that its next host inherits; of meaning once it was handed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inherited: Option<InheritedProtectionRecord>,
    /// Where it is being handed over to: whether it was, the mark beside the record says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leaving: Option<PendingHandover>,
}

/// A handover that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PendingHandover {
    pub(crate) handover: HandoverId,
    pub(crate) to: HostName,
    /// As in [`Phase::HandedOver`].
    pub(crate) keeps: bool,
}

/// A protection that a handover's target inherits: this host is its witness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InheritedProtectionRecord {
    pub(crate) id: ProtectionId,
    /// Who may take the machine over.
    pub(crate) standby: HostName,
    /// Who inherits.
    pub(crate) heir: HostName,
    pub(crate) term_ms: u32,
}

/// The unchanging content under a disk's overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub(crate) enum DiskBase {
    /// A raw image of the user's, which is never written.
    File { path: PathBuf },
    /// An image of the store.
    Image {
        root: Digest,
        /// How its pages were cut from the disk; none if from byte 0 on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cuts: Option<PageAlignment>,
    },
    /// Nothing: reads as zeros.
    Blank,
}

/// Who may run the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub(crate) enum Phase {
    /// This host, and it does as far as QEMU lives.
    Here,
    /// Nobody: it was switched off.
    Stopped,
    /// Nobody: its QEMU died.
    Crashed { reason: String },
    /// Nobody until it is resumed from the capsule.
    Suspended { capsule: CapsuleId },
    /// The host that it was given to, suspended as this capsule.
    Given { to: HostName, capsule: CapsuleId },
    /// The host it went to; it has not confirmed yet.
    HandedOver {
        handover: HandoverId,
        to: HostName,
        /// Whether that host may lack pages, which are kept here until it says that it does not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        keeps: bool,
    },
    /// Its old host, until that one commits.
    Prepared {
        handover: HandoverId,
        /// Written before the machine was here: whether all of it is, its slot says.
        #[serde(default)]
        ahead: bool,
    },
}

/// The QEMU of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecord {
    pub(crate) pid: u32,
    /// From /proc/PID/stat: a process that has the pid later has another.
    pub(crate) started: u64,
    pub(crate) slot: String,
    /// Whether its memory is filled on demand, from the image `memory` (none: an empty one).
    pub(crate) lazy: bool,
    pub(crate) memory: Option<Digest>,
    /// Whose its RAM file is. Records of machines that never shared one do not say.
    #[serde(default)]
    pub(crate) ram: RamFile,
}

/// Whose the RAM file of a machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RamFile {
    /// The machine's alone: what its guest writes is in the file.
    #[default]
    Own,
    /// The template of all clones of a capsule: what their guests write is not in it.
    Template,
}

impl Record {
    pub(crate) fn new(name: MachineName, config: MachineConfig, bases: Vec<DiskBase>) -> Self {
        Self {
            format: FORMAT,
            name,
            config,
            origin: None,
            last: None,
            bases,
            vmgenid: None,
            phase: Phase::Here,
            process: None,
            since_ms: crate::now_ms(),
            squeezed_from: None,
            ballooned: None,
            self_service: SelfService::default(),
            tunnel: None,
            arrived_by: None,
            owed: None,
            inherited: None,
            leaving: None,
        }
    }

    /// Makes the record durable.
    pub(crate) fn save(&self, layout: &Directories) -> Result<(), DaemonError> {
        let dir = layout.machine(&self.name);
        fs::create_dir_all(&dir).map_err(|source| DaemonError::io("create", &dir, source))?;
        let path = dir.join(FILE);
        let text = serde_json::to_vec_pretty(self).expect("a record is always encodable");
        atomic_file::replace(&path, &text).map_err(|source| DaemonError::io("write", &path, source))
    }

    /// Removes everything that is kept of the machine.
    pub(crate) fn forget(layout: &Directories, name: &MachineName) -> Result<(), DaemonError> {
        erase(layout, &layout.machine(name))
    }

    /// The record in the folder of a machine, if there is one.
    pub(crate) fn read(folder: &Path) -> Result<Option<Record>, DaemonError> {
        let path = folder.join(FILE);
        match fs::read(&path) {
            Ok(text) => {
                let record = parse(&text).map_err(|source| DaemonError::io("read", &path, source))?;
                let mark = CommitMark::read(folder);
                Ok(Some(record.marked(mark.map_err(|source| DaemonError::io("read", folder, source))?)))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(DaemonError::io("read", &path, error)),
        }
    }

    /// Every record there is. Directories without one are left over from a cut-off start and are removed.
    pub(crate) fn load_all(layout: &Directories) -> Result<Vec<Record>, DaemonError> {
        let dir = layout.machines();
        let mut records = Vec::new();
        for entry in fs::read_dir(&dir).map_err(|source| DaemonError::io("read", &dir, source))? {
            let path = entry.map_err(|source| DaemonError::io("read", &dir, source))?.path();
            match Self::read(&path)? {
                Some(record) => records.push(record),
                None => {
                    fs::remove_dir_all(&path).map_err(|source| DaemonError::io("remove", &path, source))?
                }
            }
        }
        Ok(records)
    }
}

impl Record {
    /// The machine was handed over if the mark beside its record names the handover that was under way.
    fn marked(mut self, mark: Option<HandoverId>) -> Self {
        match (self.leaving.take(), &self.phase) {
            (Some(PendingHandover { handover, to, keeps }), Phase::Here) if mark == Some(handover) => {
                self.phase = Phase::HandedOver { handover, to, keeps };
            }
            _ => {}
        }
        self
    }
}

/// Removes the folder of a machine. The record goes first: a folder without one is garbage.
pub(crate) fn erase(layout: &Directories, folder: &Path) -> Result<(), DaemonError> {
    let io = |source| DaemonError::io("remove", folder, source);
    match fs::remove_file(folder.join(FILE)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    remove_overlays(layout, folder);
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io(error)),
        _ => Ok(()),
    }
}

fn parse(text: &[u8]) -> std::io::Result<Record> {
    let record: Record = serde_json::from_slice(text)?;
    if record.format != FORMAT {
        let reason = format!("record format {} is not {FORMAT}, which this version reads", record.format);
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, reason));
    }
    Ok(record)
}
