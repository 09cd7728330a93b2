//! Output buffer of a protected machine: holds frames until their epoch is committed. Pure.
//!
//! Every frame belongs to the epoch in which it was sent. [`OutputBuffer::barrier`] ends an epoch;
//! [`OutputBuffer::release`] releases the frames of ended epochs up to the given one, and no others.
//!
//! Invariants: frames leave in the order in which they came; none leaves before its epoch is released; none
//! is lost, since a full buffer refuses a frame; a frame of the open epoch never leaves.

use std::collections::VecDeque;

/// Number of an epoch: starts at 0 and grows by one with every barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// Capacity of an output buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferLimits {
    /// Most frames in the buffer.
    pub frames: usize,
    /// Most bytes of all frames together.
    pub bytes: usize,
}

impl Default for BufferLimits {
    /// Capacity for half a second at one Gbit/s.
    fn default() -> Self {
        Self { frames: 65_536, bytes: 64 << 20 }
    }
}

/// The buffer is full; the sender must wait for a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the output buffer is full")]
pub struct BufferFull;

/// Buffered frames with their epochs.
#[derive(Debug)]
pub struct OutputBuffer {
    frames: VecDeque<(Epoch, Box<[u8]>)>,
    bytes: usize,
    open: Epoch,
    limits: BufferLimits,
}

impl OutputBuffer {
    /// Creates an empty buffer in epoch 0.
    pub fn new(limits: BufferLimits) -> Self {
        Self { frames: VecDeque::new(), bytes: 0, open: Epoch(0), limits }
    }

    /// Adds a frame to the open epoch. A full buffer refuses it; an empty one accepts any frame.
    pub fn push(&mut self, frame: &[u8]) -> Result<(), BufferFull> {
        if !self.has_room(frame.len()) {
            return Err(BufferFull);
        }
        self.bytes += frame.len();
        self.frames.push_back((self.open, frame.into()));
        Ok(())
    }

    /// Whether a frame of `len` bytes would be accepted.
    pub fn has_room(&self, len: usize) -> bool {
        self.frames.is_empty()
            || (self.frames.len() < self.limits.frames && self.bytes + len <= self.limits.bytes)
    }

    /// Ends the open epoch and returns its number; later frames belong to the next.
    pub fn barrier(&mut self) -> Epoch {
        let ended = self.open;
        self.open = Epoch(ended.0 + 1);
        ended
    }

    /// Takes the next frame that belongs to an ended epoch not after `up_to`.
    pub fn release(&mut self, up_to: Epoch) -> Option<Box<[u8]>> {
        let (_, frame) = self.frames.pop_front_if(|(epoch, _)| *epoch <= up_to && *epoch < self.open)?;
        self.bytes -= frame.len();
        Some(frame)
    }

    /// Number of buffered frames.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether no frame is buffered.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Number of buffered bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Push(u8),
        Barrier,
        Release(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (1..60u8).prop_map(Step::Push),
            2 => Just(Step::Barrier),
            2 => (0..20u64).prop_map(Step::Release),
        ]
    }

    proptest! {
        #[test]
        fn order_is_kept_nothing_leaves_early_and_nothing_is_lost(
            steps in prop::collection::vec(step(), 0..200), frames in 1..40usize, bytes in 1..600usize,
        ) {
            let mut queue = OutputBuffer::new(BufferLimits { frames, bytes });
            let (mut accepted, mut left, mut released) = (Vec::new(), Vec::new(), None::<u64>);
            let mut open = 0;
            for step in steps {
                match step {
                    Step::Push(len) => {
                        // The frame has the number of its epoch and its own number.
                        let mut frame = vec![open as u8; usize::from(len)];
                        frame.push(accepted.len() as u8);
                        let full = queue.push(&frame).is_err();
                        prop_assert!(!full || !queue.is_empty(), "an empty queue refused a frame");
                        if !full { accepted.push((open, frame)) }
                    }
                    Step::Barrier => {
                        prop_assert_eq!(queue.barrier(), Epoch(open));
                        open += 1;
                    }
                    Step::Release(up_to) => {
                        // An epoch that has not ended releases only those that have.
                        released = released.max(Some(up_to.min(open.wrapping_sub(1)))).filter(|_| open > 0).or(released);
                        while let Some(frame) = queue.release(Epoch(up_to)) { left.push(frame.to_vec()) }
                    }
                }
                prop_assert!(queue.len() <= frames.max(1));
                prop_assert_eq!(left.len() + queue.len(), accepted.len());
                for (frame, (epoch, sent)) in left.iter().zip(&accepted) {
                    prop_assert_eq!(frame, sent);
                    prop_assert!(released.is_some_and(|released| *epoch <= released));
                }
                prop_assert!(accepted[left.len()..].iter().all(|(epoch, _)| released.is_none_or(|r| *epoch > r)));
            }
        }
    }
}
