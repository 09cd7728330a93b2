//! Starts without a user: machines that start with the host, and restarts of those that ended by themselves.
//!
//! One thread does them one by one. The mark `RUN/started` says that the host's machines were started: it is
//! on a tmpfs, so it is gone after a restart of the host and stays over one of the daemon. Whoever starts a
//! machine decides under its lock whether it is this host's; a machine in doubt is asked about again later.

use crate::{
    core::{event_log::EventLog, notifier::Notifier},
    daemon::Daemon,
    machine::restart::{End, Restarts, autostarts},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use whimbrel_api::{
    EventKind, MachineInfo, MachineSettings, MachineState, RestartInfo, RestartPolicy, RestartRule,
};
use whimbrel_core::{MachineName, lock};

/// Interval at which a machine in doubt is asked about again.
const DOUBT: Duration = Duration::from_secs(5);
/// Longest sleep of the thread.
const IDLE: Duration = Duration::from_secs(60);

/// Outcome of a start without a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StartedBySelf {
    Started,
    /// The machine is busy, or its owner is not known yet.
    NotYet,
    /// The machine runs, is gone, or is not this host's.
    NotWanted,
    Failed(String),
}

/// Planned and past starts without a user.
#[derive(Default)]
pub(crate) struct SelfStarts {
    rows: Mutex<BTreeMap<MachineName, Restarts>>,
    changed: Notifier,
    events: Arc<EventLog>,
}

impl SelfStarts {
    pub(crate) fn new(events: Arc<EventLog>) -> Arc<Self> {
        Arc::new(Self { events, ..Self::default() })
    }

    /// Plans the restart of a machine that has ended by itself, if its rule wants one.
    pub(crate) fn ended(&self, name: &MachineName, rule: RestartRule, how: End) {
        let mut rows = lock(&self.rows);
        let row = rows.entry(name.clone()).or_default();
        row.ended(rule, how, Instant::now());
        if row.gave_up {
            self.report(name, &format!("not restarted any more, after {} restarts", row.count));
        }
        if *row == Restarts::default() {
            rows.remove(name);
        }
        drop(rows);
        self.changed.notify();
    }

    /// Plans the starts of a host that has just started.
    fn host_started(&self, machines: &[MachineInfo]) {
        let settings: Vec<_> = machines.iter().map(|it| (it.name.clone(), it.settings.autostart)).collect();
        let (mut rows, now) = (lock(&self.rows), Instant::now());
        for (place, (name, offset)) in autostarts(&settings).into_iter().enumerate() {
            rows.insert(name, Restarts::due(now + offset, place));
        }
    }

    /// Forgets what was planned for a machine: a user has started, stopped or deleted it.
    pub(crate) fn forget(&self, name: &MachineName) {
        lock(&self.rows).remove(name);
    }

    /// Adds restarts to the information about machines.
    pub(crate) fn add_to(&self, machines: &mut [MachineInfo]) {
        let (rows, now, now_ms) = (lock(&self.rows), Instant::now(), crate::now_ms());
        for machine in machines {
            let Some(row) = rows.get(&machine.name) else { continue };
            let until = |(at, _): (Instant, usize)| at.saturating_duration_since(now).as_millis() as u64;
            machine.restarts = Some(RestartInfo {
                count: row.count,
                next_ms: row.next.map(|next| now_ms + until(next)),
                gave_up: row.gave_up,
                failure: row.failure.clone(),
            });
        }
    }

    /// The machine whose start is due, or the time until one is.
    fn due(&self, now: Instant) -> Result<MachineName, Duration> {
        let rows = lock(&self.rows);
        let next = rows.iter().filter_map(|(name, row)| Some((row.next?, name))).min();
        match next {
            Some(((at, _), name)) if at <= now => Ok(name.clone()),
            Some(((at, _), _)) => Err((at - now).min(IDLE)),
            None => Err(IDLE),
        }
    }

    /// Whether no start of the host's beginning is left.
    fn is_done(&self) -> bool {
        lock(&self.rows).values().all(|row| row.next.is_none())
    }

    /// Notes the outcome of a start. `rule` decides about the next one.
    fn note(&self, name: &MachineName, rule: RestartRule, outcome: StartedBySelf) {
        let mut rows = lock(&self.rows);
        // A user has decided meanwhile.
        let Some(row) = rows.get_mut(name) else { return };
        let now = Instant::now();
        match outcome {
            StartedBySelf::Started => {
                row.started(now);
                self.report(name, "started");
            }
            StartedBySelf::NotYet => row.put_off(now + DOUBT),
            StartedBySelf::NotWanted => drop(rows.remove(name)),
            StartedBySelf::Failed(failure) => {
                self.report(name, &format!("could not be started: {failure}"));
                row.failed(rule, failure, now);
            }
        }
    }

