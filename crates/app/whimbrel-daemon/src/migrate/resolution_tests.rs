//! Tests of decisions about machines between two hosts. None of them has a QEMU any more, as after a power
//! loss.

use super::*;
use crate::{core::sample, machine::record::Record};
use whimbrel_core::{ByteSize, MachineConfig};

const HANDOVER: HandoverId = HandoverId([3; 16]);

/// Machine `web` of alpha in this phase, durable, and beta, which answers.
fn scene(phase: Phase) -> ([Arc<Daemon>; 2], Vec<sample::Folders>, MachineName) {
    let (hosts, folders) = sample::hosts(["alpha", "beta"]);
    let name: MachineName = "web".parse().unwrap();
    let mut record = Record::new(name.clone(), MachineConfig::minimal(ByteSize(1 << 20)), vec![]);
    record.phase = phase;
    record.save(&hosts[0].directories).unwrap();
    hosts[0].machines.insert(Machine::new(record, None));
    (hosts, folders, name)
}

fn handed_over(to: &str) -> Phase {
    Phase::HandedOver { handover: HANDOVER, to: to.parse().unwrap(), keeps: false }
}

fn decide(
    host: &Arc<Daemon>,
    name: &MachineName,
    decision: Option<HandoverDecision>,
) -> Result<(), DaemonError> {
    host.resolve(name, &ResolveRequest { decision })
}

/// What the next daemon would read.
fn durable(host: &Daemon, name: &MachineName) -> Option<Phase> {
    Record::read(&host.directories.machine(name)).unwrap().map(|record| record.phase)
}

#[test]
fn what_is_known_is_said_before_anything_is_decided() {
    let prepared =
        |never_ran| Phase::Prepared { handover: HANDOVER, ahead: false, never_ran, handed_off: None };
    let cases = [
        (
            prepared(false),
            "the source has not said whether the machine was handed over; its memory is lost here",
        ),
        (prepared(true), "it never ran here and goes back to its source"),
        (
            handed_over("absent"),
            "it was handed over to absent, which has not confirmed it and cannot be reached",
        ),
    ];
    for (phase, expected) in cases {
        let (hosts, _folders, name) = scene(phase.clone());
        let refusal = decide(&hosts[0], &name, None).expect_err("nothing is decided");
        let DaemonError::Unresolved { known, .. } = &refusal else { panic!("{refusal:?}") };
        assert!(known.starts_with(expected), "{known}");
        assert_eq!(durable(&hosts[0], &name), Some(phase));
    }
}

#[test]
fn a_person_takes_back_a_machine_from_a_target_that_is_gone_and_it_starts_from_its_disks() {
    let (hosts, _folders, name) = scene(handed_over("absent"));
    decide(&hosts[0], &name, Some(HandoverDecision::RunHere)).unwrap();
    let phase = durable(&hosts[0], &name).expect("a record");
    assert!(matches!(&phase, Phase::Crashed { reason } if reason.contains("handed over")), "{phase:?}");
}

#[test]
fn nothing_is_decided_against_a_target_that_answers() {
    for decision in [None, Some(HandoverDecision::RunHere), Some(HandoverDecision::Discard)] {
        let (hosts, _folders, name) = scene(handed_over("beta"));
        let refusal = decide(&hosts[0], &name, decision).expect_err("beta has to say it");
        assert!(matches!(&refusal, DaemonError::Unconfirmed { .. }), "{refusal:?}");
    }
}

#[test]
fn a_machine_that_is_of_one_host_alone_has_nothing_to_be_decided() {
    for phase in [Phase::Here, Phase::Stopped, Phase::Crashed { reason: "it ended".into() }] {
        let (hosts, _folders, name) = scene(phase.clone());
        let refusal = decide(&hosts[0], &name, Some(HandoverDecision::Discard)).expect_err("it is here");
        assert!(matches!(&refusal, DaemonError::State { needed: "between two hosts", .. }), "{refusal:?}");
        assert_eq!(durable(&hosts[0], &name), Some(phase));
    }
}

#[test]
fn a_machine_that_a_person_gives_up_leaves_nothing_here() {
    let (hosts, _folders, name) = scene(handed_over("absent"));
    decide(&hosts[0], &name, Some(HandoverDecision::Discard)).unwrap();
    hosts[0].cleanup.wait(std::time::Duration::from_secs(30));
    assert_eq!(durable(&hosts[0], &name), None);
    assert!(hosts[0].machines.get(&name).is_err());
}
