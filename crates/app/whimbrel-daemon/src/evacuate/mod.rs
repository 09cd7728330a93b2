//! Evacuation: migrates all machines that run here to other hosts, those that dirty least first.
//!
//! One operation that starts migrations, each an operation of its own, a few at a time. Nothing is recorded:
//! what is left to do is what still runs here, so a call after a failure, a Ctrl-C or a restart continues. A
//! cancel also cancels the migrations under way, waits for the end of each, and starts no other.
//!
//! A machine that finds no host or fails to migrate runs on here and is reported; it does not hold up the
//! others. Another host may request an evacuation (`remote`): then only machines move that it may read and
//! write here, and it learns of no others.

mod capacity;
pub(crate) mod plan;
pub(crate) mod remote;

pub(crate) use capacity::{CapacityReply, QueryCapacity};
pub(crate) use remote::EvacuateHost;

use crate::{
    core::{
        error::DaemonError,
        operations::ProgressReporter,
        refs,
        rights::{self, Access, Caller},
    },
    daemon::Daemon,
    machine::entry::Machine,
};
use capacity::CapacityQuery;
use plan::{CandidateHost, MovableMachine, Placed};
use remote::EvacuationId;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use whimbrel_api::{
    ApiError, ErrorCode, EvacuateReport, EvacuateRequest, EvacuatedMachine, MachineInfo, MachineState,
    MigrateRequest, MoveOutcome, Operation, OperationId, OperationKind, OperationResult, OperationState,
    Unit,
};
use whimbrel_core::{ByteSize, HostName, MachineName, error_chain, lock};

/// Machines that migrate at the same time.
const PARALLEL: u32 = 1;
const PARALLEL_MAX: u32 = 16;
/// How long dirty pages are counted: enough to tell a busy machine from an idle one.
const SAMPLE_MS: u64 = 1_000;
const SAMPLE_MS_MIN: u64 = 10;
const SAMPLE_MS_MAX: u64 = 60_000;
/// Interval at which a migration under way is polled, beside its notifications.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// State of evacuations; one may be under way at a time.
#[derive(Default)]
pub(crate) struct EvacuationState {
    under_way: AtomicBool,
    /// The last evacuation that another host requested.
    requested: Mutex<Option<(EvacuationId, OperationId)>>,
}

/// The exclusive right to evacuate, released on drop.
struct EvacuationGuard(Arc<Daemon>);

impl Drop for EvacuationGuard {
    fn drop(&mut self) {
        self.0.evacuation.under_way.store(false, Ordering::Release);
    }
}

impl Daemon {
    /// Migrates all machines that run on a host to others.
    pub(crate) fn evacuate(self: &Arc<Self>, mut request: EvacuateRequest) -> Result<Operation, DaemonError> {
        match request.host.take() {
            Some(host) if host != self.name => self.evacuate_remotely(host, request),
            _ => self.evacuate_here(request, None),
        }
    }

    /// Migrates all machines that run here to other hosts: those that `by` may move, if another host requests
    /// it.
    fn evacuate_here(
        self: &Arc<Self>,
        request: EvacuateRequest,
        by: Option<Caller>,
    ) -> Result<Operation, DaemonError> {
        let parallel = request.parallel.unwrap_or(PARALLEL);
        if !(1..=PARALLEL_MAX).contains(&parallel) {
            return Err(DaemonError::invalid(format!(
                "1 to {PARALLEL_MAX} machines can move at the same time"
            )));
        }
        if !(SAMPLE_MS_MIN..=SAMPLE_MS_MAX).contains(&request.sample_ms.unwrap_or(SAMPLE_MS)) {
            return Err(DaemonError::invalid(format!(
                "the sample time must be {SAMPLE_MS_MIN} ms to {SAMPLE_MS_MAX} ms"
            )));
        }
        let targets = self.targets(&request)?;
        if self.evacuation.under_way.swap(true, Ordering::AcqRel) {
            return Err(DaemonError::Evacuating);
        }
        let alone = EvacuationGuard(self.clone());
        Ok(self.operations().start(OperationKind::Evacuate, self.name.to_string(), move |reporter| {
            let host = &alone.0;
            let theirs = host.may_move(by.as_ref());
            let (placed, left) = host.plan(&theirs, &request, targets, reporter)?;
            let evacuation = Evacuation::new(host, &request, placed, reporter);
            if !request.dry_run {
                evacuation.run(parallel);
            }
            evacuation.report(left, theirs.withheld)
        }))
    }

