//! Records of schedules: definition and last runs, one JSON file each, replaced as a whole.
//!
//! A run is recorded before it begins, so that one during which the daemon died is not begun again and again,
//! and is shown as failed. A file that cannot be read stays where it is, and its name stays taken.

use crate::{
    copies::{self, Copies},
    error::ScheduleError,
    plan::Rhythm,
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use whimbrel_api::{Retention, ScheduleRequest, ScheduledRun, ScheduledWork, is_bucket};
use whimbrel_core::{HostName, MachineName, RefName};
use whimbrel_wire::json_file;

/// Prefix of the tags that schedules give.
pub const TAG_PREFIX: &str = "schedule.";
const FORMAT: u32 = 1;
/// Runs that are remembered.
const RUNS_MAX: usize = 100;
/// Longest name: it is a part of the names of capsules.
const NAME_MAX: usize = 30;
const SHORTEST_MS: u64 = 60_000;
const LONGEST_MS: u64 = 366 * 86_400_000;
/// Most capsules of each kind that a rule retains.
const RETAINED_MAX: u32 = 10_000;
/// Digits of a time in a tag, in milliseconds since 1970.
const DIGITS: usize = 13;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ScheduleRecord {
    format: u32,
    pub(crate) schedule: ScheduleRequest,
    pub(crate) created_ms: u64,
    /// Time at which the last run began; first, that of the creation.
    pub(crate) last_ms: u64,
    /// Run that has begun and not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) begun_ms: Option<u64>,
    pub(crate) runs: Vec<ScheduledRun>,
    /// Copies that a push with a rule has made.
    #[serde(default, skip_serializing_if = "Copies::is_empty")]
    pub(crate) copies: Copies,
}

impl ScheduleRecord {
    pub(crate) fn new(schedule: ScheduleRequest, now_ms: u64) -> Result<Self, ScheduleError> {
        check(&schedule)?;
        let (created_ms, last_ms) = (now_ms, now_ms);
        let (runs, copies) = (Vec::new(), Copies::default());
        Ok(Self { format: FORMAT, schedule, created_ms, last_ms, begun_ms: None, runs, copies })
    }

    pub(crate) fn rhythm(&self) -> Rhythm {
        Rhythm { every_ms: self.schedule.every_ms, offset_ms: self.schedule.offset_ms }
    }

    /// Notes that a run begins.
    pub(crate) fn begin(&mut self, now_ms: u64) {
        (self.last_ms, self.begun_ms) = (now_ms, Some(now_ms));
    }

    /// Notes how a run ended, and forgets the oldest ones.
    pub(crate) fn end(&mut self, run: ScheduledRun) {
        self.begun_ms = None;
        self.runs.push(run);
        let surplus = self.runs.len().saturating_sub(RUNS_MAX);
        self.runs.drain(..surplus);
    }

    /// Tags of copies by their numbers.
    pub(crate) fn copy_tags(&self, host: &HostName, numbers: Vec<u32>) -> Vec<RefName> {
        let tag = |number| copies::tag(host, self.schedule.name.as_str(), self.created_ms, number);
        numbers.into_iter().map(tag).collect()
    }

    /// Why the last run failed, if it did.
    pub(crate) fn failure(&self) -> Option<&ScheduledRun> {
        self.runs.last().filter(|run| !run.succeeded)
    }

    pub(crate) fn save(&self, folder: &Path) -> Result<(), ScheduleError> {
        let path = path_of(folder, &self.schedule.name);
        json_file::replace(&path, self).map_err(ScheduleError::io("write", &path))
    }

    /// Reads a record. A run that was under way has failed at `now_ms`.
    pub(crate) fn load(path: &Path, now_ms: u64) -> Result<Self, String> {
        let mut record: Self = json_file::read_format(path, FORMAT).map_err(|error| error.to_string())?;
        check(&record.schedule).map_err(|error| error.to_string())?;
        if path.file_stem().and_then(|stem| stem.to_str()) != Some(record.schedule.name.as_str()) {
            return Err(format!("it is the record of {}", record.schedule.name));
        }
        if let Some(started_ms) = record.begun_ms {
            let text = "the daemon ended before the run had".to_owned();
            record.end(ScheduledRun { started_ms, ended_ms: now_ms, succeeded: false, text });
        }
        Ok(record)
    }
}

/// Why the record of a schedule cannot be read, if it cannot.
pub fn check_file(path: &Path) -> Result<(), String> {
    ScheduleRecord::load(path, 0).map(drop)
}

pub(crate) fn path_of(folder: &Path, name: &MachineName) -> PathBuf {
    folder.join(format!("{name}.json"))
}

/// The tag of a capsule that a schedule takes at a time.
pub(crate) fn tag(schedule: &MachineName, time_ms: u64) -> RefName {
    let text = format!("{TAG_PREFIX}{schedule}.{time_ms:0DIGITS$}");
    text.parse().expect("a prefix, a short name and digits are a valid ref")
}

/// The time in a tag of this schedule.
pub(crate) fn time_in(tag: &RefName, schedule: &MachineName) -> Option<u64> {
    let digits = tag.as_str().strip_prefix(TAG_PREFIX)?.strip_prefix(schedule.as_str())?.strip_prefix('.')?;
    let all_digits = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| all_digits)
}

