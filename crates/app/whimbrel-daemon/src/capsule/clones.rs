//! Clones: several machines made from one capsule, each with an identity and disks of its own.
//!
//! All of them are prepared before the first one runs: clones that run would take the processors from those
//! that still start. Their names are reserved first. A failure or a cancellation while they are prepared
//! leaves none of them, and none that has run.

use crate::{
    capsule::resume::{Plan, Relation, check_not_cancelled},
    core::{error::DaemonError, operations::ProgressReporter, refs},
    daemon::Daemon,
    machine::{
        folder,
        record::{Phase, Record},
    },
};
use std::{
    sync::{Arc, Mutex},
    thread,
    time::Instant,
};
use whimbrel_api::{CloneRequest, MachineSettings, Operation, OperationKind, OperationResult, Unit};
use whimbrel_core::{CapsuleId, MachineName, lock};
use whimbrel_image::Manifest;
use whimbrel_vm::RunningMachine;

/// Most clones in one request.
const CLONES_MAX: u32 = 1000;

/// A clone before its first instruction.
type Prepared = (Record, RunningMachine);

impl Daemon {
    pub(crate) fn clone_machines(self: &Arc<Self>, request: CloneRequest) -> Result<Operation, DaemonError> {
        let (host, subject) = (self.clone(), request.capsule.to_string());
        let begun = Instant::now();
        if !(1..=CLONES_MAX).contains(&request.count) {
            return Err(DaemonError::invalid(format!(
                "between 1 and {CLONES_MAX} clones can be made at once"
            )));
        }
        let (capsule, manifest) = self.find(&request.capsule)?;
        let names = clone_names(&request, &manifest)?;
        names.iter().try_for_each(|name| self.machines.check_free(name, false))?;
        Ok(self.operations().start(OperationKind::Clone, subject, move |reporter| {
            let reserved = names.iter().map(|name| host.machines.reserve(name, false));
            let _reserved = reserved.collect::<Result<Vec<_>, _>>()?;
            let prepared = host.prepare_clones(&request, (capsule, &manifest), &names, reporter)?;
            host.run_clones(prepared)?;
            let to_running_ms = begun.elapsed().as_secs_f64() * 1e3;
            Ok(OperationResult::Clone { machines: names, to_running_ms })
        }))
    }

    /// Prepares all clones or none.
    fn prepare_clones(
        &self,
        request: &CloneRequest,
        (capsule, manifest): (CapsuleId, &Manifest),
        names: &[MachineName],
        reporter: &ProgressReporter,
    ) -> Result<Vec<Prepared>, DaemonError> {
        let prepare = |(at, name): (usize, &MachineName)| {
            check_not_cancelled(reporter)?;
            let CloneRequest { mode, network, .. } = *request;
            let (name, fetch_rest, tunnel, kind) = (name.clone(), false, None, Relation::Clone);
            let plan = Plan { capsule, manifest, name, mode, fetch_rest, network, tunnel, kind };
            let prepared = self.prepare_machine(&plan, MachineSettings::default(), reporter)?;
            reporter.progress("starting clones", Unit::Items, at as u64 + 1, Some(names.len() as u64));
            Ok(prepared)
        };
        let Outcome { done, result, .. } = for_each(names.iter().enumerate().collect(), prepare);
        if let Err(error) = result.and_then(|()| check_not_cancelled(reporter)) {
            done.into_iter().for_each(|(_, live)| live.end());
            names.iter().for_each(|name| self.remove_clone_folder(name));
            return Err(error);
        }
        Ok(done)
    }

    /// Runs all clones. After a failure those that run already are ended.
    fn run_clones(self: &Arc<Self>, prepared: Vec<Prepared>) -> Result<(), DaemonError> {
        let run = |(record, live): Prepared| {
            let machine = self.register_started(record, live)?;
            Ok(machine.name().clone())
        };
        let Outcome { done, left, result } = for_each(prepared, run);
        if result.is_err() {
            done.iter().for_each(|name| self.remove_clone(name));
            for (record, live) in left {
                live.end();
                self.remove_clone_folder(&record.name);
            }
        }
        result
    }

    /// Ends and deletes a clone that was just made.
    fn remove_clone(&self, name: &MachineName) {
        let Ok(machine) = self.machines.get(name) else { return };
        {
            let mut turn = machine.lock("removal");
            turn.running.take().into_iter().for_each(RunningMachine::end);
            turn.record.phase = Phase::Stopped;
        }
        if let Err(error) = self.delete(name) {
            tracing::warn!(%name, error = &error as &dyn std::error::Error, "could not remove a clone");
        }
    }

    /// Removes what is left of a clone that never ran, whose name is reserved.
    fn remove_clone_folder(&self, name: &MachineName) {
        if let Err(error) = folder::delete_marked(&self.directories, name) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%name, error, "could not remove the folder of a clone");
        }
    }
}

/// What became of work on several items.
struct Outcome<T, U> {
    done: Vec<U>,
    /// Items that nobody has begun after a failure.
    left: Vec<T>,
    /// What failed first, if anything did.
    result: Result<(), DaemonError>,
}

/// Works on a few items at once, until one fails. Starting a QEMU is half waiting, so one more than there are
/// processors keeps these busy.
fn for_each<T: Send, U: Send>(
    items: Vec<T>,
    work: impl Fn(T) -> Result<U, DaemonError> + Sync,
) -> Outcome<T, U> {
    let parallel = thread::available_parallelism().map_or(2, |n| n.get() + 1).min(items.len());
    let (items, done, failed) = (Mutex::new(items.into_iter()), Mutex::default(), Mutex::new(None));
    let next = || if lock(&failed).is_some() { None } else { lock(&items).next() };
    let one_after_another = || {
        while let Some(item) = next() {
            match work(item) {
                Ok(result) => lock::<Vec<U>>(&done).push(result),
                Err(error) => drop(lock(&failed).get_or_insert(error)),
            }
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..parallel).map(|_| scope.spawn(one_after_another)).collect();
        if workers.into_iter().any(|worker| worker.join().is_err()) {
            lock(&failed).get_or_insert(DaemonError::Panicked);
        }
    });
    let left = std::mem::take(&mut *lock(&items)).collect();
    let result = lock(&failed).take().map_or(Ok(()), Err);
    Outcome { done: std::mem::take(&mut *lock(&done)), left, result }
}

fn clone_names(request: &CloneRequest, manifest: &Manifest) -> Result<Vec<MachineName>, DaemonError> {
    let prefix = match &request.prefix {
        Some(prefix) => prefix.clone(),
        None => refs::machine_of(manifest)?,
    };
    let name = |number| {
        format!("{prefix}-{number}").parse().map_err(|error| DaemonError::invalid(format!("{error}")))
    };
    (1..=request.count).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_or_left_and_one_failure_ends_the_work() {
        let Outcome { done, left, result } = for_each((0..100).collect(), Ok::<usize, DaemonError>);
        assert_eq!((done.len(), left.len(), result.is_ok()), (100, 0, true));
        let refuse = |item| if item == 7 { Err(DaemonError::invalid("no")) } else { Ok(item) };
        let Outcome { done, left, result } = for_each((0..100).collect(), refuse);
        assert_eq!((done.len() + left.len(), result.is_err()), (99, true));
        assert!(!done.contains(&7) && !left.contains(&7));
    }

    #[test]
    fn work_that_panics_is_a_failure() {
        let Outcome { result, .. } =
            for_each(vec![1], |_| -> Result<(), DaemonError> { panic!("of the test") });
        assert!(matches!(result, Err(DaemonError::Panicked)));
    }
}
