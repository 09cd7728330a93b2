//! One machine and its three locks.
//!
//! The machine lock is held, for minutes if need be, by the one operation that changes the machine. Only its
//! holder touches the data: the record and the running parts. While nobody holds the lock, a process is given
//! copies of the running parts ([`super::waiting_process`]), and later the parts themselves
//! ([`super::serving_process`]); a holder that comes meanwhile waits for the data, and gets the parts back.
//! Who uses parts without the lock, a console for example, holds a [`Use`] of the machine. The
//! [view](super::view) is the copy that `ps` reads.

use crate::{
    core::{error::DaemonError, event_log::EventLog},
    machine::{
        console::SerialStream,
        record::{Phase, Record},
        serving_process::ServingProcess,
        view::View,
        waiting_process::WaitingProcess,
    },
};
use std::{
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering, fence},
    },
    time::{Duration, Instant},
};
use whimbrel_api::{EventKind, MachineInfo, MachineProcess, MachineState, OperationId};
use whimbrel_capture::dirty_observer::DirtyObserver;
use whimbrel_core::{CapsuleId, MachineName, lock};
use whimbrel_qemu::QemuGa;
use whimbrel_vm::{RunningMachine, TrafficView, process_report::ProcessReport};

/// Time to wait for a handover to give up its lock: an attempt to connect, and the longest delay between two.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(40);
/// Time without a holder of the lock after which a machine is at rest: operations often follow each other.
const REST: Duration = Duration::from_millis(500);
/// Time at rest after which its own process has the machine.
const LONG_REST: Duration = Duration::from_secs(10);
/// Purpose of a lock that only takes the machine back from its process: for less than a second, unless that
/// process hangs.
pub(super) const RETURN: &str = "return of the machine from its process";
/// Pause while another operation takes the machine back from its process.
const RETURN_POLL: Duration = Duration::from_millis(2);

pub(crate) struct Machine {
    name: MachineName,
    lock_holder: Mutex<Option<LockHolder>>,
    lock_released: Condvar,
    /// When it is at rest, unless the lock is taken until then.
    rests_from: Mutex<Instant>,
    data: Mutex<MachineData>,
    view: Mutex<View>,
    /// Machine type of its QEMU; never changes.
    machine_type: String,
    /// Whether a person decides who has it: a handover that waits for another host gives up its lock.
    resolving: AtomicBool,
    /// Whether it has another name now, and another entry in the registry.
    retired: AtomicBool,
    /// Where changes of its state are told, while it is in the registry.
    events: Mutex<Option<Arc<EventLog>>>,
    /// Whether its own process has it, or just gets it.
    is_passed: AtomicBool,
    /// One reference for each [`Use`], and one of this value.
    uses: Arc<()>,
}

/// A use of a machine without its lock. The machine stays with the daemon meanwhile.
#[derive(Clone)]
pub(crate) struct Use(#[expect(dead_code, reason = "counted")] Arc<()>);

/// Port of qemu-ga in the guest of a machine that stays with the daemon meanwhile.
pub(crate) struct GuestAgentPort {
    port: QemuGa,
    _use: Use,
}

impl Deref for GuestAgentPort {
    type Target = QemuGa;

    fn deref(&self) -> &QemuGa {
        &self.port
    }
}

/// Data that the holder of the machine lock works with.
pub(crate) struct MachineData {
    pub(crate) record: Record,
    /// QEMU and everything attached to it; none without a QEMU, or while another process has the machine.
    pub(crate) running: Option<RunningMachine>,
    /// Process that waits for the end of this daemon; none while the lock is held.
    pub(super) waiting: Option<WaitingProcess>,
    /// Process that has the machine; none while an operation holds the lock.
    pub(super) serving: Option<ServingProcess>,
}

#[derive(Debug, Clone)]
struct LockHolder {
    purpose: &'static str,
    operation: Option<OperationId>,
}

/// The machine lock. Dropping it updates the view, then releases the lock.
pub(crate) struct MachineLock<'a> {
    machine: &'a Machine,
    data: MutexGuard<'a, MachineData>,
}

impl Machine {
    pub(crate) fn new(record: Record, live: Option<RunningMachine>) -> Self {
        let view = View::new(&record, live.as_ref(), None);
        Self::viewed(record, live, view)
    }

    /// A machine that its own process has, of which `view` shows what is known.
    pub(super) fn left(record: Record, view: View) -> Self {
        let machine = Self::viewed(record, None, view);
        machine.is_passed.store(true, Ordering::SeqCst);
        machine
    }

