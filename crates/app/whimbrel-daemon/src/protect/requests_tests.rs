//! Tests of requests of users, and of what is asked of a standby before its machine may start.

use super::*;
use crate::{
    core::sample,
    machine::record::{Phase, Record},
    protect::records::{ProtectionRecord, ProtectionSide},
};
use serde_json::{Value, json};
use whimbrel_core::{ByteSize, MachineConfig};
use whimbrel_protect::protocol::ProtectionId;

const ID: ProtectionId = ProtectionId([8; 16]);
const HANDOVER: HandoverId = HandoverId([9; 16]);

fn web() -> MachineName {
    "web".parse().unwrap()
}

/// Alpha with the machine `web` that is switched off, and beta.
fn scene() -> ([Arc<Daemon>; 2], Vec<sample::Folders>) {
    let (hosts, folders) = sample::hosts(["alpha", "beta"]);
    let mut record = Record::new(web(), MachineConfig::minimal(ByteSize(1 << 20)), vec![]);
    record.phase = Phase::Stopped;
    record.save(&hosts[0].directories).unwrap();
    hosts[0].machines.insert(Machine::new(record, None));
    (hosts, folders)
}

fn request(request: Value) -> ProtectRequest {
    serde_json::from_value(request).unwrap()
}

fn record(host: &Daemon, side: ProtectionSide) {
    host.protections.put_record(ProtectionRecord::new(ID, &web(), HANDOVER, side)).unwrap();
}

#[test]
fn a_protection_by_hosts_that_cannot_hold_it_is_refused_before_anything_begins() {
    let (hosts, _folders) = scene();
    let cases = [
        (json!({"host": "alpha"}), "its standby, spare or witness"),
        (json!({"host": "beta", "witness": "alpha"}), "its standby, spare or witness"),
        (json!({"host": "beta", "spares": ["alpha"]}), "its standby, spare or witness"),
        (json!({"host": "beta", "witness": "beta"}), "a third host"),
        (json!({"host": "delta"}), "delta"),
        (json!({"host": "beta", "spares": ["delta"]}), "delta"),
        (json!({"host": "beta", "witness": "delta"}), "delta"),
        (json!({"host": "beta", "epoch_ms": 1}), "an epoch of 1 ms"),
    ];
    for (wanted, expected) in cases {
        let refusal = hosts[0].protect(&web(), request(wanted.clone())).expect_err("it is refused");
        assert!(refusal.to_string().contains(expected), "{wanted}: {refusal}");
        assert!(hosts[0].protections.handle(&web()).is_none());
    }
    let unknown = "db".parse().unwrap();
    let refusal = hosts[0].protect(&unknown, request(json!({"host": "beta"}))).expect_err("no such machine");
    assert!(refusal.to_string().contains("db"), "{refusal}");
}

#[test]
fn what_is_not_protected_is_neither_unprotected_nor_switched_over() {
    let (hosts, _folders) = scene();
    let unprotected = hosts[0].unprotect(&web()).expect_err("it is not protected");
    assert!(matches!(unprotected, DaemonError::State { needed: "protected", .. }), "{unprotected}");
    let request = serde_json::from_value(json!({})).unwrap();
    let switched = hosts[0].failover(&web(), request).expect_err("it has no standby");
    assert!(matches!(switched, DaemonError::State { needed: "protected", .. }), "{switched}");
    hosts[0].unprotect_before_stop(&web()).unwrap();
}

#[test]
fn a_machine_has_one_protection_at_a_time() {
    let (hosts, _folders) = scene();
    let machine = hosts[0].machines.get(&web()).unwrap();
    let settings = || ProtectionSettings::of(&request(json!({"host": "beta"}))).unwrap();
    let held = Arc::new(ProtectionHandle::new(web(), settings(), HANDOVER));
    lock(&hosts[0].protections.handles).insert(web(), held.clone());
    let second = hosts[0].start_protection(&machine, settings(), HandoverId([1; 16]), false);
    let refusal = second.err().expect("there is one");
    assert!(matches!(refusal, DaemonError::Busy { .. }), "{refusal}");
    // An older handle that ends late removes only itself.
    hosts[0].protections.remove_handle(&Arc::new(ProtectionHandle::new(web(), settings(), HANDOVER)));
    assert!(hosts[0].protections.handle(&web()).is_some());
    hosts[0].protections.remove_handle(&held);
    assert!(hosts[0].protections.handle(&web()).is_none());
}

#[test]
fn a_machine_starts_only_once_its_standby_has_heard_that_it_does() {
    let (hosts, _folders) = scene();
    let side =
        |host: &str| ProtectionSide::Primary { request: request(json!({"host": host})), gave_up: false };
    record(&hosts[0], side("absent"));
    let refusal = hosts[0].end_at_standbys(&web()).expect_err("it does not answer");
    let DaemonError::Unresolved { known, .. } = &refusal else { panic!("{refusal}") };
    assert!(known.starts_with("its standby absent does not answer"), "{known}");
    hosts[0].decide_start(&web(), false).expect_err("nobody decides");
    hosts[0].decide_start(&web(), true).expect("a person decides");
    assert!(lock(&hosts[0].protections.to_notify).contains(&ID), "absent is told when it is back");

    record(&hosts[0], side("beta"));
    let took = ProtectionSide::TookOver { from: hosts[0].name.clone(), at_ms: 1 };
    record(&hosts[1], took);
    for is_decided in [false, true] {
        let refusal = hosts[0].decide_start(&web(), is_decided).expect_err("beta has it");
        assert!(
            matches!(&refusal, DaemonError::TakenOver { host, .. } if *host == hosts[1].name),
            "{refusal}"
        );
    }

    hosts[1].protections.remove_record(ID);
    hosts[0].end_at_standbys(&web()).expect("beta has nothing of it");
    assert!(!hosts[0].has_unheard_standby(&web()));
}

#[test]
fn what_a_host_was_as_a_standby_is_told_by_its_records() {
    let (hosts, _folders) = scene();
    let (alpha, beta) = (&hosts[0], &hosts[1].name);
    let outcome = |host: &Daemon| host.protections.outcome(ID).unwrap();
    use whimbrel_protect::protocol::StandbyOutcome::{Ended, TakenOver};
    assert_eq!(outcome(alpha), Ended, "without a record the epochs are lost");
    record(alpha, ProtectionSide::Loading { from: beta.clone() });
    let mut arrival = Record::new(web(), MachineConfig::minimal(ByteSize(1 << 20)), vec![]);
    arrival.phase = Phase::Prepared { handover: HANDOVER, ahead: true, never_ran: false, handed_off: None };
    assert!(alpha.protections.was_loading(&arrival) && outcome(alpha) == Ended);
    arrival.phase = Phase::Here;
    assert!(!alpha.protections.was_loading(&arrival));
    alpha.protections.remove_loading_records();
    assert_eq!(alpha.protections.taken_over(&web()), None);

    record(alpha, ProtectionSide::TookOver { from: beta.clone(), at_ms: 5 });
    assert_eq!(outcome(alpha), TakenOver);
    let older = ProtectionSide::TookOver { from: "gamma".parse().unwrap(), at_ms: 4 };
    let older = ProtectionRecord::new(ProtectionId([1; 16]), &web(), HANDOVER, older);
    alpha.protections.put_record(older).unwrap();
    let last = alpha.protections.taken_over(&web()).expect("a takeover");
    assert_eq!((last.from, last.at_ms), (beta.clone(), 5));
    alpha.protections.remove_loading_records();
    assert_eq!(outcome(alpha), TakenOver, "records of takeovers stay");
}
