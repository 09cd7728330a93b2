//! The old process: offers the machine, stops it, sends its state; takes it back if the new process ends.

use super::{PassError, Step, SwapLimits, clock, qemu, send};
use crate::{
    Disk, LazyMemory, MachineParts, PartError, PassablePort,
    channel::{Channel, ChannelError, seal},
    lazy_memory::FilledPages,
    machine::DiskFiles,
    message::{DiskOffer, MAX_DISKS, MAX_PORTS, MachineOffer, MachineState, Message, decode, encode_state},
    swap::{Knowledge, OldAction, OldEvent, OldSide},
};
use std::{os::fd::OwnedFd, time::Duration};
use whimbrel_block::OverlayFiles;
use whimbrel_capture::DirtyLog;
use whimbrel_machine::Machine as _;
use whimbrel_memory::{AttachmentDescriptors, Mode};
use whimbrel_net::{PortDescriptors, PortState};
use whimbrel_qemu::{Console, ConsoleState, QemuDescriptors, QmpState};

type PortParts = Vec<(PortState, PortDescriptors)>;
type ConsoleParts = (ConsoleState, Option<OwnedFd>);

/// Interval at which a new process that was killed and does not end is reported.
const END_REPORT: Duration = Duration::from_secs(5);

/// What became of a machine that was offered.
#[derive(Debug)]
pub enum Given {
    /// The new process has it. This one has nothing more to do with it.
    Gone {
        /// Time for which the guest was stopped.
        stopped: Duration,
    },
    /// Still the machine of this process, and it runs as before.
    Kept {
        /// Machine of this process.
        machine: Box<MachineParts>,
        /// Whether its dirty logs are complete; if not, every page counts as dirty.
        knowledge: Knowledge,
        /// Why it was not passed on.
        reason: PassError,
    },
}

/// Passes `machine` on to the process at the other end of `channel`, which calls [`take`](super::take()).
/// Tells each step to `reached`.
///
/// # Errors
/// If the machine could neither be passed on nor taken up again. It is as if this process had ended:
/// another one can adopt it, whose dirty pages are not known.
pub fn give(
    machine: MachineParts,
    channel: &Channel,
    limits: &SwapLimits,
    reached: &mut dyn FnMut(Step),
) -> Result<Given, PassError> {
    let runs = machine.qemu.qmp().is_running();
    Giving { machine, channel, limits, reached, runs, held: None, reason: None, stopped: Duration::ZERO }
        .run()
}

struct Giving<'a> {
    machine: MachineParts,
    channel: &'a Channel,
    limits: &'a SwapLimits,
    reached: &'a mut dyn FnMut(Step),
    /// Whether the guest is meant to run.
    runs: bool,
    /// Place in the control connection, while nobody here uses it.
    held: Option<QmpState>,
    /// First cause of not passing it on.
    reason: Option<PassError>,
    stopped: Duration,
}

