//! The new process: prepares from what the old one passes, and has the machine once it may.

use super::{PassError, Step, SwapLimits, clock, qemu, send};
use crate::{
    MachineDescription, MachinePlace, RunningMachine,
    channel::{Channel, ChannelError, Packet},
    message::{MAX_DISKS, MAX_PORTS, MachineOffer, MachineState, Message, decode, read_state},
    passable_port::PassablePort,
    running::{BuiltMachine, OfferedDisk, OfferedMachine},
    swap::{Knowledge, NewAction, NewEvent, NewSide},
};
use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
    time::Duration,
};
use whimbrel_block::OverlayFiles;
use whimbrel_memory::{Attachment, AttachmentDescriptors, RamSharing};
use whimbrel_nbd::ConnectionState;
use whimbrel_net::PortDescriptors;
use whimbrel_qemu::{Console, ConsoleState, Qemu, QemuDescriptors, QemuState, QmpState};

/// A machine that this process got.
pub struct Taken {
    /// The machine, which runs again if it ran before.
    pub machine: RunningMachine,
    /// Whether its dirty logs are complete. If not, nobody follows them: as for a machine that was adopted,
    /// every page may have been written.
    pub knowledge: Knowledge,
    /// Time for which the guest was stopped; none if the old process ended before it told.
    pub stopped: Option<Duration>,
}

/// Makes place for the machine of a description in this process, or says why there is none.
pub type FindPlace<'a> =
    &'a dyn Fn(&MachineDescription) -> Result<MachinePlace, Box<dyn std::error::Error + Send + Sync>>;

/// Takes the machine that the process at the other end of `channel` gives ([`give`](super::give())).
/// `find_place` opens what a description does not pass. Tells each step to `reached`.
///
/// # Errors
/// If the machine is not this process's, which does nothing with it any more. The old process has it, unless
/// it was given and could not be taken up: so the caller ends, or ends the old process and adopts the
/// machine.
pub fn take(
    channel: &Channel,
    limits: &SwapLimits,
    find_place: FindPlace<'_>,
    reached: &mut dyn FnMut(Step),
) -> Result<Taken, PassError> {
    let (offer, built) = (None, None);
    Taking { channel, limits, find_place, reached, offer, built, reason: None }.run()
}

/// All that came while the guest ran.
struct Offered {
    offer: MachineOffer,
    machine: OfferedMachine,
    qemu: QemuDescriptors,
}

/// All but what acts on the machine.
struct Built {
    machine: BuiltMachine,
    ports: Vec<PassablePort>,
    console: PassedConsole,
    qemu: QemuDescriptors,
    qemu_state: QemuState,
    runs: bool,
    stopped_at: Option<u64>,
}

/// Console that nobody reads yet.
enum PassedConsole {
    /// As the old process left it.
    Suspended(Option<OwnedFd>, ConsoleState),
    /// Socket and log of a console whose connection ended with the old process.
    Unopened(PathBuf, PathBuf),
}

impl PassedConsole {
    fn read(self) -> io::Result<Console> {
        match self {
            Self::Suspended(connection, state) => Console::from_parts(connection, state),
            Self::Unopened(socket, log) => Console::open(&socket, &log),
        }
    }
}

/// What came of the streams of a stopped machine.
#[derive(Default)]
struct Streams {
    connections: Vec<Vec<(UnixStream, ConnectionState)>>,
    ports: Vec<PortDescriptors>,
    console: Option<OwnedFd>,
}

struct Taking<'a> {
    channel: &'a Channel,
    limits: &'a SwapLimits,
    find_place: FindPlace<'a>,
    reached: &'a mut dyn FnMut(Step),
    offer: Option<Offered>,
    built: Option<Built>,
    reason: Option<PassError>,
}