    fn report(&self, name: &MachineName, text: &str) {
        tracing::info!(machine = %name, text, "start without a user");
        self.events.add(EventKind::SelfStart, name, text);
    }
}

impl Daemon {
    /// Starts the machines that start with the host, if it has just started, and restarts those that have
    /// ended, as long as the daemon lives.
    pub(crate) fn start_machines_by_themselves(self: &Arc<Self>) {
        let mark = self.directories.autostarted();
        let mut first = !mark.exists();
        if first {
            self.self_starts.host_started(&self.machines.infos());
        }
        for machine in self.machines.infos() {
            if let MachineState::Crashed { .. } = machine.state {
                self.self_starts.ended(&machine.name, machine.settings.restart, End::Failure);
            }
        }
        let (daemon, starts) = (Arc::downgrade(self), self.self_starts.clone());
        let work = move || {
            // Machines of a host that has just started need bridges that are not there yet.
            daemon.upgrade().iter().for_each(|daemon| daemon.set_networks_up());
            while let Some(daemon) = daemon.upgrade().filter(|daemon| daemon.is_open()) {
                match starts.due(Instant::now()) {
                    Ok(name) => daemon.start_due(&name),
                    Err(pause) => {
                        if first && starts.is_done() {
                            // Without the mark, a later daemon starts them again, which is no harm.
                            first = std::fs::write(&mark, "").is_err();
                        }
                        drop(daemon);
                        starts.changed.wait(pause);
                    }
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("self-start".into()).spawn(work) {
            tracing::error!(%error, "no machine is started by itself");
        }
    }

    fn start_due(self: &Arc<Self>, name: &MachineName) {
        let outcome = self.start_by_itself(name);
        let settings = self.machines.get(name).map(|machine| machine.info().settings).unwrap_or_default();
        self.self_starts.note(name, rule_of_starts(&settings), outcome);
    }
}

/// The rule by which a start that failed is tried again: what the host lacks at first may come.
fn rule_of_starts(settings: &MachineSettings) -> RestartRule {
    match settings.restart.policy {
        RestartPolicy::No if !settings.autostart.is_off() => {
            RestartRule { policy: RestartPolicy::OnFailure, ..settings.restart }
        }
        _ => settings.restart,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALWAYS: RestartRule = RestartRule { policy: RestartPolicy::Always, limit: 3 };

    fn name(text: &str) -> MachineName {
        text.parse().unwrap()
    }

    #[test]
    fn the_first_that_is_due_comes_first_and_a_user_ends_the_plan() {
        let (starts, web) = (SelfStarts::new(Arc::default()), name("web"));
        starts.ended(&web, ALWAYS, End::Failure);
        assert!(starts.due(Instant::now()).is_err(), "the first restart has a delay");
        let later = Instant::now() + Duration::from_secs(2);
        assert_eq!(starts.due(later), Ok(web.clone()));
        starts.forget(&web);
        assert_eq!(starts.due(later), Err(IDLE));
        starts.note(&web, ALWAYS, StartedBySelf::Failed("late".into()));
        assert!(starts.is_done(), "an outcome after the user's word plans nothing");
    }

    #[test]
    fn a_machine_in_doubt_is_asked_about_again_and_another_hosts_is_dropped() {
        let (starts, web) = (SelfStarts::new(Arc::default()), name("web"));
        lock(&starts.rows).insert(web.clone(), Restarts::due(Instant::now(), 0));
        starts.note(&web, ALWAYS, StartedBySelf::NotYet);
        assert!(starts.due(Instant::now()).is_err() && !starts.is_done());
        assert_eq!(starts.due(Instant::now() + DOUBT), Ok(web.clone()));
        starts.note(&web, ALWAYS, StartedBySelf::NotWanted);
        assert!(starts.is_done() && lock(&starts.rows).is_empty());
    }

    #[test]
    fn a_machine_without_a_rule_leaves_no_row() {
        let (starts, web) = (SelfStarts::new(Arc::default()), name("web"));
        starts.ended(&web, RestartRule::default(), End::Failure);
        assert!(lock(&starts.rows).is_empty());
    }
}
