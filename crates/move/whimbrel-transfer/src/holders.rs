//! Holders to fetch from, nearest first, and the state of each.
//!
//! A lost link is dialled again later, after half a second at first and ten at most; a holder that sent wrong
//! data is not asked again. Each dial has a thread of its own, so a host that does not answer delays nobody
//! who can be served by another. All fetches share the list: a pull sees that a running machine waits for a
//! page ([`Demand`]) and sends no requests meanwhile.
//!
//! A host that lost its power or its cable says nothing, and its link counts as up for seconds. Whoever waits
//! for a page notes that nothing arrives from it ([`Holders::quiet`]); until something does, the others are
//! asked.

use crate::{Link, LinkError, LinkMeter, TransferError, protocol::HasObjects};
use bytes::Bytes;
use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::{Digest, lock};

/// Most holders in a list.
pub const HOLDERS_MAX: usize = 64;
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Time without a byte from a holder after which another one is asked, and the most of it for one that is
/// far.
const QUIET_AFTER: Duration = Duration::from_millis(100);
const QUIET_AFTER_MAX: Duration = Duration::from_secs(2);
/// Time after a demand in which the next one is expected.
const DEMAND_EXPECTED: Duration = Duration::from_secs(2);

/// Host or pool that may have what is wanted.
pub trait Holder: Send + Sync {
    /// Name of the holder.
    fn name(&self) -> &str;

    /// Connects. Blocks as long as the caller allows for a connection.
    fn connect(&self) -> Result<Arc<dyn Link>, LinkError>;

    /// Round trip to the holder, if it is known.
    fn round_trip(&self) -> Option<Duration> {
        None
    }
}

enum State {
    Fresh,
    /// A thread connects.
    Dialling(Attempt),
    Up(Arc<dyn Link>),
    Down {
        until: Instant,
        wait: Duration,
        why: LinkError,
    },
    Blamed {
        digest: Digest,
    },
}

/// One dial of a holder.
#[derive(Clone)]
struct Attempt {
    /// Wait before the next one, if it fails.
    wait: Duration,
    /// Failure of the one before.
    before: Option<LinkError>,
}

/// Whether a holder can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    Up,
    /// Being dialled at the moment.
    Dialling {
        /// Whether the dial before failed.
        again: bool,
    },
    Down,
    Blamed,
}

struct Entry {
    peer: Box<dyn Holder>,
    state: Mutex<State>,
    meter: Mutex<LinkMeter>,
    /// Bytes that had arrived over the link when nothing more did.
    quiet: Mutex<Option<u64>>,
}

/// Number of dials that have ended.
#[derive(Default)]
struct EndedDials {
    number: Mutex<u64>,
    changed: Condvar,
}

/// List of holders, nearest first.
pub struct Holders {
    entries: Vec<Arc<Entry>>,
    ended_dials: Arc<EndedDials>,
    demands: AtomicUsize,
    /// Milliseconds from `started` until the next demand is no longer expected.
    expected_until: AtomicU64,
    started: Instant,
    retry: Duration,
}