impl Taking<'_> {
    fn run(mut self) -> Result<Taken, PassError> {
        let mut side = NewSide::Waiting;
        loop {
            let event = self.next(side);
            match side.on(event) {
                None => {}
                Some(NewAction::SendReady) => {
                    (self.reached)(Step::Received);
                    self.notify(&Message::Ready);
                    (self.reached)(Step::Ready);
                }
                Some(NewAction::SendPrepared) => {
                    self.notify(&Message::Prepared);
                    (self.reached)(Step::Prepared);
                }
                Some(NewAction::TakeUp(knowledge)) => return self.activate(knowledge),
                Some(NewAction::Refuse) => {
                    let error = self.reason.unwrap_or(PassError::Unexpected { what: "a message" });
                    let reason = whimbrel_core::error_chain(&error);
                    let _ = send(self.channel, &Message::Refused { reason }, &[]);
                    return Err(error);
                }
                Some(NewAction::End) if event == NewEvent::Withdrawn => return Err(PassError::Withdrawn),
                Some(NewAction::End) => return Err(PassError::Channel(ChannelError::Ended)),
            }
        }
    }

    /// Says a word. A failure means that the old process has ended, which is noticed next.
    fn notify(&self, message: &Message) {
        let _ = send(self.channel, message, &[]);
    }

    fn next(&mut self, side: NewSide) -> NewEvent {
        let done = match side {
            NewSide::Waiting => self.receive_offer().map(|()| NewEvent::Offer),
            NewSide::Ready => self.receive_state().map(|()| NewEvent::State),
            NewSide::Prepared | NewSide::Has | NewSide::Over => match self.receive() {
                Ok((Message::Yours, _)) => Ok(NewEvent::Yours),
                Ok(_) => Err(PassError::Unexpected { what: "a message" }),
                Err(error) => Err(error),
            },
        };
        match done {
            Ok(event) => event,
            Err(PassError::Channel(ChannelError::Ended)) => NewEvent::PeerEnded,
            Err(PassError::Withdrawn) => NewEvent::Withdrawn,
            Err(error) => {
                self.reason = Some(error);
                NewEvent::Failed
            }
        }
    }

    /// Next message, however long it takes: silence never makes the machine this process's.
    fn receive(&self) -> Result<(Message, Vec<OwnedFd>), PassError> {
        loop {
            match self.receive_in_time() {
                Err(PassError::Channel(ChannelError::Silent { .. })) => {}
                received => return received,
            }
        }
    }

    /// Next message, unless the other process is silent.
    fn receive_in_time(&self) -> Result<(Message, Vec<OwnedFd>), PassError> {
        let Packet { bytes, descriptors } = self.channel.receive(self.limits.ready)?;
        match decode(&bytes)? {
            Message::Withdrawn => Err(PassError::Withdrawn),
            message => Ok((message, descriptors)),
        }
    }

    fn receive_offer(&mut self) -> Result<(), PassError> {
        // Nothing has passed yet: a process that hangs can be given up, and ended by whoever called this.
        let (Message::Offer(offer), descriptors) = self.receive_in_time()? else {
            return Err(PassError::Unexpected { what: "something before an offer" });
        };
        let offer = *offer;
        if usize::from(offer.disks) > MAX_DISKS || offer.ports.len() > MAX_PORTS {
            return Err(PassError::Unsupported { what: "so many disks or network ports" });
        }
        let mut passed = Passed(descriptors.into_iter());
        let description = MachineDescription::unseal(passed.next()?)?;
        let qemu = QemuDescriptors { pidfd: passed.next()?, qmp: passed.next()? };
        let memory = attachment(&offer, passed)?;
        let disks = (0..offer.disks).map(|_| self.receive_disk()).collect::<Result<_, _>>()?;
        let place = (self.find_place)(&description).map_err(PassError::Place)?;
        let machine = OfferedMachine::open(description, place, memory, disks)?;
        self.offer = Some(Offered { offer, machine, qemu });
        Ok(())
    }

    fn receive_disk(&self) -> Result<OfferedDisk, PassError> {
        let (Message::Disk, descriptors) = self.receive()? else {
            return Err(PassError::Unexpected { what: "something between disks" });
        };
        let mut passed = Passed(descriptors.into_iter());
        let (data, durable, live) = (passed.next()?.into(), passed.next()?.into(), passed.next()?.into());
        let (files, listener) = (OverlayFiles { data, durable, live }, passed.next()?.into());
        Ok(OfferedDisk { files, listener, base: passed.0.next().map(Into::into) })
    }

    fn receive_state(&mut self) -> Result<(), PassError> {
        let offered = self.offer.as_ref().ok_or(PassError::Unexpected { what: "a state" })?;
        let streams = self.receive_streams(offered)?;
        let (Message::State, descriptors) = self.receive()? else {
            return Err(PassError::Unexpected { what: "something before the state" });
        };
        let state = read_state(Passed(descriptors.into_iter()).next()?)?;
        let offered = self.offer.take().ok_or(PassError::Unexpected { what: "a state" })?;
        self.built = Some(build(offered, state, streams)?);
        Ok(())
    }

    fn receive_streams(&self, offered: &Offered) -> Result<Streams, PassError> {
        let mut streams = Streams::default();
        for _ in 0..offered.machine.disks() {
            let (Message::Connections(states), descriptors) = self.receive()? else {
                return Err(PassError::Unexpected { what: "something between connections" });
            };
            if states.len() != descriptors.len() {
                return Err(PassError::Unexpected { what: "other sockets than states" });
            }
            let sockets = descriptors.into_iter().map(UnixStream::from);
            streams.connections.push(sockets.zip(states).collect());
        }
        for _ in 0..offered.offer.ports.len() {
            let (Message::Port { uplink, guest, device }, descriptors) = self.receive()? else {
                return Err(PassError::Unexpected { what: "something between network ports" });
            };
            let mut passed = Passed(descriptors.into_iter());
            let uplink = uplink.then(|| passed.next()).transpose()?;
            let guest = guest.then(|| passed.next()).transpose()?;
            let device = device.then(|| passed.next()).transpose()?;
            streams.ports.push(PortDescriptors { uplink, guest, device });
        }
        let (Message::Console { connected }, descriptors) = self.receive()? else {
            return Err(PassError::Unexpected { what: "something before the console" });
        };
        let mut passed = Passed(descriptors.into_iter());
        streams.console = connected.then(|| passed.next()).transpose()?;
        Ok(streams)
    }

    /// Has the machine from now on.
    fn activate(mut self, knowledge: Knowledge) -> Result<Taken, PassError> {
        let built = match (self.built.take(), self.offer.take()) {
            (Some(built), _) => built,
            (None, Some(offered)) => build_without_state(offered)?,
            (None, None) => return Err(PassError::Unexpected { what: "nothing" }),
        };
        let Built { machine: mut parts, ports, console, runs, stopped_at, .. } = built;
        parts.runtime_dir.disks().iter_mut().try_for_each(|disk| disk.resume())?;
        parts.memory.serve()?;
        let driver = Qemu::from_parts(built.qemu, built.qemu_state).map_err(qemu("control"))?;
        let ports = ports.into_iter().map(|port| port.serve(&driver)).collect::<Result<_, _>>()?;
        let console = console.read().map_err(PassError::Console)?;
        let mut machine = parts.complete(driver, ports, console)?;
        (self.reached)(Step::Serving);
        if runs {
            machine.set_paused(false)?;
        }
        let stopped = stopped_at.map(|at| Duration::from_micros(clock().saturating_sub(at)));
        (self.reached)(Step::Continued);
        let stopped_micros = stopped.map_or(0, |time| time.as_micros() as u64);
        self.notify(&Message::Running { stopped_micros });
        Ok(Taken { machine, knowledge, stopped })
    }
}

