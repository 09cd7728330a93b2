//! Operations: long work with progress, a result and cancel.
//!
//! Each runs on its own thread and publishes snapshots that anyone may watch. A fixed number of ended
//! operations is retained, so that a caller that lost its connection can ask for the result.

use crate::core::{error::DaemonError, event_log::EventLog};
use std::{
    collections::{BTreeMap, HashMap},
    ops::ControlFlow,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;
use whimbrel_api::{
    ErrorCode, EventKind, Operation, OperationId, OperationKind, OperationResult, OperationState,
    PostcopyInfo, Progress, RoundInfo, Unit,
};
use whimbrel_core::lock;

/// Ended operations that are retained.
const RETAINED_MAX: usize = 1000;
/// Shortest interval between snapshots; a person reads no faster.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(crate) struct Operations {
    next: AtomicU64,
    table: Mutex<BTreeMap<OperationId, Arc<Entry>>>,
    ended: Arc<EndedOperations>,
    events: Arc<EventLog>,
}

/// Numbers of operations that have ended, by kind and outcome. More end than are retained.
type EndedOperations = Mutex<HashMap<(OperationKind, &'static str), u64>>;

/// An operation under way.
pub(crate) struct RunningOperation {
    pub(crate) kind: OperationKind,
    pub(crate) subject: String,
    /// Pages that are left of its present round or stage, if it counts pages.
    pub(crate) pages_left: Option<u64>,
}

struct Entry {
    snapshot: watch::Sender<Operation>,
    cancelled: AtomicBool,
}

/// The worker's side of an operation: reports progress and sees a cancel.
pub(crate) struct ProgressReporter {
    entry: Arc<Entry>,
    published: Mutex<Published>,
    pub(crate) id: OperationId,
}

struct Published {
    at: Instant,
    stage: String,
    done: u64,
    stage_begun: Instant,
}

impl Operations {
    /// No operations yet; those to come are told as events.
    pub(crate) fn new(events: Arc<EventLog>) -> Self {
        Self { events, ..Self::default() }
    }

    /// Starts `work` on a thread of its own and returns its first snapshot. Without a thread, it has failed.
    pub(crate) fn start(
        &self,
        kind: OperationKind,
        subject: impl Into<String>,
        work: impl FnOnce(&ProgressReporter) -> Result<OperationResult, DaemonError> + Send + 'static,
    ) -> Operation {
        self.start_on(std::thread::Builder::new(), kind, subject.into(), work)
    }

    fn start_on(
        &self,
        thread: std::thread::Builder,
        kind: OperationKind,
        subject: String,
        work: impl FnOnce(&ProgressReporter) -> Result<OperationResult, DaemonError> + Send + 'static,
    ) -> Operation {
        let id = OperationId(self.next.fetch_add(1, Ordering::Relaxed) + 1);
        let mut first = Operation {
            id,
            kind,
            subject,
            started_ms: crate::now_ms(),
            progress: Progress::stage("starting", Unit::Items),
            state: OperationState::Running,
        };
        let entry = Arc::new(Entry {
            snapshot: watch::Sender::new(first.clone()),
            cancelled: AtomicBool::new(false),
        });
        self.retain(id, entry.clone());
        let (worker, ended, events) = (entry.clone(), self.ended.clone(), self.events.clone());
        let about = first.subject.clone();
        events.add(EventKind::OperationStarted { operation: kind }, &about, "");
        let run = move || {
            let outcome = run(worker, id, work);
            events.add(EventKind::OperationEnded { operation: kind }, about, outcome);
            *lock(&ended).entry((kind, outcome)).or_default() += 1;
        };
        if let Err(source) = thread.name(format!("{kind}-{id}")).spawn(run) {
            first.state = OperationState::Failed { error: DaemonError::Thread { source }.to_api() };
            entry.snapshot.send_replace(first.clone());
        }
        first
    }

    fn retain(&self, id: OperationId, entry: Arc<Entry>) {
        let mut table = self.table.lock().expect("no panic while held");
        table.insert(id, entry);
        while table.len() > RETAINED_MAX {
            let ended = |entry: &Arc<Entry>| entry.snapshot.borrow().state != OperationState::Running;
            let Some(oldest) = table.iter().find(|(_, entry)| ended(entry)).map(|(id, _)| *id) else { break };
            table.remove(&oldest);
        }
    }

    /// All retained operations, oldest first.
    pub(crate) fn list(&self) -> Vec<Operation> {
        let table = self.table.lock().expect("no panic while held");
        table.values().map(|entry| entry.snapshot.borrow().clone()).collect()
    }

    /// Operations under way.
    pub(crate) fn running(&self) -> Vec<RunningOperation> {
        let table = self.table.lock().expect("no panic while held");
        let running = |entry: &Arc<Entry>| {
            let now = entry.snapshot.borrow();
            (now.state == OperationState::Running).then(|| RunningOperation {
                kind: now.kind,
                subject: now.subject.clone(),
                pages_left: match &now.progress {
                    Progress { unit: Unit::Pages, total: Some(total), done, .. } => {
                        Some(total.saturating_sub(*done))
                    }
                    _ => None,
                },
            })
        };
        table.values().filter_map(running).collect()
    }

    /// Numbers of operations that have ended, by kind and outcome: `succeeded`, `cancelled` or `failed`.
    pub(crate) fn ended(&self) -> Vec<((OperationKind, &'static str), u64)> {
        let mut ended: Vec<_> = lock(&self.ended).iter().map(|(of, count)| (*of, *count)).collect();
        ended.sort_by_key(|((kind, outcome), _)| (kind.to_string(), *outcome));
        ended
    }

    pub(crate) fn watch(&self, id: OperationId) -> Result<watch::Receiver<Operation>, DaemonError> {
        let table = self.table.lock().expect("no panic while held");
        let entry =
            table.get(&id).ok_or(DaemonError::NotFound { what: "operation", name: id.to_string() })?;
        Ok(entry.snapshot.subscribe())
    }

    /// Asks an operation to stop. It ends as cancelled, or as succeeded if it was too late.
    pub(crate) fn cancel(&self, id: OperationId) -> Result<Operation, DaemonError> {
        let table = self.table.lock().expect("no panic while held");
        let entry =
            table.get(&id).ok_or(DaemonError::NotFound { what: "operation", name: id.to_string() })?;
        entry.cancelled.store(true, Ordering::Release);
        Ok(entry.snapshot.borrow().clone())
    }

    /// Asks every running operation to stop and waits for their ends, at most for `patience`.
    pub(crate) fn cancel_all(&self, patience: Duration) {
        let entries: Vec<_> = self.table.lock().expect("no panic while held").values().cloned().collect();
        entries.iter().for_each(|entry| entry.cancelled.store(true, Ordering::Release));
        let deadline = Instant::now() + patience;
        let running = || entries.iter().any(|entry| entry.snapshot.borrow().state == OperationState::Running);
        while running() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn run(
    entry: Arc<Entry>,
    id: OperationId,
    work: impl FnOnce(&ProgressReporter) -> Result<OperationResult, DaemonError>,
) -> &'static str {
    let reporter = ProgressReporter::new(entry.clone(), id);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&reporter)));
    let state = match outcome {
        Ok(Ok(result)) => OperationState::Succeeded { result },
        Ok(Err(error)) if error.code() == ErrorCode::Cancelled => {
            OperationState::Cancelled { left: error.state_left() }
        }
        Ok(Err(error)) => {
            tracing::warn!(operation = %id, error = &error as &dyn std::error::Error, "operation failed");
            OperationState::Failed { error: error.to_api() }
        }
        Err(_) => OperationState::Failed { error: DaemonError::Panicked.to_api() },
    };
    let outcome = match &state {
        OperationState::Succeeded { .. } => "succeeded",
        OperationState::Cancelled { .. } => "cancelled",
        _ => "failed",
    };
    entry.snapshot.send_modify(|operation| operation.state = state);
    outcome
}

