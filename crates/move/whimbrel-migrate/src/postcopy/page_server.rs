//! Page server: the source side of postcopy. It serves the pages as they were at the pause.
//!
//! Requests before [`PageServer::open`] are refused, because pages still change. Nothing is freed before the
//! target reports that no page is missing ([`super::completion`]).

use super::{
    completion::{ServeAction, ServeEvent, ServeState},
    fetch_reply::{self, FetchReplyError},
    messages::{COMPLETE, FETCH, Fetch, FetchProgress},
};
use crate::protocol::HandoverId;
use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use whimbrel_machine::{PageArray, PageError};

/// Server of the pages of one handover.
pub struct PageServer {
    handover: HandoverId,
    arrays: Vec<Mutex<Box<dyn PageArray>>>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// State of completion; none before the pause.
    serve_state: Option<ServeState>,
    /// Whether the pages are gone from here although the target may lack some.
    ended: bool,
    status: PageServerStatus,
}

/// Status of a page server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PageServerStatus {
    /// Pages that stayed here at the pause; none if a restarted daemon does not know.
    pub missing_at_start: Option<u64>,
    /// Progress of the target, as it last reported.
    pub progress: FetchProgress,
    /// Number of pages sent since the pause.
    pub sent: u64,
    /// Bytes on the wire for these, both ways.
    pub bytes: u64,
    /// Whether the target requested anything since this daemon serves.
    pub asked: bool,
    /// Whether the target has a fetch connection.
    pub connected: bool,
    /// Reason why it has none, if known.
    pub stalled: Option<String>,
    /// Whether the target has every page.
    pub complete: bool,
}

