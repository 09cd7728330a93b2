//! Late frames: frames that arrived for a paused guest, buffered until it runs again, on this host or its
//! target. Pure.
//!
//! During the handover of a machine no host runs it, and frames sent to it then would be lost: a TCP sender
//! that had all its segments in flight would wait 200 ms for nothing. So the port buffers arriving frames and
//! delivers them late.
//!
//! Invariants: frames leave in the order in which they came, each once. Frames that do not fit are refused,
//! so the buffer is bounded.

use std::collections::VecDeque;

/// Most bytes that are buffered: what a gigabit link brings in 130 ms.
const BYTES_MAX: usize = 16 << 20;
const FRAMES_MAX: usize = 16_384;

#[derive(Debug, Default)]
pub(crate) struct LateFrames {
    frames: VecDeque<Box<[u8]>>,
    bytes: usize,
    buffering: bool,
}

impl LateFrames {
    /// Starts buffering: from now on [`LateFrames::next`] returns none.
    pub(crate) fn start_buffering(&mut self) {
        self.buffering = true;
    }

    /// Stops buffering: from now on [`LateFrames::next`] returns the frames.
    pub(crate) fn stop_buffering(&mut self) {
        self.buffering = false;
    }

    pub(crate) fn is_buffering(&self) -> bool {
        self.buffering
    }

    /// Whether a frame may be delivered.
    pub(crate) fn has_next(&self) -> bool {
        !self.buffering && !self.frames.is_empty()
    }

    /// Adds a frame; false if there is no space.
    pub(crate) fn push(&mut self, frame: &[u8]) -> bool {
        let fits = self.frames.len() < FRAMES_MAX && self.bytes + frame.len() <= BYTES_MAX;
        if fits {
            self.bytes += frame.len();
            self.frames.push_back(frame.into());
        }
        fits
    }

    pub(crate) fn next(&mut self) -> Option<Box<[u8]>> {
        let frame = if self.buffering { None } else { self.frames.pop_front() }?;
        self.bytes -= frame.len();
        Some(frame)
    }

    /// Takes all frames, to be delivered on another host.
    pub(crate) fn take(&mut self) -> Vec<Box<[u8]>> {
        self.bytes = 0;
        std::mem::take(&mut self.frames).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_leaves_in_order_and_once() {
        let mut strays = LateFrames::default();
        strays.start_buffering();
        assert!(strays.push(b"one") && strays.push(b"two"));
        assert!(strays.next().is_none() && !strays.has_next());
        strays.stop_buffering();
        assert_eq!(strays.next().as_deref(), Some(&b"one"[..]));
        assert_eq!(strays.take(), [Box::from(&b"two"[..])]);
        assert!(strays.next().is_none());
    }

    #[test]
    fn no_flood_makes_it_grow() {
        let mut strays = LateFrames::default();
        let taken = (0..FRAMES_MAX + 10).filter(|_| strays.push(&[0; 60])).count();
        assert_eq!(taken, FRAMES_MAX);
        drop(strays.take());
        let taken = (0..FRAMES_MAX).filter(|_| strays.push(&[0; 65_536])).count();
        assert_eq!(taken, BYTES_MAX / 65_536);
        assert!(strays.next().is_some() && strays.push(&[0; 65_536]));
    }
}