impl ProgressReporter {
    fn new(entry: Arc<Entry>, id: OperationId) -> Self {
        let now = Instant::now();
        let published = Published { at: now, stage: String::new(), done: 0, stage_begun: now };
        Self { entry, published: Mutex::new(published), id }
    }

    /// Reporter of the same operation for a thread that this one waits for.
    pub(crate) fn for_another_thread(&self) -> Self {
        Self::new(self.entry.clone(), self.id)
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.entry.cancelled.load(Ordering::Acquire)
    }

    /// `Break` after a cancel, for loops that take it.
    pub(crate) fn flow(&self) -> ControlFlow<()> {
        if self.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    pub(crate) fn progress(&self, stage: &str, unit: Unit, done: u64, total: Option<u64>) {
        let now = Instant::now();
        let mut published = self.published.lock().expect("no panic while held");
        let new_stage = published.stage != stage;
        if new_stage {
            *published = Published { at: now, stage: stage.to_owned(), done: 0, stage_begun: now };
        } else if now - published.at < PUBLISH_EVERY {
            return;
        }
        published.at = now;
        published.done = done;
        let seconds = (now - published.stage_begun).as_secs_f64();
        let rate_per_s = (seconds > 0.05).then(|| done as f64 / seconds);
        self.entry.snapshot.send_modify(|operation| {
            let rounds = std::mem::take(&mut operation.progress.rounds);
            let (stage, postcopy) = (stage.to_owned(), operation.progress.postcopy.take());
            operation.progress =
                Progress { stage, done, total, unit, rate_per_s, detail: None, rounds, postcopy };
        });
    }

    /// Publishes an ended round at once: rounds are few and each matters.
    pub(crate) fn round(&self, round: RoundInfo) {
        self.entry.snapshot.send_modify(|operation| operation.progress.rounds.push(round));
    }

    /// Publishes the missing pages of a machine that already runs on the target.
    pub(crate) fn postcopy(&self, rest: PostcopyInfo) {
        self.entry.snapshot.send_if_modified(|operation| {
            let changed = operation.progress.postcopy.as_ref() != Some(&rest);
            let waits = match (rest.faults, &rest.stalled) {
                (_, Some(why)) => format!("stalled: {why}"),
                (0, None) => "nothing has waited for a page yet".to_owned(),
                (faults, None) => format!(
                    "waited for {faults} pages, {:.1} ms on average, {:.1} ms at most",
                    rest.waited_ms / faults as f64,
                    rest.longest_ms
                ),
            };
            operation.progress.detail = Some(waits);
            operation.progress.postcopy = Some(rest);
            changed
        });
    }

    pub(crate) fn rounds(&self) -> Vec<RoundInfo> {
        self.entry.snapshot.borrow().progress.rounds.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::ByteSize;

    fn wait(operations: &Operations, id: OperationId) -> OperationState {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let state = operations.watch(id).unwrap().borrow().state.clone();
            if state != OperationState::Running {
                return state;
            }
            assert!(Instant::now() < deadline, "the operation does not end");
            std::thread::yield_now();
        }
    }

    fn export() -> OperationResult {
        OperationResult::Export { path: "/x".into(), bytes: ByteSize(1) }
    }

    #[test]
    fn an_operation_without_a_thread_has_failed() {
        let operations = Operations::default();
        // More than the address space has.
        let thread = std::thread::Builder::new().stack_size(1 << 47);
        let first = operations.start_on(thread, OperationKind::Export, "a".into(), |_| Ok(export()));
        assert!(matches!(first.state, OperationState::Failed { .. }), "{first:?}");
        assert_eq!(operations.list(), [first]);
    }

    #[test]
    fn an_operation_ends_as_its_work_does() {
        let operations = Operations::default();
        let good = operations.start(OperationKind::Export, "a", |_| Ok(export())).id;
        let bad = operations
            .start(OperationKind::Export, "b", |_| Err(DaemonError::Cancelled { left: "x".into() }))
            .id;
        let worse = operations.start(OperationKind::Export, "c", |_| panic!("on purpose")).id;
        assert!(matches!(wait(&operations, good), OperationState::Succeeded { .. }));
        assert!(matches!(wait(&operations, bad), OperationState::Cancelled { .. }));
        assert!(matches!(wait(&operations, worse), OperationState::Failed { .. }));
        let deadline = Instant::now() + Duration::from_secs(10);
        let counts = |of: &str| operations.ended().iter().find(|((_, end), _)| *end == of).map(|(_, n)| *n);
        while ["succeeded", "cancelled", "failed"].map(counts) != [Some(1); 3] {
            assert!(Instant::now() < deadline, "{:?}", operations.ended());
            std::thread::yield_now();
        }
        assert!(operations.running().is_empty());
    }

    #[test]
    fn cancelling_reaches_the_work() {
        let operations = Operations::default();
        let id = operations
            .start(OperationKind::Export, "a", |reporter| {
                while !reporter.is_cancelled() {
                    std::thread::yield_now();
                }
                Err(DaemonError::Cancelled { left: "nothing".into() })
            })
            .id;
        operations.cancel(id).unwrap();
        assert_eq!(wait(&operations, id), OperationState::Cancelled { left: "nothing".into() });
        assert!(operations.cancel(OperationId(99)).is_err());
    }
}