/// Reason why a request is refused.
#[derive(Debug, thiserror::Error)]
pub enum PageServerError {
    /// The header cannot be decoded.
    #[error("cannot decode the message header")]
    Header {
        /// Cause reported by the decoder.
        source: postcard::Error,
    },
    /// The request is for another machine's pages.
    #[error("this connection is for the pages of another handover")]
    Handover,
    /// The request came too early, or after the target reported that no page is missing.
    #[error("no pages are served now: the machine {reason}")]
    Closed {
        /// State of the machine: `still runs here`, …
        reason: &'static str,
    },
    /// The machine has no such array.
    #[error("there is no array {array}")]
    Array {
        /// Index of the array.
        array: u32,
    },
    /// The request is invalid, or the reply could not be encoded.
    #[error("cannot serve the pages")]
    Reply(#[from] FetchReplyError),
    /// The pages could not be read.
    #[error("cannot read the pages")]
    Read(#[source] PageError),
    /// The message kind does not belong to page fetching.
    #[error("message kind {kind:#06x} does not belong to page fetching")]
    Kind {
        /// Number of the kind.
        kind: u16,
    },
}

impl PageServer {
    /// Creates a server of these arrays, in the order of the offer, for this handover. Closed until
    /// [`PageServer::open`].
    pub fn new(handover: HandoverId, arrays: Vec<Box<dyn PageArray>>) -> Self {
        let state = State { serve_state: None, ended: false, status: PageServerStatus::default() };
        let arrays = arrays.into_iter().map(Mutex::new).collect();
        Self { handover, arrays, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Handover whose pages are served.
    pub fn handover(&self) -> HandoverId {
        self.handover
    }

    /// Starts to serve once the machine is paused and its pages no longer change; `owed` pages stayed here.
    pub fn open(&self, owed: u64) {
        let mut state = self.state();
        state.serve_state = Some(ServeState::initial().0);
        state.status.missing_at_start = Some(owed);
        state.status.progress.missing = owed;
    }

    /// Starts to serve again after a restart of the daemon.
    pub fn reopen(&self) {
        self.state().serve_state = Some(ServeState::recovered(true).0);
    }

    /// Whether pages are served: the machine is paused.
    pub fn is_open(&self) -> bool {
        self.state().serve_state.is_some()
    }

    /// Adds bytes that the connections carried to the status.
    pub fn add_bytes(&self, bytes: u64) {
        self.state().status.bytes += bytes;
    }

    /// Ends the server because the pages are gone from here.
    pub fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// Handles a message of the target; returns the reply's header and payload.
    pub fn handle(&self, kind: u16, header: &[u8]) -> Result<(Vec<u8>, Vec<u8>), PageServerError> {
        let malformed = |source| PageServerError::Header { source };
        match kind {
            FETCH => self.fetch(&postcard::from_bytes(header).map_err(malformed)?),
            COMPLETE => {
                let handover: HandoverId = postcard::from_bytes(header).map_err(malformed)?;
                if handover != self.handover {
                    return Err(PageServerError::Handover);
                }
                self.mark_complete();
                Ok((Vec::new(), Vec::new()))
            }
            kind => Err(PageServerError::Kind { kind }),
        }
    }

    fn fetch(&self, fetch: &Fetch) -> Result<(Vec<u8>, Vec<u8>), PageServerError> {
        if fetch.handover != self.handover {
            return Err(PageServerError::Handover);
        }
        self.check_open()?;
        let array = self.arrays.get(fetch.array as usize);
        let array = array.ok_or(PageServerError::Array { array: fetch.array })?;
        let array = array.lock().unwrap_or_else(PoisonError::into_inner);
        fetch_reply::check(&fetch.runs, array.page_count())?;
        let pages = fetch_reply::count(&fetch.runs);
        let mut data = vec![0; pages as usize * whimbrel_core::PAGE_SIZE];
        let mut rest = &mut data[..];
        for run in &fetch.runs {
            let (out, after) = rest.split_at_mut(run.bytes());
            array.read(*run, out).map_err(PageServerError::Read)?;
            rest = after;
        }
        drop(array);
        let (fetched, payload) = fetch_reply::encode(&fetch.runs, &data)?;
        self.record_progress(fetch.stand, pages);
        let header = postcard::to_stdvec(&fetched).map_err(|source| PageServerError::Header { source })?;
        Ok((header, payload))
    }

    fn check_open(&self) -> Result<(), PageServerError> {
        let mut state = self.state();
        if state.ended {
            return Err(PageServerError::Closed { reason: "was stopped here by its user" });
        }
        let keeper = state.serve_state.ok_or(PageServerError::Closed { reason: "still runs here" })?;
        let (next, actions) = keeper.step(ServeEvent::Fetch);
        state.serve_state = Some(next);
        match actions {
            [ServeAction::SendPages] => Ok(()),
            _ => Err(PageServerError::Closed { reason: "has every page, as its host reported" }),
        }
    }

    fn record_progress(&self, stand: FetchProgress, pages: u64) {
        let mut state = self.state();
        let view = &mut state.status;
        view.sent += pages;
        // There are two connections, so the report that arrives later may be the older one.
        if !view.asked || stand.missing <= view.progress.missing {
            view.progress.missing = stand.missing;
        }
        if stand.faults >= view.progress.faults || !view.asked {
            let missing = view.progress.missing;
            view.progress = FetchProgress { missing, ..stand };
        }
        view.asked = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Records that the target has every page, so that those here may be freed.
    pub fn mark_complete(&self) {
        let mut state = self.state();
        let Some(keeper) = state.serve_state else { return };
        state.serve_state = Some(keeper.step(ServeEvent::Complete).0);
        state.status.complete = true;
        state.status.progress.missing = 0;
        drop(state);
        self.changed.notify_all();
    }

    /// Records whether the target has a fetch connection, and why not.
    pub fn connected(&self, connected: bool, stalled: Option<String>) {
        let mut state = self.state();
        state.status.connected = connected;
        state.status.stalled = stalled;
        if let (false, Some(keeper)) = (connected, state.serve_state) {
            state.serve_state = Some(keeper.step(ServeEvent::LinkLost).0);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether nothing more is to be served: the target has every page, or the pages are gone.
    pub fn is_finished(&self) -> bool {
        let state = self.state();
        state.ended || state.serve_state == Some(ServeState::Released)
    }

    /// Waits at most `patience` until nothing more is to be served; returns whether that is so.
    pub fn wait_finished(&self, patience: Duration) -> bool {
        let going_on = |state: &mut State| !state.ended && state.serve_state != Some(ServeState::Released);
        let waited = self.changed.wait_timeout_while(self.state(), patience, going_on);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.ended || state.serve_state == Some(ServeState::Released)
    }

    /// Waits at most `patience` until the target has a fetch connection; returns whether it has one.
    pub fn wait_connected(&self, patience: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.state(), patience, |state| !state.status.connected);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.status.connected
    }

    /// Current status of the server.
    pub fn status(&self) -> PageServerStatus {
        self.state().status.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
