//! Epochs of one machine: when the next one is captured, what buffers its output, and what ends them.

use super::{
    captured_machine::{EpochMachine, SeedingMachine, SlowableMachine},
    events::{QemuEvents, QemuVerdict},
    group::Membership,
    handle::{ProtectionCommand, ProtectionEvent, ProtectionHandle},
    heartbeat::Heartbeat,
    input_shipping::InputShipper,
};
use crate::protect::{link::PageLink, settings::ProtectionSettings};
use crate::{core::error::DaemonError, daemon::Daemon, machine::record::Record};
use std::{
    cell::RefCell,
    ops::ControlFlow,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender},
    },
    time::{Duration, Instant},
};
use whimbrel_api::ProtectState;
use whimbrel_capture::{CaptureSource, Consumer};
use whimbrel_core::{error_chain, lock};
use whimbrel_migrate::{link::Link, source::BoxError};
use whimbrel_net::{Epoch, Port};
use whimbrel_protect::{
    PrimaryError,
    clock::BootTime,
    epoch_length::EpochLength,
    primary::{EpochSender as Sending, was_cancelled},
    protocol::ProtectionId,
    seeding_policy::SeedingPolicy,
    stats::EpochStats,
};
use whimbrel_qemu::{Console, MachineEvent};
use whimbrel_vm::{CaptureBreaks, NetworkPort, PausableMachine, RunningMachine};

/// Interval at which events are polled during long epochs.
const POLL_INTERVAL: Duration = Duration::from_millis(25);

/// How long to wait for the other members of a group before polling for events.
const GROUP_WAIT: Duration = Duration::from_millis(100);

/// Reason for which the epochs ended.
pub(in crate::protect) enum EpochsEnd {
    /// The standby was lost, or something else failed.
    Failed(DaemonError),
    /// A user ended the protection.
    Unprotect(Sender<Result<(), DaemonError>>),
    /// A user requested a failover. The standby has the last epoch, and the machine is paused here.
    Failover { answer: Sender<Result<f64, DaemonError>>, paused_at: Instant },
    /// QEMU has died, or cannot go on here.
    QemuGone,
    /// The guest has shut down.
    SwitchedOff,
    /// The last missing page of an inherited protection has arrived.
    Complete,
    /// The daemon is shutting down.
    Closing,
}

/// Creates the epoch sender for these settings.
pub(in crate::protect) fn sender<'a>(
    link: &'a dyn Link,
    id: ProtectionId,
    settings: &ProtectionSettings,
    memory: u64,
) -> Result<Sending<'a>, DaemonError> {
    let hash_bytes_max = settings.hash_bytes_max(memory);
    Sending::new(link, id, settings.coding, rand::random(), hash_bytes_max).map_err(failed)
}

/// Where an epoch ends in the output of the machine: frames of each port, and bytes of the console.
#[derive(Default)]
pub(in crate::protect) struct OutputMarks {
    ports: Vec<(Arc<Port>, Epoch)>,
    console: Option<(Arc<Console>, u64)>,
}

/// Ends the output epoch of every port and of the console.
pub(in crate::protect) fn barriers(beats: &Heartbeat) -> OutputMarks {
    let barrier = |port: Arc<Port>| port.barrier().ok().map(|epoch| (port, epoch));
    let ports = beats.ports().filter_map(barrier).collect();
    let position = |console: Arc<Console>| {
        let position = console.output_position();
        (console, position)
    };
    OutputMarks { ports, console: beats.console().map(position) }
}

/// Releases output up to these marks, if the machine may be visible now.
fn release(beats: &Heartbeat, cut: &Mutex<OutputMarks>) {
    release_all(beats, std::mem::take(&mut *lock(cut)));
}

/// Releases output up to marks that the caller owns.
pub(in crate::protect) fn release_all(beats: &Heartbeat, cut: OutputMarks) {
    if let Some((console, position)) = cut.console
        && beats.may_run()
    {
        console.release_output(position);
    }
    for (port, epoch) in cut.ports {
        if beats.may_run()
            && let Err(error) = port.release(epoch)
        {
            tracing::warn!(%error, "cannot release output of a protected machine");
        }
    }
}

