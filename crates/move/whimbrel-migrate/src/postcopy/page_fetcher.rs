//! Page fetcher: the target side of postcopy. It fetches touched pages at once, and all others in the
//! background.
//!
//! It uses two connections that the source opens: one for pages that a reader waits for, the other for all
//! the rest, with a few requests in flight (`fetch_window.rs`). Requests that are lost with a connection are
//! repeated over the next one. The page stores decide what is missing; the order is that of
//! [`super::fetch_schedule`].

use super::{
    completion::{FetchAction, FetchEvent, FetchState},
    fetch_reply::{self, FetchReplyError},
    fetch_schedule::{FetchRange, FetchSchedule},
    fetch_window::FetchWindow,
    messages::{COMPLETE, FETCH, Fetch, FetchPriority, FetchProgress, Fetched, OfferFetchReply},
    page_set_codec::{self, PageSetCodecError},
};
use crate::{link::LinkError, protocol::HandoverId, source::BoxError};
use bytes::Bytes;
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::{HostName, PAGE_SIZE, PageRun, PageSet, lock};

/// Pages in a background request: at 1 Gbit/s, 1 ms.
const PAGES_PER_REQUEST: u64 = 32;
/// Time that a read waits for a connection before it fails.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);
/// Pause after a refusal.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Most disk pages that were read on demand and wait to be stored.
const UNSTORED_MAX: usize = 64;

/// Connection to the source for fetching.
pub trait FetchConnection: Send + Sync {
    /// Sends a request.
    fn request(&self, kind: u16, header: Vec<u8>) -> Result<Box<dyn PendingReply>, LinkError>;

    /// Closes the connection: waiting readers get an error.
    fn close(&self);
}

/// Reply that has not arrived yet.
pub trait PendingReply: Send {
    /// Blocks until the reply (header and payload) arrives or the connection is known to be lost.
    fn wait(self: Box<Self>) -> Result<(Bytes, Bytes), LinkError>;
}

/// Array of the machine that stores fetched pages.
pub trait PageStore: Send + Sync {
    /// Pages of `owed` that are not here.
    fn missing(&self, owed: &PageSet) -> PageSet;

    /// Stores pages where none is. Pages that are here stay as they are.
    fn fill(&self, run: PageRun, content: &[u8]) -> Result<(), BoxError>;

    /// Makes the stored pages as durable as the array is.
    fn sync(&self) -> Result<(), BoxError>;
}

/// Reason why a page cannot be fetched now.
#[derive(Debug, thiserror::Error)]
pub enum PageFetchError {
    /// The source has not opened a connection, or it is lost.
    #[error("{from} is not connected and has pages of this machine")]
    NotConnected {
        /// Name of the source.
        from: HostName,
    },
    /// The source refused the request.
    #[error("{from} refuses to send pages of this machine")]
    Refused {
        /// Name of the source.
        from: HostName,
        /// Refusal of the source.
        source: LinkError,
    },
    /// The source sent an invalid reply.
    #[error("{from} sent an invalid reply to a request for pages")]
    Reply {
        /// Name of the source.
        from: HostName,
        /// Cause reported by the decoder.
        source: BoxError,
    },
}

/// Fetcher of the missing pages of one machine.
pub struct PageFetcher {
    handover: HandoverId,
    from: HostName,
    state: Mutex<State>,
    changed: Condvar,
    closed: AtomicBool,
}

struct State {
    fetch_state: FetchState,
    missing: Vec<PageSet>,
    hot: Vec<PageSet>,
    urgent: Option<Arc<dyn FetchConnection>>,
    bulk: Option<Arc<dyn FetchConnection>>,
    /// Pages that a reader waited for, and that the background has not handled yet.
    faults: VecDeque<(usize, u64)>,
    /// Contents that were read on demand and are not stored yet.
    unstored: VecDeque<(usize, PageRun, Vec<u8>)>,
    progress: FetchProgress,
    stalled: Option<String>,
}

/// Status of a page fetcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageFetcherStatus {
    /// Host that has the missing pages.
    pub from: HostName,
    /// Number of pages that were missing when the machine arrived.
    pub missing_at_start: u64,
    /// Progress of the fetching.
    pub progress: FetchProgress,
    /// Whether there is a connection for urgent pages.
    pub connected: bool,
    /// Reason why pages do not arrive, if known.
    pub stalled: Option<String>,
}

impl PageFetcher {
    /// Creates a fetcher for arrays of these lengths, without missing pages yet.
    pub fn new(handover: HandoverId, from: HostName, lengths: &[u64]) -> Self {
        let empty = || lengths.iter().map(|len| PageSet::empty(*len)).collect();
        let state = State {
            fetch_state: FetchState::initial().0,
            missing: empty(),
            hot: empty(),
            urgent: None,
            bulk: None,
            faults: VecDeque::new(),
            unstored: VecDeque::new(),
            progress: FetchProgress::default(),
            stalled: None,
        };
        Self {
            handover,
            from,
            state: Mutex::new(state),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
        }
    }

