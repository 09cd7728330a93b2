//! Scene: for weeks, a host cares for a machine by schedules: checkpoints with a rule, copies with a rule at
//! another host, garbage collections. Its daemon is killed at any call, both hosts lose power, its clock is
//! put forward and back, and a user gives names and removes them. Schedules, their records and the stores are
//! the program's own; the machine is a few numbers, and the copy is read and written by the scene.

use super::capsules::{self, Pages, after, changes, commit, content, is_collected, is_excused, name};
use crate::{
    report::violation,
    rules::{
        acknowledged_exists::Ledger,
        comes_back, named_is_whole,
        promised_stays::{self, Promise},
    },
    world::{
        draw,
        faults::Rates,
        log,
        processes::{self, Shared},
        with,
    },
};
use std::{
    cell::Cell,
    collections::BTreeMap,
    path::PathBuf,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use whimbrel_api::{Retention, ScheduleRequest, ScheduledWork};
use whimbrel_core::{CapsuleId, HostName, MachineName, RefName};
use whimbrel_schedule::{HostFailure, ScheduleError, ScheduledActions, Schedules, TAG_PREFIX};
use whimbrel_store::{Expected, GcRoots, Store, StoreError};

const HERE: usize = 0;
const THERE: usize = 1;
/// Daemons one after another, and the days that each lives for if nothing ends it.
const LIVES: u64 = 4;
const DAYS: u64 = 6;
const HOUR: Duration = Duration::from_secs(3600);
/// Interval at which due schedules are looked for. The daemon looks more often, which only costs calls here.
const LOOK: Duration = HOUR;
/// Longest interval of a schedule, in hours.
const LONGEST: u32 = 72;
/// Name of the machine's newest capsule.
const MACHINE: &str = "machine.m";
/// Names of the schedules.
const NIGHTLY: &str = "nightly";
const OFFSITE: &str = "offsite";
const COLLECT: &str = "collect";

thread_local! {
    /// Time that this thread was told last: during a run, that of its beginning.
    static LAST_LOOK: Cell<u64> = const { Cell::new(0) };
}

/// What was promised to the user so far.
#[derive(Debug, Default)]
struct Known {
    /// Names that the user gave here.
    named: Ledger<Pages>,
    /// Schedules that the user made.
    schedules: Ledger<()>,
    checkpoints: Promise,
    copies: Promise,
}

pub(crate) fn run() {
    let known = Shared::new(Known::default());
    let rates = with(|world| Rates {
        stall: world.faults.draw_rate(100),
        slow_sync: world.faults.draw_rate(40),
        failed_sync: world.faults.draw_rate(400),
        failed_read: world.faults.draw_rate(300),
        failed_change: world.faults.draw_rate(300),
        no_descriptor: world.faults.draw_rate(600),
        ..Rates::default()
    });
    log(&format!("{rates:?}"));
    let rules = [rule(), rule()];
    for life in 0..LIVES {
        let known = known.clone();
        let process = processes::start(HERE, &format!("daemon.{life}"), move || live(&known, &rules, rates));
        if draw(4) > 0 {
            process.doom(draw(5_000), draw(2) == 0);
        }
        await_end(process);
        if draw(4) == 0 {
            processes::lose_power(THERE);
        }
        comes_back::end_faults();
    }
    await_end(processes::start(HERE, "daemon.last", move || finish(&known, &rules)));
}

fn await_end(process: processes::Running) {
    if !process.await_end(HOUR * 24 * 20) {
        violation("ends_or_says", "a daemon has not ended after twenty days");
    }
}

/// A rule that retains a little of everything.
fn rule() -> Retention {
    let upto = |most: u64| draw(most + 1) as u32;
    let last = 1 + upto(2);
    Retention { last, hourly: upto(2), daily: upto(4), weekly: upto(2), ..Retention::default() }
}

fn requests([checkpoints, copies]: &[Retention; 2]) -> [ScheduleRequest; 3] {
    let machine: MachineName = "m".parse().expect("a name");
    let request = |name: &str, work, hours: u32| ScheduleRequest {
        name: name.parse().expect("a name"),
        work,
        every_ms: (HOUR * hours).as_millis() as u64,
        offset_ms: 3 * HOUR.as_millis() as u64,
    };
    let checkpoint =
        ScheduledWork::Checkpoint { machine: machine.clone(), disks_only: false, retain: Some(*checkpoints) };
    let push = ScheduledWork::Push { machine, host: Some(there()), pool: None, retain: Some(*copies) };
    [
        request(NIGHTLY, checkpoint, 24),
        request(OFFSITE, push, 36),
        request(COLLECT, ScheduledWork::Gc { bucket: None }, LONGEST),
    ]
}

fn there() -> HostName {
    "beta".parse().expect("a name")
}

fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// One daemon, from its start to its orderly end.
fn live(known: &Shared<Known>, rules: &[Retention; 2], rates: Rates) {
    let host = Host::open(known);
    host.check("after the start");
    with(|world| world.faults.rates = rates);
    host.create(rules);
    for _ in 0..DAYS * 24 {
        host.run_due();
        match draw(120) {
            0 => set_clock(),
            1 | 2 => host.user_names(),
            3 => drop(host.there.gc(GcRoots::Referenced)),
            _ => {}
        }
    }
}

/// The last daemon: without faults and with the right time, every schedule runs by itself.
fn finish(known: &Shared<Known>, rules: &[Retention; 2]) {
    with(|world| world.hosts[HERE].wall_error = 0);
    let host = Host::open(known);
    host.create(rules);
    let since = wall_ms();
    (0..2 * LONGEST + 1).for_each(|_| host.run_due());
    for one in host.schedules.list(&host) {
        if !one.runs.iter().any(|run| run.succeeded && run.started_ms >= since) {
            let (name, runs) = (one.schedule.name, one.runs.last());
            violation("comes_back", &format!("{name} has not done its work in two intervals: {runs:?}"));
        }
    }
    host.check("in the end");
}

/// Puts the wall clock of the host right, or forward or back by days or years.
fn set_clock() {
    let hours = [0, 0, 1, 30, 24 * 40, 24 * 3_650][draw(6) as usize];
    let error = (HOUR * hours).as_nanos() as i64 * if draw(2) == 0 { 1 } else { -1 };
    log(&format!("the clock is {hours} hours off, {error} ns"));
    with(|world| world.hosts[HERE].wall_error = error);
}

/// A daemon with its schedules, and the stores of both hosts.
struct Host {
    here: Store,
    there: Store,
    schedules: Schedules,
    known: Shared<Known>,
}

impl Host {
    fn open(known: &Shared<Known>) -> Self {
        let [here, there] = [HERE, THERE].map(|host| {
            capsules::open(host)
                .unwrap_or_else(|error| violation("comes_back", &format!("does not open: {error:?}")))
        });
        let folder = PathBuf::from(format!("/sim/h{HERE}/schedules"));
        let schedules = Schedules::open(folder, wall_ms())
            .unwrap_or_else(|error| violation("comes_back", &format!("schedules do not open: {error:?}")));
        Self { here, there, schedules, known: known.clone() }
    }

    /// What was acknowledged is there, and what the rules promise.
    fn check(&self, when: &str) {
        let [here, there] = [&self.here, &self.there].map(|store| named_is_whole::check(store, when));
        let seen: Result<(), String> = self.known.see(|known| {
            for schedule in known.schedules.names() {
                let is_there = self.has(&schedule.parse().expect("a name"));
                known.schedules.see(&schedule, is_there.then_some(()))?;
            }
            known.named.names().into_iter().try_for_each(|user| {
                let found = here.iter().find(|(name, _)| name.as_str() == user);
                known.named.see(&user, found.map(|(_, pages)| pages.clone()))
            })
        });
        if let Err(text) = seen {
            violation("acknowledged_exists", &format!("{when}: {text}"));
        }
        self.learn();
        let tags = here.into_iter().filter_map(|(name, pages)| Some((time_of(&name)?, pages))).collect();
        let copies: Vec<Pages> = there.into_iter().map(|(_, pages)| pages).collect();
        self.known.see(|known| {
            promised_stays::check_tags(&known.checkpoints, &tags, when);
            promised_stays::check_copies(&known.copies, &copies, when);
        });
    }

    fn has(&self, schedule: &MachineName) -> bool {
        self.schedules.machine_of(schedule).is_some()
    }

    /// Notes the rules of the schedules that there are.
    fn learn(&self) {
        let listed = self.schedules.list(self);
        self.known.see(|known| {
            for one in listed {
                match one.schedule.work {
                    ScheduledWork::Checkpoint { retain: Some(rule), .. } => {
                        known.checkpoints.begin(rule, one.created_ms);
                    }
                    ScheduledWork::Push { retain: Some(rule), .. } => {
                        known.copies.begin(rule, one.created_ms)
                    }
                    _ => {}
                }
            }
        });
    }

    /// Makes the schedules that are missing.
    fn create(&self, rules: &[Retention; 2]) {
        for request in requests(rules) {
            let name = request.name.clone();
            if self.has(&name) {
                continue;
            }
            self.known.see(|known| known.schedules.begin(name.as_str(), Some(())));
            match self.schedules.create(request, self) {
                Ok(_) => self.known.see(|known| known.schedules.acknowledge(name.as_str(), Some(()))),
                Err(ScheduleError::Io { .. }) => {}
                Err(error) => violation("ends_or_says", &format!("no schedule for no reason: {error:?}")),
            }
        }
        self.learn();
    }

    /// Lets time pass, then runs what is due, each on a thread of its own, as the daemon does.
    fn run_due(&self) {
        thread::sleep(LOOK + Duration::from_millis(draw(1_000)));
        let due = self.schedules.due(wall_ms());
        thread::scope(|scope| {
            for name in &due {
                scope.spawn(move || self.run(name));
            }
        });
    }

    fn run(&self, name: &MachineName) {
        let report = match self.schedules.run(name, self) {
            Ok(report) => report,
            Err(ScheduleError::Io { .. }) => return,
            Err(error) => violation("ends_or_says", &format!("{name} does not run: {error:?}")),
        };
        let Some(run) = report.run.filter(|run| run.succeeded) else { return };
        self.known.see(|known| match name.as_str() {
            NIGHTLY => known.checkpoints.acknowledge(run.started_ms),
            OFFSITE => known.copies.acknowledge(run.started_ms),
            _ => {}
        });
    }

    /// A user gives the newest capsule a name, or removes one.
    fn user_names(&self) {
        let tag = format!("u{}", draw(3));
        let newest = self.here.get_ref(&name(MACHINE)).ok().flatten();
        let pages = newest.and_then(|id| Some((id, content(&self.here, &id).ok()?)));
        let done = match pages.filter(|_| draw(3) > 0) {
            Some((id, pages)) => {
                self.known.see(|known| known.named.begin(&tag, Some(pages.clone())));
                let named = self.here.set_ref(&name(&tag), &id, Expected::Anything);
                named.map(|()| Some(pages))
            }
            None => {
                self.known.see(|known| known.named.begin(&tag, None));
                match self.here.delete_ref(&name(&tag), Expected::Anything) {
                    Ok(()) | Err(StoreError::Unknown { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        };
        match done {
            Ok(pages) => self.known.see(|known| known.named.acknowledge(&tag, pages)),
            Err(error) if is_excused(&error) || is_collected(&error) => {}
            Err(error) => violation("ends_or_says", &format!("a name is refused for no reason: {error:?}")),
        }
    }

    fn checkpoint(&self, tag: &RefName) -> Result<(), StoreError> {
        let base = self.here.get_ref(&name(MACHINE))?;
        let before = base.map(|id| content(&self.here, &id)).transpose()?.unwrap_or_default();
        let changes = changes(8, 50);
        let pages = after(&before, &changes);
        // The tag has the time of the run.
        self.known.see(|known| known.checkpoints.attempt(time_of(tag).unwrap_or_default(), pages));
        let id = commit(&self.here, base, &changes, &[name(MACHINE), tag.clone()])?;
        log(&format!("{tag} is {id}"));
        Ok(())
    }

    fn copy(&self, capsule: CapsuleId, tag: &RefName) -> Result<(), StoreError> {
        let pages = content(&self.here, &capsule)?;
        let begun_ms = LAST_LOOK.get();
        self.known.see(|known| known.copies.attempt(begun_ms, pages.clone()));
        let id = commit(&self.there, None, &pages, std::slice::from_ref(tag))?;
        log(&format!("the copy {tag} is {id}"));
        Ok(())
    }
}

/// The time in a tag of the nightly schedule.
fn time_of(tag: &RefName) -> Option<u64> {
    tag.as_str().strip_prefix(TAG_PREFIX)?.strip_prefix(NIGHTLY)?.strip_prefix('.')?.parse().ok()
}

impl ScheduledActions for Host {
    fn now_ms(&self) -> u64 {
        let now = wall_ms();
        LAST_LOOK.set(now);
        now
    }

    fn host(&self) -> HostName {
        "alpha".parse().expect("a name")
    }

    fn newest(&self, _: &MachineName) -> Result<CapsuleId, HostFailure> {
        Ok(self.here.get_ref(&name(MACHINE))?.ok_or("there is no capsule yet")?)
    }

    fn perform(
        &self,
        work: &ScheduledWork,
        tag: &RefName,
        copied: Option<CapsuleId>,
    ) -> Result<String, HostFailure> {
        let done = match (work, copied) {
            (ScheduledWork::Checkpoint { .. }, _) => self.checkpoint(tag),
            (ScheduledWork::Push { .. }, Some(capsule)) => self.copy(capsule, tag),
            _ => self.here.gc(GcRoots::Referenced).map(drop),
        };
        match done {
            Ok(()) => Ok(String::from("done")),
            Err(error) if is_excused(&error) || is_collected(&error) => {
                // What an operator does: collect garbage, which opens a latched store again.
                drop((self.here.gc(GcRoots::Referenced), self.there.gc(GcRoots::Referenced)));
                Err(error.into())
            }
            Err(error) => violation("ends_or_says", &format!("{work:?} fails for no reason: {error:?}")),
        }
    }

    fn refs(&self) -> Result<BTreeMap<RefName, CapsuleId>, HostFailure> {
        Ok(self.here.list_refs()?)
    }

    fn remove(&self, name: &RefName, capsule: CapsuleId) -> Result<(), HostFailure> {
        match self.here.delete_ref(name, Expected::Capsule(capsule)) {
            Ok(()) | Err(StoreError::Unknown { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn report_end(&self, schedule: &MachineName, outcome: &str) {
        log(&format!("{schedule} {outcome}"));
    }
}
