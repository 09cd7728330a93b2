//! Codec of numbers and texts: little endian, texts and lists after their length.

use std::fmt;

pub(crate) const TEXT_MAX: usize = 255;

/// The payload does not match the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed {
    /// Part of the payload that is invalid.
    pub what: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the message has an invalid {}", self.what)
    }
}

impl std::error::Error for Malformed {}

pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed { what: "length" })?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(self.take(4)?);
        Ok(u32::from_le_bytes(bytes))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from(self.u32()?) | u64::from(self.u32()?) << 32)
    }

    pub(crate) fn text(&mut self) -> Result<String, Malformed> {
        let len = usize::from(self.u8()?);
        let text = std::str::from_utf8(self.take(len)?).map_err(|_| Malformed { what: "text" })?;
        Ok(text.to_owned())
    }

    /// Length of a list of at most `max` elements of at least `each` bytes.
    pub(crate) fn count(&mut self, max: usize, each: usize) -> Result<usize, Malformed> {
        let count = self.u32()? as usize;
        let fits = count <= max && count * each <= self.0.len();
        if fits { Ok(count) } else { Err(Malformed { what: "count" }) }
    }

    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed { what: "end" }) }
    }
}

#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a text, truncated at a character if it is too long.
    pub(crate) fn text(mut self, text: &str) -> Self {
        let mut len = text.len().min(TEXT_MAX);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        self.0.push(len as u8);
        self.0.extend(&text.as_bytes()[..len]);
        self
    }
}