impl Giving<'_> {
    fn run(mut self) -> Result<Given, PassError> {
        let mut side = OldSide::Offered;
        let offered = self.offer();
        let mut event = self.then_wait(offered, self.limits.ready);
        loop {
            event = match side.on(event) {
                None => self.next(self.limits.ready),
                Some(OldAction::StopAndSend) => {
                    let sent = self.stop_and_send();
                    self.then_wait(sent, self.limits.prepared)
                }
                Some(OldAction::SendYours) => {
                    // A failure means that it has ended, which is noticed next.
                    let _ = send(self.channel, &Message::Yours, &[]);
                    (self.reached)(Step::Gave);
                    self.next(self.limits.running)
                }
                Some(OldAction::KillPeer) => self.end_peer(),
                Some(OldAction::GoOn { stopped, knowledge }) => return self.reclaim(stopped, knowledge),
                Some(OldAction::End) => return Ok(Given::Gone { stopped: self.stopped }),
            };
        }
    }

    fn then_wait(&mut self, done: Result<(), PassError>, patience: Duration) -> OldEvent {
        match done {
            Ok(()) => self.next(patience),
            Err(error) => self.failed(error, OldEvent::Failed),
        }
    }

    fn failed(&mut self, error: PassError, event: OldEvent) -> OldEvent {
        self.reason.get_or_insert(error);
        event
    }

    /// Next event of the new process.
    fn next(&mut self, patience: Duration) -> OldEvent {
        let packet = match self.channel.receive(patience) {
            Ok(packet) => packet,
            Err(error @ ChannelError::Ended) => return self.failed(error.into(), OldEvent::PeerEnded),
            Err(error @ ChannelError::Silent { .. }) => return self.failed(error.into(), OldEvent::Late),
            Err(error) => return self.failed(error.into(), OldEvent::Refused),
        };
        match decode(&packet.bytes) {
            Ok(Message::Ready) => OldEvent::Ready,
            Ok(Message::Prepared) => OldEvent::Prepared,
            Ok(Message::Running { stopped_micros }) => {
                self.stopped = Duration::from_micros(stopped_micros);
                OldEvent::Running
            }
            Ok(Message::Refused { reason }) => {
                let reason = reason.chars().take(500).collect();
                self.failed(PassError::Refused { reason }, OldEvent::Refused)
            }
            Ok(_) => self.failed(PassError::Unexpected { what: "a message" }, OldEvent::Refused),
            Err(error) => self.failed(error.into(), OldEvent::Refused),
        }
    }

    fn check(&self) -> Result<(), PassError> {
        let MachineParts { memory, disks, ports, lazy, .. } = &self.machine;
        let unsupported = |what| Err(PassError::Unsupported { what });
        match memory.state().mode {
            Mode::Lazy if lazy.is_none() => unsupported("memory that another process fills"),
            _ if disks.len() > MAX_DISKS => unsupported("so many disks"),
            _ if ports.len() > MAX_PORTS => unsupported("so many network ports"),
            _ => Ok(()),
        }
    }

    /// Sends the descriptors of all parts, while the guest runs.
    fn offer(&mut self) -> Result<(), PassError> {
        self.check()?;
        let MachineParts { qemu: driver, memory, disks, ports, console, lazy, .. } = &self.machine;
        let AttachmentDescriptors { pidfd, userfaultfd, pagemap, ram_file, memory: by_address } =
            memory.descriptors().map_err(PassError::Descriptors)?;
        let QemuDescriptors { pidfd: qemu_pidfd, qmp } =
            driver.descriptors().map_err(PassError::Descriptors)?;
        let descriptors: Vec<OwnedFd> = [qemu_pidfd, qmp, pidfd, userfaultfd, pagemap]
            .into_iter()
            .chain(ram_file)
            .chain(by_address)
            .collect();
        let offer = MachineOffer {
            memory: memory.state(),
            qemu_dir: driver.dir().to_owned(),
            qemu: driver.process().identity(),
            private_memory: driver.has_private_memory(),
            runs: self.runs,
            disks: disks.len() as u16,
            ports: ports.iter().map(PassablePort::offer).collect(),
            console: console.as_ref().map(|console| (console.path().to_owned(), console.log().to_owned())),
            lazy: lazy.as_ref().map(LazyMemory::source),
        };
        send(self.channel, &Message::Offer(Box::new(offer)), &descriptors)?;
        for disk in disks {
            let DiskFiles { base, overlay, listener } = disk.files().map_err(PassError::Descriptors)?;
            let OverlayFiles { data, durable, live } = overlay;
            let files = [base.into(), data.into(), durable.into(), live.into(), listener.into()];
            send(self.channel, &Message::Disk(DiskOffer { base_id: disk.base_id() }), &files)?;
        }
        (self.reached)(Step::Offered);
        Ok(())
    }

    /// Stops the guest and everything here that acts on the machine, and sends what no descriptor has.
    fn stop_and_send(&mut self) -> Result<(), PassError> {
        let stopped_at = clock();
        // QEMU has no request open once it answers.
        self.machine.qemu.pause().map_err(qemu("stop"))?;
        (self.reached)(Step::Stopped);
        // All threads end at once: on a busy host each takes its turn of a processor.
        self.machine.disks.iter().for_each(Disk::begin_suspend);
        let state = self.machine.qemu.suspend().map_err(qemu("leave"))?;
        self.held = Some(state.qmp.clone());
        let drain = self.limits.drain;
        let mut overlays = Vec::new();
        for disk in &mut self.machine.disks {
            disk.suspend(drain)?;
            overlays.push(disk.state()?);
        }
        let (ports, console) = self.suspend_streams()?;
        // Nothing touches the memory of a paused guest whose disks are silent.
        self.machine.lazy.iter_mut().for_each(LazyMemory::suspend);
        let filled = self.machine.lazy.as_ref().and_then(|_| FilledPages::of(&self.machine.memory));
        let dirty = self.machine.dirty_logs.iter_mut().map(DirtyLog::export).collect::<Result<_, _>>()?;
        let (ports, port_descriptors): (Vec<_>, Vec<_>) = ports.into_iter().unzip();
        let (console, console_stream) = console.unzip();
        let (qemu, runs) = (state, self.runs);
        let state = MachineState { qemu, dirty, overlays, ports, console, filled, runs, stopped_at };
        let file = seal(&encode_state(&state)?)?;
        for disk in &self.machine.disks {
            let (sockets, states): (Vec<_>, Vec<_>) = disk.connections()?.into_iter().unzip();
            send(self.channel, &Message::Connections(states), &sockets)?;
        }
        for PortDescriptors { uplink, guest, device } in port_descriptors {
            let (uplink_passed, guest_passed) = (uplink.is_some(), guest.is_some());
            let message =
                Message::Port { uplink: uplink_passed, guest: guest_passed, device: device.is_some() };
            let descriptors = [uplink, guest, device].into_iter().flatten().collect::<Vec<_>>();
            send(self.channel, &message, &descriptors)?;
        }
        if let Some(stream) = console_stream {
            let message = Message::Console { connected: stream.is_some() };
            send(self.channel, &message, &stream.into_iter().collect::<Vec<_>>())?;
        }
        send(self.channel, &Message::State, &[file])?;
        (self.reached)(Step::StateSent);
        Ok(())
    }

    /// Stops what moves frames and serial output, and returns copies of the parts.
    fn suspend_streams(&mut self) -> Result<(PortParts, Option<ConsoleParts>), PassError> {
        let mut ports = Vec::new();
        for port in &mut self.machine.ports {
            port.suspend()?;
            let (descriptors, state) = port.parts()?;
            ports.push((state, descriptors));
        }
        let console = self.machine.console.as_mut().map(Console::suspend).transpose();
        let console = console.map_err(PartError::Console)?;
        Ok((ports, console.map(|(stream, state)| (state, stream))))
    }

    /// Moves frames and serial output again, and fills memory.
    fn resume_streams(&mut self, is_lost: bool) -> Result<(), PassError> {
        let MachineParts { qemu, memory, ports, console, lazy, .. } = &mut self.machine;
        lazy.iter_mut().try_for_each(|lazy| lazy.serve(memory))?;
        for port in ports {
            if is_lost {
                port.disconnect();
            }
            port.serve(qemu)?;
        }
        console.iter_mut().try_for_each(Console::resume).map_err(PartError::Console)?;
        Ok(())
    }

    /// Kills the new process and waits for its end, however long that takes: until then it may act.
    fn end_peer(&mut self) -> OldEvent {
        let peer = self.channel.peer();
        if let Err(error) = peer.kill() {
            tracing::error!(%error, pid = peer.pid(), "cannot end the new process");
        }
        while !peer.has_ended(END_REPORT) {
            tracing::warn!(pid = peer.pid(), "the new process was killed and has not ended yet");
        }
        OldEvent::PeerEnded
    }

    /// Takes the machine up again.
    fn reclaim(mut self, stopped: bool, knowledge: Knowledge) -> Result<Given, PassError> {
        let reason = self.reason.take().unwrap_or(PassError::Channel(ChannelError::Ended));
        if stopped {
            let is_lost = knowledge == Knowledge::Lost;
            for disk in &mut self.machine.disks {
                disk.suspend(self.limits.drain)?;
                if is_lost {
                    disk.disconnect();
                }
                disk.serve()?;
            }
            if is_lost {
                self.machine.dirty_logs.iter_mut().for_each(DirtyLog::forget);
            }
            self.resume_streams(is_lost)?;
            if let Some(state) = self.held.take() {
                self.machine.qemu.resume_control(state, is_lost).map_err(qemu("control"))?;
            }
            if self.runs {
                self.machine.qemu.unpause().map_err(qemu("continue"))?;
            }
        }
        Ok(Given::Kept { machine: Box::new(self.machine), knowledge, reason })
    }
}
