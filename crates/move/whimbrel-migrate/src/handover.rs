//! Handover: two pure state machines, one for each side, that decide which host may run the machine.
//!
//! ```text
//!   source                                        target
//!   Copying  (start recorded)
//!            ---- offer, pages ---------------->  Receiving (offer recorded; a daemon crash ends it)
//!   Stopped  ---- last pages, device state ---->
//!            <--- ready -----------------------   Prepared  (loaded, stays paused)
//!   Recording  (writes "handed over")
//!   COMMIT POINT: that record is durable; from here on the source never runs the machine again
//!   Committed --- commit (repeated until answered) ->
//!            <--- running ---------------------   Running
//!   Done
//!                                           or    its QEMU has ended, and its CPUs never ran:
//!            <--- never ran -------------------   Returned  (writes "never ran" first)
//!   TakingBack  (writes "ours")
//!   Aborted  --- abort (repeated until answered) -->  Discarded
//! ```
//!
//! Before the commit point any failure makes the source run the machine on and the target discard it. After
//! it only the target may run the machine, so the source repeats `commit` until it is answered. One answer
//! gives the machine back: the target that prepared it has found its QEMU ended, and knows that the
//! CPUs never
//! ran, because no daemon of that host has tried to start them. It records that durably before it
//! answers, and
//! never runs the machine afterwards; so the source may run it once it has recorded the machine as its own.
//! A target that has tried to start the CPUs, or whose daemon was restarted since, cannot know
//! (`PerhapsStarted`)
//! and keeps the machine. A target that
//! is `Prepared` and receives nothing must wait: it cannot know on which side of the commit point the source
//! is. A source that gave up repeats `abort` until it is answered, so that the target always learns the
//! outcome.
//!
//! A record of the handover that could not be written may be on the disk all the same. The source then writes
//! that the machine is its own (`Reverting`), and stays paused and silent until that is durable.
//!
//! No I/O and no clock here. `step` is the table of transitions. One `match` for each type of action carries
//! it out: `attempt.rs` up to the commit point, [`crate::outcome`] after it, `incoming.rs` on the target. The
//! states that a restarted daemon finds on its disk are part of the rules: [`Source::recovered`] and
//! [`Target::recovered`]. `tests/handover_model.rs` checks all of it against every order of messages, losses,
//! crashes, failed writes and power losses.

use whimbrel_core::loss::{Loss, is_back};

/// State of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The machine runs here and is being copied, or was not even offered yet.
    Copying,
    /// The machine is paused here; its last pages and device state are being sent.
    Stopped,
    /// The target is ready, and the record of the handover is being written.
    Recording,
    /// Writing that record failed, and what the disk has is unknown: another record is being written, which
    /// says that the machine belongs to this host.
    Reverting,
    /// The handover is recorded: the machine never runs here again. The target may not know yet.
    Committed,
    /// The target gave the machine back: a record is being written, which says that it belongs to this host.
    TakingBack,
    /// The target confirmed that the machine runs there. Nothing is left here.
    Done,
    /// The handover was aborted before the commit point: the machine runs here. The target may not know yet.
    Aborted,
}

/// Event on the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// Few enough pages are left: pause and send the rest.
    RoundsOver,
    /// The target has everything, loaded and paused.
    TargetReady,
    /// The record that was being written is durable.
    Recorded,
    /// The target reports that the machine runs there.
    TargetRuns,
    /// The target reports that it prepared the machine, never ran it and never will.
    TargetNeverRan,
    /// The target reports that it has nothing of the machine.
    TargetDiscarded,
    /// Anything failed, or the user cancelled: link lost, target refused, local error.
    Failed,
    /// The daemon restarted and found its durable record.
    Restarted,
}