    fn targets(&self, request: &EvacuateRequest) -> Result<Vec<HostName>, DaemonError> {
        let named: BTreeSet<HostName> = request.to.iter().cloned().collect();
        if named.contains(&self.name) {
            return Err(DaemonError::invalid(format!("{} is the host that is to be evacuated", self.name)));
        }
        named.iter().try_for_each(|host| self.route(host).map(drop))?;
        if !named.is_empty() {
            return Ok(named.into_iter().collect());
        }
        let trusted = self.trust.list().map_err(|source| DaemonError::Identity { source: source.into() })?;
        let reachable: Vec<_> =
            trusted.into_iter().map(|peer| peer.name).filter(|name| self.route(name).is_ok()).collect();
        match reachable.is_empty() {
            true => Err(DaemonError::invalid("no other host is trusted: add one with `whimbrel trust add`")),
            false => Ok(reachable),
        }
    }

    /// The machines that the requester may move. A move takes all of a machine and changes where it is, so it
    /// needs the rights to read and to write.
    fn may_move(&self, by: Option<&Caller>) -> RequesterMachines {
        let may = |machine: &Arc<Machine>| {
            let name = refs::machine_ref(machine.name());
            let ways = [Access::Read, Access::Write];
            by.is_none_or(|by| ways.into_iter().all(|way| rights::may_use(by, way, &name)))
        };
        let (machines, others): (Vec<_>, Vec<_>) = self.machines.all().into_iter().partition(may);
        let running = others.iter().filter(|machine| is_movable(&machine.info().state)).count();
        RequesterMachines { machines, withheld: running as u32 }
    }

    /// Finds a host for each machine, and lists the machines that do not move.
    fn plan(
        self: &Arc<Self>,
        theirs: &RequesterMachines,
        request: &EvacuateRequest,
        targets: Vec<HostName>,
        reporter: &ProgressReporter,
    ) -> Result<(Vec<Placed>, Vec<MachineInfo>), DaemonError> {
        let (moving, left): (Vec<_>, Vec<_>) =
            theirs.machines.iter().cloned().partition(|machine| is_movable(&machine.info().state));
        reporter.progress("measuring dirty rates", Unit::Items, 0, Some(moving.len() as u64));
        let time = Duration::from_millis(request.sample_ms.unwrap_or(SAMPLE_MS));
        let dirtied = self.measure_dirty_pages(&moving, time, &|| !reporter.is_cancelled());
        if reporter.is_cancelled() {
            return Err(DaemonError::Cancelled { left: "nothing was moved".to_owned() });
        }
        reporter.progress("querying the capacity of other hosts", Unit::Items, 0, Some(targets.len() as u64));
        let coming: Vec<CapacityQuery> = moving.iter().map(capacity_query).collect();
        let ask = |host: HostName| {
            let room = self.query_capacity(&host, &coming).map_err(|error| error_chain(&error));
            CandidateHost { host, capacity: room }
        };
        let targets = std::thread::scope(|scope| {
            let asked: Vec<_> = targets.into_iter().map(|host| scope.spawn(|| ask(host))).collect();
            asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
        });
        let candidates = moving.iter().map(|machine| candidate(&machine.info(), &dirtied)).collect();
        Ok((plan::plan(candidates, targets), left.iter().map(|machine| machine.info()).collect()))
    }

