//! Memory for the stream of a file: what is written one after the other lies one after the other.
//!
//! So the chunk pipeline can join the pieces again without a copy. A part of the memory lives as long as any
//! chunk in it.

use bytes::BytesMut;

/// Bytes allocated at first and at most: a small file needs little, and of a large one few chunks lie across
/// the end of an allocation.
const ALLOCATION: (usize, usize) = (64 << 10, 8 << 20);

/// The memory for the next bytes of a stream.
#[derive(Debug, Default)]
pub(super) struct StreamMemory {
    free: BytesMut,
    allocated: usize,
}

impl StreamMemory {
    /// A copy of bytes, behind the one before as long as there is room.
    pub(super) fn copy(&mut self, data: &[u8]) -> BytesMut {
        if self.free.capacity() < data.len() {
            self.allocated = (self.allocated * 2).clamp(ALLOCATION.0, ALLOCATION.1).max(data.len());
            self.free = BytesMut::with_capacity(self.allocated);
        }
        self.free.extend_from_slice(data);
        self.free.split()
    }
}
