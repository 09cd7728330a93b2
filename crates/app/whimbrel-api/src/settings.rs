//! Settings of a machine on its host: when it starts by itself, how people find it, and its hardware.

use crate::{BootOrder, NicRequest, openapi_names::Name};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, DeviceModel, MachineName};

/// Most restarts in a row by default.
pub const RESTARTS_MAX: u32 = 10;

/// Settings of a machine on the host that has it. They do not move with the machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineSettings {
    /// Start with the host.
    #[serde(default, skip_serializing_if = "Autostart::is_off")]
    pub autostart: Autostart,
    /// Restart after the machine has ended by itself.
    #[serde(default, skip_serializing_if = "RestartRule::is_default")]
    pub restart: RestartRule,
    /// Labels, for people and programs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Remark of its users; empty if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl MachineSettings {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Whether a machine starts with its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Autostart {
    /// Do not start the machine.
    #[default]
    Off,
    /// Start the machine after the host has started.
    On {
        /// Place among the machines of the host: the lowest number starts first.
        #[serde(default)]
        order: u32,
        /// Seconds to wait after its start before the next machine is started.
        #[serde(default)]
        delay_s: u32,
    },
}

impl Autostart {
    /// Whether the machine is not started.
    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }
}

/// Reaction to the end of a machine that no user asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestartRule {
    /// Ends after which the machine is restarted.
    #[serde(default)]
    pub policy: RestartPolicy,
    /// Most restarts in a row; a run of ten minutes begins a new row.
    #[serde(default = "restarts_max")]
    pub limit: u32,
}

fn restarts_max() -> u32 {
    RESTARTS_MAX
}

impl Default for RestartRule {
    fn default() -> Self {
        Self { policy: RestartPolicy::No, limit: RESTARTS_MAX }
    }
}

impl RestartRule {
    /// Whether the machine is never restarted.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Ends after which a machine is restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    /// The daemon never starts it by itself.
    #[default]
    No,
    /// End of its QEMU without a shutdown of the guest.
    OnFailure,
    /// Any end but a stop by a user.
    Always,
}

/// Body of `POST /v1/machines/{name}/rename`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RenameRequest {
    /// New name of the machine, which must be free.
    #[schema(value_type = Name)]
    pub to: MachineName,
}

/// Body of `POST /v1/machines/{name}/settings`: what is absent stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SettingsRequest {
    /// Start with the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// Restart after the machine has ended by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartRule>,
    /// Labels to set, and, with null, labels to remove.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Remark of its users; an empty one removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Changes of its hardware; none by default.
    #[serde(default, skip_serializing_if = "HardwareChange::is_empty")]
    pub hardware: HardwareChange,
}

/// Other hardware of a machine: what is absent stays as it is. One that runs gets and loses disks and
/// network ports, of which it can lose the last that it got while it ran; all else needs one that is stopped
/// or crashed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HardwareChange {
    /// Size of the guest memory, a multiple of 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub memory: Option<ByteSize>,
    /// Number of virtual CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// CPU model, as of a new machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Whether it has a screen, a keyboard and a pointer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<bool>,
    /// Kind of its disks and network ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub devices: Option<DeviceModel>,
    /// Disks that become larger; what is added reads as zeros.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disk_sizes: Vec<DiskSize>,
    /// Whether all CD-ROM drives are taken away. Those of a machine that runs stay, and each gets another of
    /// the media in `add_cdroms`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub eject: bool,
    /// Absolute paths of media for CD-ROM drives to add, on the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub add_cdroms: Vec<PathBuf>,
    /// Order in which it tries what it can boot from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_order: Option<BootOrder>,
    /// Sizes of empty disks to add after those that it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<u64>)]
    pub add_disks: Vec<ByteSize>,
    /// Index of the last disk, which is removed with all that is on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remove_disk: Option<u32>,
    /// Network ports to add after those that it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub add_nics: Vec<NicRequest>,
    /// Hardware addresses of network ports to remove.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remove_nics: Vec<String>,
}

/// Size that a disk gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSize {
    /// Index of the disk, from 0.
    pub disk: u32,
    /// Size of the disk, at least that which it has.
    #[schema(value_type = u64)]
    pub size: ByteSize,
}

impl HardwareChange {
    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Restarts of a machine that ended by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestartInfo {
    /// Number of restarts in a row.
    pub count: u32,
    /// Time of the next restart; none if the machine runs, or is not restarted any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_ms: Option<u64>,
    /// Whether the limit was reached.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gave_up: bool,
    /// Cause of the last failed start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}
