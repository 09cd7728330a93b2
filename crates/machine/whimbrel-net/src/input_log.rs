//! What reached a guest, numbered, for whoever keeps a log of it elsewhere. One of these for all ports of a
//! machine.
//!
//! A frame is recorded before the guest gets it, so whatever the guest sends was caused by frames that are
//! recorded. Bounded: a frame for which there is no room is not recorded, and not delivered either, as on a
//! network that is too busy. Until [`InputLog::start`] only what came lately is kept.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Most bytes that are recorded and not yet let go, and most frames.
const BYTES_MAX: usize = 64 << 20;
const FRAMES_MAX: usize = 1 << 18;
/// Most fingerprints of frames that left and of which nobody was told yet.
const SENT_MAX: usize = 1 << 16;
/// How old what QEMU has been given may be before a guest has it for certain: what waits for room in the
/// guest's queue is not in its state.
const ON_ITS_WAY: Duration = Duration::from_millis(200);

/// A frame that reached a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// By which of its ports.
    pub port: u16,
    /// When, since some moment.
    pub at: Duration,
    /// The frame.
    pub frame: Vec<u8>,
}

/// The record of a machine's inputs.
pub struct InputLog {
    since: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    begun: bool,
    /// Number of the first of `kept`.
    first: u64,
    /// When each of them came and how long it is.
    kept: VecDeque<(Duration, usize)>,
    bytes: usize,
    /// Those of them that nobody was told of: the last ones.
    untold: VecDeque<Input>,
    sent: VecDeque<u64>,
}

/// What is to be told.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InputBatch {
    /// Number of the first of the inputs.
    pub first: u64,
    /// Inputs, in the order in which they came.
    pub inputs: Vec<Input>,
    /// Fingerprints of frames that have left since the last time.
    pub sent: Vec<u64>,
}

impl Default for InputLog {
    fn default() -> Self {
        Self { since: Instant::now(), state: Mutex::default() }
    }
}

impl InputLog {
    /// Records a frame that is about to be delivered; no if there is no room, and it must not be delivered.
    pub(crate) fn record(&self, port: u16, frame: &[u8]) -> bool {
        let at = self.since.elapsed();
        let mut state = self.state();
        if !state.begun {
            state.let_go_before(at.saturating_sub(ON_ITS_WAY));
        }
        if state.bytes + frame.len() > BYTES_MAX || state.kept.len() >= FRAMES_MAX {
            return false;
        }
        state.bytes += frame.len();
        state.kept.push_back((at, frame.len()));
        state.untold.push_back(Input { port, at, frame: frame.to_vec() });
        true
    }

    /// A frame has left.
    pub(crate) fn left(&self, frame: &[u8]) {
        if let Some(print) = crate::input_replay::fingerprint(frame) {
            let mut state = self.state();
            if state.sent.len() >= SENT_MAX {
                state.sent.pop_front();
            }
            state.sent.push_back(print);
        }
    }

    /// The number from which on inputs may not be in the state of a guest that stands still now.
    pub fn start(&self) -> u64 {
        let mut state = self.state();
        let before = self.since.elapsed().saturating_sub(ON_ITS_WAY);
        if !state.begun {
            state.let_go_before(before);
            state.begun = true;
        }
        state.first + state.kept.partition_point(|(at, _)| *at < before) as u64
    }

    /// The number of the next input.
    pub fn next(&self) -> u64 {
        let state = self.state();
        state.first + state.kept.len() as u64
    }

    /// From now on only what came lately is kept again.
    pub fn restart(&self) {
        self.state().begun = false;
    }

    /// Inputs before this number are in a guest's state that is safe.
    pub fn release(&self, before: u64) {
        let mut state = self.state();
        while state.first < before && state.kept.len() > state.untold.len() {
            state.pop();
        }
    }

    /// Whether so much is kept that a guest's state should be made safe soon.
    pub fn is_filling(&self) -> bool {
        let state = self.state();
        state.bytes > BYTES_MAX / 2 || state.kept.len() > FRAMES_MAX / 2
    }

    /// What nobody was told of yet, at most so many bytes of frames but for the last one and so many frames.
    pub fn take(&self, bytes_max: usize, frames_max: usize) -> InputBatch {
        let mut state = self.state();
        let first = state.first + (state.kept.len() - state.untold.len()) as u64;
        let (mut inputs, mut bytes) = (Vec::new(), 0);
        while bytes < bytes_max
            && inputs.len() < frames_max
            && let Some(input) = state.untold.pop_front()
        {
            bytes += input.frame.len();
            inputs.push(input);
        }
        let some = state.sent.len().min(frames_max);
        InputBatch { first, inputs, sent: state.sent.drain(..some).collect() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn let_go_before(&mut self, before: Duration) {
        while self.kept.front().is_some_and(|(at, _)| *at < before) {
            self.pop();
        }
    }

    fn pop(&mut self) {
        let Some((_, len)) = self.kept.pop_front() else { return };
        self.first += 1;
        self.bytes -= len;
        while self.untold.len() > self.kept.len() {
            self.untold.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_let_go_makes_room_and_what_nobody_was_told_of_stays() {
        let inputs = InputLog::default();
        let frame = vec![7; 1 << 20];
        assert_eq!(inputs.start(), 0);
        assert_eq!(
            (0..80).filter(|_| inputs.record(0, &frame)).count(),
            64,
            "no more than there is room for"
        );
        assert!(inputs.is_filling());
        let told = inputs.take(3 << 20, 100);
        assert_eq!((told.first, told.inputs.len()), (0, 3));
        inputs.release(10);
        assert_eq!(inputs.take(1, 100).first, 3, "nothing goes that was not told");
        assert_eq!((0..80).filter(|_| inputs.record(0, &frame)).count(), 3);
        assert_eq!(inputs.next(), 67);
    }
}
