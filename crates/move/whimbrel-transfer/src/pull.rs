//! Copies a whole capsule here.
//!
//! All that comes is kept as it comes, so a pull that ends early costs at most what was under way, and the
//! next one walks what is here and goes on. Nothing is named before it is whole. Blobs that come in pieces
//! are the exception: they live in memory until their digest can be compared.

use crate::{Holders, LocalObjects, PageLookup, SyncError, pull_driver::PullDriver, tree_walk::PageCounts};
use std::{sync::atomic::AtomicBool, time::Duration};
use whimbrel_core::{CapsuleId, RefName};
use whimbrel_store::{Expected, Store};

/// How a pull goes about it.
pub struct Options<'a> {
    /// Capsules that may be here and resemble it: the machine's previous one first.
    pub bases: Vec<CapsuleId>,
    /// Other places on this host where pages may lie.
    pub holders: &'a [&'a dyn PageLookup],
    /// Set to give up.
    pub cancel: &'a AtomicBool,
    /// Told now and then how far it is.
    pub progress: &'a mut dyn FnMut(&Progress),
    /// How long to wait for holders that do not answer.
    pub patience: Duration,
}

/// How far a pull is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes received.
    pub received: u64,
    /// Bytes that are probably still to come, of what is known to be missing.
    pub left: u64,
    /// Bytes a second, once measured.
    pub rate: Option<u64>,
    /// Until all is here, at this rate.
    pub eta: Option<Duration>,
}

/// What a pull did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes of frames sent and received.
    pub sent: u64,
    /// See `sent`.
    pub received: u64,
    /// Requests made.
    pub requests: u64,
    /// How pages came.
    pub pages: PageCounts,
    /// Processor time of the calling thread, if the system tells it.
    pub cpu: Option<Duration>,
}

/// Copies a capsule into `store` and names it `refs`, once all of it is here.
pub fn pull(
    store: &Store,
    sources: &Holders,
    capsule: CapsuleId,
    refs: &[RefName],
    options: Options<'_>,
) -> Result<Report, SyncError> {
    let commit = |source| SyncError::Commit { source };
    let report = fetch_capsule(store, sources, capsule, options)?;
    if store.is_partial(&capsule).map_err(commit)? {
        store.complete(&capsule).map_err(commit)?;
    }
    refs.iter().try_for_each(|name| store.set_ref(name, &capsule, Expected::Anything)).map_err(commit)?;
    Ok(report)
}

/// Brings all that a capsule consists of onto a shelf.
pub fn fetch_capsule(
    shelf: &dyn LocalObjects,
    sources: &Holders,
    capsule: CapsuleId,
    options: Options<'_>,
) -> Result<Report, SyncError> {
    let cpu = cpu_time();
    let mut driver = PullDriver::new(shelf, sources, options.holders);
    let ended = driver.capsule(capsule, options);
    let flushed = shelf.flush().map_err(|source| SyncError::Keep { source });
    ended.and(flushed)?;
    let mut report = driver.report;
    report.pages = driver.walk.pages;
    report.cpu = cpu_time().zip(cpu).map(|(now, then)| now.saturating_sub(then));
    Ok(report)
}

/// Time that this thread spent on a processor: the first number of its scheduler statistics.
fn cpu_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(Duration::from_nanos(text.split(' ').next()?.parse().ok()?))
}