    /// Handover by which the machine arrived.
    pub fn handover(&self) -> HandoverId {
        self.handover
    }

    /// Host that has the missing pages.
    pub fn from(&self) -> &HostName {
        &self.from
    }

    /// Adds pages that the source announces as missing. Returns the array's set so far.
    pub fn add_missing(&self, array: usize, hot: bool, piece: &[u8]) -> Result<PageSet, BoxError> {
        let mut state = lock(&self.state);
        let sets = if hot { &mut state.hot } else { &mut state.missing };
        let set = sets.get_mut(array).ok_or("pages of an array that was not offered")?;
        page_set_codec::decode_into(piece, set).map_err(|error: PageSetCodecError| BoxError::from(error))?;
        let set = set.clone();
        state.progress.missing = state.missing.iter().map(PageSet::count).sum();
        Ok(set)
    }

    /// Restores the missing pages that an earlier daemon has recorded.
    pub fn restore_missing(&self, sets: Vec<(u32, PageSet)>) {
        let mut state = lock(&self.state);
        for (array, set) in sets {
            if let Some(owed) = state.missing.get_mut(array as usize).filter(|owed| owed.len() == set.len()) {
                *owed = set;
            }
        }
        state.progress.missing = state.missing.iter().map(PageSet::count).sum();
    }

    /// Pages of an array that were missing when the machine arrived.
    pub fn missing_at_start(&self, array: usize) -> PageSet {
        lock(&self.state).missing.get(array).cloned().unwrap_or_else(|| PageSet::empty(0))
    }

    /// Drops the missing pages of an array that is gone with the machine's QEMU.
    pub fn drop_missing(&self, array: usize) {
        if let Some(owed) = lock(&self.state).missing.get_mut(array) {
            *owed = PageSet::empty(owed.len());
        }
    }

    /// Accepts a connection that the source offers.
    pub fn accept_connection(&self, kind: FetchPriority, lane: Arc<dyn FetchConnection>) -> OfferFetchReply {
        let mut state = lock(&self.state);
        if state.fetch_state.step(FetchEvent::FetchOffered).1 == [FetchAction::ReportComplete] {
            return OfferFetchReply::Whole;
        }
        let place = match kind {
            FetchPriority::Urgent => &mut state.urgent,
            FetchPriority::Bulk => &mut state.bulk,
        };
        let before = place.replace(lane);
        state.stalled = None;
        drop(state);
        // Readers that wait for a reply over the old connection repeat the request over the new one.
        before.iter().for_each(|lane| lane.close());
        self.changed.notify_all();
        OfferFetchReply::Waiting
    }

    /// Reads pages for a waiting reader, and fetches those that are missing. `keep` sets the content aside to
    /// be stored later, for arrays whose reader does not store it.
    pub fn read(&self, array: usize, run: PageRun, out: &mut [u8], keep: bool) -> Result<(), PageFetchError> {
        out.fill(0);
        let wanted = self.missing_runs(array, run);
        let begun = Instant::now();
        for piece in wanted.into_iter().flat_map(|run| run.chunks(PAGES_PER_REQUEST).collect::<Vec<_>>()) {
            let content = self.fetch_now(array, piece)?;
            let at = (piece.start - run.start) as usize * PAGE_SIZE;
            out[at..at + content.len()].copy_from_slice(&content);
            self.record_wait(array, piece, begun.elapsed(), keep.then_some(content));
        }
        Ok(())
    }

    /// Pages of `run` that were missing when the machine arrived.
    pub fn missing_runs(&self, array: usize, run: PageRun) -> Vec<PageRun> {
        let state = lock(&self.state);
        state.missing.get(array).map_or_else(Vec::new, |owed| owed.runs_within(run).collect())
    }

    fn fetch_now(&self, array: usize, run: PageRun) -> Result<Vec<u8>, PageFetchError> {
        let lane = self.connection(FetchPriority::Urgent, CONNECT_TIMEOUT);
        let lane = lane.ok_or_else(|| PageFetchError::NotConnected { from: self.from.clone() })?;
        let ask = FetchRange { array, runs: vec![run] };
        let outcome = self.send_request(&*lane, &ask).and_then(PendingReply::wait);
        self.handle_reply(&lane, &ask, outcome)
    }

    fn send_request(
        &self,
        lane: &dyn FetchConnection,
        ask: &FetchRange,
    ) -> Result<Box<dyn PendingReply>, LinkError> {
        let (handover, stand) = (self.handover, lock(&self.state).progress);
        let fetch = Fetch { handover, array: ask.array as u32, runs: ask.runs.clone(), stand };
        let header = postcard::to_stdvec(&fetch).map_err(|error| LinkError::Lost { source: error.into() })?;
        lane.request(FETCH, header)
    }