fn check(schedule: &ScheduleRequest) -> Result<(), ScheduleError> {
    if schedule.name.as_str().len() > NAME_MAX || schedule.name.as_str().contains('.') {
        return Err(ScheduleError::invalid(format!(
            "a schedule's name has at most {NAME_MAX} characters and no dot"
        )));
    }
    if !(SHORTEST_MS..=LONGEST_MS).contains(&schedule.every_ms) {
        return Err(ScheduleError::invalid("the interval is from a minute to a year"));
    }
    match &schedule.work {
        ScheduledWork::Checkpoint { retain: Some(rule), .. } => check_rule(rule),
        ScheduledWork::Push { host: None, pool: None, .. } => {
            Err(ScheduleError::invalid("name a host, a pool or a bucket to push to"))
        }
        ScheduledWork::Push { host: Some(_), pool: Some(_), .. } => {
            Err(ScheduleError::invalid("name a host or a pool, not both"))
        }
        ScheduledWork::Push { pool: Some(pool), retain: Some(_), .. } if !is_bucket(pool) => {
            Err(ScheduleError::invalid(
                "the policy of a pool's folder says what it retains: see `whimbrel pool policy --help`",
            ))
        }
        ScheduledWork::Push { retain: Some(Retention { may_empty: true, .. }), .. } => {
            Err(ScheduleError::invalid("the newest copy always stays: leave --may-empty out"))
        }
        ScheduledWork::Push { retain: Some(rule), .. } => check_rule(rule),
        _ => Ok(()),
    }
}

fn check_rule(rule: &Retention) -> Result<(), ScheduleError> {
    let counts = [rule.last, rule.hourly, rule.daily, rule.weekly, rule.monthly];
    if counts.iter().any(|count| *count > RETAINED_MAX) {
        return Err(ScheduleError::invalid(format!("at most {RETAINED_MAX} of a kind are retained")));
    }
    if counts.iter().all(|count| *count == 0) && !rule.may_empty {
        return Err(ScheduleError::invalid(
            "this rule retains no capsule; name how many to keep, or say --may-empty",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(retain: Option<Retention>) -> ScheduleRequest {
        ScheduleRequest {
            name: "nightly".parse().unwrap(),
            work: ScheduledWork::Checkpoint { machine: "web".parse().unwrap(), disks_only: false, retain },
            every_ms: 86_400_000,
            offset_ms: 0,
        }
    }

    #[test]
    fn a_run_that_the_daemon_did_not_survive_has_failed_and_is_not_due_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = ScheduleRecord::new(request(None), 1_000).unwrap();
        record.begin(90_000_000);
        record.save(dir.path()).unwrap();
        let loaded = ScheduleRecord::load(&path_of(dir.path(), &record.schedule.name), 90_000_001).unwrap();
        assert!(loaded.failure().is_some_and(|run| run.text.contains("daemon ended")), "{loaded:?}");
        assert!(!loaded.rhythm().is_due(loaded.last_ms, 90_000_001));
    }

    #[test]
    fn a_rule_that_retains_nothing_is_refused_unless_it_was_said() {
        assert!(ScheduleRecord::new(request(Some(Retention::default())), 1).is_err());
        let said = Retention { may_empty: true, ..Retention::default() };
        assert!(ScheduleRecord::new(request(Some(said)), 1).is_ok());
        let short = ScheduleRequest { every_ms: 59_999, ..request(None) };
        assert!(ScheduleRecord::new(short, 1).is_err());
    }

    #[test]
    fn only_own_tags_have_a_time_and_the_log_is_bounded() {
        let nightly: MachineName = "nightly".parse().unwrap();
        assert_eq!(time_in(&tag(&nightly, 1_795_564_800_000), &nightly), Some(1_795_564_800_000));
        for other in ["schedule.nightly2.1795564800000", "schedule.nightly.monday", "nightly.1795564800000"] {
            assert_eq!(time_in(&other.parse().unwrap(), &nightly), None, "{other}");
        }
        let mut record = ScheduleRecord::new(request(None), 1).unwrap();
        for time in 0..200 {
            let text = String::new();
            record.end(ScheduledRun { started_ms: time, ended_ms: time, succeeded: true, text });
        }
        assert_eq!((record.runs.len(), record.runs[0].started_ms), (RUNS_MAX, 100));
    }
}
