//! Parts of a new machine: its hardware, and what its guest is told at the first boot.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;
use whimbrel_core::ByteSize;

/// Hardware of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// A PC with a BIOS, which boots disks and kernels.
    #[default]
    Default,
    /// A PC with UEFI. Its variables are a disk of the machine.
    Uefi,
    /// A PC with UEFI, a TPM 2.0 and a screen.
    Desktop,
    /// A small machine for a kernel that is loaded directly: no BIOS, none of the old devices of a PC.
    Micro,
}

impl Profile {
    /// Whether it has a TPM and a screen without being asked for them.
    pub fn is_desktop(self) -> bool {
        self == Self::Desktop
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == Self::Default
    }
}

/// File that a new disk starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSource {
    /// Absolute path of a raw image on the host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Size of the virtual disk, if larger than the file; the rest reads as zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub size: Option<ByteSize>,
}

/// Network port of a new machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NicRequest {
    /// Bridge on the host; none leaves the port unplugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// Hardware address [default: a random one].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

/// Settings that cloud-init reads at the first boot, from a disk of the machine's own. The host name is the
/// machine's.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloudInit {
    /// User data: `#cloud-config`, a script, or MIME parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// Network configuration, version 1 or 2 [default: DHCP].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_config: Option<String>,
    /// Public SSH keys that may log in as the image's own user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<String>,
}
