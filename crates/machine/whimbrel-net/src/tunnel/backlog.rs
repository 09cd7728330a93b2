//! Backlog of a tunnel: frames that wait for the link, in batches of one message. Pure.
//!
//! A batch is a sequence of: number of the port (one byte), length of the frame (four bytes, little endian),
//! frame. Frames are batched only while the link is busy, so an idle link delays none. The backlog is bounded
//! in bytes and in age: beyond that frames are dropped, as a switch does, and their senders slow down.

use crate::FRAME_MAX;
use std::{collections::VecDeque, time::Duration};

/// Bytes after which a batch is closed.
const BATCH: usize = 64 << 10;
/// Most bytes of a batch: the limit and one frame more.
pub const BATCH_MAX: usize = BATCH + HEAD + FRAME_MAX;
/// Bytes before a frame.
const HEAD: usize = 5;
/// Shortest frame: two addresses and a type (IEEE 802.3).
const FRAME_MIN: usize = 14;
const BACKLOG: usize = 512 << 10;
/// Longest time that a frame waits. TCP has sent it again by then (RFC 6298: a second at first).
const AGE: Duration = Duration::from_secs(1);

/// The bytes are no valid batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadBatch {
    /// The batch ends in the middle of a frame.
    #[error("a batch of frames is truncated")]
    Truncated,
    /// A frame has an impossible length.
    #[error("the batch announces a frame of {length} bytes; {FRAME_MIN} to {FRAME_MAX} are allowed")]
    Length {
        /// Length of the frame.
        length: u32,
    },
    /// The machine does not have this port, or it is not connected.
    #[error("there is no port {port}")]
    Port {
        /// Number of the port.
        port: u8,
    },
}

/// Frames of a batch, with the numbers of their ports.
pub fn frames(mut batch: &[u8]) -> impl Iterator<Item = Result<(u8, &[u8]), BadBatch>> {
    std::iter::from_fn(move || {
        if batch.is_empty() {
            return None;
        }
        let next = next(batch);
        batch = next.as_ref().map_or(&[], |(_, _, rest)| rest);
        Some(next.map(|(port, frame, _)| (port, frame)))
    })
}

fn next(batch: &[u8]) -> Result<(u8, &[u8], &[u8]), BadBatch> {
    let (&port, rest) = batch.split_first().ok_or(BadBatch::Truncated)?;
    let (length, rest) = rest.split_first_chunk::<4>().ok_or(BadBatch::Truncated)?;
    let length = u32::from_le_bytes(*length);
    match length as usize {
        FRAME_MIN..=FRAME_MAX => {}
        _ => return Err(BadBatch::Length { length }),
    }
    let (frame, rest) = rest.split_at_checked(length as usize).ok_or(BadBatch::Truncated)?;
    Ok((port, frame, rest))
}

/// Batches of frames that wait for the link.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    batches: VecDeque<(Duration, Vec<u8>)>,
    bytes: usize,
}

impl Backlog {
    /// Adds a frame; false if there is no space, or its length is invalid.
    pub(crate) fn push(&mut self, now: Duration, port: u8, frame: &[u8]) -> bool {
        if !(FRAME_MIN..=FRAME_MAX).contains(&frame.len()) || self.bytes + HEAD + frame.len() > BACKLOG {
            return false;
        }
        if self.batches.back().is_none_or(|(_, batch)| batch.len() >= BATCH) {
            self.batches.push_back((now, Vec::new()));
        }
        let Some((_, batch)) = self.batches.back_mut() else { return false };
        batch.push(port);
        batch.extend((frame.len() as u32).to_le_bytes());
        batch.extend(frame);
        self.bytes += HEAD + frame.len();
        true
    }

    /// Takes the next batch; returns also the number of frames before it that were too old.
    pub(crate) fn pop(&mut self, now: Duration) -> (Option<Vec<u8>>, u64) {
        let mut dropped = 0;
        while let Some((since, batch)) = self.batches.pop_front() {
            self.bytes -= batch.len();
            if now.saturating_sub(since) <= AGE {
                return (Some(batch), dropped);
            }
            dropped += frames(&batch).count() as u64;
        }
        (None, dropped)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Drops all frames; returns their number.
    pub(crate) fn clear(&mut self) -> u64 {
        let dropped = self.batches.iter().map(|(_, batch)| frames(batch).count() as u64).sum();
        *self = Self::default();
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_out_in_order_or_are_counted_as_dropped(
            sent in prop::collection::vec((0..4u8, prop::collection::vec(any::<u8>(), 14..3000)), 0..600),
            every in 1..40usize,
        ) {
            let (mut backlog, mut out, mut kept) = (Backlog::default(), Vec::new(), Vec::new());
            for (index, (port, frame)) in sent.iter().enumerate() {
                if backlog.push(Duration::ZERO, *port, frame) {
                    kept.push((*port, frame.clone()));
                }
                prop_assert!(backlog.bytes <= BACKLOG);
                if index % every == 0 && let (Some(batch), _) = backlog.pop(Duration::ZERO) {
                    prop_assert!(batch.len() <= BATCH_MAX);
                    out.push(batch);
                }
            }
            while let (Some(batch), 0) = backlog.pop(AGE) { out.push(batch) }
            let read: Result<Vec<_>, _> = out.iter().flat_map(|batch| frames(batch)).collect();
            let read: Vec<_> = read.unwrap().into_iter().map(|(port, frame)| (port, frame.to_vec())).collect();
            prop_assert_eq!(read, kept);
            prop_assert!(backlog.is_empty() && backlog.bytes == 0);
        }

        #[test]
        fn hostile_batches_are_read_without_harm(batch in prop::collection::vec(any::<u8>(), 0..200)) {
            for frame in frames(&batch) {
                prop_assert!(frame.is_err() || frame.unwrap().1.len() >= FRAME_MIN);
            }
        }
    }

    #[test]
    fn an_old_frame_is_dropped_and_so_is_one_without_room() {
        let mut backlog = Backlog::default();
        assert!(backlog.push(Duration::ZERO, 0, &[1; 60]));
        assert_eq!(backlog.pop(AGE * 2), (None, 1));
        let room =
            std::iter::repeat_with(|| backlog.push(AGE, 0, &[1; 1500])).take_while(|taken| *taken).count();
        assert_eq!(room, BACKLOG / (1500 + HEAD));
        assert_eq!(backlog.clear(), room as u64);
        assert!(backlog.push(AGE, 0, &[1; 1500]) && !backlog.push(AGE, 0, &[1; 13]));
    }

    #[test]
    fn what_comes_after_a_broken_frame_is_not_read() {
        let mut backlog = Backlog::default();
        backlog.push(Duration::ZERO, 3, &[1; 20]);
        let batch = backlog.pop(Duration::ZERO).0.unwrap();
        assert_eq!(frames(&batch[..batch.len() - 1]).collect::<Vec<_>>(), [Err(BadBatch::Truncated)]);
        let broken = [&[0, 1, 0, 0, 0][..], &batch].concat();
        assert_eq!(frames(&broken).collect::<Vec<_>>(), [Err(BadBatch::Length { length: 1 })]);
    }
}
