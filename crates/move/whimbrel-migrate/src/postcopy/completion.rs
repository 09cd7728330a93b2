//! Completion of postcopy: two pure state machines, one for each side, that decide when each may drop its
//! records.
//!
//! ```text
//!   source                                              target
//!   Keeping  ---- offer fetch (again after a loss) --->  Lacking
//!            <--- fetch ------------------------------  Lacking
//!            ---- pages ----------------------------->  (stores those that are absent)
//!                                                       the last page is here, all of it durable:
//!                                                       the target removes its record of missing pages
//!            <--- complete (again at each offer) -----  Whole
//!   Released
//! ```
//!
//! The source keeps everything until it receives *complete*, which the target sends only after it has
//! recorded durably that no page is missing. Either side may crash at any time: [`ServeState::recovered`] and
//! [`FetchState::recovered`] are the states after a restart. No I/O and no clock here.
//! `tests/it/postcopy_model.rs` checks this against every order of messages, losses, repetitions and crashes.

/// State of the source, from the commit on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServeState {
    /// The target may lack pages: memory and disks stay.
    Serving,
    /// The target has every page. Nothing is left here.
    Released,
}

/// Event on the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServeEvent {
    /// A connection to the target is lost, or could not be made.
    LinkLost,
    /// The target requests pages.
    Fetch,
    /// The target reports that no page is missing.
    Complete,
    /// The daemon restarted and found the record of pages that it serves.
    Restarted,
}

/// Action of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServeAction {
    /// Connect and offer to serve; again after each loss.
    OfferFetch,
    /// Send the pages, as they were at the pause.
    SendPages,
    /// Kill the paused machine here, free its resources, remove the record.
    Release,
    /// Refuse the request: no pages are served any more.
    Refuse,
}

impl ServeState {
    /// State after the commit of the handover, and its actions.
    pub fn initial() -> (ServeState, &'static [ServeAction]) {
        (ServeState::Serving, &[ServeAction::OfferFetch])
    }

    /// State after a restart; `kept` tells whether there is a record of pages that are served.
    pub fn recovered(kept: bool) -> (ServeState, &'static [ServeAction]) {
        if kept { ServeState::Serving.step(ServeEvent::Restarted) } else { (ServeState::Released, &[]) }
    }

    /// Transition function of the source.
    pub fn step(self, event: ServeEvent) -> (ServeState, &'static [ServeAction]) {
        use {ServeAction::*, ServeEvent::*, ServeState::*};
        match (self, event) {
            (Serving, LinkLost | Restarted) => (Serving, &[OfferFetch]),
            (Serving, ServeEvent::Fetch) => (Serving, &[SendPages]),
            (Serving, Complete) => (Released, &[Release]),
            (Released, ServeEvent::Fetch) => (Released, &[Refuse]),
            (Released, _) => (Released, &[]),
        }
    }
}

/// State of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FetchState {
    /// Pages are missing here.
    Incomplete,
    /// No page is missing. The source may not know yet.
    Complete,
}

/// Event on the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FetchEvent {
    /// The source offers a connection.
    FetchOffered,
    /// A connection to the source is lost, with the requests on it.
    LinkLost,
    /// The last missing page is stored.
    LastStored,
    /// The machine is gone from here for good: deleted, or saved completely in a capsule.
    Gone,
}

/// Actions of the target, to be carried out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FetchAction {
    /// Request missing pages.
    Request,
    /// Schedule the requests without a reply again.
    Reschedule,
    /// Make the fetched pages durable, then remove the record of missing pages durably.
    RemoveRecord,
    /// Report to the source that no page is missing.
    ReportComplete,
}

impl FetchState {
    /// State after a commit with missing pages.
    pub fn initial() -> (FetchState, &'static [FetchAction]) {
        (FetchState::Incomplete, &[])
    }

    /// State after a restart; `owed` tells whether there is a record of missing pages.
    pub fn recovered(owed: bool) -> (FetchState, &'static [FetchAction]) {
        (if owed { FetchState::Incomplete } else { FetchState::Complete }, &[])
    }

    /// Transition function of the target.
    pub fn step(self, event: FetchEvent) -> (FetchState, &'static [FetchAction]) {
        use {FetchAction::*, FetchEvent::*, FetchState::*};
        match (self, event) {
            (Incomplete, FetchOffered) => (Incomplete, &[Request]),
            (Incomplete, LinkLost) => (Incomplete, &[Reschedule]),
            (Incomplete, LastStored | Gone) => (Complete, &[RemoveRecord, ReportComplete]),
            (Complete, FetchOffered) => (Complete, &[ReportComplete]),
            (Complete, _) => (Complete, &[]),
        }
    }
}