/// Protects the machine until an event ends the epochs.
pub(in crate::protect) fn run(
    host: &Arc<Daemon>,
    guard: &ProtectionHandle,
    parts: (&mut Record, &mut RunningMachine),
    (link, beats): (&PageLink, &Heartbeat),
    has_pages: bool,
    told: &Sender<ProtectionEvent>,
) -> EpochsEnd {
    let shipping = guard.settings().replay.then(|| InputShipper::new(host, beats, link));
    std::thread::scope(|scope| {
        if let Some(shipping) = &shipping {
            let ship =
                std::thread::Builder::new().name("inputs".into()).spawn_scoped(scope, || shipping.run());
            if let Err(source) = ship {
                shipping.end();
                return EpochsEnd::Failed(DaemonError::io(
                    "start a thread for",
                    host.directories.data(),
                    source,
                ));
            }
        }
        let outcome = attach_consumer(host, guard, parts, (link, beats, shipping.as_ref()), has_pages, told);
        shipping.iter().for_each(InputShipper::end);
        outcome
    })
}

fn attach_consumer(
    host: &Daemon,
    guard: &ProtectionHandle,
    (record, live): (&mut Record, &mut RunningMachine),
    (link, beats, shipping): (&PageLink, &Heartbeat, Option<&InputShipper<'_>>),
    has_pages: bool,
    told: &Sender<ProtectionEvent>,
) -> EpochsEnd {
    let events = live.events();
    let mut sending = match sender(link, beats.id, &guard.settings(), record.config.memory.0) {
        Ok(sending) => sending,
        Err(error) => return EpochsEnd::Failed(error),
    };
    let known = host.protections.shared_pages_at(&guard.settings().request.host);
    known.join(beats.id).into_iter().for_each(|member| sending.share_with(member));
    let mut epochs = Epochs::new(host, guard, events, beats, &mut sending, shipping);
    if let Err(error) = epochs.sender.attach_consumer(&mut live.dirty_logs, has_pages) {
        return epochs.end_of_error(live, failed(error));
    }
    match epochs.seed(live, told) {
        Ok(pause) => {
            guard.set_state(ProtectState::Protected);
            let pause_ms = pause.as_secs_f64() * 1e3;
            let _ = told.send(ProtectionEvent::Protected { pause_ms, wire_bytes: link.bytes_both_ways() });
            tracing::info!(machine = %guard.name, standby = %guard.settings().request.host, "the machine is protected");
        }
        Err(error) => return epochs.end_of_error(live, error),
    }
    epochs.run_all(record, live)
}

/// Continues a standby that the source has seeded, until all missing pages are here or another event ends the
/// epochs.
pub(in crate::protect) fn inherit(
    host: &Daemon,
    guard: &ProtectionHandle,
    (record, live): (&mut Record, &mut RunningMachine),
    (link, beats): (&PageLink, &Heartbeat),
) -> EpochsEnd {
    let events = live.events();
    let mut sending = match sender(link, beats.id, &guard.settings(), record.config.memory.0) {
        Ok(sending) => sending,
        Err(error) => return EpochsEnd::Failed(error),
    };
    sending.inherit_standby();
    let epochs = Epochs::new(host, guard, events, beats, &mut sending, None);
    // The state of the pause is the standby's epoch 0.
    Epochs { inherited: true, next: 1, ..epochs }.run_all(record, live)
}

struct Epochs<'a, 'l> {
    host: &'a Daemon,
    handle: &'a ProtectionHandle,
    heartbeat: &'a Heartbeat,
    sender: &'a mut Sending<'l>,
    events: QemuEvents,
    output_marks: Mutex<OutputMarks>,
    /// Present in a group while epochs run.
    membership: Option<Membership>,
    /// Present in mode replay.
    shipper: Option<&'a InputShipper<'a>>,
    /// Whether the protection is inherited: it cannot be seeded again, and ends when no page is missing.
    inherited: bool,
    /// Number of the next epoch.
    next: u64,
    timing: Timing,
    /// Failure of an epoch in a break of other work.
    failure: Option<DaemonError>,
}

/// When the next epoch is captured.
struct Timing {
    stretch: EpochLength,
    begun: Instant,
    earliest: Instant,
    /// Instant at which the last epoch was captured.
    last_cut: Instant,
}

impl<'a, 'l> Epochs<'a, 'l> {
    /// Epochs of a machine whose standby is still to be seeded.
    fn new(
        host: &'a Daemon,
        handle: &'a ProtectionHandle,
        events: Receiver<MachineEvent>,
        heartbeat: &'a Heartbeat,
        sender: &'a mut Sending<'l>,
        shipper: Option<&'a InputShipper<'a>>,
    ) -> Self {
        let (output_marks, membership, inherited, next) = (Mutex::default(), None, false, 0);
        let events = QemuEvents::new(events);
        let (settings, now) = (handle.settings(), Instant::now());
        let stretch = EpochLength::new(settings.epoch, settings.stretch);
        let timing = Timing { stretch, begun: now, earliest: now, last_cut: now };
        Self {
            host,
            handle,
            heartbeat,
            sender,
            events,
            output_marks,
            membership,
            shipper,
            inherited,
            next,
            timing,
            failure: None,
        }
    }
}

impl Epochs<'_, '_> {
    /// Seeds the standby. Returns how long the machine was paused.
    fn seed(
        &mut self,
        live: &mut RunningMachine,
        told: &Sender<ProtectionEvent>,
    ) -> Result<Duration, DaemonError> {
        self.handle.set_state(ProtectState::Seeding);
        let RunningMachine { qemu, dirty_logs: ledgers, disks, ports, .. } = live;
        let machine = PausableMachine { qemu, disks, keep_paused: false, buffering_ports: &[] };
        self.shipper.iter().for_each(|shipping| shipping.stop_release());
        let shipping = self.shipper;
        let mut machine = SeedingMachine {
            machine: SlowableMachine::new(machine),
            heartbeat: self.heartbeat,
            output_marks: &self.output_marks,
            shipper: shipping,
        };
        let mut subject =
            CaptureSource { machine: &mut machine, dirty_logs: ledgers, consumer: Consumer::Standby };
        let addresses = || {
            shipping.iter().for_each(|shipping| shipping.wait_captured_known());
            ports.iter().map(NetworkPort::addresses).collect()
        };
        let guard = self.handle;
        let captured = self.sender.seed(&mut subject, &SeedingPolicy, &addresses, &mut |progress| {
            let _ = told.send(ProtectionEvent::Progress(progress));
            if guard.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let captured = captured.map_err(failed)?;
        release(self.heartbeat, &self.output_marks);
        self.next = 1;
        if let Some(shipping) = shipping {
            shipping.epoch_committed(0);
        }
        self.handle.committed(0, self.sender.hash_bytes(), |_| {});
        self.handle.set_state(ProtectState::Protected);
        self.join_group();
        Ok(captured.downtime)
    }

    fn join_group(&mut self) {
        let group = self.handle.settings().request.group.clone();
        self.membership = group.map(|group| self.host.protections.groups.join(&group));
    }

    fn run_all(&mut self, record: &mut Record, live: &mut RunningMachine) -> EpochsEnd {
        let length = self.handle.settings().epoch;
        if self.timing.stretch.is_adaptive() {
            self.heartbeat.wake_on_output();
        }
        // Events must be handled also during long epochs.
        let look_every = if self.shipper.is_some() { POLL_INTERVAL } else { length };
        (self.timing.begun, self.timing.last_cut) = (Instant::now(), Instant::now());
        self.timing.earliest = self.timing.begun + length;
        loop {
            match self.handle.wait_command(self.due().min(Instant::now() + look_every)) {
                Some(ProtectionCommand::Unprotect(answer)) => return EpochsEnd::Unprotect(answer),
                Some(ProtectionCommand::Failover(answer)) => return self.fail_over(live, answer),
                Some(ProtectionCommand::Work(work)) => work(record, live, self),
                None => {}
            }
            if let Some(error) = self.failure.take() {
                return self.end_of_error(live, error);
            }
            if let Some(outcome) = self.poll_events(live) {
                return outcome;
            }
            if !self.is_due() || !self.is_gathered() {
                continue;
            }
            if let Err(error) = self.run_epoch(live, false) {
                return self.end_of_error(live, error);
            }
        }
    }

    fn due(&self) -> Instant {
        let Timing { stretch, begun, earliest, .. } = &self.timing;
        stretch.due(*begun, *earliest, self.heartbeat.output_waits())
    }

    fn is_due(&self) -> bool {
        Instant::now() >= self.due() || self.shipper.is_some_and(InputShipper::is_urgent)
    }

    /// Sends a last epoch, after which the machine stays paused here.
    fn fail_over(
        &mut self,
        live: &mut RunningMachine,
        answer: Sender<Result<f64, DaemonError>>,
    ) -> EpochsEnd {
        // The last epoch does not wait for the group.
        self.membership = None;
        let paused_at = Instant::now();
        match self.run_epoch(live, true) {
            Ok(()) => EpochsEnd::Failover { answer, paused_at },
            Err(error) => {
                let _ = answer.send(Err(DaemonError::invalid(error_chain(&error))));
                self.end_of_error(live, error)
            }
        }
    }

    /// Whether to capture the next epoch now: in a group once it is due for all members. False if there may
    /// be something else to do.
    fn is_gathered(&self) -> bool {
        let until = Instant::now() + GROUP_WAIT;
        let mut go_on = || !self.host.is_closing() && !self.handle.has_command() && Instant::now() < until;
        self.membership.as_ref().is_none_or(|membership| membership.wait_due(&mut go_on))
    }

    /// Checks for events of the machine or the daemon.
    fn poll_events(&mut self, live: &RunningMachine) -> Option<EpochsEnd> {
        if self.host.is_closing() {
            return Some(EpochsEnd::Closing);
        }
        if self.inherited && live.is_complete() {
            return Some(EpochsEnd::Complete);
        }
        if self.heartbeat.is_forgotten() && !self.inherited {
            // A new protection registers there again; this one may have been decided.
            return Some(EpochsEnd::Failed(DaemonError::invalid(
                "the witness has forgotten this protection, as after a reinstallation",
            )));
        }
        match self.events.poll(Instant::now())? {
            QemuVerdict::SwitchedOff => Some(EpochsEnd::SwitchedOff),
            QemuVerdict::Gone => Some(EpochsEnd::QemuGone),
            QemuVerdict::DiskFails => {
                tracing::error!(machine = %self.handle.name, "a disk keeps failing: yielding the machine to its standby");
                Some(EpochsEnd::QemuGone)
            }
        }
    }

    /// Reports a dead QEMU instead of an error that it caused.
    fn end_of_error(&self, live: &RunningMachine, error: DaemonError) -> EpochsEnd {
        if self.host.is_closing() {
            return EpochsEnd::Closing;
        }
        // The QMP socket closes a moment before the process ends. Errors of the link say nothing about QEMU.
        let patience = if is_of_link(&error) { Duration::ZERO } else { Duration::from_secs(1) };
        if live.qemu.process().wait(patience) {
            return if self.heartbeat.is_armed() { EpochsEnd::QemuGone } else { EpochsEnd::Failed(error) };
        }
        EpochsEnd::Failed(error)
    }

    /// Captures an epoch, sends it, and releases its output. With `stay` the machine stays paused.
    fn run_epoch(&mut self, live: &mut RunningMachine, stay: bool) -> Result<(), DaemonError> {
        let RunningMachine { qemu, dirty_logs, disks, ports, .. } = live;
        let machine = PausableMachine { qemu, disks, keep_paused: stay, buffering_ports: &[] };
        let mut machine = SlowableMachine::new(machine);
        let consumer = Consumer::Standby;
        self.timed_epoch(CaptureSource { machine: &mut machine, dirty_logs, consumer }, ports, stay)
    }

    /// Captures and sends an epoch, and decides when the next one is due.
    fn timed_epoch(
        &mut self,
        source: CaptureSource<'_>,
        ports: &[NetworkPort],
        stay: bool,
    ) -> Result<(), DaemonError> {
        self.timing.begun = Instant::now();
        let delay = self.capture_epoch(source, ports, stay)?;
        self.timing.stretch.committed(delay);
        let (begun, now) = (self.timing.begun, Instant::now());
        self.timing.earliest = begun + self.handle.settings().epoch;
        if self.timing.earliest <= now {
            // The link is too slow: the next epoch is as long as it takes.
            self.timing.earliest = now + (now - begun) / 4;
            self.handle.count_late();
        }
        Ok(())
    }

    /// Captures an epoch, sends it, and releases its output. Returns the time since the capture.
    fn capture_epoch(
        &mut self,
        source: CaptureSource<'_>,
        ports: &[NetworkPort],
        stay: bool,
    ) -> Result<Duration, DaemonError> {
        let CaptureSource { machine, dirty_logs, consumer } = source;
        let mut machine = EpochMachine { machine, heartbeat: self.heartbeat };
        let mut subject = CaptureSource { machine: &mut machine, dirty_logs, consumer };
        let (shipping, epoch, mut needed) = (self.shipper, self.next, 0);
        let addresses = || {
            shipping.iter().for_each(|shipping| shipping.wait_captured_known());
            ports.iter().map(NetworkPort::addresses).collect()
        };
        let (beats, cut) = (self.heartbeat, &self.output_marks);
        let membership = RefCell::new(self.membership.take());
        let mut stopped = || {
            *lock(cut) = barriers(beats);
            if let Some(shipping) = shipping {
                needed = shipping.epoch_captured(epoch, stay);
            }
            membership.borrow().iter().for_each(Membership::wait_paused);
        };
        let (host, name) = (self.host, &self.handle.name);
        let mut committed = self.sender.epoch(&mut subject, &addresses, &mut stopped);
        if let Err(PrimaryError::EpochTooLarge { bytes }) = committed {
            tracing::warn!(machine = %name, bytes, "more is dirty than a pause can copy; sending it in rounds, output waits");
            // Nobody in a group waits for that.
            drop(membership.take());
            let mut go_on = |_, _| match beats.may_run() && !host.is_closing() {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            };
            committed = self.sender.large_epoch(&mut subject, &addresses, &mut stopped, &mut go_on);
        }
        drop(machine);
        let committed = committed.map_err(failed)?;
        let mut go_on = || beats.may_run() && !host.is_closing();
        // Output of an epoch that others may not have leaves with a later one, if any.
        let membership = membership.into_inner();
        if membership.as_ref().is_none_or(|membership| membership.wait_committed(&mut go_on)) {
            release(self.heartbeat, &self.output_marks);
        }
        self.membership = membership;
        if !stay && self.membership.is_none() {
            self.join_group();
        }
        self.next = committed.epoch + 1;
        let waits = shipping.map(|shipping| shipping.epoch_committed(needed));
        let (pause, cut_at) = self.sender.last_pause();
        let stats = EpochStats {
            pause,
            length: cut_at.saturating_duration_since(self.timing.last_cut),
            delay: waits.unwrap_or(cut_at.elapsed()),
            volume: committed.volume,
        };
        self.timing.last_cut = cut_at;
        host.counts.epoch(&stats);
        self.handle.committed(committed.epoch, self.sender.hash_bytes(), |all| {
            all.add(stats);
            all.resent_pages += committed.resent_pages;
            all.device_bytes += committed.device_bytes;
        });
        if !beats.lease().may_run(BootTime::now()) {
            return Err(DaemonError::invalid("the lease has run out"));
        }
        Ok(stats.delay)
    }
}

impl CaptureBreaks for Epochs<'_, '_> {
    /// Captures an epoch if one is due. Work ends early if the protection is to end.
    fn take_break(&mut self, source: &mut CaptureSource<'_>, ports: &[NetworkPort]) -> Result<(), BoxError> {
        if self.host.is_closing() || self.handle.has_command() {
            return Err("the protection ends, or has other work to do".into());
        }
        if !self.is_due() || !self.is_gathered() {
            return Ok(());
        }
        let CaptureSource { machine, dirty_logs, .. } = source;
        let source = CaptureSource { machine: &mut **machine, dirty_logs, consumer: Consumer::Standby };
        self.timed_epoch(source, ports, false).map_err(|error| {
            let reason = error_chain(&error);
            self.failure = Some(error);
            reason.into()
        })
    }
}

fn is_of_link(error: &DaemonError) -> bool {
    let DaemonError::Protect { source } = error else { return true };
    matches!(source.downcast_ref::<PrimaryError>(), Some(PrimaryError::Link(_)))
}

pub(in crate::protect) fn failed(error: PrimaryError) -> DaemonError {
    match was_cancelled(&error) {
        true => DaemonError::Cancelled { left: "the machine keeps running unprotected".into() },
        false => DaemonError::Protect { source: error.into() },
    }
}