/// Actions of the source, to be carried out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Record durably that this handover has begun and with which target; then offer the machine.
    RecordAndOffer,
    /// Pause the machine; what is left is sent next.
    Pause,
    /// Record durably that the machine was handed over.
    RecordHandover,
    /// Record durably that the machine belongs to this host, whatever was recorded before.
    RecordOurs,
    /// Let the machine run here again, with every page that was sent dirty again.
    ResumeHere,
    /// Action after the commit point.
    Committed(CommittedAction),
    /// Action after an abort.
    Aborted(AbortedAction),
}

/// Actions of the source after the commit point, for [`crate::outcome`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CommittedAction {
    /// Send the commit; repeat it until it is answered.
    SendCommit,
    /// Remove the paused machine here with the record of the handover, and free its resources.
    FreeMachine,
    /// Record durably that the machine, which the target gave back, belongs to this host.
    RecordOurs,
    /// Let the machine run here again; all of it is dirty for a later migration.
    ResumeHere,
}

/// Actions of the source for a handover that was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AbortedAction {
    /// Send the abort; repeat it until it is answered.
    SendAbort,
    /// Remove the record, because the target knows the outcome.
    RemoveRecord,
}

/// Durable state on the source of a handover that has begun and whose record was not removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceRecord {
    /// The machine belongs to this host.
    Ours,
    /// The machine was handed over by this handover.
    HandedOver,
    /// The machine is gone, or in a later handover: this handover must not touch it.
    Other,
}

impl Source {
    /// First state of a migration, and its actions.
    pub fn initial() -> (Source, &'static [SourceAction]) {
        (Source::Copying, &[SourceAction::RecordAndOffer])
    }

    /// State of a handover after a restart of the daemon.
    pub fn recovered(record: SourceRecord) -> (Source, &'static [SourceAction]) {
        match record {
            SourceRecord::Ours => Source::Copying.step(SourceEvent::Restarted),
            SourceRecord::HandedOver => Source::Committed.step(SourceEvent::Restarted),
            SourceRecord::Other => Source::Aborted.step(SourceEvent::Restarted),
        }
    }

    /// Transition function of the source.
    pub fn step(self, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        use {
            AbortedAction::*,
            CommittedAction::{FreeMachine, SendCommit},
            Source::*,
            SourceAction::*,
            SourceEvent::*,
        };
        match (self, event) {
            (Copying, RoundsOver) => (Stopped, &[Pause]),
            (Stopped, TargetReady) => (Recording, &[RecordHandover]),
            // What must never be: the simulation brings these back.
            (Recording, Failed) if is_back(Loss::RecordNotReverted) => {
                (Source::Aborted, &[ResumeHere, SourceAction::Aborted(SendAbort)])
            }
            (Source::Committed, Failed) if is_back(Loss::CommitTakenBack) => {
                (Source::Aborted, &[ResumeHere, SourceAction::Aborted(SendAbort)])
            }
            (Recording, Recorded) => (Source::Committed, &[SourceAction::Committed(SendCommit)]),
            (Recording | Reverting, Failed) => (Reverting, &[RecordOurs]),
            (Copying | Stopped, Failed | Restarted) | (Reverting, Recorded) => {
                (Source::Aborted, &[ResumeHere, SourceAction::Aborted(SendAbort)])
            }
            (Source::Committed, TargetRuns) => (Done, &[SourceAction::Committed(FreeMachine)]),
            (Source::Committed, TargetNeverRan) | (TakingBack, Failed) => {
                (TakingBack, &[SourceAction::Committed(CommittedAction::RecordOurs)])
            }
            (TakingBack, Recorded) => (
                Source::Aborted,
                &[SourceAction::Committed(CommittedAction::ResumeHere), SourceAction::Aborted(SendAbort)],
            ),
            (Source::Committed, Failed | Restarted) => {
                (Source::Committed, &[SourceAction::Committed(SendCommit)])
            }
            (Source::Aborted, TargetDiscarded) => (Source::Aborted, &[SourceAction::Aborted(RemoveRecord)]),
            (Source::Aborted, Failed | Restarted) => (Source::Aborted, &[SourceAction::Aborted(SendAbort)]),
            // Late or repeated messages change nothing.
            (state, _) => (state, &[]),
        }
    }

