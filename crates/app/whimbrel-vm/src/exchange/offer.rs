//! Offer of a machine: its description and descriptors, sent while the guest runs. A swap begins with it; a
//! process that waits for the end of this one has got no more.

use super::{PassError, send};
use crate::{
    RunningMachine,
    channel::Channel,
    message::{MAX_DISKS, MAX_PORTS, MachineOffer, Message, decode},
};
use std::{os::fd::OwnedFd, time::Duration};
use whimbrel_block::OverlayFiles;
use whimbrel_memory::AttachmentDescriptors;
use whimbrel_qemu::QemuDescriptors;

/// Offers `machine` to the process at the other end of `channel`, which calls [`take`](super::take()), and
/// returns when that process is ready. It has the machine once this process has ended, and not before; every
/// page counts as dirty then.
///
/// The caller ends that process, and waits for its end, before anything changes that the offer describes:
/// disks, ports, whether the guest is to run, and whose machine it is.
///
/// # Errors
/// If the machine cannot pass, or the other process refuses or is not ready in time. The caller ends it.
pub fn offer_for_later(
    machine: &mut RunningMachine,
    channel: &Channel,
    patience: Duration,
) -> Result<(), PassError> {
    let runs = machine.qemu.qmp().is_running();
    send_offer(machine, channel, runs)?;
    match decode(&channel.receive(patience)?.bytes)? {
        Message::Ready => Ok(()),
        Message::Refused { reason } => Err(PassError::Refused { reason: reason.chars().take(500).collect() }),
        _ => Err(PassError::Unexpected { what: "a message" }),
    }
}

/// Sends the description and the descriptors of all parts. `runs` says whether the guest is meant to run.
pub(super) fn send_offer(
    machine: &mut RunningMachine,
    channel: &Channel,
    runs: bool,
) -> Result<(), PassError> {
    check(machine)?;
    let description = machine.description().seal()?;
    let RunningMachine { qemu: driver, memory, disks, ports, console, runtime_dir, .. } = machine;
    let AttachmentDescriptors { pidfd, userfaultfd, pagemap, ram_file, memory: by_address } =
        memory.attachment().descriptors().map_err(PassError::Descriptors)?;
    let QemuDescriptors { pidfd: qemu_pidfd, qmp } = driver.descriptors().map_err(PassError::Descriptors)?;
    let descriptors: Vec<OwnedFd> = [description, qemu_pidfd, qmp, pidfd, userfaultfd, pagemap]
        .into_iter()
        .chain(ram_file)
        .chain(by_address)
        .collect();
    let offer = MachineOffer {
        memory: memory.attachment().state(),
        qemu_dir: driver.dir().to_owned(),
        qemu: driver.process().identity(),
        private_memory: driver.has_private_memory(),
        runs,
        disks: disks.len() as u16,
        ports: ports.iter().map(|port| port.offer().clone()).collect(),
        console: (console.path().to_owned(), console.log().to_owned()),
    };
    send(channel, &Message::Offer(Box::new(offer)), &descriptors)?;
    for (disk, served) in disks.iter().zip(runtime_dir.disks()) {
        let OverlayFiles { data, durable, live } = disk.files().map_err(PassError::Descriptors)?;
        let listener = served.listener().map_err(PassError::Descriptors)?;
        let base = disk.base_file().map(|base| base.descriptor()).transpose();
        let base = base.map_err(PassError::Descriptors)?.map(OwnedFd::from);
        let files: Vec<OwnedFd> =
            [data.into(), durable.into(), live.into(), listener.into()].into_iter().chain(base).collect();
        send(channel, &Message::Disk, &files)?;
    }
    Ok(())
}

fn check(machine: &RunningMachine) -> Result<(), PassError> {
    let RunningMachine { disks, ports, .. } = machine;
    let what = match machine.unpassable() {
        Some(what) => what,
        None if disks.len() > MAX_DISKS => "so many disks",
        None if ports.len() > MAX_PORTS => "so many network ports",
        None => return Ok(()),
    };
    Err(PassError::Unsupported { what })
}
