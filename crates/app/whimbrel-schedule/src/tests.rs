//! Schedules against a fake host: a store of names and a clock.

use crate::{HostFailure, ScheduleError, ScheduledActions, Schedules, record::ScheduleRecord};
use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use whimbrel_api::{Retention, ScheduleRequest, ScheduledWork};
use whimbrel_core::{CapsuleId, Digest, HostName, MachineName, RefName, lock};

const DAY_MS: u64 = 86_400_000;
const START: u64 = 1_795_564_800_000;

/// A store of names, a clock, and work that fails on request.
struct Fake {
    now: AtomicU64,
    fails: AtomicBool,
    refs: Mutex<BTreeMap<RefName, CapsuleId>>,
}

impl Fake {
    fn new() -> Self {
        let fake = Self { now: AtomicU64::new(START), fails: AtomicBool::new(false), refs: Mutex::default() };
        fake.name("golden");
        fake
    }

    fn name(&self, text: &str) {
        let capsule = CapsuleId(Digest::of(text.as_bytes()));
        lock(&self.refs).insert(text.parse().unwrap(), capsule);
    }

    fn pass(&self, ms: u64) -> u64 {
        self.now.fetch_add(ms, Ordering::Relaxed) + ms
    }

    fn names(&self) -> Vec<String> {
        lock(&self.refs).keys().map(ToString::to_string).collect()
    }
}