    /// Decodes a reply; stops using a lost connection.
    fn handle_reply(
        &self,
        lane: &Arc<dyn FetchConnection>,
        ask: &FetchRange,
        outcome: Result<(Bytes, Bytes), LinkError>,
    ) -> Result<Vec<u8>, PageFetchError> {
        let from = self.from.clone();
        let (header, payload) = match outcome {
            Ok(reply) => reply,
            Err(LinkError::Lost { .. }) => {
                self.connection_lost(lane);
                return Err(PageFetchError::NotConnected { from });
            }
            Err(source) => return Err(PageFetchError::Refused { from, source }),
        };
        let garbled = |source: BoxError| PageFetchError::Reply { from: from.clone(), source };
        let fetched: Fetched = postcard::from_bytes(&header).map_err(|error| garbled(error.into()))?;
        fetch_reply::decode(&ask.runs, &fetched, &payload)
            .map_err(|error: FetchReplyError| garbled(error.into()))
    }

    fn connection_lost(&self, lane: &Arc<dyn FetchConnection>) {
        let mut state = lock(&self.state);
        state.fetch_state = state.fetch_state.step(FetchEvent::LinkLost).0;
        let State { urgent, bulk, .. } = &mut *state;
        for place in [urgent, bulk] {
            if place.as_ref().is_some_and(|known| Arc::ptr_eq(known, lane)) {
                *place = None;
            }
        }
    }

    /// Connection of this kind; waits at most `patience` for one.
    fn connection(&self, kind: FetchPriority, patience: Duration) -> Option<Arc<dyn FetchConnection>> {
        let of = |state: &State| match kind {
            FetchPriority::Urgent => state.urgent.clone(),
            FetchPriority::Bulk => state.bulk.clone(),
        };
        let none = |state: &mut State| of(state).is_none() && !self.is_closed();
        let (state, _) = self
            .changed
            .wait_timeout_while(lock(&self.state), patience, none)
            .unwrap_or_else(PoisonError::into_inner);
        of(&state).filter(|_| !self.is_closed())
    }

    fn record_wait(&self, array: usize, run: PageRun, took: Duration, content: Option<Vec<u8>>) {
        let micros = took.as_micros() as u64;
        let mut state = lock(&self.state);
        state.progress.faults += 1;
        state.progress.waited_us += micros;
        state.progress.longest_us = state.progress.longest_us.max(micros);
        state.faults.push_back((array, run.start));
        if let Some(content) = content.filter(|_| state.unstored.len() < UNSTORED_MAX) {
            state.unstored.push_back((array, run, content));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Fetches all missing pages into `stores`, one for each array (none: that array is skipped), until none
    /// is missing or the fetcher is closed. Returns whether none is missing.
    pub fn fetch_all(&self, stores: &[Option<Arc<dyn PageStore>>]) -> bool {
        while !self.is_closed() {
            let missing = self.missing(stores);
            let left: u64 = missing.iter().map(PageSet::count).sum();
            lock(&self.state).progress.missing = left;
            if left == 0 {
                return true;
            }
            let hot = lock(&self.state).hot.clone();
            BackgroundFetch {
                fetcher: self,
                stores,
                schedule: FetchSchedule::new(missing, &hot),
                window: FetchWindow::new(),
                in_flight: VecDeque::new(),
            }
            .run();
        }
        false
    }

    fn missing(&self, stores: &[Option<Arc<dyn PageStore>>]) -> Vec<PageSet> {
        let owed = lock(&self.state).missing.clone();
        let missing = |(index, owed): (usize, &PageSet)| match stores.get(index) {
            Some(Some(store)) => store.missing(owed),
            _ => PageSet::empty(owed.len()),
        };
        owed.iter().enumerate().map(missing).collect()
    }

    /// Records that every page is here, durable and recorded: no page is requested again. Reports it to the
    /// source, which otherwise learns it at its next offer of a connection.
    pub fn mark_complete(&self) {
        let lane = {
            let mut state = lock(&self.state);
            state.fetch_state = state.fetch_state.step(FetchEvent::LastStored).0;
            state.progress.missing = 0;
            state.urgent.clone().or_else(|| state.bulk.clone())
        };
        let Some(lane) = lane else { return };
        let told = postcard::to_stdvec(&self.handover)
            .map_err(BoxError::from)
            .and_then(|header| Ok(lane.request(COMPLETE, header)?.wait()?));
        if let Err(error) = told {
            tracing::debug!(handover = %self.handover, error = &*error, "the source did not receive the completion");
        }
    }

    /// Closes the fetcher: readers stop waiting, and nothing is requested any more.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let mut state = lock(&self.state);
        let lanes = [state.urgent.take(), state.bulk.take()];
        drop(state);
        lanes.iter().flatten().for_each(|lane| lane.close());
        self.changed.notify_all();
    }

    /// Opens the fetcher again after [`PageFetcher::close`], when the machine restarts here.
    pub fn reopen(&self) {
        self.closed.store(false, Ordering::Release);
    }

    /// Whether the fetcher is closed.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Current status of the fetcher.
    pub fn status(&self) -> PageFetcherStatus {
        let state = lock(&self.state);
        PageFetcherStatus {
            from: self.from.clone(),
            missing_at_start: state.missing.iter().map(PageSet::count).sum(),
            progress: state.progress,
            connected: state.urgent.is_some(),
            stalled: state.stalled.clone(),
        }
    }
}

struct BackgroundFetch<'a> {
    fetcher: &'a PageFetcher,
    stores: &'a [Option<Arc<dyn PageStore>>],
    schedule: FetchSchedule,
    window: FetchWindow,
    in_flight: VecDeque<InFlight>,
}

