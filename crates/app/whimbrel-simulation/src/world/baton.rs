//! Baton: stops and goes on with real threads, so that only one runs at a time.
//!
//! Each thread sleeps on a word of its own until it is given the baton. A killed thread is never given it
//! again: it sleeps until the process of the seed ends.

use super::{
    me,
    schedule::{Stuck, ThreadId, Wait},
    with,
};
use crate::{raw, report};
use std::sync::atomic::{AtomicU32, Ordering};

/// A word for a new thread.
pub(crate) fn new_word() -> &'static AtomicU32 {
    Box::leak(Box::new(AtomicU32::new(0)))
}

/// Sleeps until this thread has the baton.
pub(crate) fn await_turn(word: &AtomicU32) {
    while word.swap(0, Ordering::Acquire) == 0 {
        raw::wait_while_zero(word);
    }
}

fn give(word: &AtomicU32) {
    word.store(1, Ordering::Release);
    raw::wake(word);
}

/// A place at which another thread may go on.
pub(crate) fn point() {
    let me = me();
    let next = with(|world| {
        let next = world.schedule.chance(me)?;
        Some((world.schedule.baton(next), world.schedule.baton(me)))
    });
    if let Some((next, own)) = next {
        give(next);
        await_turn(own);
    }
}

/// Waits, until `deadline` at most. Whether it was woken before that.
pub(crate) fn wait(wait: Wait, deadline: Option<u64>) -> bool {
    let me = me();
    let (next, own) = with(|world| {
        world.schedule.wait(me, wait, deadline);
        let next = world.schedule.pick().map(|next| (next, world.schedule.baton(next)));
        (next, world.schedule.baton(me))
    });
    match next {
        Ok((next, _)) if next == me => {}
        Ok((_, word)) => {
            give(word);
            await_turn(own);
        }
        Err(stuck) => deadlock(&stuck),
    }
    with(|world| !world.schedule.threads[&me].timed_out)
}

/// Sleeps for a time in nanoseconds.
pub(crate) fn sleep(time: u64) {
    let until = with(|world| world.schedule.now + time);
    wait(Wait::Sleep, Some(until));
}

/// Passes the baton on for good: this thread has ended.
pub(crate) fn leave() {
    match with(|world| world.schedule.pick().map(|next| world.schedule.baton(next))) {
        Ok(next) => give(next),
        Err(stuck) => deadlock(&stuck),
    }
}

/// Passes the baton on and never goes on: this thread was killed.
pub(crate) fn die(me: ThreadId) -> ! {
    let own = with(|world| world.schedule.baton(me));
    leave();
    loop {
        await_turn(own);
    }
}

fn deadlock(stuck: &Stuck) -> ! {
    let waiting = stuck.0.iter().map(|(thread, process, wait)| format!("t{thread} of p{process}: {wait:?}"));
    let waiting: Vec<String> = waiting.collect();
    report::violation("ends_or_says", &format!("deadlock: {}", waiting.join(", ")))
}
