//! Launch: builds QEMU's command line from a typed configuration.
//!
//! Source and target of a migration must present the same machine: device ids and PCI addresses are fixed
//! here, by position, and never left to QEMU.

mod command_line;
mod confined;
pub(crate) mod devices;
mod spec;

pub use spec::{
    LaunchError, LaunchSpec, MAX_DISKS, MAX_NICS, MAX_SATA, RamBacking, Sharing, SpecError, TapDevices,
    Vmgenid, display_in, guest_disks, sata_disks,
};
pub(crate) use spec::{agent_in, guest_in, log_in, qmp_in};
