//! Machine records: the durable state by which a restarted daemon finds its machines.
//!
//! One JSON file for each machine, replaced as a whole. The phase decides who may run the machine, so it is
//! made durable before anything acts on it.

use crate::{
    core::{directories::Directories, error::DaemonError},
    machine::{commit_mark, folder},
    migrate::target::missing_pages::MissingPagesRecord,
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_api::{MachineSettings, SelfService};
use whimbrel_core::{ByteSize, CapsuleId, HostName, MachineConfig, MachineName};
use whimbrel_migrate::protocol::{HandoverId, HomeNetwork};
use whimbrel_protect::protocol::ProtectionId;
pub(crate) use whimbrel_vm::{DiskBase, ProcessRecord};
use whimbrel_wire::{atomic_file, json_file};

const FORMAT: u32 = 1;
const FILE: &str = "machine.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    format: u32,
    pub(crate) name: MachineName,
    /// Name before a rename that is not finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) was: Option<MachineName>,
    pub(crate) config: MachineConfig,
    /// The capsule that it was resumed from.
    pub(crate) origin: Option<CapsuleId>,
    /// The last capsule taken of it: the base of the next one.
    pub(crate) last: Option<CapsuleId>,
    /// The base of each disk's overlay.
    pub(crate) bases: Vec<DiskBase>,
    pub(crate) vmgenid: Option<String>,
    pub(crate) phase: Phase,
    pub(crate) process: Option<ProcessRecord>,
    pub(crate) since_ms: u64,
    /// Settings of its user on this host.
    #[serde(default, skip_serializing_if = "MachineSettings::is_empty")]
    pub(crate) settings: MachineSettings,
    /// Whether the media of its CD-ROM drives are being changed while it runs: the drives may have those of
    /// before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) changes_media: bool,
    /// Memory size before the balloon was inflated, until it is restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) squeezed_from: Option<ByteSize>,
    /// Requests that its guest may make.
    #[serde(default, skip_serializing_if = "SelfService::is_empty")]
    pub(crate) self_service: SelfService,
    /// Memory that its user left it with the balloon; none means all.
    #[serde(default)]
    pub(crate) ballooned: Option<ByteSize>,
    /// Home network, if the network is not on the host that runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tunnel: Option<HomeNetwork>,
    /// The handover by which it came here. The source may not know yet that it did, and asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) arrived_by: Option<HandoverId>,
    /// The host that has its missing pages, and which they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owed: Option<MissingPagesRecord>,
    /// The protection that the target inherits; valid once the machine was handed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inherited: Option<InheritedProtectionRecord>,
    /// The pending handover; the commit mark beside the record says whether it was committed.
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

/// A protection that the target of a handover inherits; this host is its witness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InheritedProtectionRecord {
    pub(crate) id: ProtectionId,
    /// The host that may take the machine over.
    pub(crate) standby: HostName,
    /// The host that inherits the protection.
    pub(crate) heir: HostName,
    pub(crate) term_ms: u32,
}

/// The phase of a machine: which host may run it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub(crate) enum Phase {
    /// Only this host; the machine runs while its QEMU lives.
    Here,
    /// No host: it was switched off.
    Stopped,
    /// No host: its QEMU died.
    Crashed { reason: String },
    /// No host until it is resumed from the capsule.
    Suspended { capsule: CapsuleId },
    /// The host that it was handed off to, suspended as this capsule.
    Given { to: HostName, capsule: CapsuleId },
    /// The target, which has not confirmed yet.
    HandedOver {
        handover: HandoverId,
        to: HostName,
        /// Whether the target may lack pages; this host keeps them until it has all.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        keeps: bool,
    },
    /// The source, until it commits.
    Prepared {
        handover: HandoverId,
        /// Written before the machine had arrived: a mark in the runtime directory says whether it has.
        #[serde(default)]
        ahead: bool,
        /// The QEMU ended before anything started it: it goes back to the source, and never runs here.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        never_ran: bool,
        /// Record of the handoff that this migration brings back; again the machine's record if it does not
        /// come.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        handed_off: Option<Box<Record>>,
    },
}

impl Record {
    pub(crate) fn new(name: MachineName, config: MachineConfig, bases: Vec<DiskBase>) -> Self {
        Self {
            format: FORMAT,
            name,
            was: None,
            config,
            origin: None,
            last: None,
            bases,
            vmgenid: None,
            phase: Phase::Here,
            process: None,
            since_ms: crate::now_ms(),
            settings: MachineSettings::default(),
            changes_media: false,
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

    /// Makes the record durable, and with the first one the folder of the machine.
    pub(crate) fn save(&self, layout: &Directories) -> Result<(), DaemonError> {
        let dir = layout.machine(&self.name);
        fs::create_dir_all(&dir).map_err(|source| DaemonError::io("create", &dir, source))?;
        let path = path(&dir);
        let is_new = !path.exists();
        self.save_in(&dir)?;
        if is_new {
            let synced = atomic_file::sync_dir(&layout.machines());
            synced.map_err(|source| DaemonError::io("write", &path, source))?;
        }
        Ok(())
    }

    /// Makes the record durable in a folder that is there.
    pub(super) fn save_in(&self, folder: &Path) -> Result<(), DaemonError> {
        let path = path(folder);
        let saved = folder::unmark(folder).and_then(|()| json_file::replace(&path, self));
        saved.map_err(|source| DaemonError::io("write", &path, source))
    }

    /// The record in a machine's folder, if there is one.
    pub(crate) fn read(folder: &Path) -> Result<Option<Record>, DaemonError> {
        let path = path(folder);
        match json_file::read_format::<Self>(&path, FORMAT) {
            Ok(record) => record.marked(folder).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(DaemonError::io("read", &path, error)),
        }
    }
}

impl Record {
    /// Sets the phase to handed over if the commit mark names the pending handover. Without a mark that can
    /// be read it is not known who has the machine, and it runs nowhere until a user says so.
    fn marked(mut self, folder: &Path) -> Result<Self, DaemonError> {
        let Some(PendingHandover { handover, to, keeps }) = self.leaving.take() else { return Ok(self) };
        if self.phase == Phase::Here {
            let path = commit_mark::path(folder);
            let undecided = |source| DaemonError::CommitMark { path: path.clone(), to: to.clone(), source };
            if commit_mark::is_made(&path, handover).map_err(undecided)? {
                self.phase = Phase::HandedOver { handover, to, keeps };
            }
        }
        Ok(self)
    }
}

/// The record's file in a machine's folder.
pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(FILE)
}
