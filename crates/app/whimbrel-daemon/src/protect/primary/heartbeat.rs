//! Heartbeats and lease of the primary: renews the lease, and fences the machine when it expires.
//!
//! Four threads for each protection: one renews the lease at the witness, two send heartbeats to the standby,
//! one watches the clock. The last one never waits for anybody, so nothing that hangs can keep the gates of
//! the network ports open. The page link of a standby that is silent for a whole term is closed, which ends
//! all waits for it.
//!
//! Heartbeats go over two connections in turn. A lost segment stops a TCP connection for 200 ms or more, a
//! second one right after it for longer than a usual term.

use super::handle::ProtectionHandle;
use crate::protect::{
    link::{ControlLink, PageLink},
    lock,
    witness::client::WitnessClient,
};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};
use whimbrel_net::{BufferLimits, Gates, Port};
use whimbrel_protect::{
    clock::BootTime,
    inherited_primary,
    lease::{PrimaryLease, PrimaryState, WitnessQuery, WitnessReply},
    protocol::{self, HeartbeatReply, ProtectionId},
};
use whimbrel_qemu::Console;
use whimbrel_vm::{NetworkPort, RunningMachine};

/// Additional time for which a standby may be silent during seeding.
const SEEDING_SILENCE: Duration = Duration::from_secs(10);
/// Interval at which the clock is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long QEMU and the disks may take for the capture of an epoch, unless the term is longer. QEMU answers
/// in milliseconds, a busy disk may sync for seconds, and a member of a group is waited for during the pause.
const STALL_MIN: Duration = Duration::from_secs(5);

/// Lease of one protection.
pub(in crate::protect) struct Heartbeat {
    pub(in crate::protect) id: ProtectionId,
    pub(in crate::protect) term: Duration,
    pub(in crate::protect) standby: Arc<ControlLink>,
    /// Another connection to the standby, for every other heartbeat.
    second: ControlLink,
    pub(in crate::protect) witness: Option<WitnessClient>,
    lease: Mutex<PrimaryLease>,
    /// Whether the standby might take over: only then are gates closed.
    armed: AtomicBool,
    stop: AtomicBool,
    /// Time since when an epoch is being captured, by QEMU and the disks.
    capturing: Mutex<Option<BootTime>>,
    /// Whether the witness has lost the protection.
    forgotten: AtomicBool,
    output: Output,
    link: Weak<PageLink>,
    handle: Weak<ProtectionHandle>,
}

/// Whatever shows output of the machine.
#[derive(Default)]
pub(in crate::protect) struct Output {
    ports: Vec<Weak<Port>>,
    console: Weak<Console>,
}

impl Output {
    /// The output of a running machine.
    pub(in crate::protect) fn of(live: &RunningMachine) -> Self {
        let ports = live.ports.iter().map(NetworkPort::port).collect();
        Self { ports, console: Arc::downgrade(live.console()) }
    }
}

impl Heartbeat {
    pub(in crate::protect) fn new(
        id: ProtectionId,
        lease: PrimaryLease,
        term: Duration,
        (standby, witness): (Arc<ControlLink>, Option<WitnessClient>),
        (output, link): (Output, Weak<PageLink>),
        handle: Weak<ProtectionHandle>,
    ) -> Self {
        let (armed, stop, forgotten) = Default::default();
        let (lease, capturing, second) = (Mutex::new(lease), Mutex::default(), standby.another());
        Self {
            id,
            term,
            standby,
            second,
            witness,
            lease,
            armed,
            stop,
            capturing,
            forgotten,
            output,
            link,
            handle,
        }
    }

    pub(in crate::protect) fn lease(&self) -> MutexGuard<'_, PrimaryLease> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the machine may be visible to the outside now.
    pub(in crate::protect) fn may_run(&self) -> bool {
        !self.is_armed() || self.lease().may_run(BootTime::now())
    }

    /// Records that QEMU and the disks have begun to capture an epoch, or are done with it.
    pub(in crate::protect) fn set_capturing(&self, capturing: bool) {
        *lock(&self.capturing) = capturing.then(BootTime::now);
    }

    /// Whether QEMU or a disk has not answered for too long, and the standby is there to take over.
    pub(in crate::protect) fn is_stalled(&self, now: BootTime) -> bool {
        let since = *lock(&self.capturing);
        self.is_armed()
            && since.is_some_and(|since| now > since.after(self.term.max(STALL_MIN)))
            && inherited_primary::yields(&self.lease(), now)
    }

    /// Whether the witness knows nothing of this protection any more, and could not decide.
    pub(in crate::protect) fn is_forgotten(&self) -> bool {
        self.forgotten.load(Ordering::SeqCst)
    }

