//! Stream reader: big-endian fields of a migration stream, each checked against the remaining length. Pure.

use super::stream_header::StreamError;

/// Position in a stream that is completely in memory.
#[derive(Clone)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], StreamError> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or(StreamError::CutOff { at: self.at as u64 })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], StreamError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn peek(&self) -> Result<u8, StreamError> {
        self.clone().u8()
    }

    pub(super) fn u8(&mut self) -> Result<u8, StreamError> {
        self.array().map(u8::from_be_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, StreamError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, StreamError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, StreamError> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads a name after its length in one byte.
    pub(super) fn name(&mut self) -> Result<&'a str, StreamError> {
        let at = self.at as u64;
        let len = self.u8()?;
        std::str::from_utf8(self.take(len.into())?).map_err(|_| StreamError::Name { at })
    }
}
