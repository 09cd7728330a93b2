//! Tests of who has a machine, with daemons that answer each other as in production.

use super::*;
use crate::{
    core::sample, protect::Protections, protect::link::ControlLink, protect::primary::heartbeat::Output,
    protect::settings::ProtectionSettings,
};
use std::{fs, sync::Weak};
use whimbrel_core::{HostName, MachineName, WitnessAddress, lock};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::{
    lease::{PrimaryLease, WitnessReply},
    protocol::ProtectionId,
};

const ID: ProtectionId = ProtectionId([7; 16]);
const HANDOVER: HandoverId = HandoverId([2; 16]);
const TERM: Duration = Duration::from_millis(400);
const PATIENCE: Duration = Duration::from_secs(30);

/// Machine `web` of alpha. Its standby is `standby`, its witness gamma if there is one, and alpha knows of no
/// outcome, as after a restart.
struct Scene {
    hosts: [Arc<Daemon>; 3],
    handle: Arc<ProtectionHandle>,
    heartbeat: Arc<Heartbeat>,
    _folders: Vec<sample::Folders>,
}

impl Scene {
    fn new(standby: &str, has_witness: bool) -> Self {
        let (hosts, folders) = sample::hosts(["alpha", "beta", "gamma"]);
        let standby: HostName = standby.parse().unwrap();
        let request = serde_json::from_value(serde_json::json!({ "host": standby })).unwrap();
        let settings = ProtectionSettings::of(&request).unwrap();
        let handle = Arc::new(ProtectionHandle::new(web(), settings, HANDOVER));
        let alpha = &hosts[0];
        let witness = has_witness.then(|| WitnessClient::new(alpha, &witness(), ID, TERM));
        let link = Arc::new(ControlLink::new(alpha, &standby));
        if let Some(witness) = &witness {
            let registered = witness.ask(&WitnessQuery::Register { standby, term_ms: 400 }, PATIENCE);
            assert_eq!(registered, Some(WitnessReply::Yes));
        }
        let heartbeat = Arc::new(Heartbeat::new(
            ID,
            PrimaryLease::recovered(has_witness, TERM),
            TERM,
            (link, witness),
            (Output::default(), Weak::new()),
            Arc::downgrade(&handle),
        ));
        Self { hosts, handle, heartbeat, _folders: folders }
    }

    fn determine(&self) -> Ownership {
        determine_owner(&self.hosts[0], &self.handle, &self.heartbeat, None, false)
    }

    /// Determines the owner on another thread until the machine is fenced, then ends the daemon. Returns why
    /// it was fenced, and the result.
    fn fenced_until_closing(&self, work: fn(&Self) -> Ownership) -> (String, Ownership) {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| work(self));
            let deadline = Instant::now() + PATIENCE;
            let reason = loop {
                if let ProtectState::Fenced { reason } = self.handle.standing().0 {
                    break reason;
                }
                assert!(Instant::now() < deadline, "the machine is not fenced");
                std::thread::sleep(Duration::from_millis(5));
            };
            self.hosts[0].close();
            (reason, thread.join().unwrap())
        })
    }

    /// Has beta record that it took the machine over.
    fn took_over(&self) {
        let side = ProtectionSide::TookOver { from: self.hosts[0].name.clone(), at_ms: 1 };
        let record = ProtectionRecord::new(ID, &web(), HANDOVER, side);
        self.hosts[1].protections.put_record(record).unwrap();
    }

    /// What a host asks the witness, and the answer.
    fn ask_witness(&self, host: usize, query: &WitnessQuery) -> Option<WitnessReply> {
        WitnessClient::new(&self.hosts[host], &witness(), ID, TERM).ask(query, PATIENCE)
    }

    /// What the next daemon of alpha would find on its disk.
    fn recorded(&self) -> Option<ProtectionSide> {
        let found = Protections::open(&self.hosts[0].directories).unwrap();
        let records = lock(&found.records);
        records.get(&ID).map(|record| record.side.clone())
    }
}

fn web() -> MachineName {
    "web".parse().unwrap()
}

fn witness() -> WitnessAddress {
    WitnessAddress::Host("gamma".parse().unwrap())
}

#[test]
fn a_standby_that_never_had_the_machine_leaves_it_here() {
    let scene = Scene::new("beta", false);
    assert_eq!(scene.determine(), Ownership::Alone);
    assert_eq!(scene.heartbeat.lease().state(), PrimaryState::Alone);
    assert!(scene.heartbeat.may_run());
}