    /// Whether the machine may run on the source.
    pub fn may_run(self) -> bool {
        matches!(self, Source::Copying | Source::Aborted)
    }
}

impl AbortedAction {
    /// Actions of a source that gave up after `event`.
    pub fn after(event: SourceEvent) -> impl Iterator<Item = Self> {
        let actions = Source::Aborted.step(event).1.iter();
        actions.filter_map(
            |action| if let SourceAction::Aborted(action) = action { Some(*action) } else { None },
        )
    }
}

/// State of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// Resources are reserved, pages arrive. Nothing here is worth keeping if the source disappears.
    Receiving,
    /// Everything is here, loaded and paused; only the source decides what happens. This daemon loaded it,
    /// and nothing has tried to start its CPUs.
    Prepared,
    /// Like `Prepared`, but an earlier daemon or a failed start may have run its CPUs.
    PerhapsStarted,
    /// The machine never ran here and never will: its QEMU ended, and it goes back to the source, which may
    /// not know yet.
    Returned,
    /// The machine belongs to this host, and was started here.
    Running,
    /// The incoming machine was discarded.
    Discarded,
}

/// Event on the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetEvent {
    /// The last pages and the device state arrived.
    Finished,
    /// The source sent its commit.
    Commit,
    /// The source sent its commit, would take the machine back, and the QEMU of the machine has ended.
    CommitOfEnded,
    /// Starting the machine failed, perhaps after its CPUs had run.
    StartFailed,
    /// A person decided that the machine is this host's, because the source is gone.
    Decided,
    /// The source sent its abort.
    Abort,
    /// The connection to the source is lost, or loading failed here.
    Failed,
    /// The daemon restarted after a crash.
    Restarted,
}

/// Actions of the target, to be carried out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetAction {
    /// Reserve resources, record durably which machine is incoming; then reply to the source. A machine that
    /// does not fit is refused instead.
    ReserveAndAccept,
    /// Load the machine and mark it as complete, for a later daemon; then reply to the source. The mark need
    /// not outlive the paused machine, so it is no durable write: nothing is synced for the record during the
    /// downtime.
    LoadAndConfirmReady,
    /// Run the machine, open its network, announce it; record durably that it belongs to this host; then
    /// reply to the source.
    RunAndConfirm,
    /// Confirm (again) to the source that the machine runs here.
    ConfirmRunning,
    /// Record durably that the machine never ran here; then tell the source, which takes it back. Its disks
    /// stay until the source has done so.
    RecordNeverRan,
    /// Confirm (again) to the source that the machine never ran here.
    ConfirmNeverRan,
    /// Kill the machine and free its resources, the record too; then reply to the source.
    Discard,
    /// Confirm (again) to the source that nothing of the machine is here.
    ConfirmDiscarded,
}

/// Durable state of a handover on the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetRecord {
    /// The machine is incoming here.
    Arriving,
    /// The machine never ran here and is given back.
    NeverRan,
    /// The machine arrived and belongs, or belonged, to this host.
    Ours,
}

/// State of the paused incoming machine after a restart of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PausedIncoming {
    /// The machine is here without the mark, so the source was never told that it is complete.
    Unfinished,
    /// The machine is here and marked as complete.
    Complete,
    /// The machine and its mark are gone, as after a power loss: its state is unknown.
    Gone,
}

impl Target {
    /// First state after an accepted offer, and its actions.
    pub fn initial() -> (Target, &'static [TargetAction]) {
        (Target::Receiving, &[TargetAction::ReserveAndAccept])
    }

    /// State after an abort of a handover that is unknown here. Its offer may still arrive over an older
    /// connection, and must then be refused.
    pub fn discard_unknown() -> (Target, &'static [TargetAction]) {
        Target::Discarded.step(TargetEvent::Abort)
    }

