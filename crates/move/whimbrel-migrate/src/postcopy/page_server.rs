//! The source's side of post-copy: it keeps the pages as they were at the pause, and sends what it is asked
//! for.
//!
//! Nothing is sent before [`PageServer::open`]: until then pages change. Nothing is forgotten before the
//! target says that it lacks nothing ([`super::completion`]).

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

/// The pages of one handover.
pub struct PageServer {
    handover: HandoverId,
    arrays: Vec<Mutex<Box<dyn PageArray>>>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// None before the pause.
    keeper: Option<ServeState>,
    /// The pages are gone from here although the target may lack some.
    ended: bool,
    view: PageServerStatus,
}

/// What can be seen of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PageServerStatus {
    /// Pages that stayed here at the pause; none if a daemon that does not know took them up.
    pub owed: Option<u64>,
    /// How the target fares, as it last said.
    pub stand: FetchProgress,
    /// Pages that were sent since the pause.
    pub sent: u64,
    /// Bytes on the wire for that, both ways.
    pub bytes: u64,
    /// Whether the target asked for anything since this daemon serves.
    pub asked: bool,
    /// Whether the target can ask at the moment.
    pub connected: bool,
    /// Why not, if that is known.
    pub stalled: Option<String>,
    /// The target lacks nothing.
    pub whole: bool,
}

/// Why a target gets no answer.
#[derive(Debug, thiserror::Error)]
pub enum PageServerError {
    /// The header is garbage.
    #[error("the message header cannot be read")]
    Header {
        /// Why.
        #[source]
        source: postcard::Error,
    },
    /// It asks for another machine's pages.
    #[error("this connection is for the pages of another handover")]
    Handover,
    /// It asks before it may, or after it said that it lacks nothing.
    #[error("pages are not given now: the machine {reason}")]
    Closed {
        /// `still runs here`, …
        reason: &'static str,
    },
    /// There is no such array.
    #[error("there is no array {array}")]
    Array {
        /// Its index.
        array: u32,
    },
    /// What it asks for is senseless, or could not be encoded.
    #[error("cannot give the pages")]
    Frame(#[from] FetchReplyError),
    /// The pages could not be read.
    #[error("cannot read the pages")]
    Read(#[source] PageError),
    /// No message has this kind.
    #[error("message kind {kind:#06x} is not one of a target")]
    Kind {
        /// The kind.
        kind: u16,
    },
}

impl PageServer {
    /// These arrays, in the order of the offer, for whoever has this handover. Closed until
    /// [`PageServer::open`].
    pub fn new(handover: HandoverId, arrays: Vec<Box<dyn PageArray>>) -> Self {
        let state = State { keeper: None, ended: false, view: PageServerStatus::default() };
        let arrays = arrays.into_iter().map(Mutex::new).collect();
        Self { handover, arrays, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// For which handover.
    pub fn handover(&self) -> HandoverId {
        self.handover
    }

    /// The machine is paused, its pages change no more; so many stayed here.
    pub fn open(&self, owed: u64) {
        let mut state = self.state();
        state.keeper = Some(ServeState::initial().0);
        state.view.owed = Some(owed);
        state.view.stand.missing = owed;
    }

    /// The same for pages that a daemon before this one kept.
    pub fn open_again(&self) {
        self.state().keeper = Some(ServeState::recovered(true).0);
    }

    /// Whether pages are given: the machine is paused.
    pub fn is_open(&self) -> bool {
        self.state().keeper.is_some()
    }

    /// So many more bytes went over the connections.
    pub fn carried(&self, bytes: u64) {
        self.state().view.bytes += bytes;
    }

    /// The pages are gone from here.
    pub fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// Handles a message of the target; reply header and payload.
    pub fn handle(&self, kind: u16, header: &[u8]) -> Result<(Vec<u8>, Vec<u8>), PageServerError> {
        let malformed = |source| PageServerError::Header { source };
        match kind {
            FETCH => self.fetch(&postcard::from_bytes(header).map_err(malformed)?),
            COMPLETE => {
                let handover: HandoverId = postcard::from_bytes(header).map_err(malformed)?;
                if handover != self.handover {
                    return Err(PageServerError::Handover);
                }
                self.whole();
                Ok((Vec::new(), Vec::new()))
            }
            kind => Err(PageServerError::Kind { kind }),
        }
    }

    fn fetch(&self, fetch: &Fetch) -> Result<(Vec<u8>, Vec<u8>), PageServerError> {
        if fetch.handover != self.handover {
            return Err(PageServerError::Handover);
        }
        self.may_give()?;
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
        self.note(fetch.stand, pages);
        let header = postcard::to_stdvec(&fetched).map_err(|source| PageServerError::Header { source })?;
        Ok((header, payload))
    }

    fn may_give(&self) -> Result<(), PageServerError> {
        let mut state = self.state();
        if state.ended {
            return Err(PageServerError::Closed { reason: "was ended here by its user" });
        }
        let keeper = state.keeper.ok_or(PageServerError::Closed { reason: "still runs here" })?;
        let (next, actions) = keeper.step(ServeEvent::Fetch);
        state.keeper = Some(next);
        match actions {
            [ServeAction::SendPages] => Ok(()),
            _ => Err(PageServerError::Closed { reason: "lacks nothing, said its host" }),
        }
    }

    fn note(&self, stand: FetchProgress, pages: u64) {
        let mut state = self.state();
        let view = &mut state.view;
        view.sent += pages;
        // Two connections: the later word may be the older one.
        if !view.asked || stand.missing <= view.stand.missing {
            view.stand.missing = stand.missing;
        }
        if stand.faults >= view.stand.faults || !view.asked {
            let missing = view.stand.missing;
            view.stand = FetchProgress { missing, ..stand };
        }
        view.asked = true;
        drop(state);
        self.changed.notify_all();
    }

    /// The target lacks nothing: what is kept here may go.
    pub fn whole(&self) {
        let mut state = self.state();
        let Some(keeper) = state.keeper else { return };
        state.keeper = Some(keeper.step(ServeEvent::Whole).0);
        state.view.whole = true;
        state.view.stand.missing = 0;
        drop(state);
        self.changed.notify_all();
    }

    /// Whether the target can ask, and why not.
    pub fn connected(&self, connected: bool, stalled: Option<String>) {
        let mut state = self.state();
        state.view.connected = connected;
        state.view.stalled = stalled;
        if let (false, Some(keeper)) = (connected, state.keeper) {
            state.keeper = Some(keeper.step(ServeEvent::LinkLost).0);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether nothing more is to be served: the target lacks nothing, or the pages are gone.
    pub fn is_over(&self) -> bool {
        let state = self.state();
        state.ended || state.keeper == Some(ServeState::Released)
    }

    /// Waits until that is so, at most for `patience`; whether it is.
    pub fn wait_over(&self, patience: Duration) -> bool {
        let going_on = |state: &mut State| !state.ended && state.keeper != Some(ServeState::Released);
        let waited = self.changed.wait_timeout_while(self.state(), patience, going_on);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.ended || state.keeper == Some(ServeState::Released)
    }

    /// Waits until the target can ask, at most for `patience`; whether it can.
    pub fn wait_connected(&self, patience: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.state(), patience, |state| !state.view.connected);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.view.connected
    }

    /// What can be seen of it.
    pub fn view(&self) -> PageServerStatus {
        self.state().view.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
