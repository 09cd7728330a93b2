//! Schedule: which threads there are, which of them may go on, and the clock. Pure: nothing here stops a
//! thread.
//!
//! Exactly one thread has the baton. If none can go on, the clock jumps to the next timer; if there is none
//! either, the world is stuck.

use super::{files::Inode, hosts::HostId};
use crate::random::Random;
use std::{collections::BTreeMap, sync::atomic::AtomicU32};

pub(crate) type ThreadId = u32;
pub(crate) type ProcessId = u32;

/// Time at which every world begins, in nanoseconds.
pub(crate) const BEGINNING: u64 = 1_000_000_000_000;

/// Reason why a thread does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The word at this address.
    Futex(usize),
    Join(ThreadId),
    Sleep,
    /// The lock on a file.
    Lock(HostId, Inode),
    /// A message for a host.
    Mail(HostId),
    /// The end of a process.
    Exit(ProcessId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThreadState {
    Runnable,
    Waiting(Wait),
    Finished,
    /// Killed with its process: it never goes on.
    Dead,
}

#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) process: ProcessId,
    /// Set to 1 when the thread is given the baton.
    pub(crate) baton: &'static AtomicU32,
    pub(crate) state: ThreadState,
    timer: Option<(u64, u64)>,
    /// Whether the last wait ended by its timer.
    pub(crate) timed_out: bool,
}

/// No thread can go on and no timer is set; the threads that wait.
#[derive(Debug)]
pub(crate) struct Stuck(pub(crate) Vec<(ThreadId, ProcessId, Wait)>);

#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) now: u64,
    pub(crate) threads: BTreeMap<ThreadId, Thread>,
    runnable: Vec<ThreadId>,
    timers: BTreeMap<(u64, u64), ThreadId>,
    futexes: BTreeMap<usize, Vec<ThreadId>>,
    next_thread: ThreadId,
    next_timer: u64,
    random: Random,
    /// One call in so many lets another thread go on.
    switch_one_in: u64,
    /// Changes of thread by chance, and how many there may be.
    pub(crate) switches: u64,
    switches_max: u64,
}

impl Schedule {
    pub(crate) fn new(mut random: Random, switches_max: u64) -> Self {
        let switch_one_in = [2, 3, 6, 20][random.below(4) as usize];
        Self {
            now: BEGINNING,
            threads: BTreeMap::new(),
            runnable: Vec::new(),
            timers: BTreeMap::new(),
            futexes: BTreeMap::new(),
            next_thread: 1,
            next_timer: 0,
            random,
            switch_one_in,
            switches: 0,
            switches_max,
        }
    }

    /// Adds a thread that may go on.
    pub(crate) fn add(&mut self, process: ProcessId, baton: &'static AtomicU32) -> ThreadId {
        let id = self.next_thread;
        self.next_thread += 1;
        let thread = Thread { process, baton, state: ThreadState::Runnable, timer: None, timed_out: false };
        self.threads.insert(id, thread);
        self.runnable.push(id);
        id
    }