impl ScheduledActions for Fake {
    fn now_ms(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    fn host(&self) -> HostName {
        "alpha".parse().unwrap()
    }

    fn newest(&self, _: &MachineName) -> Result<CapsuleId, HostFailure> {
        Ok(CapsuleId(Digest::of(&self.now_ms().to_le_bytes())))
    }

    fn perform(&self, _: &ScheduledWork, tag: &RefName, _: Option<CapsuleId>) -> Result<String, HostFailure> {
        if self.fails.load(Ordering::Relaxed) {
            return Err("the machine is gone".into());
        }
        self.name(tag.as_str());
        Ok("capsule".into())
    }

    fn refs(&self) -> Result<BTreeMap<RefName, CapsuleId>, HostFailure> {
        Ok(lock(&self.refs).clone())
    }

    fn remove(&self, name: &RefName, capsule: CapsuleId) -> Result<(), HostFailure> {
        let removed = lock(&self.refs).remove(name);
        assert_eq!(removed, Some(capsule), "{name}");
        Ok(())
    }

    fn report_end(&self, _: &MachineName, _: &str) {}
}

fn nightly(rule: Retention) -> ScheduleRequest {
    ScheduleRequest {
        name: "nightly".parse().unwrap(),
        work: ScheduledWork::Checkpoint {
            machine: "web".parse().unwrap(),
            disks_only: false,
            retain: Some(rule),
        },
        every_ms: DAY_MS,
        offset_ms: 0,
    }
}

fn open(dir: &tempfile::TempDir) -> Schedules {
    Schedules::open(dir.path().to_owned(), START).unwrap()
}

#[test]
fn only_what_the_schedule_made_is_removed_and_a_dry_run_says_it_before() {
    let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
    let schedules = open(&dir);
    // An earlier schedule of that name, and another one with a longer name.
    fake.name("schedule.nightly.1795000000000");
    fake.name("schedule.nightly-2.1795564900000");
    schedules.create(nightly(Retention { last: 2, ..Retention::default() }), &fake).unwrap();
    let name: MachineName = "nightly".parse().unwrap();
    for _ in 0..4 {
        let now = fake.pass(DAY_MS);
        assert_eq!(schedules.due(now), std::slice::from_ref(&name));
        assert!(schedules.run(&name, &fake).unwrap().run.is_some_and(|run| run.succeeded));
        assert!(schedules.due(now).is_empty());
    }
    let left = fake.names();
    assert!(left.contains(&"golden".to_owned()), "{left:?}");
    assert!(left.contains(&"schedule.nightly.1795000000000".to_owned()), "{left:?}");
    assert!(left.contains(&"schedule.nightly-2.1795564900000".to_owned()), "{left:?}");
    let shown = schedules.show(&name, &fake).unwrap();
    assert_eq!((left.len(), shown.tags.len(), shown.runs.len()), (5, 2, 4), "{left:?}");
    let asked = schedules.dry_run(&name, &fake).unwrap();
    assert!(asked.removed.is_empty() && asked.retained == shown.tags && fake.names() == left);
}

#[test]
fn a_failure_removes_nothing_is_shown_and_is_over_after_the_next_success() {
    let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
    let schedules = open(&dir);
    schedules.create(nightly(Retention { last: 1, ..Retention::default() }), &fake).unwrap();
    let name: MachineName = "nightly".parse().unwrap();
    fake.pass(DAY_MS);
    schedules.run(&name, &fake).unwrap();
    let before = fake.names();
    fake.fails.store(true, Ordering::Relaxed);
    let now = fake.pass(5 * DAY_MS);
    let failed = schedules.run(&name, &fake).unwrap().run.unwrap();
    assert!(!failed.succeeded && failed.text.contains("the machine is gone"), "{failed:?}");
    assert_eq!(fake.names(), before);
    assert_eq!(schedules.health(), [(name.clone(), true, Some(START + DAY_MS))]);
    assert!(schedules.due(now).is_empty(), "five missed days were one run");

    // Another daemon knows all that.
    let schedules = open(&dir);
    assert!(schedules.health()[0].1);
    fake.fails.store(false, Ordering::Relaxed);
    let now = fake.pass(DAY_MS);
    assert_eq!(schedules.due(now), std::slice::from_ref(&name));
    schedules.run(&name, &fake).unwrap();
    assert!(!schedules.health()[0].1);
}

#[test]
fn the_capsule_of_a_run_stays_though_the_clock_was_put_back() {
    let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
    let schedules = open(&dir);
    schedules.create(nightly(Retention { last: 1, ..Retention::default() }), &fake).unwrap();
    let name: MachineName = "nightly".parse().unwrap();
    fake.pass(10 * DAY_MS);
    schedules.run(&name, &fake).unwrap();
    fake.now.fetch_sub(5 * DAY_MS, Ordering::Relaxed);
    let report = schedules.run(&name, &fake).unwrap();
    assert_eq!((report.retained.len(), report.removed.len()), (2, 0), "{report:?}");
}

#[test]
fn a_deleted_schedule_leaves_its_capsules_and_an_unreadable_one_its_file() {
    let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
    let schedules = open(&dir);
    let rule = Retention { last: 1, ..Retention::default() };
    schedules.create(nightly(rule), &fake).unwrap();
    assert!(schedules.create(nightly(rule), &fake).is_err(), "the name is taken");
    let name: MachineName = "nightly".parse().unwrap();
    fake.pass(DAY_MS);
    schedules.run(&name, &fake).unwrap();
    let before = fake.names();
    schedules.delete(&name).unwrap();
    assert_eq!(fake.names(), before);
    assert!(matches!(schedules.run(&name, &fake), Err(ScheduleError::Unknown { .. })));

    std::fs::write(dir.path().join("nightly.json"), "{").unwrap();
    let schedules = open(&dir);
    assert!(schedules.health().is_empty() && schedules.create(nightly(rule), &fake).is_err());
    assert_eq!(std::fs::read(dir.path().join("nightly.json")).unwrap(), b"{");
}

#[test]
fn copies_at_another_host_have_as_many_tags_as_are_retained_whoever_restarts_meanwhile() {
    let (dir, fake) = (tempfile::tempdir().unwrap(), Fake::new());
    let retain = Some(Retention { last: 2, ..Retention::default() });
    let (machine, host) = ("web".parse().unwrap(), Some("beta".parse().unwrap()));
    let name: MachineName = "offsite".parse().unwrap();
    let work = ScheduledWork::Push { machine, host, pool: None, retain };
    let request = ScheduleRequest { name: name.clone(), work, every_ms: DAY_MS, offset_ms: 0 };
    open(&dir).create(request.clone(), &fake).unwrap();
    for _ in 0..5 {
        fake.pass(DAY_MS);
        let schedules = open(&dir);
        assert!(schedules.run(&name, &fake).unwrap().run.is_some_and(|run| run.succeeded));
    }
    // The fake has the tags that the other host would have.
    let copies: Vec<String> = fake.names().into_iter().filter(|name| name != "golden").collect();
    let mut shown = open(&dir).show(&name, &fake).unwrap().tags;
    shown.sort();
    assert_eq!((copies.len(), &copies), (2, &shown));
    fake.fails.store(true, Ordering::Relaxed);
    fake.pass(DAY_MS);
    open(&dir).run(&name, &fake).unwrap();
    let mut after = open(&dir).show(&name, &fake).unwrap().tags;
    after.sort();
    assert_eq!(after, shown, "a failure moves no tag");

    let pool =
        ScheduledWork::Push { machine: "web".parse().unwrap(), host: None, pool: Some("m/x".into()), retain };
    assert!(ScheduleRecord::new(ScheduleRequest { work: pool, ..request.clone() }, 1).is_err());
    let pool = Some("s3://vault/vms".into());
    let bucket = ScheduledWork::Push { machine: "web".parse().unwrap(), host: None, pool, retain };
    assert!(ScheduleRecord::new(ScheduleRequest { work: bucket, ..request }, 1).is_ok());
}