    /// Records that the standby might take over from now on.
    pub(in crate::protect) fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    pub(in crate::protect) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst)
    }

    /// The network ports that still exist.
    pub(in crate::protect) fn ports(&self) -> impl Iterator<Item = Arc<Port>> {
        self.output.ports.iter().filter_map(Weak::upgrade)
    }

    /// The console, if it still exists.
    pub(in crate::protect) fn console(&self) -> Option<Arc<Console>> {
        self.output.console.upgrade()
    }

    /// Buffers all output from now on.
    pub(in crate::protect) fn buffer_output(&self) {
        self.ports().for_each(|port| port.buffer_output(BufferLimits::default()));
        self.console().iter().for_each(|console| console.hold_output());
    }

    /// Lets all output pass again.
    pub(in crate::protect) fn release_output(&self) {
        self.ports().for_each(|port| port.release_all());
        self.console().iter().for_each(|console| console.release_all_output());
    }

    /// Wakes the protection thread when output starts to wait for an epoch.
    pub(in crate::protect) fn wake_on_output(&self) {
        for port in self.ports() {
            let guard = self.handle.clone();
            port.on_first_buffered(move || guard.upgrade().iter().for_each(|guard| guard.wake()));
        }
    }

    /// Whether any output is buffered.
    pub(in crate::protect) fn output_waits(&self) -> bool {
        self.ports().any(|port| port.has_buffered_output())
    }

    /// Timeout of requests to the witness and the standby.
    pub(in crate::protect) fn timeout(&self) -> Duration {
        self.term.max(Duration::from_millis(200))
    }

    /// Queries the witness, if there is one, and applies its reply.
    pub(in crate::protect) fn ask_witness(&self, question: &WitnessQuery) {
        let Some(witness) = &self.witness else { return };
        let asked = BootTime::now();
        let verdict = witness.ask(question, self.timeout());
        if let Some(guard) = self.handle.upgrade() {
            guard.witness_answered(verdict.is_some());
        }
        if let Some(verdict) = verdict {
            if *question == WitnessQuery::Renew {
                self.forgotten.store(verdict == WitnessReply::Unknown, Ordering::SeqCst);
            }
            self.lease().handle_witness_reply(question, verdict, asked);
        }
    }

    /// Sends a heartbeat to the standby and applies its reply. A host that has yielded the machine asks for
    /// no promise: then the standby takes over by itself if it is not told.
    pub(in crate::protect) fn send_heartbeat(&self) {
        self.send_heartbeat_over(&self.standby);
    }

    fn send_heartbeat_over(&self, link: &ControlLink) {
        if self.lease().state() != PrimaryState::Protected {
            return;
        }
        let asked = BootTime::now();
        let heard: Option<HeartbeatReply> = link.ask(protocol::HEARTBEAT, &self.id, self.timeout());
        if let Some(heard) = heard {
            self.lease().handle_heartbeat_reply(heard, asked);
        }
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn repeat(&self, span: Duration, work: impl Fn()) {
        while !self.is_over() {
            work();
            std::thread::sleep(span);
        }
    }

    /// Renews the lease at the witness. Once the standby's promise gets old, it renews as often as a lease
    /// alone requires.
    fn renew(&self) {
        let mut renewed: Option<BootTime> = None;
        while let (Some(witness), false) = (&self.witness, self.is_over()) {
            let now = BootTime::now();
            let answers = now.until(self.lease().promise_until()) > self.term / 2;
            if self.lease().state() == PrimaryState::Protected
                && renewed.is_none_or(|renewed| now >= renewed.after(witness.renewal_interval(answers)))
            {
                renewed = Some(now);
                self.ask_witness(&WitnessQuery::Renew);
            }
            std::thread::sleep(self.term / 16);
        }
    }

    /// Opens and closes the gates as the lease demands, and closes the link to a silent standby.
    fn watch(&self) {
        let (begun, mut shut) = (BootTime::now(), false);
        while !self.is_over() {
            let (now, lease) = (BootTime::now(), *self.lease());
            if self.is_armed() {
                let may = lease.may_run(now);
                if may == shut {
                    let gates = if may { Gates::OPEN } else { Gates::BLOCKED };
                    self.ports().for_each(|port| port.set_gates(gates));
                    shut = !may;
                    if shut && lease.state() == PrimaryState::Protected {
                        tracing::error!(standby = %self.standby.to(), "the lease has run out: the machine is fenced");
                    }
                }
            }
            // Seeding delays no output: a late heartbeat on busy hosts does not end it.
            let patience = if self.is_armed() { Duration::ZERO } else { SEEDING_SILENCE };
            let silent = now > lease.promise_until().max(begun.after(self.term * 4)).after(patience);
            if (silent || shut)
                && let Some(link) = self.link.upgrade()
            {
                link.close();
            }
            std::thread::sleep(POLL_INTERVAL.min(self.term / 32));
        }
        // The thread that ended this has opened the gates; this one may have closed them a moment later.
        if shut && self.may_run() {
            self.ports().for_each(|port| port.set_gates(Gates::OPEN));
        }
    }
}

/// The threads of a lease; dropping this ends them.
pub(in crate::protect) struct HeartbeatThreads {
    heartbeat: Arc<Heartbeat>,
    threads: Vec<JoinHandle<()>>,
}

impl HeartbeatThreads {
    pub(in crate::protect) fn start(beats: Arc<Heartbeat>) -> std::io::Result<Self> {
        let mut beating = Self { heartbeat: beats, threads: Vec::new() };
        let (term, has_witness) = (beating.heartbeat.term, beating.heartbeat.witness.is_some());
        beating.spawn("lease-watch", Heartbeat::watch)?;
        beating.spawn("lease-beat", move |beats| beats.repeat(term / 4, || beats.send_heartbeat()))?;
        beating.spawn("lease-beat-2", move |beats| {
            std::thread::sleep(term / 8);
            beats.repeat(term / 4, || beats.send_heartbeat_over(&beats.second));
        })?;
        if has_witness {
            beating.spawn("lease-renew", Heartbeat::renew)?;
        }
        Ok(beating)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce(&Heartbeat) + Send + 'static) -> std::io::Result<()> {
        let beats = self.heartbeat.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&beats))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for HeartbeatThreads {
    fn drop(&mut self) {
        self.heartbeat.stop.store(true, Ordering::SeqCst);
        // Not joined: they sleep for a quarter of a term, or wait for a reply until its timeout.
        self.threads.drain(..).for_each(drop);
    }
}
