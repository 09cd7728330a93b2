//! Frames that came for a guest that stood still, until it runs again: here, or where it has moved. Pure.
//!
//! While a machine is handed over nobody runs it, and what is sent to it then would be lost: a TCP that had
//! all its segments in that moment waits 200 ms for nothing. So its port keeps what comes, and gives it to
//! the guest late.
//!
//! Invariants: frames leave in the order in which they came; each leaves once; what has no room is refused,
//! so the one who keeps is bounded whatever comes.

use std::collections::VecDeque;

/// Most bytes that are kept, and most frames: what a gigabit brings in 130 ms.
const BYTES_MAX: usize = 16 << 20;
const FRAMES_MAX: usize = 16_384;

/// Frames on their way to a guest, late.
#[derive(Debug, Default)]
pub(crate) struct LateFrames {
    frames: VecDeque<Box<[u8]>>,
    bytes: usize,
    keeps: bool,
}

impl LateFrames {
    /// From now on frames are kept, and none leaves by [`LateFrames::next`].
    pub(crate) fn start_buffering(&mut self) {
        self.keeps = true;
    }

    /// From now on frames leave by [`LateFrames::next`].
    pub(crate) fn stop_buffering(&mut self) {
        self.keeps = false;
    }

    /// Whether frames are kept.
    pub(crate) fn is_buffering(&self) -> bool {
        self.keeps
    }

    /// Whether a frame waits that may leave.
    pub(crate) fn has_next(&self) -> bool {
        !self.keeps && !self.frames.is_empty()
    }

    /// Adds a frame; no if there is no room.
    pub(crate) fn push(&mut self, frame: &[u8]) -> bool {
        let fits = self.frames.len() < FRAMES_MAX && self.bytes + frame.len() <= BYTES_MAX;
        if fits {
            self.bytes += frame.len();
            self.frames.push_back(frame.into());
        }
        fits
    }

    /// The next frame that may leave.
    pub(crate) fn next(&mut self) -> Option<Box<[u8]>> {
        let frame = if self.keeps { None } else { self.frames.pop_front() }?;
        self.bytes -= frame.len();
        Some(frame)
    }

    /// All that was kept, to go elsewhere.
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
