//! Pull: copies a complete capsule to this host.
//!
//! Objects are stored as they arrive, so a pull that fails loses at most what was in flight, and the next
//! pull continues after checking what is here. Blobs that arrive in ranges are the exception: they stay in
//! memory until their digest can be compared.
//!
//! Refs move last: until the capsule is complete here they name what they named before, which garbage
//! collection retains. A pin retains what has arrived while the pull runs.

use crate::{
    Holders, LocalObjects, PageLookup, TransferError, pull_driver::PullDriver, tree_walk::PageCounts,
};
use std::{sync::atomic::AtomicBool, time::Duration};
use whimbrel_core::{
    CapsuleId, RefName,
    loss::{Loss, is_back},
};
use whimbrel_store::{Expected, Store, StoreError};

/// Most walks of one pull. What the pin does not lead to yet, such as pages whose leaf is still to come, may
/// be collected; the next walk finds that.
const ATTEMPTS: usize = 4;

/// Options of a pull.
pub struct Options<'a> {
    /// Similar capsules that may be here: the machine's previous one first.
    pub bases: Vec<CapsuleId>,
    /// Additional sources of pages on this host.
    pub page_sources: &'a [&'a dyn PageLookup],
    /// Flag that cancels the pull when it is set.
    pub cancel: &'a AtomicBool,
    /// Called with the progress from time to time.
    pub progress: &'a mut dyn FnMut(&Progress),
    /// Time to wait for holders that do not answer.
    pub holder_timeout: Duration,
}

/// Progress of a pull.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of bytes received.
    pub received: u64,
    /// Estimated bytes still to receive, for what is known to be missing.
    pub left: u64,
    /// Bytes a second, once measured.
    pub rate: Option<u64>,
    /// Estimated time left, at this rate.
    pub eta: Option<Duration>,
}

/// Result of a pull.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes of wire frames sent.
    pub sent: u64,
    /// Bytes of wire frames received.
    pub received: u64,
    /// Number of requests made.
    pub requests: u64,
    /// Sources of the pages.
    pub pages: PageCounts,
    /// Processor time of the calling thread, if the system reports it.
    pub cpu: Option<Duration>,
}

impl Report {
    /// Adds the figures of a repeated fetch.
    fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.requests += other.requests;
        self.pages.add(&other.pages);
        self.cpu = self.cpu.into_iter().chain(other.cpu).reduce(|a, b| a + b);
    }
}

/// Copies a capsule into `store` and points `refs` at it, once it is complete. A ref that something else
/// moves in the meantime stays where that put it.
pub fn pull(
    store: &Store,
    sources: &Holders,
    capsule: CapsuleId,
    refs: &[RefName],
    mut options: Options<'_>,
) -> Result<Report, TransferError> {
    let commit = |source| TransferError::Commit { source };
    let before = refs.iter().map(|name| state_of(store, name)).collect::<Result<Vec<_>, _>>();
    let before = before.map_err(commit)?;
    // A manifest alone means nothing: a failed attempt may have left it.
    let mark = || match store.is_complete(&capsule)? {
        true => Ok(()),
        false => store.expect_partial(&capsule),
    };
    mark().map_err(commit)?;
    let (mut pin, mut report) = (None, Report::default());
    for left in (0..ATTEMPTS).rev() {
        let fetched = fetch(store, sources, capsule, &mut options, &mut || {
            // Until it is pinned, garbage collection may take the mark.
            pin = Some(mark().and_then(|()| store.pin(&capsule)).map_err(commit)?);
            if is_back(Loss::NameBeforePages) {
                store.adopt_partial(&capsule, refs).map_err(commit)?;
            }
            Ok(())
        });
        match fetched {
            // A collection may take the manifest, too.
            Err(TransferError::Commit { source: StoreError::Missing { .. } })
                if pin.is_none() && left > 0 =>
            {
                continue;
            }
            fetched => report.add(&fetched?),
        }
        if !store.is_partial(&capsule).map_err(commit)? {
            break;
        }
        match store.complete(&capsule) {
            Err(StoreError::Incomplete { .. }) if left > 0 => {
                tracing::info!(%capsule, "garbage collection took a part of a pull, which is fetched again");
            }
            completed => {
                completed.map_err(commit)?;
                break;
            }
        }
    }
    for (name, before) in refs.iter().zip(before) {
        match store.set_ref(name, &capsule, before) {
            Err(StoreError::RefChanged { found, .. }) => {
                tracing::info!(%name, ?found, "a ref was moved during the pull, and is left there");
            }
            set => set.map_err(commit)?,
        }
    }
    Ok(report)
}

/// Present state of a ref, as what a later change expects. A damaged ref may be replaced by anything.
pub fn state_of(store: &Store, name: &RefName) -> Result<Expected, StoreError> {
    match store.get_ref(name) {
        Ok(named) => Ok(named.map_or(Expected::Absent, Expected::Capsule)),
        Err(StoreError::SmallFile { .. }) => Ok(Expected::Anything),
        Err(error) => Err(error),
    }
}

/// Copies all objects of a capsule into `shelf`.
pub fn fetch_capsule(
    shelf: &dyn LocalObjects,
    sources: &Holders,
    capsule: CapsuleId,
    mut options: Options<'_>,
) -> Result<Report, TransferError> {
    fetch(shelf, sources, capsule, &mut options, &mut || Ok(()))
}

/// Copies the manifest of a capsule, calls `described`, and copies the rest.
fn fetch(
    shelf: &dyn LocalObjects,
    sources: &Holders,
    capsule: CapsuleId,
    options: &mut Options<'_>,
    described: &mut dyn FnMut() -> Result<(), TransferError>,
) -> Result<Report, TransferError> {
    let cpu = cpu_time();
    let flush = || shelf.flush().map_err(|source| TransferError::Store { source });
    let mut driver = PullDriver::new(shelf, sources, options.page_sources);
    driver.manifest(capsule, options)?;
    flush()?;
    described()?;
    let ended = driver.capsule(capsule, options);
    let flushed = flush();
    ended.and(flushed)?;
    let mut report = driver.report;
    report.pages = driver.walk.pages;
    report.cpu = cpu_time().zip(cpu).map(|(now, then)| now.saturating_sub(then));
    Ok(report)
}

/// Processor time of this thread: the first number of its scheduler statistics.
fn cpu_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(Duration::from_nanos(text.split(' ').next()?.parse().ok()?))
}