    pub(crate) fn baton(&self, id: ThreadId) -> &'static AtomicU32 {
        self.threads[&id].baton
    }

    /// The thread that goes on, now that the one with the baton cannot.
    pub(crate) fn pick(&mut self) -> Result<ThreadId, Stuck> {
        loop {
            if !self.runnable.is_empty() {
                let at = self.random.below(self.runnable.len() as u64) as usize;
                return Ok(self.runnable[at]);
            }
            let Some(((when, _), id)) = self.timers.pop_first() else { return Err(self.stuck()) };
            self.now = self.now.max(when);
            self.wake(id, true);
        }
    }

    fn stuck(&self) -> Stuck {
        let waiting = |(id, thread): (&ThreadId, &Thread)| match thread.state {
            ThreadState::Waiting(wait) => Some((*id, thread.process, wait)),
            _ => None,
        };
        Stuck(self.threads.iter().filter_map(waiting).collect())
    }

    /// Another thread than `me` that goes on by chance at this call.
    pub(crate) fn chance(&mut self, me: ThreadId) -> Option<ThreadId> {
        // Timers that have passed let their threads go on, as preemption would.
        while let Some((&(when, _), &id)) = self.timers.first_key_value() {
            if when > self.now {
                break;
            }
            self.wake(id, true);
        }
        if self.runnable.len() < 2 || !self.random.one_in(self.switch_one_in) {
            return None;
        }
        let at = self.random.below(self.runnable.len() as u64) as usize;
        let next = self.runnable[at];
        if next == me || self.switches >= self.switches_max {
            return None;
        }
        self.switches += 1;
        Some(next)
    }

    /// The thread waits, until `deadline` at most.
    pub(crate) fn wait(&mut self, me: ThreadId, wait: Wait, deadline: Option<u64>) {
        self.runnable.retain(|id| *id != me);
        let timer = deadline.map(|when| (when, self.next_timer));
        self.next_timer += 1;
        self.timers.extend(timer.map(|timer| (timer, me)));
        if let Wait::Futex(at) = wait {
            self.futexes.entry(at).or_default().push(me);
        }
        if let Some(thread) = self.threads.get_mut(&me) {
            (thread.state, thread.timer, thread.timed_out) = (ThreadState::Waiting(wait), timer, false);
        }
    }

    fn wake(&mut self, id: ThreadId, timed_out: bool) {
        let Some(thread) = self.threads.get_mut(&id) else { return };
        let ThreadState::Waiting(wait) = thread.state else { return };
        (thread.state, thread.timed_out) = (ThreadState::Runnable, timed_out);
        let timer = thread.timer.take();
        self.runnable.push(id);
        self.forget(id, wait, timer);
    }

    fn forget(&mut self, id: ThreadId, wait: Wait, timer: Option<(u64, u64)>) {
        if let Some(timer) = timer {
            self.timers.remove(&timer);
        }
        if let Wait::Futex(at) = wait
            && let Some(waiting) = self.futexes.get_mut(&at)
        {
            waiting.retain(|other| *other != id);
            if waiting.is_empty() {
                self.futexes.remove(&at);
            }
        }
    }

    /// Wakes `most` threads that wait for the word at an address, in any order. Returns their number.
    pub(crate) fn wake_futex(&mut self, at: usize, most: usize) -> usize {
        for woken in 0..most {
            let Some(waiting) = self.futexes.get(&at) else { return woken };
            let id = waiting[self.random.below(waiting.len() as u64) as usize];
            self.wake(id, false);
        }
        most
    }

    /// Wakes all threads that wait for this.
    pub(crate) fn wake_all(&mut self, wait: Wait) {
        let waits = |thread: &Thread| thread.state == ThreadState::Waiting(wait);
        let ids: Vec<ThreadId> = self.threads.iter().filter(|(_, t)| waits(t)).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.wake(id, false));
    }

    /// The thread has ended by itself.
    pub(crate) fn finish(&mut self, me: ThreadId) {
        self.stop(me, ThreadState::Finished);
        self.wake_all(Wait::Join(me));
    }

    /// No thread of the process goes on, but for `spared`.
    pub(crate) fn kill(&mut self, process: ProcessId, spared: Option<ThreadId>) {
        let of = |(id, thread): &(&ThreadId, &Thread)| thread.process == process && Some(**id) != spared;
        let ids: Vec<ThreadId> = self.threads.iter().filter(of).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.stop(id, ThreadState::Dead));
        self.wake_all(Wait::Exit(process));
    }

    fn stop(&mut self, id: ThreadId, end: ThreadState) {
        let Some(thread) = self.threads.get_mut(&id) else { return };
        let (state, timer) = (thread.state, thread.timer.take());
        if matches!(state, ThreadState::Finished | ThreadState::Dead) {
            return;
        }
        thread.state = end;
        self.runnable.retain(|other| *other != id);
        if let ThreadState::Waiting(wait) = state {
            self.forget(id, wait, timer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule() -> (Schedule, ThreadId, ThreadId) {
        let mut schedule = Schedule::new(Random::new(1, 1), u64::MAX);
        let mut add = |process| schedule.add(process, Box::leak(Box::new(AtomicU32::new(0))));
        let (a, b) = (add(1), add(2));
        (schedule, a, b)
    }

    #[test]
    fn the_clock_jumps_to_the_first_timer_when_nobody_can_go_on() {
        let (mut schedule, a, b) = schedule();
        schedule.wait(a, Wait::Sleep, Some(BEGINNING + 50));
        schedule.wait(b, Wait::Futex(8), Some(BEGINNING + 20));
        assert_eq!((schedule.pick().unwrap(), schedule.now), (b, BEGINNING + 20));
        assert!(schedule.threads[&b].timed_out);
        assert_eq!(schedule.wake_futex(8, 1), 0, "whom its timer woke waits for nothing");
    }

    #[test]
    fn threads_that_wait_for_each_other_are_stuck() {
        let (mut schedule, a, b) = schedule();
        schedule.wait(a, Wait::Join(b), None);
        schedule.wait(b, Wait::Join(a), None);
        assert_eq!(schedule.pick().unwrap_err().0.len(), 2);
    }

    #[test]
    fn a_killed_process_never_goes_on() {
        let (mut schedule, a, b) = schedule();
        schedule.wait(a, Wait::Sleep, Some(BEGINNING + 50));
        schedule.kill(1, None);
        assert_eq!(schedule.pick().unwrap(), b);
        schedule.wait(b, Wait::Sleep, None);
        assert!(schedule.pick().is_err());
    }
}