    /// Whether no machine runs here, may have to run on here, or needs pages from here.
    fn is_empty(&self) -> bool {
        let runs = |state: &MachineState| {
            let needs = matches!(
                state,
                MachineState::Starting | MachineState::Migrating | MachineState::ServingPages { .. }
            );
            is_movable(state) || needs
        };
        !self.machines.all().iter().any(|machine| runs(&machine.info().state))
    }
}

/// The machines of this host that the requester may move.
struct RequesterMachines {
    machines: Vec<Arc<Machine>>,
    withheld: u32,
}

fn is_movable(state: &MachineState) -> bool {
    matches!(state, MachineState::Running | MachineState::Paused | MachineState::Loading { .. })
}

fn capacity_query(machine: &Arc<Machine>) -> CapacityQuery {
    CapacityQuery { name: machine.name().clone(), machine: machine.machine_type() }
}

fn candidate(info: &MachineInfo, dirtied: &BTreeMap<MachineName, u64>) -> MovableMachine {
    let disks = info.disks.iter().fold(0, |sum: u64, disk| sum.saturating_add(disk.size.0));
    let dirtied = dirtied.get(&info.name).copied().unwrap_or_default();
    MovableMachine { name: info.name.clone(), memory: info.memory.0, disks, dirtied }
}

/// Migrations of an evacuation, one after the other or a few at a time.
struct Evacuation<'a> {
    host: &'a Arc<Daemon>,
    request: &'a EvacuateRequest,
    reporter: &'a ProgressReporter,
    placed: Vec<Placed>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The next of `placed` to examine.
    next: usize,
    /// Outcomes of those of `placed` that were tried.
    outcomes: BTreeMap<usize, MoveOutcome>,
    under_way: BTreeSet<String>,
    /// Whether one has failed and no other is to start.
    halted: bool,
}

impl<'a> Evacuation<'a> {
    fn new(
        host: &'a Arc<Daemon>,
        request: &'a EvacuateRequest,
        placed: Vec<Placed>,
        reporter: &'a ProgressReporter,
    ) -> Self {
        Self { host, request, reporter, placed, state: Mutex::default() }
    }

    fn run(&self, parallel: u32) {
        std::thread::scope(|scope| {
            for _ in 0..parallel {
                scope.spawn(|| {
                    while let Some((index, machine, to)) = self.next() {
                        let outcome = self.move_one(machine, to);
                        self.ended(index, machine, to, outcome);
                    }
                });
            }
        });
    }

    /// The next machine that has a host, unless no other is to start.
    fn next(&self) -> Option<(usize, &MachineName, &HostName)> {
        let mut state = lock(&self.state);
        loop {
            if state.halted || self.reporter.is_cancelled() {
                return None;
            }
            let index = state.next;
            let (machine, place) = self.placed.get(index)?;
            state.next += 1;
            if let Ok(to) = place {
                state.under_way.insert(format!("{} to {to}", machine.name));
                self.report_progress(&state);
                return Some((index, &machine.name, to));
            }
        }
    }

    fn ended(&self, index: usize, machine: &MachineName, to: &HostName, outcome: MoveOutcome) {
        let mut state = lock(&self.state);
        state.halted |= self.request.stop_on_failure && matches!(outcome, MoveOutcome::Failed { .. });
        state.under_way.remove(&format!("{machine} to {to}"));
        state.outcomes.insert(index, outcome);
        self.report_progress(&state);
    }

    fn report_progress(&self, state: &State) {
        let stage = match state.under_way.is_empty() {
            true => "moving".to_owned(),
            false => format!("moving {}", state.under_way.iter().cloned().collect::<Vec<_>>().join(", ")),
        };
        let (done, total) = (state.outcomes.len() as u64, self.placed.len() as u64);
        self.reporter.progress(&stage, Unit::Items, done, Some(total));
    }

