//! Who runs the machine: the handover as two pure state machines, one for each side.
//!
//! ```text
//!   source                                        target
//!   Copying  (noted that it was begun)
//!            ---- offer, pages ---------------->  Receiving (noted whose it is; a crash of its daemon ends it)
//!   Stopped  ---- last pages, device state ---->  (loads, stays paused)
//!            <--- ready -----------------------   Prepared
//!   COMMIT POINT: the source writes down "handed over" and syncs it; from here on it never runs again
//!   Committed --- commit (repeated until answered) ->
//!            <--- running ---------------------   Running
//!   Done
//! ```
//!
//! Before the commit point any failure makes the source go on and the target forget. After it only the target
//! may run, so the source repeats `commit` until it is answered. A target that is `Prepared` and hears
//! nothing must wait: it cannot know on which side of the commit point the source is. A source that gave up
//! repeats `abort` until it is answered, so that the word always comes.
//!
//! No I/O and no clock here. What a daemon finds on its disk when it comes back is part of the rule too:
//! [`Source::recovered`] and [`Target::recovered`]. `tests/handover_model.rs` checks all of it against every
//! order of messages, losses, crashes and power losses.

/// The source's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The machine runs here and is being copied (or was not even offered yet).
    Copying,
    /// The machine is paused here; its last pages and device state are on their way.
    Stopped,
    /// Handed over, written down: it never runs here again. The target may not know yet.
    Committed,
    /// The target said that it runs. Nothing is left here.
    Done,
    /// Given up before the commit point: the machine runs here. The target may not know yet.
    Aborted,
}

/// What the source hears or decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// Little enough is left: stop and send the rest.
    RoundsOver,
    /// The target has everything, loaded and paused.
    TargetReady,
    /// The target says that the machine runs there.
    TargetRuns,
    /// The target says that it has nothing of the machine.
    TargetForgot,
    /// Anything went wrong, or the user cancelled: link lost, target refused, local error.
    Failed,
    /// This daemon came back after a crash and found its durable record.
    Restarted,
}

/// What the source must do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Write down, durably, that this handover was begun and with whom; then offer the machine.
    NoteAndOffer,
    /// Pause the machine and send what is left.
    StopAndSend,
    /// Write down, durably, that the machine was handed over.
    RecordHandover,
    /// Tell the target to run it; again after each silence.
    SendCommit,
    /// Tell the target to forget it; again after each silence.
    SendAbort,
    /// Let the machine run here again, with every page it has sent unseen again.
    ResumeHere,
    /// The target knows how it ended: strike the note out.
    RemoveRecord,
    /// End the paused machine here and free what it held.
    FreeMachine,
}

/// What the source's disk says about a handover that was begun and not struck out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceRecord {
    /// The machine is this host's.
    Ours,
    /// The machine was handed over, by this handover.
    HandedOver,
    /// It is about a later handover, or the machine is gone: nothing of it is this handover's business.
    Other,
}

impl Source {
    /// A migration begins.
    pub fn initial() -> (Source, &'static [SourceAction]) {
        (Source::Copying, &[SourceAction::NoteAndOffer])
    }

    /// A handover as a new daemon finds it.
    pub fn recovered(record: SourceRecord) -> (Source, &'static [SourceAction]) {
        match record {
            SourceRecord::Ours => Source::Copying.step(SourceEvent::Restarted),
            SourceRecord::HandedOver => Source::Committed.step(SourceEvent::Restarted),
            SourceRecord::Other => Source::Aborted.step(SourceEvent::Restarted),
        }
    }

    /// The one transition function.
    pub fn step(self, event: SourceEvent) -> (Source, &'static [SourceAction]) {
        use {Source::*, SourceAction::*, SourceEvent::*};
        match (self, event) {
            (Copying, RoundsOver) => (Stopped, &[StopAndSend]),
            (Stopped, TargetReady) => (Committed, &[RecordHandover, SendCommit]),
            (Copying | Stopped, Failed | Restarted) => (Aborted, &[ResumeHere, SendAbort]),
            (Committed, TargetRuns) => (Done, &[RemoveRecord, FreeMachine]),
            (Committed, Failed | Restarted) => (Committed, &[SendCommit]),
            (Aborted, TargetForgot) => (Aborted, &[RemoveRecord]),
            (Aborted, Failed | Restarted) => (Aborted, &[SendAbort]),
            // Late or repeated news changes nothing.
            (state, _) => (state, &[]),
        }
    }