/// Guard that lives while something is wanted at once.
#[derive(Debug)]
pub struct Demand<'a>(&'a Holders);

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        let until = self.0.now() + DEMAND_EXPECTED;
        self.0.expected_until.fetch_max(until.as_millis() as u64, Ordering::AcqRel);
        self.0.demands.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Holders {
    /// List of `peers`, ordered by their round trips; those without one follow in their order. More than
    /// [`HOLDERS_MAX`] are left out.
    pub fn new(mut peers: Vec<Box<dyn Holder>>) -> Self {
        peers.sort_by_key(|peer| peer.round_trip().unwrap_or(Duration::MAX));
        Self::in_order(peers)
    }

    /// List of `first`, however far it is, and then `others` as in [`Self::new`].
    pub fn led_by(first: Box<dyn Holder>, mut others: Vec<Box<dyn Holder>>) -> Self {
        others.sort_by_key(|peer| peer.round_trip().unwrap_or(Duration::MAX));
        others.insert(0, first);
        Self::in_order(others)
    }

    fn in_order(mut peers: Vec<Box<dyn Holder>>) -> Self {
        peers.truncate(HOLDERS_MAX);
        let entry = |peer: Box<dyn Holder>| {
            let mut meter = LinkMeter::default();
            peer.round_trip().into_iter().for_each(|time| meter.set_round_trip(time));
            Arc::new(Entry {
                peer,
                state: Mutex::new(State::Fresh),
                meter: Mutex::new(meter),
                quiet: Mutex::default(),
            })
        };
        let entries = peers.into_iter().map(entry).collect();
        Self {
            entries,
            ended_dials: Arc::default(),
            demands: AtomicUsize::new(0),
            expected_until: AtomicU64::new(0),
            started: Instant::now(),
            retry: RETRY_FIRST,
        }
    }

    /// Changes the first wait before a holder that does not answer is dialled again, instead of half a
    /// second.
    #[must_use]
    pub fn with_retry(self, retry: Duration) -> Self {
        Self { retry, ..self }
    }

    pub(crate) fn retry(&self) -> Duration {
        self.retry
    }

    /// Number of holders.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no holders.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Name of a holder.
    pub fn name(&self, peer: usize) -> &str {
        self.entries[peer].peer.name()
    }

    /// Bytes a second of the nearest holder that was measured.
    pub fn rate(&self) -> Option<u64> {
        self.entries.iter().find_map(|entry| lock(&entry.meter).rate())
    }

    /// Round trip of the nearest holder that was measured.
    pub fn round_trip(&self) -> Option<Duration> {
        self.entries.iter().find_map(|entry| lock(&entry.meter).round_trip())
    }

    /// Bytes sent and received over the links that are up now.
    pub fn bytes(&self) -> (u64, u64) {
        self.entries.iter().fold((0, 0), |sum, entry| match &*lock(&entry.state) {
            State::Up(link) => (sum.0 + link.bytes().0, sum.1 + link.bytes().1),
            _ => sum,
        })
    }

    /// Announces that something is wanted at once, until the guard is dropped.
    pub fn demand(&self) -> Demand<'_> {
        self.demands.fetch_add(1, Ordering::AcqRel);
        Demand(self)
    }

    /// Whether something is wanted at once.
    pub(crate) fn is_demanded(&self) -> bool {
        self.demands.load(Ordering::Acquire) > 0
    }

    /// Whether a machine lives from the holders: something is wanted at once, or was a moment ago.
    pub(crate) fn serves_machine(&self) -> bool {
        self.is_demanded() || self.now().as_millis() < self.expected_until.load(Ordering::Acquire).into()
    }

    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn meter(&self, peer: usize) -> MutexGuard<'_, LinkMeter> {
        lock(&self.entries[peer].meter)
    }

    /// Link to a holder that is up.
    pub(crate) fn link(&self, peer: usize) -> Result<Arc<dyn Link>, LinkError> {
        match &*lock(&self.entries[peer].state) {
            State::Up(link) => Ok(link.clone()),
            State::Down { why, .. } | State::Dialling(Attempt { before: Some(why), .. }) => Err(why.clone()),
            State::Fresh | State::Dialling(_) => Err(LinkError::lost("the holder is not connected yet")),
            State::Blamed { .. } => Err(LinkError::lost("the holder sent wrong data before")),
        }
    }

    /// Starts to dial a holder in the background, if it is time to.
    pub(crate) fn dial(&self, peer: usize) {
        let entry = self.entries[peer].clone();
        let attempt = {
            let mut state = lock(&entry.state);
            let attempt = match &*state {
                State::Fresh => Attempt { wait: self.retry, before: None },
                State::Down { until, wait, why } if *until <= Instant::now() => {
                    Attempt { wait: (*wait * 2).min(RETRY_MAX), before: Some(why.clone()) }
                }
                _ => return,
            };
            *state = State::Dialling(attempt.clone());
            attempt
        };
        let (dialled, ended, wait) = (entry.clone(), self.ended_dials.clone(), attempt.wait);
        let dial = move || {
            let outcome = dialled.connect();
            dialled.end_dial(wait, outcome);
            *lock(&ended.number) += 1;
            ended.changed.notify_all();
        };
        if let Err(error) = std::thread::Builder::new().name("dial".to_owned()).spawn(dial) {
            entry.end_dial(wait, Err(LinkError::lost(error)));
        }
    }

    pub(crate) fn reach(&self, peer: usize) -> Reach {
        match &*lock(&self.entries[peer].state) {
            State::Up(_) => Reach::Up,
            State::Dialling(attempt) => Reach::Dialling { again: attempt.before.is_some() },
            State::Fresh | State::Down { .. } => Reach::Down,
            State::Blamed { .. } => Reach::Blamed,
        }
    }

    /// Number of dials that have ended.
    pub(crate) fn ended_dials(&self) -> u64 {
        *lock(&self.ended_dials.number)
    }

    /// Waits until more dials than `seen` have ended, or until the timeout.
    pub(crate) fn wait_for_dial(&self, seen: u64, timeout: Duration) {
        let number = lock(&self.ended_dials.number);
        let waited = self.ended_dials.changed.wait_timeout_while(number, timeout, |number| *number == seen);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Reports a lost link of a holder. Has no effect on a link that was dialled since.
    pub(crate) fn lost(&self, peer: usize, link: &Arc<dyn Link>, why: &LinkError) {
        let mut state = lock(&self.entries[peer].state);
        if matches!(&*state, State::Up(up) if Arc::ptr_eq(up, link)) {
            let until = Instant::now() + self.retry;
            *state = State::Down { until, wait: self.retry, why: why.clone() };
        }
    }

    /// How long nothing may arrive from a holder before it counts as quiet: a few of its round trips.
    pub(crate) fn quiet_after(&self, peer: usize) -> Duration {
        let round_trip = lock(&self.entries[peer].meter).round_trip().unwrap_or_default();
        (QUIET_AFTER + 4 * round_trip).min(QUIET_AFTER_MAX)
    }

    /// Notes that nothing arrives from a holder.
    pub(crate) fn quiet(&self, peer: usize, link: &Arc<dyn Link>) {
        tracing::info!(
            holder = self.name(peer),
            "a holder is quiet; others are asked for what is wanted at once"
        );
        *lock(&self.entries[peer].quiet) = Some(link.bytes().1);
    }

    /// Whether a holder was quiet, and nothing has arrived from it since.
    pub(crate) fn is_quiet(&self, peer: usize) -> bool {
        let since = *lock(&self.entries[peer].quiet);
        match &*lock(&self.entries[peer].state) {
            State::Up(link) => since == Some(link.bytes().1),
            _ => false,
        }
    }

    /// Whether another holder is up, from which something arrives.
    pub(crate) fn has_other(&self, peer: usize) -> bool {
        let is_up = |other: usize| matches!(&*lock(&self.entries[other].state), State::Up(_));
        (0..self.len()).any(|other| other != peer && is_up(other) && !self.is_quiet(other))
    }

    /// Starts to dial the nearest of the others in the background, unless one is up or being dialled: it may
    /// be needed at once.
    pub(crate) fn dial_next(&self, peer: usize) {
        let others = || (0..self.len()).filter(|other| *other != peer);
        if others().all(|other| matches!(self.reach(other), Reach::Down | Reach::Blamed)) {
            others()
                .find(|other| self.reach(*other) == Reach::Down)
                .into_iter()
                .for_each(|next| self.dial(next));
        }
    }

    /// Starts to dial the others in the background, as far as it is time to.
    pub(crate) fn dial_others(&self, peer: usize) {
        (0..self.len()).filter(|other| *other != peer).for_each(|other| self.dial(other));
    }

    /// Blames a holder that sent wrong data: it is not asked again.
    pub(crate) fn blame(&self, peer: usize, digest: Digest) {
        tracing::warn!(peer = self.name(peer), %digest, "a holder sent wrong data and is not asked again");
        *lock(&self.entries[peer].state) = State::Blamed { digest };
    }

    /// Error that no holder gave `digest`; `refused` is the last refusal of one that may give it later.
    pub(crate) fn no_holder_error(&self, digest: Digest, refused: Option<LinkError>) -> TransferError {
        let (mut source, mut wrong) = (refused, None);
        // What nobody was asked for may be there.
        let mut retryable = source.is_some() || self.entries.is_empty();
        for (peer, entry) in self.entries.iter().enumerate() {
            match &*lock(&entry.state) {
                State::Down { why, .. } | State::Dialling(Attempt { before: Some(why), .. }) => {
                    source = Some(why.clone());
                    retryable = true;
                }
                State::Blamed { digest } => wrong = Some((peer, *digest)),
                State::Fresh | State::Dialling(_) => retryable = true,
                State::Up(_) => {}
            }
        }
        match wrong {
            Some((peer, digest)) if !retryable => {
                TransferError::WrongData { peer: self.name(peer).to_owned(), digest }
            }
            _ => TransferError::NoHolder { digest, retryable, source },
        }
    }

    /// Names of the holders that were blamed, and the digests.
    pub fn blamed(&self) -> Vec<(String, Digest)> {
        let blamed = self.entries.iter().filter_map(|entry| match &*lock(&entry.state) {
            State::Blamed { digest } => Some((entry.peer.name().to_owned(), *digest)),
            _ => None,
        });
        blamed.collect()
    }
}

impl Entry {
    fn connect(&self) -> Result<Arc<dyn Link>, LinkError> {
        let link = self.peer.connect()?;
        let begun = Instant::now();
        crate::call::<HasObjects>(&*link, &(), Bytes::new())?;
        lock(&self.meter).set_round_trip(begun.elapsed());
        Ok(link)
    }

    /// Records the outcome of a dial, unless the holder was blamed meanwhile.
    fn end_dial(&self, wait: Duration, outcome: Result<Arc<dyn Link>, LinkError>) {
        let mut state = lock(&self.state);
        if matches!(&*state, State::Dialling(_)) {
            *lock(&self.quiet) = None;
            *state = match outcome {
                Ok(link) => State::Up(link),
                Err(why) => State::Down { until: Instant::now() + wait, wait, why },
            };
        }
    }
}

whimbrel_core::opaque_debug!(Holders);
