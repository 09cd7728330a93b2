//! A guest with redis and PostgreSQL of the distribution in it, and clients outside that check their own
//! history: for experiments in which its hosts die, and for such in which it moves.

mod disk;
mod histories;
mod packages;
mod pgbench;

pub(super) use disk::disk;
pub(super) use histories::{Histories, Kind, Sums};
pub(super) use packages::{below, install, program};
pub(super) use pgbench::Pgbench;

use crate::hosts::Machine;
use anyhow::Result;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{DebianGuest, GuestOptions};

/// Memory of the guest.
pub(super) const MEMORY: ByteSize = ByteSize(192 << 20);

/// What it is told when it boots.
pub(super) fn options(address: &str) -> GuestOptions {
    GuestOptions { address: Some(format!("{address}/24")), buffer_mib: 1, ..GuestOptions::default() }
}

/// The guest.
pub(super) fn machine(address: &str) -> Result<Machine> {
    let DebianGuest { kernel, initrd, .. } = DebianGuest::get()?;
    let (boot, disks) = (Some((kernel, initrd)), vec![disk()?]);
    Ok(Machine { memory: MEMORY, boot, options: options(address), disks })
}
