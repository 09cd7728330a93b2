//! Model test of the handover, against everything that may happen around it.
//!
//! The transition functions are those of the product (`whimbrel_migrate::handover`); here are two hosts,
//! their disks, the QEMUs and the network, none of which can be trusted:
//!
//! - Any message may be lost, repeated, delayed and overtaken by any other, also those of an earlier attempt.
//!   Only messages on the connection of the pages (offer, the last pages, their replies) end with that
//!   connection, which the two sides notice at different times.
//! - Either daemon dies between any two of its effects, and restarts with what was durable and what survives
//!   a daemon (QEMU, files on a tmpfs). The write of a record of the source fails, and may have reached the
//!   disk all the same. A host loses power, and those too. A host never comes back.
//! - Either QEMU dies. The user migrates again after a failed attempt.
//!
//! [`PROPERTIES`] are checked in every state that can be reached. Breaking the rules one at a time checks
//! that the checker can fail.

use crate::model::{Handover, PROPERTIES, Rules};
use stateright::{Checker, Model};
use whimbrel_migrate::handover::{
    AbortedAction, CommittedAction, PausedIncoming, Source, SourceAction, SourceEvent, Target, TargetAction,
    TargetEvent, TargetRecord,
};

#[test]
fn the_handover_is_safe_and_ends_whatever_happens() {
    let begun = std::time::Instant::now();
    let checked = Handover { rules: Rules::default() }.checker().threads(2).spawn_bfs().join();
    let (unique, all) = (checked.unique_state_count(), checked.state_count());
    println!("{unique} states, {all} transitions, {:.1} s", begun.elapsed().as_secs_f64());
    checked.assert_properties();
    assert!(unique > 10_000, "the model reached only {unique} states");
}

const SEND_COMMIT: SourceAction = SourceAction::Committed(CommittedAction::SendCommit);
const SEND_ABORT: SourceAction = SourceAction::Aborted(AbortedAction::SendAbort);

/// Property that most faults break.
const ENDS_WELL: &str = PROPERTIES[7].0;

/// Property that a wrong return of a machine breaks.
const NEVER_BACK: &str = PROPERTIES[5].0;

/// Checks a handover with a fault in its rules; returns the properties that it breaks.
fn broken(rules: Rules) -> Vec<&'static str> {
    let checked = Handover { rules }.checker().spawn_bfs().join();
    let found = checked.discoveries().into_keys();
    found.filter(|name| PROPERTIES.iter().any(|(property, _)| property == name)).collect()
}

#[test]
fn a_target_that_starts_when_it_is_prepared_is_found() {
    fn eager(state: Target, event: TargetEvent) -> (Target, &'static [TargetAction]) {
        match (state, event) {
            (Target::Receiving, TargetEvent::Finished) => {
                (Target::Running, &[TargetAction::LoadAndConfirmReady, TargetAction::RunAndConfirm])
            }
            _ => state.step(event),
        }
    }
    assert!(broken(Rules { target: eager, ..Rules::default() }).contains(&"at most one side runs"));
}

#[test]
fn a_target_that_gives_up_after_a_while_is_found() {
    fn impatient(state: Target, event: TargetEvent) -> (Target, &'static [TargetAction]) {
        match (state, event) {
            (Target::Prepared, TargetEvent::Failed) => (Target::Discarded, &[TargetAction::Discard]),
            _ => state.step(event),
        }
    }
    assert!(broken(Rules { target: impatient, ..Rules::default() }).contains(&ENDS_WELL));
}

#[test]
fn a_source_that_commits_before_it_writes_is_found() {
    fn hasty(state: Source, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        match (state, event) {
            (Source::Stopped, SourceEvent::TargetReady) => {
                (Source::Recording, &[SEND_COMMIT, SourceAction::RecordHandover])
            }
            (Source::Recording, SourceEvent::Recorded) => (Source::Committed, &[]),
            _ => state.step(event),
        }
    }
    assert!(
        broken(Rules { source: hasty, ..Rules::default() }).contains(&"no user may start it on both sides")
    );
}

#[test]
fn a_source_that_goes_on_after_a_lost_commit_is_found() {
    fn wavering(state: Source, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        match (state, event) {
            (Source::Committed, SourceEvent::Failed) => {
                (Source::Aborted, &[SourceAction::ResumeHere, SEND_ABORT])
            }
            _ => state.step(event),
        }
    }
    assert!(broken(Rules { source: wavering, ..Rules::default() }).contains(&ENDS_WELL));
}

#[test]
fn a_source_that_goes_on_after_a_failed_write_is_found() {
    fn careless(state: Source, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        match (state, event) {
            (Source::Recording, SourceEvent::Failed) => {
                (Source::Aborted, &[SourceAction::ResumeHere, SEND_ABORT])
            }
            _ => state.step(event),
        }
    }
    let found = broken(Rules { source: careless, ..Rules::default() });
    assert!(found.contains(&"the source never runs again after the commit"), "{found:?}");
}