struct InFlight {
    lane: Arc<dyn FetchConnection>,
    ask: FetchRange,
    sent: Instant,
    reply: Box<dyn PendingReply>,
}

impl BackgroundFetch<'_> {
    fn run(mut self) {
        while !self.fetcher.is_closed() {
            self.drain_events();
            let asked = self.fill_up();
            let Some(InFlight { lane, ask, sent, reply }) = self.in_flight.pop_front() else {
                if asked {
                    return;
                }
                continue;
            };
            match self.fetcher.handle_reply(&lane, &ask, reply.wait()) {
                Ok(content) => {
                    self.window.answered(sent.elapsed());
                    self.store(&ask, &content);
                }
                Err(error) => self.handle_error(&ask, &error),
            }
        }
    }

    /// Applies the faults and pages that readers reported meanwhile.
    fn drain_events(&mut self) {
        let (touched, spare) = {
            let mut state = lock(&self.fetcher.state);
            state.progress.missing = self.schedule.missing();
            (std::mem::take(&mut state.faults), std::mem::take(&mut state.unstored))
        };
        for (array, page) in touched {
            // The page itself was answered, so it is here or about to be; its neighbours come next.
            self.schedule.faulted(array, page);
            self.window.waited();
        }
        for (array, run, content) in spare {
            self.store(&FetchRange { array, runs: vec![run] }, &content);
        }
    }

    /// Sends requests until enough are in flight. False if there is no connection.
    fn fill_up(&mut self) -> bool {
        while self.in_flight.len() < self.window.limit() {
            let Some(ask) = self.schedule.next(PAGES_PER_REQUEST) else { return true };
            let Some(lane) = self.fetcher.connection(FetchPriority::Bulk, CONNECT_TIMEOUT) else {
                self.schedule.lost(&ask);
                return false;
            };
            match self.fetcher.send_request(&*lane, &ask) {
                Ok(reply) => {
                    self.in_flight.push_back(InFlight { lane, ask, sent: Instant::now(), reply });
                }
                Err(error) => {
                    self.schedule.lost(&ask);
                    // Called for its effect: the connection is no longer used.
                    let _ = self.fetcher.handle_reply(&lane, &ask, Err(error));
                    return false;
                }
            }
        }
        true
    }

    fn store(&mut self, ask: &FetchRange, content: &[u8]) {
        let Some(Some(store)) = self.stores.get(ask.array) else { return };
        let mut rest = content;
        for run in &ask.runs {
            let (piece, after) = rest.split_at(run.bytes());
            if let Err(error) = store.fill(*run, piece) {
                self.schedule.lost(ask);
                return self.pause(error.to_string());
            }
            rest = after;
        }
        self.schedule.arrived(ask);
        lock(&self.fetcher.state).stalled = None;
    }

    fn handle_error(&mut self, ask: &FetchRange, error: &PageFetchError) {
        self.schedule.lost(ask);
        match error {
            PageFetchError::NotConnected { .. } => {
                lock(&self.fetcher.state).stalled = Some(error.to_string())
            }
            PageFetchError::Refused { source, .. } => self.pause(format!("{error}: {source}")),
            PageFetchError::Reply { source, .. } => self.pause(format!("{error}: {source}")),
        }
    }

    fn pause(&mut self, why: String) {
        let mut state = lock(&self.fetcher.state);
        if state.stalled.as_ref() != Some(&why) {
            tracing::warn!(handover = %self.fetcher.handover, why, "missing pages of a machine do not arrive");
        }
        state.stalled = Some(why);
        let open = |_: &mut State| !self.fetcher.is_closed();
        let waited = self.fetcher.changed.wait_timeout_while(state, RETRY_PAUSE, open);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
