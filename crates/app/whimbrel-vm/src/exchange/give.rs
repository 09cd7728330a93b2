//! The old process: offers the machine, stops it, sends its state; takes it back if the new process ends.

use super::{PassError, Step, SwapLimits, clock, offer::send_offer, qemu, send};
use crate::{
    RunningDisk, RunningMachine,
    channel::{Channel, ChannelError, seal},
    filled_pages::FilledPages,
    message::{MachineState, Message, MessageError, decode, encode_state},
    passable_port::PassablePort,
    swap::{Knowledge, OldAction, OldEvent, OldSide},
};
use std::{mem, os::fd::OwnedFd, time::Duration};
use whimbrel_block::OverlayState;
use whimbrel_capture::DirtyLog;
use whimbrel_net::{PortDescriptors, PortState};
use whimbrel_qemu::{ConsoleState, QmpState};

/// Interval at which a new process that was killed and does not end is reported.
const END_REPORT: Duration = Duration::from_secs(5);

/// What became of a machine that was offered.
pub enum Given {
    /// The new process has it. This one has nothing more to do with it.
    Gone {
        /// Time for which the guest was stopped.
        stopped: Duration,
    },
    /// Still the machine of this process, and it runs as before.
    Kept {
        /// Machine of this process.
        machine: Box<RunningMachine>,
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
    machine: RunningMachine,
    channel: &Channel,
    limits: &SwapLimits,
    reached: &mut dyn FnMut(Step),
) -> Result<Given, PassError> {
    let mut giving = Giving::of(machine, channel, limits, reached);
    let offered = giving.offer();
    let event = giving.then_wait(offered, limits.ready);
    giving.run(event)
}

/// Passes `machine` on to a process that is ready since [`offer_for_later`](super::offer_for_later) offered
/// it the machine. Nothing that the offer describes has changed since then.
///
/// # Errors
/// As those of [`give`].
pub fn give_offered(
    machine: RunningMachine,
    channel: &Channel,
    limits: &SwapLimits,
) -> Result<Given, PassError> {
    Giving::of(machine, channel, limits, &mut |_| {}).run(OldEvent::Ready)
}

struct Giving<'a> {
    machine: RunningMachine,
    /// Network ports of the machine, while the guest stands still.
    ports: Vec<PassablePort>,
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

/// State and copies of what moves bytes to and from the guest.
struct Streams {
    ports: Vec<PortState>,
    port_descriptors: Vec<PortDescriptors>,
    console: ConsoleState,
    console_stream: Option<OwnedFd>,
}

impl<'a> Giving<'a> {
    fn of(
        machine: RunningMachine,
        channel: &'a Channel,
        limits: &'a SwapLimits,
        reached: &'a mut dyn FnMut(Step),
    ) -> Self {
        let runs = machine.qemu.qmp().is_running();
        let (ports, stopped) = (Vec::new(), Duration::ZERO);
        Self { machine, ports, channel, limits, reached, runs, held: None, reason: None, stopped }
    }

    /// Goes on from `event`, the first after the offer.
    fn run(mut self, mut event: OldEvent) -> Result<Given, PassError> {
        let mut side = OldSide::Offered;
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
                Some(OldAction::Withdraw) => match send(self.channel, &Message::Withdrawn, &[]) {
                    Ok(()) | Err(PassError::Channel(ChannelError::Ended)) => OldEvent::Withdrew,
                    Err(error) => self.failed(error, OldEvent::Failed),
                },
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
            Err(error) => return self.failed(error.into(), OldEvent::Wrong),
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
            Ok(_) => self.failed(PassError::Unexpected { what: "a message" }, OldEvent::Wrong),
            // A program that speaks another version cannot have taken anything.
            Err(error @ MessageError::Version { .. }) => self.failed(error.into(), OldEvent::Refused),
            Err(error) => self.failed(error.into(), OldEvent::Wrong),
        }
    }

    fn offer(&mut self) -> Result<(), PassError> {
        send_offer(&mut self.machine, self.channel, self.runs)?;
        (self.reached)(Step::Offered);
        Ok(())
    }

