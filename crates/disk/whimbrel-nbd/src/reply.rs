//! Reply headers: values in, bytes out. Pure.

use crate::constants::*;

/// Simple reply without payload, or the header of one with data.
pub(crate) fn simple(cookie: u64, error: Option<WireError>) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.map_or(0, |e| e as u32).to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk {
    pub(crate) cookie: u64,
    pub(crate) kind: u16,
    /// Whether it is the last chunk of the reply.
    pub(crate) done: bool,
    pub(crate) len: u32,
}

impl Chunk {
    pub(crate) fn encode(self) -> [u8; 20] {
        let mut bytes = [0; 20];
        let flags = if self.done { CHUNK_DONE } else { 0 };
        bytes[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }
}

/// Bytes before the data in a data chunk: the header and the offset.
pub(crate) const DATA_HEAD: usize = 28;

/// Header of a chunk with `len` bytes of data at `offset`.
pub(crate) fn data(cookie: u64, offset: u64, len: u32, done: bool) -> [u8; DATA_HEAD] {
    let mut bytes = [0; DATA_HEAD];
    let head = Chunk { cookie, kind: CHUNK_OFFSET_DATA, done, len: len + 8 };
    bytes[..20].copy_from_slice(&head.encode());
    bytes[20..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// Chunk for `len` zeros at `offset`.
pub(crate) fn hole(cookie: u64, offset: u64, len: u32, done: bool) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..20].copy_from_slice(&Chunk { cookie, kind: CHUNK_OFFSET_HOLE, done, len: 12 }.encode());
    bytes[20..28].copy_from_slice(&offset.to_be_bytes());
    bytes[28..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// Last chunk of a failed reply, without a message.
pub(crate) fn error(cookie: u64, error: WireError) -> [u8; 26] {
    let mut bytes = [0; 26];
    bytes[..20].copy_from_slice(&Chunk { cookie, kind: CHUNK_ERROR, done: true, len: 6 }.encode());
    bytes[20..24].copy_from_slice(&(error as u32).to_be_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_where_the_protocol_puts_it() {
        assert_eq!(simple(7, Some(WireError::Io)), *b"\x67\x44\x66\x98\0\0\0\x05\0\0\0\0\0\0\0\x07");
        let head = *b"\x66\x8e\x33\xef\0\x01\0\x01\0\0\0\0\0\0\0\x07\0\0\0\x0b\0\0\0\0\0\0\x10\0";
        assert_eq!(data(7, 4096, 3, true), head);
        let zeros = *b"\x66\x8e\x33\xef\0\0\0\x02\0\0\0\0\0\0\0\x07\0\0\0\x0c\0\0\0\0\0\0\x10\0\0\0\0\x03";
        assert_eq!(hole(7, 4096, 3, false), zeros);
        let failed = *b"\x66\x8e\x33\xef\0\x01\x80\x01\0\0\0\0\0\0\0\x07\0\0\0\x06\0\0\0\x1c\0\0";
        assert_eq!(error(7, WireError::NoSpace), failed);
    }
}
