//! Frame buffer: frames to send to QEMU, in the format of its stream. Pure.

use crate::{FRAME_MAX, framing::LENGTH};

/// Bytes of the buffer.
const BATCH: usize = 4 * (FRAME_MAX + LENGTH);

/// Frames with their lengths, of which `sent` bytes were sent.
pub(crate) struct FrameBuffer {
    bytes: Box<[u8]>,
    end: usize,
    sent: usize,
    /// Bytes at the front in which no frame is known to begin.
    kept: usize,
}

impl FrameBuffer {
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; BATCH].into_boxed_slice(), end: 0, sent: 0, kept: 0 }
    }

    /// Buffer with bytes that another one has left; none if they do not fit.
    ///
    /// The first of them may be in the middle of a frame, so they are all sent: nothing of them can be
    /// removed.
    pub(crate) fn begun(bytes: &[u8]) -> Option<Self> {
        let mut buffer = Self::new();
        buffer.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        buffer.end = bytes.len();
        buffer.kept = bytes.len();
        Some(buffer)
    }

    /// Whether it has whole frames only, from the first byte on.
    pub(crate) fn is_whole(&self) -> bool {
        let mut rest = self.rest();
        while let Some((length, after)) = rest.split_first_chunk::<LENGTH>() {
            let Some(after) = after.get(u32::from_be_bytes(*length) as usize..) else { return false };
            rest = after;
        }
        rest.is_empty()
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.sent < self.end
    }

    pub(crate) fn rest(&self) -> &[u8] {
        &self.bytes[self.sent..self.end]
    }

    pub(crate) fn advance(&mut self, count: usize) {
        self.sent = (self.sent + count).min(self.end);
        if self.sent == self.end {
            self.clear();
        }
    }

    pub(crate) fn clear(&mut self) {
        (self.sent, self.end, self.kept) = (0, 0, 0);
    }

    /// Space for the next frame, if the largest one fits.
    pub(crate) fn space(&mut self) -> Option<&mut [u8]> {
        let begin = self.end + LENGTH;
        self.bytes.get_mut(begin..begin + FRAME_MAX)
    }

    /// Adds a frame of `len` bytes that was put into `space`.
    pub(crate) fn filled(&mut self, len: usize) {
        self.bytes[self.end..self.end + LENGTH].copy_from_slice(&(len as u32).to_be_bytes());
        self.end += LENGTH + len;
    }

    /// Adds a frame after `header`, if there is space.
    pub(crate) fn push(&mut self, header: &[u8], frame: &[u8]) -> bool {
        let len = header.len() + frame.len();
        let Some(space) = self.space().and_then(|space| space.get_mut(..len)) else { return false };
        let (before, after) = space.split_at_mut(header.len());
        before.copy_from_slice(header);
        after.copy_from_slice(frame);
        self.filled(len);
        true
    }

    /// Next frame of which nothing was sent, if each is sent on its own; it remains the next one until
    /// `advance` by its bytes with their length.
    pub(crate) fn next(&self) -> Option<&[u8]> {
        let (length, rest) = self.rest().split_first_chunk::<LENGTH>()?;
        rest.get(..u32::from_be_bytes(*length) as usize)
    }

    /// Removes every frame of which nothing was sent, and passes it to `show`; returns their number. A frame
    /// that was sent partially must be completed, or the stream would become invalid.
    pub(crate) fn remove_unsent(&mut self, mut show: impl FnMut(&[u8])) -> u64 {
        let (mut at, mut keep, mut cut) = (self.kept, self.sent.max(self.kept), 0);
        while let Some(length) = self.bytes[at..self.end].first_chunk::<LENGTH>() {
            let next = at + LENGTH + u32::from_be_bytes(*length) as usize;
            if at >= self.sent {
                cut += 1;
                show(&self.bytes[at + LENGTH..next]);
            } else if next > self.sent {
                keep = next;
            }
            at = next;
        }
        self.end = keep;
        if self.sent == self.end {
            self.clear();
        }
        cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(frames: &[usize]) -> FrameBuffer {
        let mut batch = FrameBuffer::new();
        frames.iter().for_each(|len| assert!(batch.push(&[], &vec![0; *len])));
        batch
    }

    #[test]
    fn what_another_port_has_left_is_sent_to_its_end_and_later_frames_can_be_cut() {
        let mut left = batch(&[10, 20]);
        left.advance(4 + 6);
        let mut begun = FrameBuffer::begun(left.rest()).unwrap();
        assert!(begun.push(&[], &[0; 30]));
        assert_eq!(begun.remove_unsent(|_| {}), 1);
        assert_eq!(begun.rest(), left.rest());
        assert!(FrameBuffer::begun(&vec![0; BATCH + 1]).is_none());
    }

    #[test]
    fn a_closing_gate_cuts_between_frames_and_never_inside_one() {
        let mut untouched = batch(&[10, 20, 30]);
        let mut cut = Vec::new();
        assert_eq!(untouched.remove_unsent(|frame| cut.push(frame.len())), 3);
        assert_eq!(cut, [10, 20, 30]);
        assert!(!untouched.is_pending());
        let mut begun = batch(&[10, 20, 30]);
        begun.advance(14 + 5);
        assert_eq!(begun.remove_unsent(|_| {}), 1);
        assert_eq!(begun.rest().len(), 24 - 5);
        let mut between = batch(&[10, 20]);
        between.advance(14);
        assert_eq!(between.remove_unsent(|_| {}), 1);
        assert!(!between.is_pending());
    }
}
