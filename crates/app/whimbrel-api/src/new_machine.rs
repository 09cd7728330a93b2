//! Parts of a new machine: its hardware, and what its guest is told at the first boot.

use serde::{Deserialize, Serialize};
use std::{net::IpAddr, path::PathBuf};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, DeviceModel};

/// Hardware of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// A PC with a BIOS, which boots disks and kernels.
    #[default]
    Default,
    /// A PC with UEFI. Its variables are a disk of the machine.
    Uefi,
    /// A PC with UEFI, Secure Boot, a TPM 2.0 and a screen.
    Desktop,
    /// A small machine for a kernel that is loaded directly: no BIOS, none of the old devices of a PC.
    Micro,
    /// A PC with a BIOS, a screen and devices that every system knows without virtio.
    Foreign,
}

/// Order in which a machine tries what it can boot from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BootOrder {
    /// Disks, and CD-ROM drives if no disk boots.
    #[default]
    Disk,
    /// CD-ROM drives, and disks if none of them boots.
    Cdrom,
}

impl Profile {
    /// Whether it has a TPM without being asked for one.
    pub fn has_tpm(self) -> bool {
        self == Self::Desktop
    }

    /// Whether it has a screen without being asked for one.
    pub fn has_display(self) -> bool {
        matches!(self, Self::Desktop | Self::Foreign)
    }

    /// Whether UEFI starts the guest.
    pub fn is_uefi(self) -> bool {
        matches!(self, Self::Uefi | Self::Desktop)
    }

    /// Whether it has Secure Boot without being asked for it.
    pub fn is_secure(self) -> bool {
        self == Self::Desktop
    }

    /// Kind of its disks and network ports.
    pub fn devices(self) -> DeviceModel {
        if self == Self::Foreign { DeviceModel::Emulated } else { DeviceModel::Virtio }
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == Self::Default
    }
}

impl BootOrder {
    pub(crate) fn is_disk(&self) -> bool {
        *self == Self::Disk
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

/// Address that a guest has without DHCP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StaticAddress {
    /// Address and length of its network, as `10.1.2.5/24` or `fd00::5/64`.
    pub address: String,
    /// Address of the router to other networks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub gateway: Option<IpAddr>,
    /// Addresses of name servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub nameservers: Vec<IpAddr>,
}

/// Settings that cloud-init reads at the first boot, from a disk of the machine's own.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloudInit {
    /// User data: `#cloud-config`, a script, or MIME parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// Network configuration, version 1 or 2 [default: DHCP].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_config: Option<String>,
    /// Host name, as RFC 1123 has them [default: the name of the machine].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Address of the first network port, in place of a network configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<StaticAddress>,
    /// Public SSH keys that may log in as the image's own user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<String>,
}