#[test]
fn a_machine_that_the_standby_took_over_is_gone_with_and_without_a_witness() {
    for has_witness in [false, true] {
        let scene = Scene::new("beta", has_witness);
        scene.took_over();
        if has_witness {
            let taken = scene.ask_witness(1, &WitnessQuery::TakeOver { yielded: true });
            assert_eq!(taken, Some(WitnessReply::Yes));
        }
        assert_eq!(scene.determine(), Ownership::Gone);
        scene.heartbeat.arm();
        assert!(!scene.heartbeat.may_run());
    }
}

#[test]
fn while_nobody_says_who_has_it_the_machine_is_fenced() {
    let scene = Scene::new("absent", false);
    let (reason, result) = scene.fenced_until_closing(Scene::determine);
    assert_eq!(reason, "absent does not answer, and may have taken over");
    assert_eq!(result, Ownership::Closing);
    assert_eq!(scene.heartbeat.lease().state(), PrimaryState::Undecided);
}

#[test]
fn the_witness_decides_for_a_standby_that_is_silent_and_then_gives_it_to_nobody_else() {
    let scene = Scene::new("absent", true);
    assert_eq!(scene.determine(), Ownership::Alone);
    // Whoever comes as the standby later.
    let late = WitnessQuery::TakeOver { yielded: false };
    assert_eq!(scene.ask_witness(0, &WitnessQuery::Renew), Some(WitnessReply::Closed));
    assert_eq!(scene.ask_witness(1, &late), Some(WitnessReply::Unknown), "beta has no part in it");
}

#[test]
fn a_machine_that_the_witness_gave_away_is_recorded_as_yielded_before_the_standby_is_asked() {
    let scene = Scene::new("beta", true);
    let taken = scene.ask_witness(1, &WitnessQuery::TakeOver { yielded: true });
    assert_eq!(taken, Some(WitnessReply::Yes));
    // Beta has lost what it had of the machine, which is this host's again.
    assert_eq!(scene.determine(), Ownership::Alone);
    let recorded = scene.recorded().expect("a record");
    assert!(matches!(recorded, ProtectionSide::Primary { gave_up: true, .. }), "{recorded:?}");
}

#[test]
fn a_yield_that_cannot_be_recorded_is_not_told() {
    let scene = Scene::new("beta", false);
    let folder = scene.hosts[0].directories.protections();
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "").unwrap();
    let yields = |scene: &Scene| yield_to_standby(&scene.hosts[0], &scene.handle, &scene.heartbeat, None);
    let (reason, result) = scene.fenced_until_closing(yields);
    assert_eq!((&*reason, result), ("beta does not answer, and is to take it over", Ownership::Closing));
    // Beta would have said that it has nothing of it.
    assert_eq!(scene.heartbeat.lease().state(), PrimaryState::Yielded { refusal: None });
}

#[test]
fn the_end_of_a_protection_is_told_now_or_recorded_to_be_told_later() {
    let scene = Scene::new("beta", true);
    let request = scene.handle.settings().request.clone();
    let side = ProtectionSide::Primary { request, gave_up: false };
    let record = ProtectionRecord::new(ID, &web(), HANDOVER, side);
    let alpha = &scene.hosts[0];
    alpha.protections.put_record(record).unwrap();
    assert_eq!(scene.determine(), Ownership::Alone);
    assert!(record_alone(alpha, &scene.handle, &scene.heartbeat, false), "beta has answered");
    assert_eq!(scene.recorded(), None);
    assert_eq!(scene.ask_witness(0, &WitnessQuery::Renew), Some(WitnessReply::Unknown), "it was forgotten");

    let scene = Scene::new("absent", true);
    let alpha = &scene.hosts[0];
    assert_eq!(scene.determine(), Ownership::Alone);
    assert!(!record_alone(alpha, &scene.handle, &scene.heartbeat, true));
    let expected =
        ProtectionSide::Ended { standby: "absent".parse().unwrap(), witness: Some(witness()), keep: true };
    assert_eq!(scene.recorded(), Some(expected));
    let next = Protections::open(&alpha.directories).unwrap();
    assert!(lock(&next.to_notify).contains(&ID), "the next daemon tells it, too");
}

#[test]
fn a_protection_without_a_witness_that_ended_unheard_stays_undecided_for_the_next_daemon() {
    let scene = Scene::new("absent", false);
    let alpha = &scene.hosts[0];
    assert!(!record_alone(alpha, &scene.handle, &scene.heartbeat, false));
    assert_eq!(scene.recorded(), None, "the record of the protection itself is not replaced");
    assert!(lock(&alpha.protections.to_notify).contains(&ID));
}
