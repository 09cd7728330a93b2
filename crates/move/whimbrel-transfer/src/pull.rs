//! Pull: copies a complete capsule to this host.
//!
//! Objects are stored as they arrive, so a pull that fails loses at most what was in flight, and the next
//! pull continues after checking what is here. No ref is set before the capsule is complete. Blobs that
//! arrive in ranges are the exception: they stay in memory until their digest can be compared.

use crate::{
    Holders, LocalObjects, PageLookup, TransferError, pull_driver::PullDriver, tree_walk::PageCounts,
};
use std::{sync::atomic::AtomicBool, time::Duration};
use whimbrel_core::{CapsuleId, RefName};
use whimbrel_store::{Expected, Store};

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

/// Copies a capsule into `store` and points `refs` at it, once it is complete.
pub fn pull(
    store: &Store,
    sources: &Holders,
    capsule: CapsuleId,
    refs: &[RefName],
    options: Options<'_>,
) -> Result<Report, TransferError> {
    let commit = |source| TransferError::Commit { source };
    let report = fetch_capsule(store, sources, capsule, options)?;
    if store.is_partial(&capsule).map_err(commit)? {
        store.complete(&capsule).map_err(commit)?;
    }
    refs.iter().try_for_each(|name| store.set_ref(name, &capsule, Expected::Anything)).map_err(commit)?;
    Ok(report)
}

/// Copies all objects of a capsule into `shelf`.
pub fn fetch_capsule(
    shelf: &dyn LocalObjects,
    sources: &Holders,
    capsule: CapsuleId,
    options: Options<'_>,
) -> Result<Report, TransferError> {
    let cpu = cpu_time();
    let mut driver = PullDriver::new(shelf, sources, options.page_sources);
    let ended = driver.capsule(capsule, options);
    let flushed = shelf.flush().map_err(|source| TransferError::Store { source });
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