    /// Stops the guest and everything here that acts on the machine, and sends what no descriptor has.
    fn stop_and_send(&mut self) -> Result<(), PassError> {
        let stopped_at = clock();
        // QEMU has no request open once it answers.
        self.machine.set_paused(true)?;
        (self.reached)(Step::Stopped);
        // All threads end at once: on a busy host each takes its turn of a processor.
        self.machine.runtime_dir.disks().iter().for_each(|disk| disk.begin_suspend());
        let state = self.machine.qemu.suspend().map_err(qemu("leave"))?;
        self.held = Some(state.qmp.clone());
        let overlays = self.suspend_disks()?;
        let Streams { ports, port_descriptors, console, console_stream } = self.suspend_streams()?;
        // Nothing touches the memory of a paused guest whose disks are silent.
        let RunningMachine { memory, dirty_logs, observer, .. } = &mut self.machine;
        if !memory.suspend(self.limits.drain) {
            return Err(PassError::PagesUnderWay { after: self.limits.drain });
        }
        let filled = FilledPages::of(memory.attachment());
        observer.set_closed(true);
        let dirty = dirty_logs.iter_mut().map(DirtyLog::export).collect::<Result<_, _>>()?;
        let (qemu, runs) = (state, self.runs);
        let state = MachineState { qemu, dirty, overlays, ports, console, filled, runs, stopped_at };
        let file = seal(&encode_state(&state)?)?;
        self.send_streams(port_descriptors, console_stream)?;
        send(self.channel, &Message::State, &[file])?;
        (self.reached)(Step::StateSent);
        Ok(())
    }

    fn suspend_disks(&mut self) -> Result<Vec<OverlayState>, PassError> {
        let RunningMachine { disks, runtime_dir, .. } = &mut self.machine;
        let mut overlays = Vec::new();
        for (disk, served) in disks.iter().zip(runtime_dir.disks()) {
            served.suspend(self.limits.drain)?;
            overlays.push(disk.state()?);
        }
        Ok(overlays)
    }

    /// Stops what moves frames and bytes of the guest, and returns copies of the parts.
    fn suspend_streams(&mut self) -> Result<Streams, PassError> {
        self.ports = mem::take(&mut self.machine.ports).into_iter().map(PassablePort::Open).collect();
        let (mut ports, mut port_descriptors) = (Vec::new(), Vec::new());
        let mut open = mem::take(&mut self.ports).into_iter();
        while let Some(port) = open.next() {
            match port.suspend() {
                Ok(port) => self.ports.push(port),
                Err(failed) => {
                    let (port, error) = *failed;
                    self.ports.extend([port].into_iter().chain(open));
                    return Err(error.into());
                }
            }
        }
        for port in &self.ports {
            let (descriptors, state) = port.parts()?;
            ports.push(state);
            port_descriptors.push(descriptors);
        }
        self.machine.guest.suspend();
        let (console_stream, console) = self.machine.console.suspend().map_err(PassError::Console)?;
        Ok(Streams { ports, port_descriptors, console, console_stream })
    }

    /// Sends the sockets of disks, network ports and console.
    fn send_streams(
        &mut self,
        ports: Vec<PortDescriptors>,
        console: Option<OwnedFd>,
    ) -> Result<(), PassError> {
        for disk in self.machine.runtime_dir.disks() {
            let (sockets, states): (Vec<_>, Vec<_>) = disk.connections()?.into_iter().unzip();
            send(self.channel, &Message::Connections(states), &sockets)?;
        }
        for PortDescriptors { uplink, guest, device } in ports {
            let (has_uplink, has_guest) = (uplink.is_some(), guest.is_some());
            let message = Message::Port { uplink: has_uplink, guest: has_guest, device: device.is_some() };
            let descriptors = [uplink, guest, device].into_iter().flatten().collect::<Vec<_>>();
            send(self.channel, &message, &descriptors)?;
        }
        let message = Message::Console { connected: console.is_some() };
        send(self.channel, &message, &console.into_iter().collect::<Vec<_>>())
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
            self.serve_again(knowledge == Knowledge::Lost)?;
            self.machine.serve_memory_and(self.runs)?;
            self.machine.guest.resume()?;
        }
        Ok(Given::Kept { machine: Box::new(self.machine), knowledge, reason })
    }

    /// Serves disks, ports and console again. `is_lost` says whether another process may have used them.
    fn serve_again(&mut self, is_lost: bool) -> Result<(), PassError> {
        let RunningMachine { qemu: driver, disks, dirty_logs, runtime_dir, observer, console, ports, .. } =
            &mut self.machine;
        disks.iter().for_each(RunningDisk::watch_tpm);
        for disk in runtime_dir.disks() {
            disk.suspend(self.limits.drain)?;
            if is_lost {
                disk.disconnect();
            }
            disk.resume()?;
        }
        if is_lost {
            dirty_logs.iter_mut().for_each(DirtyLog::forget);
        }
        observer.set_closed(false);
        for mut port in mem::take(&mut self.ports) {
            if is_lost {
                port.disconnect();
            }
            ports.push(port.serve(driver)?);
        }
        console.resume().map_err(PassError::Console)?;
        if let Some(state) = self.held.take() {
            driver.resume_control(state, is_lost).map_err(qemu("control"))?;
        }
        Ok(())
    }
}