    fn viewed(record: Record, live: Option<RunningMachine>, view: View) -> Self {
        Self {
            name: record.name.clone(),
            machine_type: record.config.machine.clone(),
            resolving: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            events: Mutex::default(),
            lock_holder: Mutex::new(None),
            lock_released: Condvar::new(),
            rests_from: Mutex::new(Instant::now() + REST),
            data: Mutex::new(MachineData { record, running: live, waiting: None, serving: None }),
            is_passed: AtomicBool::new(false),
            uses: Arc::default(),
            view: Mutex::new(view),
        }
    }

    pub(crate) fn name(&self) -> &MachineName {
        &self.name
    }

    pub(crate) fn machine_type(&self) -> String {
        self.machine_type.clone()
    }

    /// Takes the machine lock, or reports its holder. Refuses a machine between two hosts: running it here
    /// could make it run twice.
    pub(crate) fn try_lock(
        &self,
        on: &'static str,
        operation: Option<OperationId>,
    ) -> Result<MachineLock<'_>, DaemonError> {
        let turn = self.try_lock_in_any_phase(on, operation)?;
        let phase = &turn.record.phase;
        if let Phase::Prepared { .. } | Phase::HandedOver { .. } = phase {
            let (state, name) = (phase.name(), self.name.clone());
            return Err(DaemonError::State { name, state, needed: "running" });
        }
        Ok(turn)
    }

    /// Like [`Machine::try_lock`], but in any phase: for ending a machine as the user's last resort.
    pub(crate) fn try_lock_in_any_phase(
        &self,
        on: &'static str,
        operation: Option<OperationId>,
    ) -> Result<MachineLock<'_>, DaemonError> {
        let mut turn = lock(&self.lock_holder);
        if self.retired.load(Ordering::Acquire) {
            return Err(DaemonError::machine_not_found(&self.name));
        }
        while turn.as_ref().is_some_and(|working| working.purpose == RETURN) {
            turn = self.lock_released.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(working) = &*turn {
            return Err(DaemonError::Busy {
                name: self.name.clone(),
                with: format!("a {}", working.purpose),
            });
        }
        *turn = Some(LockHolder { purpose: on, operation });
        drop(turn);
        self.locked(on, operation)
    }

    /// Waits for the machine lock. For the daemon's own reactions (QEMU died), which have no caller to
    /// refuse.
    pub(crate) fn lock(&self, on: &'static str) -> MachineLock<'_> {
        loop {
            let mut turn = lock(&self.lock_holder);
            while turn.is_some() {
                turn = self.lock_released.wait(turn).unwrap_or_else(PoisonError::into_inner);
            }
            *turn = Some(LockHolder { purpose: on, operation: None });
            drop(turn);
            match self.locked(on, None) {
                Ok(turn) => return turn,
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(machine = %self.name, error, "still waiting for a {on}");
                    std::thread::sleep(REST);
                }
            }
        }
    }

    /// Like [`Machine::try_lock_in_any_phase`], but a handover that waits for another host gives up its lock
    /// first, after at most one attempt to reach that host.
    pub(crate) fn lock_to_resolve(&self) -> Result<MachineLock<'_>, DaemonError> {
        self.resolving.store(true, Ordering::Release);
        let holder = lock(&self.lock_holder);
        let held = |holder: &mut Option<LockHolder>| holder.is_some();
        let waited = self.lock_released.wait_timeout_while(holder, RESOLVE_TIMEOUT, held);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        let turn = self.try_lock_in_any_phase("resolve", None);
        self.resolving.store(false, Ordering::Release);
        turn
    }

    /// Gives the machine lock to nobody any more: the machine has another name and another entry. The caller
    /// holds the lock.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// Whether a handover must give up the machine lock.
    pub(crate) fn is_resolving(&self) -> bool {
        self.resolving.load(Ordering::Acquire)
    }

    /// The lock, once the machine is back from its process. If it stays there, the lock is released.
    fn locked(
        &self,
        on: &'static str,
        operation: Option<OperationId>,
    ) -> Result<MachineLock<'_>, DaemonError> {
        let mut turn = MachineLock { machine: self, data: lock(&self.data) };
        turn.data.waiting = None;
        if let Some(mut process) = turn.data.serving.take() {
            let returned = process.take_back(&mut turn.data);
            if returned.is_err() {
                turn.data.serving = Some(process);
            }
            returned?;
            turn.publish();
        }
        self.end_passing();
        let mut view = lock(&self.view);
        view.info.operation = operation;
        if on == "migrate" && matches!(view.info.state, MachineState::Running | MachineState::Loading { .. })
        {
            view.info.state = MachineState::Migrating;
            self.report_state(&view.info.state);
        }
        drop(view);
        Ok(turn)
    }

    /// Whether its process may have the machine from now on: nobody uses it without the lock. Who comes later
    /// waits until it has passed, and takes it back.
    pub(super) fn begin_passing(&self) -> bool {
        self.is_passed.store(true, Ordering::SeqCst);
        // Either this sees the use, or the user sees that the machine passes.
        fence(Ordering::SeqCst);
        let is_free = Arc::strong_count(&self.uses) == 1;
        if !is_free {
            self.end_passing();
        }
        is_free
    }

    /// The daemon has the machine.
    pub(super) fn end_passing(&self) {
        self.is_passed.store(false, Ordering::SeqCst);
    }

    /// Whether its own process has the machine, and nobody is about to take it back.
    pub(super) fn is_with_process(&self) -> bool {
        let is_passed = self.is_passed.load(Ordering::SeqCst) && lock(&self.lock_holder).is_none();
        is_passed && lock(&self.data).serving.is_some()
    }

    /// Shows the machine without the parts that its own process has now. Its runtime directory is `slot`.
    pub(super) fn show_passed(&self, slot: &Path, process: MachineProcess) {
        lock(&self.view).pass(slot, process);
    }

    /// Shows what the process of the machine reports.
    pub(super) fn show_report(&self, report: &ProcessReport) {
        lock(&self.view).show(report);
    }

    /// Has `process` count as the one that has the machine, as soon as it is registered.
    pub(super) fn leave_to(&self, process: ServingProcess) {
        lock(&self.data).serving = Some(process);
    }

    fn count_use(&self) -> Use {
        let used = Use(self.uses.clone());
        fence(Ordering::SeqCst);
        used
    }

    /// Has the machine stay with the daemon, or takes it back, for somebody who does not hold the lock.
    pub(super) fn use_here(&self) -> Result<Use, DaemonError> {
        let used = self.count_use();
        while self.is_passed.load(Ordering::SeqCst) {
            match self.try_lock_in_any_phase(RETURN, None) {
                Ok(turn) => drop(turn),
                // The holder takes it back before anything else.
                Err(DaemonError::Busy { .. }) => std::thread::sleep(RETURN_POLL),
                Err(error) => return Err(error),
            }
        }
        Ok(used)
    }

    /// The data of a machine that nobody works on, nor has for a while.
    pub(super) fn data_at_rest(&self) -> Option<MutexGuard<'_, MachineData>> {
        let is_at_rest = Instant::now() >= *lock(&self.rests_from) && lock(&self.lock_holder).is_none();
        is_at_rest.then(|| self.data.try_lock().ok()).flatten()
    }

    /// Whether it has been at rest for so long that its own process should have it.
    pub(super) fn is_long_at_rest(&self) -> bool {
        Instant::now() >= *lock(&self.rests_from) + LONG_REST
    }

    /// Has it count as at rest only after `pause`.
    pub(super) fn rest_later(&self, pause: Duration) {
        *lock(&self.rests_from) = Instant::now() + pause;
    }

    /// Tells the state of the machine, and its changes from now on, when it is registered.
    pub(crate) fn tell_events(&self, events: Arc<EventLog>) {
        let view = lock(&self.view);
        *lock(&self.events) = Some(events);
        self.report_state(&view.info.state);
    }

    /// Tells nothing more: another entry has its name, or nobody.
    pub(crate) fn tell_no_more(&self) {
        *lock(&self.events) = None;
    }

    fn report_state(&self, state: &MachineState) {
        let reason = match state {
            MachineState::Crashed { reason } => format!(": {reason}"),
            _ => String::new(),
        };
        let tell = |events: &Arc<EventLog>| {
            events.add(EventKind::Machine, &self.name, &format!("{}{reason}", state.name()));
        };
        lock(&self.events).iter().for_each(tell);
    }

    /// The machine as `ps` shows it.
    pub(crate) fn info(&self) -> MachineInfo {
        lock(&self.view).info()
    }

    /// The capsules without which it could not run (again).
    pub(crate) fn needed_capsules(&self) -> Vec<CapsuleId> {
        lock(&self.view).needed.clone()
    }

    /// Observer of its memory writes; none without a process.
    pub(crate) fn dirty_observer(&self) -> Option<DirtyObserver> {
        lock(&self.view).observer.clone()
    }

    /// Counters of its network ports and disks; none without a process.
    pub(crate) fn traffic(&self) -> TrafficView {
        lock(&self.view).traffic.clone()
    }

    /// Port of qemu-ga in its guest.
    pub(crate) fn qemu_ga(&self) -> Result<GuestAgentPort, DaemonError> {
        let used = self.use_here()?;
        let view = lock(&self.view);
        let name = self.name.clone();
        if view.console.is_none() {
            return Err(DaemonError::State { name, state: "not running", needed: "running" });
        }
        let port = view.qemu_ga.clone().ok_or(DaemonError::NoAgentPort { name })?;
        Ok(GuestAgentPort { port, _use: used })
    }

    /// Port of qemu-ga, unless there is none or its own process has the machine: nobody takes it back for
    /// this.
    pub(crate) fn qemu_ga_at_hand(&self) -> Option<GuestAgentPort> {
        let used = self.count_use();
        let is_here = !self.is_passed.load(Ordering::SeqCst);
        let port = lock(&self.view).qemu_ga.clone().filter(|_| is_here)?;
        Some(GuestAgentPort { port, _use: used })
    }

    /// Socket of its screen.
    pub(crate) fn display(&self) -> Result<PathBuf, DaemonError> {
        let view = lock(&self.view);
        let name = self.name.clone();
        match (&view.display, view.info.display) {
            (Some(socket), _) => Ok(socket.clone()),
            (None, true) => Err(DaemonError::State { name, state: "not running", needed: "running" }),
            (None, false) => Err(DaemonError::invalid(format!(
                "{name} has no screen: a machine gets one by --display of `whimbrel run` or `whimbrel launch`; its serial port is `whimbrel console {name}`"
            ))),
        }
    }

    /// Opens the serial port in both directions.
    pub(crate) fn console(&self) -> Result<SerialStream, DaemonError> {
        let used = self.use_here()?;
        let console = lock(&self.view).console.clone();
        let name = self.name.clone();
        console.ok_or(DaemonError::State { name, state: "not running", needed: "running" })?.open(used)
    }
}

