//! Held output: bytes that the guest printed and nobody may see yet. Pure.
//!
//! A position counts all bytes since the start. What came before a released position may be taken. Bounded:
//! the oldest bytes of more than [`HELD_MAX`] are lost, as they would be from the recent output.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Most bytes that are held.
const HELD_MAX: usize = 256 << 10;

/// Held output in plain types, for another process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldOutputState {
    bytes: Vec<u8>,
    received: u64,
    released: u64,
    holding: bool,
}

#[derive(Debug, Default)]
pub(super) struct HeldOutput {
    bytes: VecDeque<u8>,
    received: u64,
    released: u64,
    holding: bool,
}

impl HeldOutput {
    /// State for another process.
    pub(super) fn state(&self) -> HeldOutputState {
        let Self { bytes, received, released, holding } = self;
        let bytes = bytes.iter().copied().collect();
        HeldOutputState { bytes, received: *received, released: *released, holding: *holding }
    }

    /// Held output of another process; none if its state contradicts itself.
    pub(super) fn from_state(state: HeldOutputState) -> Option<Self> {
        let HeldOutputState { bytes, received, released, holding } = state;
        let is_whole = bytes.len() <= HELD_MAX && bytes.len() as u64 <= received && released <= received;
        is_whole.then(|| Self { bytes: bytes.into(), received, released, holding })
    }

    /// Holds everything from now on.
    pub(super) fn hold(&mut self) {
        self.released = self.released.max(self.received);
        self.holding = true;
    }

    /// Position after the last byte.
    pub(super) fn position(&self) -> u64 {
        self.received
    }

    pub(super) fn release(&mut self, up_to: u64) {
        self.released = self.released.max(up_to.min(self.received));
    }

    /// Holds nothing any more.
    pub(super) fn release_all(&mut self) {
        self.released = self.received;
        self.holding = false;
    }

    pub(super) fn push(&mut self, output: &[u8]) {
        self.bytes.extend(output);
        self.received += output.len() as u64;
        if !self.holding {
            self.released = self.received;
        }
        self.bytes.drain(..self.bytes.len().saturating_sub(HELD_MAX));
    }

    /// Whether anything waits.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes what is released.
    pub(super) fn take(&mut self) -> Vec<u8> {
        let held = (self.received - self.released).min(self.bytes.len() as u64) as usize;
        self.bytes.drain(..self.bytes.len() - held).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_leaves_once_it_is_released_and_in_order() {
        let mut output = HeldOutput::default();
        output.push(b"before ");
        assert_eq!(output.take(), b"before ");
        output.push(b"at ");
        output.hold();
        output.push(b"one ");
        let mark = output.position();
        output.push(b"two ");
        assert_eq!(output.take(), b"at ");
        assert!(output.take().is_empty() && !output.is_empty());
        output.release(mark);
        output.release(0);
        assert_eq!(output.take(), b"one ");
        output.release_all();
        output.push(b"three");
        assert_eq!(output.take(), b"two three");
        assert!(output.is_empty());
    }

    #[test]
    fn what_is_held_is_held_by_the_next_process_and_a_state_that_lies_is_refused() {
        let mut output = HeldOutput::default();
        output.push(b"seen");
        output.hold();
        output.push(b"held");
        let state = output.state();
        let mut next = HeldOutput::from_state(state.clone()).unwrap();
        assert_eq!((next.take(), next.position()), (b"seen".to_vec(), 8));
        next.release(8);
        assert_eq!(next.take(), b"held");
        let long = vec![0; HELD_MAX + 1];
        let lies = [
            HeldOutputState { received: 7, ..state.clone() },
            HeldOutputState { released: 9, ..state.clone() },
            HeldOutputState { received: long.len() as u64, bytes: long, ..state },
        ];
        assert!(lies.into_iter().all(|lie| HeldOutput::from_state(lie).is_none()));
    }

    #[test]
    fn of_much_output_the_end_is_kept() {
        let mut output = HeldOutput::default();
        output.push(b"seen");
        output.hold();
        assert_eq!(output.take(), b"seen");
        for byte in 0..5u8 {
            output.push(&vec![byte; HELD_MAX / 4]);
        }
        assert!(output.take().is_empty());
        output.release(output.position());
        let left = output.take();
        assert_eq!((left.len(), left[0], left[HELD_MAX - 1]), (HELD_MAX, 1, 4));
    }
}
