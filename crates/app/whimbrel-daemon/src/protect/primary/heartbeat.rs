//! The primary's lease at work: asks for it again and again, and shuts the machine off from the world the
//! moment it runs out.
//!
//! Three threads a protection: one renews at the witness, one beats to the standby, one watches the clock.
//! The last one does not wait for anybody, so nothing that hangs can keep the gates open. A standby that is
//! silent for a whole term has its link cut, which ends whatever waits for it.

use super::handle::ProtectionHandle;
use crate::protect::{
    link::{ControlLink, PageLink},
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
use whimbrel_net::{Gates, Port};
use whimbrel_protect::{
    clock::BootTime,
    lease::{PrimaryLease, PrimaryState, WitnessQuery},
    protocol::{self, HeartbeatReply, ProtectionId},
};

/// How much longer a standby may be silent while it is filled for the first time.
const FIRST_COPY_SILENT: Duration = Duration::from_secs(10);
/// How often the clock is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// The lease of one protection.
pub(in crate::protect) struct Heartbeat {
    pub(in crate::protect) id: ProtectionId,
    pub(in crate::protect) term: Duration,
    pub(in crate::protect) standby: Arc<ControlLink>,
    pub(in crate::protect) witness: Option<WitnessClient>,
    lease: Mutex<PrimaryLease>,
    /// From when on the standby might take over: only then is anything shut.
    armed: AtomicBool,
    stop: AtomicBool,
    ports: Vec<Weak<Port>>,
    link: Weak<PageLink>,
    guard: Weak<ProtectionHandle>,
}

impl Heartbeat {
    pub(in crate::protect) fn new(
        id: ProtectionId,
        lease: PrimaryLease,
        term: Duration,
        (standby, witness): (Arc<ControlLink>, Option<WitnessClient>),
        (ports, link): (Vec<Weak<Port>>, Weak<PageLink>),
        guard: Weak<ProtectionHandle>,
    ) -> Self {
        let (armed, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { id, term, standby, witness, lease: Mutex::new(lease), armed, stop, ports, link, guard }
    }

    pub(in crate::protect) fn lease(&self) -> MutexGuard<'_, PrimaryLease> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anything of the machine may be seen now.
    pub(in crate::protect) fn may_run(&self) -> bool {
        !self.is_armed() || self.lease().may_run(BootTime::now())
    }

    /// From now on the standby might take over.
    pub(in crate::protect) fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    pub(in crate::protect) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst)
    }

    /// Every port that is still there.
    pub(in crate::protect) fn ports(&self) -> impl Iterator<Item = Arc<Port>> {
        self.ports.iter().filter_map(Weak::upgrade)
    }

    /// From now on the guard's thread looks when the machine begins to wait for an epoch.
    pub(in crate::protect) fn look_at_output(&self) {
        for port in self.ports() {
            let guard = self.guard.clone();
            port.on_first_held(move || guard.upgrade().iter().for_each(|guard| guard.nudge()));
        }
    }

    /// Whether anything that the machine sent is held back.
    pub(in crate::protect) fn output_waits(&self) -> bool {
        self.ports().any(|port| port.holds())
    }

    /// How long an answer is waited for.
    pub(in crate::protect) fn patience(&self) -> Duration {
        self.term.max(Duration::from_millis(200))
    }

    /// Asks the witness, if there is one, and enters what it says.
    pub(in crate::protect) fn ask_witness(&self, question: &WitnessQuery) {
        let Some(witness) = &self.witness else { return };
        let asked = BootTime::now();
        let verdict = witness.ask(question, self.patience());
        if let Some(guard) = self.guard.upgrade() {
            guard.witness_answered(verdict.is_some());
        }
        if let Some(verdict) = verdict {
            self.lease().witness_said(question, verdict, asked);
        }
    }

    /// Asks the standby for its promise.
    pub(in crate::protect) fn send_heartbeat(&self) {
        let asked = BootTime::now();
        let heard: Option<HeartbeatReply> = self.standby.ask(protocol::HEARTBEAT, &self.id, self.patience());
        if let Some(heard) = heard {
            self.lease().standby_heard(heard, asked);
        }
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn every(&self, span: Duration, work: impl Fn()) {
        while !self.is_over() {
            work();
            std::thread::sleep(span);
        }
    }

    /// Renews the lease at the witness: as often as a lease without a standby's promise needs it once that is
    /// getting old.
    fn renew(&self) {
        let mut renewed: Option<BootTime> = None;
        while let (Some(witness), false) = (&self.witness, self.is_over()) {
            let now = BootTime::now();
            let answers = now.until(self.lease().promise_until()) > self.term / 2;
            if renewed.is_none_or(|renewed| now >= renewed.after(witness.renewed_every(answers))) {
                renewed = Some(now);
                self.ask_witness(&WitnessQuery::Renew);
            }
            std::thread::sleep(self.term / 16);
        }
    }

    /// Shuts and opens the gates as the lease says, and cuts off a silent standby.
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
                    if shut && lease.state() == PrimaryState::Guarded {
                        tracing::error!(standby = %self.standby.to(), "the lease has run out: nothing of the machine is seen any more");
                    }
                }
            }
            // A first copy holds nothing up: one that is made on busy hosts is not given up for a late
            // heartbeat.
            let patience = if self.is_armed() { Duration::ZERO } else { FIRST_COPY_SILENT };
            let silent = now > lease.promise_until().max(begun.after(self.term * 4)).after(patience);
            if (silent || shut)
                && let Some(link) = self.link.upgrade()
            {
                link.cut();
            }
            std::thread::sleep(LOOK.min(self.term / 32));
        }
        // Whoever ended this has opened the gates; this thread may have shut them a moment later, on what it
        // knew before.
        if shut && self.may_run() {
            self.ports().for_each(|port| port.set_gates(Gates::OPEN));
        }
    }
}

/// The threads of a lease. They end when this is dropped.
pub(in crate::protect) struct HeartbeatThreads {
    beats: Arc<Heartbeat>,
    threads: Vec<JoinHandle<()>>,
}

impl HeartbeatThreads {
    pub(in crate::protect) fn start(beats: Arc<Heartbeat>) -> std::io::Result<Self> {
        let mut beating = Self { beats, threads: Vec::new() };
        let (term, has_witness) = (beating.beats.term, beating.beats.witness.is_some());
        beating.spawn("lease-watch", Heartbeat::watch)?;
        beating.spawn("lease-beat", move |beats| beats.every(term / 4, || beats.send_heartbeat()))?;
        if has_witness {
            beating.spawn("lease-renew", Heartbeat::renew)?;
        }
        Ok(beating)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce(&Heartbeat) + Send + 'static) -> std::io::Result<()> {
        let beats = self.beats.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&beats))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for HeartbeatThreads {
    fn drop(&mut self) {
        self.beats.stop.store(true, Ordering::SeqCst);
        // They sleep a quarter of a term at most, or wait for an answer as long as they are patient: nobody
        // waits for that.
        self.threads.drain(..).for_each(drop);
    }
}