/// The attachment to the memory of an offer.
fn attachment(offer: &MachineOffer, mut passed: Passed) -> Result<Attachment, PassError> {
    let (pidfd, userfaultfd, pagemap) = (passed.next()?, passed.next()?, passed.next()?);
    let (has_file, has_memory) = match offer.memory.sharing {
        RamSharing::Shared { .. } => (true, false),
        RamSharing::Template { .. } => (true, true),
        RamSharing::Anonymous => (false, true),
    };
    let ram_file = has_file.then(|| passed.next()).transpose()?;
    let memory = has_memory.then(|| passed.next()).transpose()?;
    let parts = AttachmentDescriptors { pidfd, userfaultfd, pagemap, ram_file, memory };
    Ok(Attachment::from_parts(parts, &offer.memory)?)
}

/// Builds everything from the state. Starts no thread, and takes no dirty page.
fn build(offered: Offered, state: MachineState, streams: Streams) -> Result<Built, PassError> {
    let Offered { offer, machine, qemu } = offered;
    let MachineState { qemu: qemu_state, dirty, overlays, ports, console, filled, runs, stopped_at } = state;
    let mut machine = machine.build(Some(&overlays))?;
    if dirty.len() != machine.dirty_logs.len() || ports.len() != offer.ports.len() {
        return Err(PassError::Unexpected { what: "the state of another machine" });
    }
    for (log, state) in machine.dirty_logs.iter_mut().zip(dirty) {
        log.import(state).map_err(|_| PassError::Unexpected { what: "dirty pages of another machine" })?;
    }
    if filled.is_some_and(|filled| !filled.apply(machine.memory.attachment())) {
        return Err(PassError::Unexpected { what: "filled pages of another machine" });
    }
    for (disk, connections) in machine.runtime_dir.disks().iter_mut().zip(streams.connections) {
        disk.take_connections(connections);
    }
    let parts = streams.ports.into_iter().zip(ports);
    let ports = offer.ports.into_iter().zip(parts);
    let ports = ports.map(|(offer, parts)| PassablePort::passed(offer, Some(parts))).collect();
    let console = PassedConsole::Suspended(streams.console, console);
    let stopped_at = Some(stopped_at);
    Ok(Built { machine, ports, console, qemu, qemu_state, runs, stopped_at })
}

/// Builds everything after the old process ended without a state. Its connections ended with it, and QEMU
/// connects again; so do network ports and console.
fn build_without_state(offered: Offered) -> Result<Built, PassError> {
    let Offered { offer, machine, qemu } = offered;
    let machine = machine.build(None)?;
    let qemu_state = QemuState {
        dir: offer.qemu_dir,
        identity: offer.qemu,
        private_memory: offer.private_memory,
        head: None,
        qmp: QmpState::unknown(),
    };
    let ports = offer.ports.into_iter().map(|offer| PassablePort::passed(offer, None)).collect();
    let (socket, log) = offer.console;
    let console = PassedConsole::Unopened(socket, log);
    let (runs, stopped_at) = (offer.runs, None);
    Ok(Built { machine, ports, console, qemu, qemu_state, runs, stopped_at })
}

/// Descriptors of a message, one after the other.
struct Passed(std::vec::IntoIter<OwnedFd>);

impl Passed {
    fn next(&mut self) -> Result<OwnedFd, PassError> {
        self.0.next().ok_or(PassError::Unexpected { what: "too few descriptors" })
    }
}
