//! Tests of what a daemon makes of protections that it finds on its disk. The QEMU of each machine is gone,
//! as after a power loss.

use super::*;
use crate::core::sample;
use std::time::Instant;
use whimbrel_core::{ByteSize, HostName, MachineConfig, MachineName};
use whimbrel_migrate::protocol::HandoverId;

const ID: ProtectionId = ProtectionId([5; 16]);
const HANDOVER: HandoverId = HandoverId([6; 16]);
const PATIENCE: Duration = Duration::from_secs(30);

/// Machine `web` of alpha, which was protected by a standby on another host.
struct Scene {
    hosts: [Arc<Daemon>; 2],
    record: Record,
    _folders: Vec<sample::Folders>,
}

impl Scene {
    fn new(phase: Phase, standby: &str) -> Self {
        Self::with(phase, serde_json::json!({ "host": standby }))
    }

    fn with(phase: Phase, request: serde_json::Value) -> Self {
        let (hosts, folders) = sample::hosts(["alpha", "beta"]);
        let mut record = Record::new(web(), MachineConfig::minimal(ByteSize(1 << 20)), vec![]);
        record.phase = phase;
        record.save(&hosts[0].directories).unwrap();
        let request = serde_json::from_value(request).unwrap();
        let side = ProtectionSide::Primary { request, gave_up: false };
        hosts[0].protections.put_record(ProtectionRecord::new(ID, &web(), HANDOVER, side)).unwrap();
        Self { hosts, record, _folders: folders }
    }

    fn alpha(&self) -> &Arc<Daemon> {
        &self.hosts[0]
    }

    /// Has beta record that it took the machine over.
    fn took_over(&self) {
        let side = ProtectionSide::TookOver { from: self.alpha().name.clone(), at_ms: 1 };
        let record = ProtectionRecord::new(ID, &web(), HANDOVER, side);
        self.hosts[1].protections.put_record(record).unwrap();
    }

    fn recovered(&self) -> bool {
        self.alpha().recover_protected(&self.record)
    }

    /// The phase that the machine has in the end, when nobody asks for its owner any more.
    fn phase(&self) -> Phase {
        let deadline = Instant::now() + PATIENCE;
        while self.alpha().protections.handle(&web()).is_some() {
            assert!(Instant::now() < deadline, "the owner is not determined");
            std::thread::sleep(Duration::from_millis(5));
        }
        Record::read(&self.alpha().directories.machine(&web())).unwrap().expect("a record").phase
    }

    fn is_recorded(&self) -> bool {
        !self.alpha().protections.undecided_records(&web()).is_empty()
    }

    fn is_to_be_told(&self) -> bool {
        lock(&self.alpha().protections.to_notify).contains(&ID)
    }
}

fn web() -> MachineName {
    "web".parse().unwrap()
}

#[test]
fn a_machine_whose_standby_has_nothing_of_it_has_crashed_here_and_may_start_again() {
    let scene = Scene::new(Phase::Here, "beta");
    assert!(scene.recovered());
    let phase = scene.phase();
    assert!(matches!(&phase, Phase::Crashed { reason } if reason.contains("no complete epoch")), "{phase:?}");
    assert!(!scene.is_recorded() && !scene.alpha().protections.may_be_elsewhere(&web()));
}

#[test]
fn a_machine_that_was_taken_over_is_the_standbys_and_never_starts_here() {
    let scene = Scene::new(Phase::Here, "beta");
    scene.took_over();
    assert!(scene.recovered());
    let to: HostName = "beta".parse().unwrap();
    assert_eq!(scene.phase(), Phase::HandedOver { handover: HANDOVER, to, keeps: false });
    assert!(!scene.is_recorded());
    scene.alpha().start(&web()).expect_err("it is beta's");
}

#[test]
fn while_the_standby_is_silent_the_machine_is_fenced_and_no_user_starts_it() {
    let scene = Scene::new(Phase::Here, "absent");
    assert!(scene.recovered());
    let handle = scene.alpha().protections.handle(&web()).expect("its owner is being determined");
    let deadline = Instant::now() + PATIENCE;
    let expected = "absent does not answer, and is to take it over";
    while handle.standing().0 != (ProtectState::Fenced { reason: expected.to_owned() }) {
        assert!(Instant::now() < deadline, "{:?}", handle.standing().0);
        std::thread::sleep(Duration::from_millis(5));
    }
    scene.alpha().start(&web()).expect_err("the standby may have it");
    scene.alpha().close();
    assert_eq!(scene.phase(), Phase::Here, "the next daemon asks again");
    assert!(scene.is_recorded());
}

#[test]
fn a_protection_of_a_machine_that_is_not_here_is_forgotten_or_ended_first() {
    let handed_over = Phase::HandedOver { handover: HANDOVER, to: "beta".parse().unwrap(), keeps: false };
    let scene = Scene::new(handed_over, "beta");
    assert!(!scene.recovered() && !scene.is_recorded(), "the record of the machine says whose it is");

    for phase in [Phase::Stopped, Phase::Crashed { reason: "it ended".into() }] {
        let scene = Scene::new(phase.clone(), "beta");
        assert!(!scene.recovered() && scene.is_to_be_told(), "{phase:?}");
        scene.alpha().notify_ended_once();
        assert!(!scene.is_recorded() && !scene.is_to_be_told(), "beta has heard of it: {phase:?}");
    }

    let prepared = Phase::Prepared { handover: HANDOVER, ahead: true, never_ran: false, handed_off: None };
    let scene = Scene::new(prepared, "beta");
    assert!(!scene.recovered() && scene.is_recorded(), "the machine inherits it at the commit");
}

#[test]
fn a_standby_that_cannot_be_told_is_told_later() {
    let scene = Scene::new(Phase::Stopped, "absent");
    assert!(!scene.recovered());
    scene.alpha().notify_ended_once();
    assert!(scene.is_recorded() && scene.is_to_be_told());
}

#[test]
fn a_machine_that_a_person_switched_over_meanwhile_ends_here() {
    let scene = Scene::new(Phase::Here, "beta");
    scene.took_over();
    scene.alpha().machines.insert(Machine::new(scene.record.clone(), None));
    scene.alpha().protections.notify_later(ID);
    scene.alpha().notify_ended_once();
    assert!(matches!(scene.phase(), Phase::HandedOver { .. }));
    assert!(!scene.is_to_be_told());
}

#[test]
fn a_protection_with_settings_that_make_no_sense_keeps_its_machine_from_running() {
    let scene = Scene::with(Phase::Here, serde_json::json!({ "host": "beta", "epoch_ms": 1 }));
    assert!(scene.recovered());
    let refusal = scene.alpha().machines.get(&web()).err().expect("nobody may use it");
    let words = whimbrel_core::error_chain(&refusal);
    assert!(words.contains("the record of its protection is invalid"), "{words}");
}