    /// Whether the machine may run on the source.
    pub fn may_run(self) -> bool {
        matches!(self, Source::Copying | Source::Aborted)
    }
}

/// The target's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// Room is reserved, pages arrive. Nothing here is worth keeping if the source goes away.
    Receiving,
    /// Everything is here, loaded and paused; only the source's word decides what happens.
    Prepared,
    /// The machine is this host's, and was started here.
    Running,
    /// Forgotten.
    Discarded,
}

/// What the target hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetEvent {
    /// The last pages and the device state came and were loaded.
    Loaded,
    /// The source committed.
    Commit,
    /// The source gave up.
    Abort,
    /// The connection to the source is gone, or this side failed to load.
    Failed,
    /// This daemon came back after a crash.
    Restarted,
}

/// What the target must do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetAction {
    /// Reserve room, write down, durably, whose machine is on its way here; then tell the source.
    ReserveAndAccept,
    /// Mark what waits here as whole, for a later daemon; then tell the source. The mark need not outlive the
    /// paused machine, so this is no durable write: nothing is synced for the record while nobody runs.
    MarkAndSayReady,
    /// Let the machine run, open its network, announce it; write down, durably, that it is this host's; then
    /// tell the source.
    RunAndConfirm,
    /// Tell the source (again) that the machine runs here.
    SayRunning,
    /// End it and free what it held, the record too; then tell the source.
    Discard,
    /// Tell the source (again) that nothing of it is here.
    ConfirmDiscarded,
}

/// What the target's disk says about a handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetRecord {
    /// Its machine is on its way here.
    Arriving,
    /// Its machine came here and is, or was, this host's.
    Ours,
}

/// What became of the paused machine of an arrival while its daemon was away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Waiting {
    /// It is there and is not marked as whole, so the source was never told that it is.
    Unfinished,
    /// It is there and marked.
    Whole,
    /// It is gone and its mark too, as after a loss of power: what it was is not known.
    Gone,
}

impl Target {
    /// A machine is offered, and there is room for it.
    pub fn initial() -> (Target, &'static [TargetAction]) {
        (Target::Receiving, &[TargetAction::ReserveAndAccept])
    }

    /// The source gave up a handover that is not known here. Its offer may still be on its way, on an older
    /// connection, and must find it ended.
    pub fn forget_unheard() -> (Target, &'static [TargetAction]) {
        Target::Discarded.step(TargetEvent::Abort)
    }

    /// A handover as a new daemon finds it.
    pub fn recovered(record: TargetRecord, waiting: Waiting) -> (Target, &'static [TargetAction]) {
        let state = match (record, waiting) {
            (TargetRecord::Ours, _) => Target::Running,
            (TargetRecord::Arriving, Waiting::Unfinished) => Target::Receiving,
            (TargetRecord::Arriving, Waiting::Whole | Waiting::Gone) => Target::Prepared,
        };
        state.step(TargetEvent::Restarted)
    }

    /// The one transition function.
    pub fn step(self, event: TargetEvent) -> (Target, &'static [TargetAction]) {
        use {Target::*, TargetAction::*, TargetEvent::*};
        match (self, event) {
            (Receiving, Loaded) => (Prepared, &[MarkAndSayReady]),
            (Receiving, Abort | Failed | Restarted) => (Discarded, &[Discard]),
            (Prepared, Commit) => (Running, &[RunAndConfirm]),
            (Prepared, Abort) => (Discarded, &[Discard]),
            (Running, Commit) => (Running, &[SayRunning]),
            (Discarded, Abort) => (Discarded, &[ConfirmDiscarded]),
            (state, _) => (state, &[]),
        }
    }

    /// Whether the machine may run on the target.
    pub fn may_run(self) -> bool {
        self == Target::Running
    }
}
