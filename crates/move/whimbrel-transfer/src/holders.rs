//! Holders to fetch from, nearest first, and the state of each.
//!
//! A lost link is dialled again later, after half a second at first and ten at most; a holder that sent wrong
//! data is not asked again. All fetches share the list: a pull sees that a running machine waits for a page
//! ([`Demand`]) and sends no requests meanwhile.

use crate::{Link, LinkError, LinkMeter, TransferError, protocol::HasObjects};
use bytes::Bytes;
use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::{Digest, lock};

/// Most holders in a list.
pub const HOLDERS_MAX: usize = 64;
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(10);

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
    Up(Arc<dyn Link>),
    Down { until: Instant, wait: Duration, why: LinkError },
    Blamed { digest: Digest },
}

struct Entry {
    peer: Box<dyn Holder>,
    state: Mutex<State>,
    /// Held while dialling, so that a holder is dialled once.
    dialling: Mutex<()>,
    meter: Mutex<LinkMeter>,
}

/// List of holders, nearest first.
pub struct Holders {
    entries: Vec<Entry>,
    demands: AtomicUsize,
    started: Instant,
    retry: Duration,
}

/// Guard that lives while something is wanted at once.
#[derive(Debug)]
pub struct Demand<'a>(&'a AtomicUsize);

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Holders {
    /// List of `peers`, ordered by their round trips; those without one follow in their order. More than
    /// [`HOLDERS_MAX`] are left out.
    pub fn new(mut peers: Vec<Box<dyn Holder>>) -> Self {
        peers.sort_by_key(|peer| peer.round_trip().unwrap_or(Duration::MAX));
        peers.truncate(HOLDERS_MAX);
        let entry = |peer: Box<dyn Holder>| {
            let mut meter = LinkMeter::default();
            peer.round_trip().into_iter().for_each(|time| meter.set_round_trip(time));
            Entry {
                peer,
                state: Mutex::new(State::Fresh),
                dialling: Mutex::default(),
                meter: Mutex::new(meter),
            }
        };
        let entries = peers.into_iter().map(entry).collect();
        Self { entries, demands: AtomicUsize::new(0), started: Instant::now(), retry: RETRY_FIRST }
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
        Demand(&self.demands)
    }

    /// Whether something is wanted at once.
    pub(crate) fn is_demanded(&self) -> bool {
        self.demands.load(Ordering::Acquire) > 0
    }

    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn meter(&self, peer: usize) -> MutexGuard<'_, LinkMeter> {
        lock(&self.entries[peer].meter)
    }

    /// Link to a holder, dialled if need be; an error while it is not yet time to dial again.
    pub(crate) fn link(&self, peer: usize) -> Result<Arc<dyn Link>, LinkError> {
        let entry = &self.entries[peer];
        let _one = lock(&entry.dialling);
        let wait = match &*lock(&entry.state) {
            State::Up(link) => return Ok(link.clone()),
            State::Blamed { .. } => return Err(LinkError::lost("the holder sent wrong data before")),
            State::Down { until, why, .. } if *until > Instant::now() => return Err(why.clone()),
            State::Down { wait, .. } => (*wait * 2).min(RETRY_MAX),
            State::Fresh => self.retry,
        };
        let connected = entry.peer.connect().and_then(|link| {
            let begun = Instant::now();
            crate::call::<HasObjects>(&*link, &(), Bytes::new())?;
            lock(&entry.meter).set_round_trip(begun.elapsed());
            Ok(link)
        });
        let mut state = lock(&entry.state);
        match connected {
            Ok(link) => {
                *state = State::Up(link.clone());
                Ok(link)
            }
            Err(why) => {
                *state = State::Down { until: Instant::now() + wait, wait, why: why.clone() };
                Err(why)
            }
        }
    }

    /// Reports a lost link of a holder. Has no effect on a link that was dialled since.
    pub(crate) fn lost(&self, peer: usize, link: &Arc<dyn Link>, why: &LinkError) {
        let mut state = lock(&self.entries[peer].state);
        if matches!(&*state, State::Up(up) if Arc::ptr_eq(up, link)) {
            let until = Instant::now() + self.retry;
            *state = State::Down { until, wait: self.retry, why: why.clone() };
        }
    }

    /// Time at which a holder that is down may be dialled again; none if it is up or blamed.
    pub(crate) fn dial_at(&self, peer: usize) -> Option<Instant> {
        match &*lock(&self.entries[peer].state) {
            State::Down { until, .. } => Some(*until),
            State::Fresh => Some(Instant::now()),
            State::Up(_) | State::Blamed { .. } => None,
        }
    }

    /// Blames a holder that sent wrong data: it is not asked again.
    pub(crate) fn blame(&self, peer: usize, digest: Digest) {
        tracing::warn!(peer = self.name(peer), %digest, "a holder sent wrong data and is not asked again");
        *lock(&self.entries[peer].state) = State::Blamed { digest };
    }

    pub(crate) fn is_blamed(&self, peer: usize) -> bool {
        matches!(&*lock(&self.entries[peer].state), State::Blamed { .. })
    }

    pub(crate) fn no_holder_error(&self, digest: Digest) -> TransferError {
        let (mut source, mut wrong) = (None, None);
        for (peer, entry) in self.entries.iter().enumerate() {
            match &*lock(&entry.state) {
                State::Down { why, .. } => source = Some(why.clone()),
                State::Blamed { digest } => wrong = Some((peer, *digest)),
                State::Fresh | State::Up(_) => {}
            }
        }
        match (source, wrong) {
            (None, Some((peer, digest))) => {
                TransferError::WrongData { peer: self.name(peer).to_owned(), digest }
            }
            (source, _) => TransferError::NoHolder { digest, retryable: source.is_some(), source },
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

whimbrel_core::opaque_debug!(Holders);
