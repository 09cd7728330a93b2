//! Who may forget what: the time after the commit as two pure state machines, one for each side.
//!
//! ```text
//!   source                                          target
//!   Keeping  ---- attend (again after each loss) ->  Lacking
//!            <--- fetch ---------------------------  Lacking
//!            ---- pages --------------------------->  (stores them where nothing is)
//!                                                     the last page is here, all of it durable:
//!                                                     the target writes down that nothing is owed
//!            <--- whole (again at each attend) ----  Whole
//!   Released
//! ```
//!
//! The source keeps everything until it hears *whole*, which is said only after the target has written down
//! that it lacks nothing. Either may crash at any time: what they find on their disks when they come back is
//! [`ServeState::recovered`] and [`FetchState::recovered`]. No I/O and no clock here.
//! `tests/postcopy_model.rs` checks it against every order of messages, losses, repetitions and crashes.

/// The source's side, from the commit on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServeState {
    /// The target may lack pages: memory and disks stay.
    Keeping,
    /// The target lacks nothing. Nothing is left here.
    Released,
}

/// What the source hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServeEvent {
    /// A connection to the target is lost, or could not be made.
    LinkLost,
    /// The target asks for pages.
    Fetch,
    /// The target says that it lacks nothing.
    Whole,
    /// This daemon came back and found that it keeps the machine's pages.
    Restarted,
}

/// What the source must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServeAction {
    /// Connect and offer to serve; again after each loss.
    Attend,
    /// Send the pages, as they were at the pause.
    SendPages,
    /// End the paused machine here, free what it held, strike the record out.
    Release,
    /// Nothing is left to send: say so.
    Refuse,
}

impl ServeState {
    /// The handover was committed.
    pub fn initial() -> (ServeState, &'static [ServeAction]) {
        (ServeState::Keeping, &[ServeAction::Attend])
    }

    /// A new daemon found, or did not find, a record that pages are kept for this handover.
    pub fn recovered(kept: bool) -> (ServeState, &'static [ServeAction]) {
        if kept { ServeState::Keeping.step(ServeEvent::Restarted) } else { (ServeState::Released, &[]) }
    }

    /// The one transition function.
    pub fn step(self, event: ServeEvent) -> (ServeState, &'static [ServeAction]) {
        use {ServeAction::*, ServeEvent::*, ServeState::*};
        match (self, event) {
            (Keeping, LinkLost | Restarted) => (Keeping, &[Attend]),
            (Keeping, ServeEvent::Fetch) => (Keeping, &[SendPages]),
            (Keeping, Whole) => (Released, &[Release]),
            (Released, ServeEvent::Fetch) => (Released, &[Refuse]),
            (Released, _) => (Released, &[]),
        }
    }
}

/// The target's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FetchState {
    /// Pages are missing here.
    Lacking,
    /// None is. The source may not know yet.
    Whole,
}

/// What the target hears or finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FetchEvent {
    /// The source offers a connection.
    Attended,
    /// A connection to the source is lost, with whatever was asked over it.
    LinkLost,
    /// The last missing page is stored.
    LastStored,
    /// The machine is gone from here for good: forgotten, or kept whole in a capsule.
    Gone,
}

/// What the target must do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FetchAction {
    /// Ask for what is missing.
    Ask,
    /// What was asked for and did not come is to be asked for again.
    TakeBack,
    /// Make what came durable, then strike out, durably, that something is owed.
    RemoveRecord,
    /// Tell the source that nothing is missing.
    SayWhole,
}

impl FetchState {
    /// The machine was committed to this side with pages missing.
    pub fn initial() -> (FetchState, &'static [FetchAction]) {
        (FetchState::Lacking, &[])
    }

    /// A new daemon found, or did not find, a record that pages are owed by this handover.
    pub fn recovered(owed: bool) -> (FetchState, &'static [FetchAction]) {
        (if owed { FetchState::Lacking } else { FetchState::Whole }, &[])
    }

    /// The one transition function.
    pub fn step(self, event: FetchEvent) -> (FetchState, &'static [FetchAction]) {
        use {FetchAction::*, FetchEvent::*, FetchState::*};
        match (self, event) {
            (Lacking, Attended) => (Lacking, &[Ask]),
            (Lacking, LinkLost) => (Lacking, &[TakeBack]),
            (Lacking, LastStored | Gone) => (Whole, &[RemoveRecord, SayWhole]),
            (Whole, Attended) => (Whole, &[SayWhole]),
            (Whole, _) => (Whole, &[]),
        }
    }
}