    fn move_one(&self, machine: &MachineName, to: &HostName) -> MoveOutcome {
        let begun = match self.migration(to).and_then(|request| self.host.migrate(machine, request)) {
            Ok(begun) => begun,
            Err(error) => return MoveOutcome::Failed { error: error.to_api() },
        };
        match self.wait(begun.id) {
            Some(OperationState::Succeeded {
                result: OperationResult::Migrate { downtime_ms, total_ms, .. },
            }) => MoveOutcome::Moved { downtime_ms, total_ms },
            Some(OperationState::Failed { error }) => MoveOutcome::Failed { error },
            Some(OperationState::Cancelled { left }) => MoveOutcome::Failed {
                error: ApiError::new(ErrorCode::Cancelled, format!("cancelled: {left}")),
            },
            _ => MoveOutcome::Failed { error: DaemonError::Panicked.to_api() },
        }
    }

    /// A migration request with defaults, as if a caller of the API had made it.
    fn migration(&self, to: &HostName) -> Result<MigrateRequest, DaemonError> {
        let said = serde_json::json!({ "host": to, "rate_max": self.request.rate_max });
        serde_json::from_value(said).map_err(|error| DaemonError::invalid(error.to_string()))
    }

    /// Waits for the end of a migration. A cancel is passed on to it, and its end is still awaited.
    fn wait(&self, id: OperationId) -> Option<OperationState> {
        let mut watch = self.host.operations().watch(id).ok()?;
        let mut told = false;
        loop {
            let state = watch.borrow_and_update().state.clone();
            if state.is_ended() {
                return Some(state);
            }
            if self.reporter.is_cancelled() && !told {
                told = self.host.operations().cancel(id).is_ok();
            }
            let changed = async { tokio::time::timeout(POLL_INTERVAL, watch.changed()).await };
            let _ = self.host.runtime.block_on(changed);
        }
    }

    fn report(self, left: Vec<MachineInfo>, withheld: u32) -> Result<OperationResult, DaemonError> {
        let cancelled = self.reporter.is_cancelled();
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut outcomes = state.outcomes;
        let all_placed = self.placed.iter().all(|(_, place)| place.is_ok());
        let dry_run = self.request.dry_run;
        let mut machines: Vec<EvacuatedMachine> = Vec::new();
        for (index, (machine, place)) in self.placed.into_iter().enumerate() {
            let (host, outcome) = match place {
                Err(reasons) => (None, MoveOutcome::NoRoom { reasons }),
                Ok(host) if dry_run => (Some(host), MoveOutcome::Planned),
                Ok(host) => (Some(host), outcomes.remove(&index).unwrap_or(MoveOutcome::NotBegun)),
            };
            let (name, memory) = (machine.name, ByteSize(machine.memory));
            machines.push(EvacuatedMachine {
                name,
                memory,
                dirtied_pages: Some(machine.dirtied),
                host,
                outcome,
            });
        }
        if cancelled {
            return Err(DaemonError::Cancelled { left: state_left(&self.host.name, &machines) });
        }
        machines.extend(left.into_iter().map(|info| EvacuatedMachine {
            name: info.name,
            memory: info.memory,
            dirtied_pages: None,
            host: None,
            outcome: MoveOutcome::Left { state: info.state },
        }));
        let empty = if dry_run { all_placed && withheld == 0 } else { self.host.is_empty() };
        Ok(OperationResult::Evacuate(EvacuateReport { empty, dry_run, machines, withheld }))
    }
}

fn state_left(host: &HostName, machines: &[EvacuatedMachine]) -> String {
    let names = |moved: bool| {
        let of = machines.iter().filter(|m| matches!(m.outcome, MoveOutcome::Moved { .. }) == moved);
        of.map(|machine| machine.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let or_none = |names: String| if names.is_empty() { "none".to_owned() } else { names };
    let (moved, left) = (or_none(names(true)), or_none(names(false)));
    format!("moved: {moved}; still on {host}: {left}; call it again to continue")
}