impl MachineData {
    /// Whether its guest may request operations, which only a daemon carries out.
    pub(super) fn needs_daemon(&self) -> bool {
        !self.record.self_service.is_empty()
    }

    /// Whether it runs here, and on no other host, and is not about to leave.
    pub(super) fn is_here(&self) -> bool {
        self.record.phase == Phase::Here && self.record.leaving.is_none()
    }
}

impl MachineLock<'_> {
    /// The running parts, or an error that names the state of the machine.
    pub(crate) fn running(&mut self) -> Result<&mut RunningMachine, DaemonError> {
        let (state, name) = (self.data.record.phase.name(), self.machine.name.clone());
        self.data.running.as_mut().ok_or(DaemonError::State { name, state, needed: "running" })
    }

    pub(crate) fn parts(&mut self) -> Result<(&mut Record, &mut RunningMachine), DaemonError> {
        let (state, name) = (self.data.record.phase.name(), self.machine.name.clone());
        let MachineData { record, running: live, .. } = &mut *self.data;
        let live = live.as_mut().ok_or(DaemonError::State { name, state, needed: "running" })?;
        Ok((record, live))
    }

    /// Updates the view; `drop` does so too. That of a machine that its own process has stays as it is.
    pub(crate) fn publish(&self) {
        if self.data.serving.is_some() {
            return;
        }
        let operation = lock(&self.machine.lock_holder).as_ref().and_then(|working| working.operation);
        let now = View::new(&self.data.record, self.data.running.as_ref(), operation);
        let mut view = lock(&self.machine.view);
        if view.info.state.name() != now.info.state.name() {
            self.machine.report_state(&now.info.state);
        }
        *view = now;
    }
}

impl Deref for MachineLock<'_> {
    type Target = MachineData;

    fn deref(&self) -> &MachineData {
        &self.data
    }
}

impl DerefMut for MachineLock<'_> {
    fn deref_mut(&mut self) -> &mut MachineData {
        &mut self.data
    }
}

impl Drop for MachineLock<'_> {
    fn drop(&mut self) {
        self.machine.rest_later(REST);
        *lock(&self.machine.lock_holder) = None;
        self.publish();
        self.machine.lock_released.notify_one();
    }
}

impl Phase {
    /// Name of the phase, for messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Phase::Here => "running",
            Phase::Stopped => "stopped",
            Phase::Crashed { .. } => "crashed",
            Phase::Suspended { .. } => "suspended",
            Phase::Given { .. } => "handed off to another host",
            Phase::HandedOver { .. } => "handed over",
            Phase::Prepared { .. } => "arriving",
        }
    }
}
