//! Prefetch thread of the pager: fetches pages in the background.

use super::{
    Filling, PagerEnd, Prefetch, Shared,
    faults::reason,
    filler::{FillError, Filler, MAX_RUN},
};
use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};
use whimbrel_core::PageRun;

/// Niceness: less priority than the fault thread, the target and all others.
const NICE: i32 = 10;
/// Pages fetched at a time if the source prefers no run: enough for bandwidth, and short enough to pause
/// soon.
const RUN: u64 = 64;
/// Longest pause for a fault that is being handled (its source may hang while this one does not).
const STEP_ASIDE: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(200);

pub(super) fn run(shared: Arc<Shared>) {
    // On Linux this applies to the calling thread. If refused, the thread works at normal priority.
    let _ = rustix::process::setpriority_process(None, NICE);
    let mut filler = Filler::new(shared.clone());
    while let Some(run) = next_run(&shared) {
        step_aside(&shared);
        match filler.run(run) {
            Ok(()) => {
                shared.set_stalled(Filling::Prefetch, None);
                done(&shared, run);
            }
            Err(FillError::TargetEnded) => return shared.end(PagerEnd::TargetEnded),
            Err(error) => pause(&shared, &error),
        }
    }
}

/// Waits for work; `None` when the pager ends.
fn next_run(shared: &Shared) -> Option<PageRun> {
    let mut progress = shared.progress();
    loop {
        if shared.stopped() {
            return None;
        }
        if progress.state.prefetch == Prefetch::Running {
            match progress.wanted.runs().next() {
                Some(wanted) => {
                    drop(progress);
                    return Some(widened(shared, wanted));
                }
                None => {
                    progress.state.prefetch = Prefetch::Idle;
                    shared.changed.notify_all();
                }
            }
        }
        progress = shared.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Start of the wanted run, with the rest of its last page's frame, so that no frame is fetched twice.
fn widened(shared: &Shared, wanted: PageRun) -> PageRun {
    let last = wanted.start + wanted.len.min(RUN) - 1;
    let frame = shared.lazy.source.preferred_run(last);
    let end = frame.start.saturating_add(frame.len).max(last + 1).min(shared.inner.page_count());
    PageRun::new(wanted.start, (end - wanted.start).min(MAX_RUN))
}

fn done(shared: &Shared, run: PageRun) {
    let mut progress = shared.progress();
    progress.wanted.remove_run(run);
    if progress.wanted.is_empty() && progress.state.prefetch == Prefetch::Running {
        progress.state.prefetch = Prefetch::Idle;
        shared.changed.notify_all();
    }
}

fn step_aside(shared: &Shared) {
    let until = Instant::now() + STEP_ASIDE;
    while shared.busy.load(Ordering::Acquire) > 0 && !shared.stopped() && Instant::now() < until {
        thread::sleep(NAP);
    }
}

fn pause(shared: &Shared, error: &FillError) {
    shared.set_stalled(Filling::Prefetch, Some(reason(error)));
    let waits = |_: &mut super::Progress| !shared.stopped();
    let waited = shared.changed.wait_timeout_while(shared.progress(), PAUSE_AFTER_FAILURE, waits);
    drop(waited.unwrap_or_else(PoisonError::into_inner));
}