#[test]
fn a_source_that_goes_on_before_it_has_taken_a_failed_record_back_is_found() {
    fn hasty(state: Source, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        match (state, event) {
            (Source::Recording, SourceEvent::Failed) => {
                (Source::Aborted, &[SourceAction::ResumeHere, SourceAction::RecordOurs, SEND_ABORT])
            }
            _ => state.step(event),
        }
    }
    let found = broken(Rules { source: hasty, ..Rules::default() });
    assert!(found.contains(&"the source never runs again after the commit"), "{found:?}");
}

#[test]
fn a_source_that_does_not_remember_what_it_began_is_found() {
    assert!(broken(Rules { keep_notes: false, ..Rules::default() }).contains(&ENDS_WELL));
}

#[test]
fn a_target_that_does_not_remember_what_came_is_found() {
    fn forgetful(record: TargetRecord, waiting: PausedIncoming) -> (Target, &'static [TargetAction]) {
        match record {
            TargetRecord::Ours => (Target::Discarded, &[]),
            TargetRecord::Arriving | TargetRecord::NeverRan => Target::recovered(record, waiting),
        }
    }
    assert!(broken(Rules { target_recovered: forgetful, ..Rules::default() }).contains(&ENDS_WELL));
}

#[test]
fn a_target_that_takes_half_a_machine_for_a_lost_one_is_safe_but_one_that_drops_a_lost_one_is_found() {
    fn patient(record: TargetRecord, _: PausedIncoming) -> (Target, &'static [TargetAction]) {
        Target::recovered(record, PausedIncoming::Complete)
    }
    fn dropping(record: TargetRecord, waiting: PausedIncoming) -> (Target, &'static [TargetAction]) {
        match waiting {
            PausedIncoming::Gone => Target::recovered(record, PausedIncoming::Unfinished),
            _ => Target::recovered(record, waiting),
        }
    }
    assert_eq!(broken(Rules { target_recovered: patient, ..Rules::default() }), [""; 0]);
    assert!(broken(Rules { target_recovered: dropping, ..Rules::default() }).contains(&ENDS_WELL));
}

#[test]
fn a_target_that_takes_an_offer_twice_is_found() {
    assert!(broken(Rules { refuse_ended: false, ..Rules::default() }).contains(&ENDS_WELL));
}

#[test]
fn a_target_that_returns_what_an_earlier_daemon_may_have_started_is_found() {
    fn sure(record: TargetRecord, waiting: PausedIncoming) -> (Target, &'static [TargetAction]) {
        match Target::recovered(record, waiting) {
            (Target::PerhapsStarted, actions) => (Target::Prepared, actions),
            recovered => recovered,
        }
    }
    assert!(broken(Rules { target_recovered: sure, ..Rules::default() }).contains(&NEVER_BACK));
}

#[test]
fn a_target_that_returns_what_it_may_have_started_is_found() {
    fn sure(state: Target, event: TargetEvent) -> (Target, &'static [TargetAction]) {
        match event {
            TargetEvent::StartFailed => (state, &[]),
            _ => state.step(event),
        }
    }
    assert!(broken(Rules { target: sure, ..Rules::default() }).contains(&NEVER_BACK));
}

#[test]
fn a_target_that_returns_a_machine_and_does_not_write_that_down_is_found() {
    fn forgetful(state: Target, event: TargetEvent) -> (Target, &'static [TargetAction]) {
        match state.step(event) {
            (Target::Returned, [TargetAction::RecordNeverRan]) => {
                (Target::Returned, &[TargetAction::ConfirmNeverRan])
            }
            step => step,
        }
    }
    let found = broken(Rules { target: forgetful, ..Rules::default() });
    assert!(found.contains(&"no user may start it on both sides"), "{found:?}");
}

#[test]
fn a_target_that_keeps_what_it_has_returned_for_an_older_source_is_found() {
    fn wavering(state: Target, event: TargetEvent) -> (Target, &'static [TargetAction]) {
        match (state, event) {
            (Target::Returned, TargetEvent::Commit) => (Target::Running, &[TargetAction::RunAndConfirm]),
            _ => state.step(event),
        }
    }
    let found = broken(Rules { target: wavering, ..Rules::default() });
    assert!(found.contains(&"no user may start it on both sides"), "{found:?}");
}

#[test]
fn a_source_that_runs_what_came_back_before_it_has_recorded_it_is_found() {
    fn hasty(state: Source, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        match (state, event) {
            (Source::Committed, SourceEvent::TargetNeverRan) => {
                (Source::Aborted, &[SourceAction::Committed(CommittedAction::ResumeHere), SEND_ABORT])
            }
            _ => state.step(event),
        }
    }
    let found = broken(Rules { source: hasty, ..Rules::default() });
    assert!(found.contains(&"the source never runs again after the commit"), "{found:?}");
}

#[test]
fn a_source_that_does_not_tell_that_it_took_its_machine_back_is_found() {
    fn silent(state: Source, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        match (state, event) {
            (Source::TakingBack, SourceEvent::Recorded) => {
                (Source::Aborted, &[SourceAction::Committed(CommittedAction::ResumeHere)])
            }
            (Source::Aborted, SourceEvent::Failed) => (Source::Aborted, &[]),
            _ => state.step(event),
        }
    }
    assert!(broken(Rules { source: silent, ..Rules::default() }).contains(&ENDS_WELL));
}
