//! Input log: numbered frames that reached a guest, to be replicated to another host. One for all ports of a
//! machine.
//!
//! A frame is recorded before it is delivered, so everything that the guest sends was caused by recorded
//! frames. Bounded: if there is no space, a frame is neither recorded nor delivered, as on a congested
//! network. Until [`InputLog::start`] only recent frames are retained.

use std::{
    borrow::Cow,
    collections::VecDeque,
    sync::Mutex,
    time::{Duration, Instant},
};
use whimbrel_core::lock;

/// Most bytes that are recorded and not yet released.
const BYTES_MAX: usize = 64 << 20;
/// Most frames that are recorded and not yet released.
const FRAMES_MAX: usize = 1 << 18;
/// Most fingerprints of sent frames that were not taken yet.
const SENT_MAX: usize = 1 << 16;
/// Age after which a frame has certainly left QEMU's queue: a frame that waits for space in the guest's queue
/// is not in its state.
const DELIVERY_DELAY: Duration = Duration::from_millis(200);

/// Frame that reached a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Number of the port that received it.
    pub port: u16,
    /// Time since the start of the log.
    pub at: Duration,
    /// Content of the frame.
    pub frame: Vec<u8>,
}

/// Log of a machine's inputs.
pub struct InputLog {
    since: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    started: bool,
    /// Number of the first frame of `kept`.
    first: u64,
    /// Time and length of each retained frame.
    retained: VecDeque<(Duration, usize)>,
    bytes: usize,
    /// Frames that were not taken yet, which are the last ones.
    untaken: VecDeque<Input>,
    sent: VecDeque<u64>,
}

/// Inputs and fingerprints to be sent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InputBatch {
    /// Number of the first input.
    pub first: u64,
    /// Inputs, in the order in which they came.
    pub inputs: Vec<Input>,
    /// Fingerprints of frames that were sent since the last batch.
    pub sent: Vec<u64>,
}

impl Default for InputLog {
    fn default() -> Self {
        Self { since: Instant::now(), state: Mutex::default() }
    }
}

impl InputLog {
    /// Records frames that are to be delivered together; false if there is no space, so that they must be
    /// dropped.
    pub(crate) fn record(&self, port: u16, frames: &[Cow<[u8]>]) -> bool {
        let at = self.since.elapsed();
        let mut state = lock(&self.state);
        if !state.started {
            state.release_before(at.saturating_sub(DELIVERY_DELAY));
        }
        let bytes = frames.iter().map(|frame| frame.len()).sum::<usize>();
        if state.bytes + bytes > BYTES_MAX || state.retained.len() + frames.len() > FRAMES_MAX {
            return false;
        }
        state.bytes += bytes;
        for frame in frames {
            state.retained.push_back((at, frame.len()));
            state.untaken.push_back(Input { port, at, frame: frame.to_vec() });
        }
        true
    }

    pub(crate) fn record_sent(&self, frame: &[u8]) {
        if let Some(print) = crate::input_replay::fingerprint(frame) {
            let mut state = lock(&self.state);
            if state.sent.len() >= SENT_MAX {
                state.sent.pop_front();
            }
            state.sent.push_back(print);
        }
    }

    /// Starts the log; returns the number from which on inputs may not be in the state of a guest that is
    /// paused now.
    pub fn start(&self) -> u64 {
        let mut state = lock(&self.state);
        let before = self.since.elapsed().saturating_sub(DELIVERY_DELAY);
        if !state.started {
            state.release_before(before);
            state.started = true;
        }
        state.first + state.retained.partition_point(|(at, _)| *at < before) as u64
    }

    /// Number of the next input.
    pub fn next(&self) -> u64 {
        let state = lock(&self.state);
        state.first + state.retained.len() as u64
    }

    /// Retains only recent frames from now on.
    pub fn restart(&self) {
        lock(&self.state).started = false;
    }

    /// Releases inputs before this number, because a committed state of the guest has them.
    pub fn release(&self, before: u64) {
        let mut state = lock(&self.state);
        while state.first < before && state.retained.len() > state.untaken.len() {
            state.pop();
        }
    }

    /// Whether the log is so full that a state of the guest should be committed soon.
    pub fn is_filling(&self) -> bool {
        let state = lock(&self.state);
        state.bytes > BYTES_MAX / 2 || state.retained.len() > FRAMES_MAX / 2
    }

    /// Takes inputs that were not taken yet: at most `frames_max` frames, and `bytes_max` bytes except for
    /// the last frame.
    pub fn take(&self, bytes_max: usize, frames_max: usize) -> InputBatch {
        let mut state = lock(&self.state);
        let first = state.first + (state.retained.len() - state.untaken.len()) as u64;
        let (mut inputs, mut bytes) = (Vec::new(), 0);
        while bytes < bytes_max
            && inputs.len() < frames_max
            && let Some(input) = state.untaken.pop_front()
        {
            bytes += input.frame.len();
            inputs.push(input);
        }
        let some = state.sent.len().min(frames_max);
        InputBatch { first, inputs, sent: state.sent.drain(..some).collect() }
    }
}

impl State {
    fn release_before(&mut self, before: Duration) {
        while self.retained.front().is_some_and(|(at, _)| *at < before) {
            self.pop();
        }
    }

    fn pop(&mut self) {
        let Some((_, len)) = self.retained.pop_front() else { return };
        self.first += 1;
        self.bytes -= len;
        while self.untaken.len() > self.retained.len() {
            self.untaken.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_let_go_makes_room_and_what_nobody_was_told_of_stays() {
        let inputs = InputLog::default();
        let frame = [Cow::Owned(vec![7; 1 << 20])];
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