    /// State of a handover after a restart of the daemon.
    pub fn recovered(record: TargetRecord, waiting: PausedIncoming) -> (Target, &'static [TargetAction]) {
        let state = match (record, waiting) {
            (TargetRecord::Ours, _) => Target::Running,
            (TargetRecord::Arriving, PausedIncoming::Gone) if is_back(Loss::GoneMachineForgotten) => {
                Target::Receiving
            }
            (TargetRecord::NeverRan, _) => Target::Returned,
            (TargetRecord::Arriving, PausedIncoming::Unfinished) => Target::Receiving,
            (TargetRecord::Arriving, PausedIncoming::Complete | PausedIncoming::Gone) => {
                Target::PerhapsStarted
            }
        };
        state.step(TargetEvent::Restarted)
    }

    /// Transition function of the target.
    pub fn step(self, event: TargetEvent) -> (Target, &'static [TargetAction]) {
        use {Target::*, TargetAction::*, TargetEvent::*};
        match (self, event) {
            // What must never be: the simulation brings these back.
            (Receiving, Finished) if is_back(Loss::TargetRunsEarly) => {
                (Running, &[LoadAndConfirmReady, RunAndConfirm])
            }
            (Prepared | PerhapsStarted, Failed) if is_back(Loss::TargetGivesUp) => (Discarded, &[Discard]),
            (Receiving, Finished) => (Prepared, &[LoadAndConfirmReady]),
            (Receiving, Abort | Failed | Restarted) => (Discarded, &[Discard]),
            (Prepared, CommitOfEnded) => (Returned, &[RecordNeverRan]),
            (Returned, CommitOfEnded) => (Returned, &[ConfirmNeverRan]),
            (Prepared, Commit | Decided) | (PerhapsStarted, Commit | CommitOfEnded | Decided) => {
                (Running, &[RunAndConfirm])
            }
            (Returned, Decided) => (Running, &[RunAndConfirm]),
            (Prepared, StartFailed) => (PerhapsStarted, &[]),
            (Prepared | PerhapsStarted | Returned, Abort) => (Discarded, &[Discard]),
            (Running, Commit | CommitOfEnded) => (Running, &[ConfirmRunning]),
            (Discarded, Abort) => (Discarded, &[ConfirmDiscarded]),
            (state, _) => (state, &[]),
        }
    }

    /// Whether the machine may run on the target.
    pub fn may_run(self) -> bool {
        self == Target::Running
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each executor sees the actions of its own part only, so that none is lost between them.
    #[test]
    fn no_part_of_the_source_has_actions_of_another() {
        use SourceEvent::*;
        let events = [
            RoundsOver,
            TargetReady,
            Recorded,
            TargetRuns,
            TargetNeverRan,
            TargetDiscarded,
            Failed,
            Restarted,
        ];
        for event in events {
            for before in [Source::Committed, Source::TakingBack] {
                let of_outcome = |action: &SourceAction| {
                    matches!(action, SourceAction::Committed(_) | SourceAction::Aborted(_))
                };
                assert!(before.step(event).1.iter().all(of_outcome), "{before:?}, {event:?}");
            }
            assert_eq!(AbortedAction::after(event).count(), Source::Aborted.step(event).1.len(), "{event:?}");
            assert_eq!(Source::Done.step(event), (Source::Done, &[][..]));
            for before in [Source::Copying, Source::Stopped, Source::Recording, Source::Reverting] {
                let (after, actions) = before.step(event);
                let own = |action: &SourceAction| match action {
                    SourceAction::Committed(_) => after == Source::Committed,
                    SourceAction::Aborted(_) => after == Source::Aborted,
                    _ => true,
                };
                assert!(actions.iter().all(own), "{before:?}, {event:?}");
            }
        }
    }
}
