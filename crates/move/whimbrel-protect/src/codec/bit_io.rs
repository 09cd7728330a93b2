//! Bit streams of the page codec: numbers of a few bits each, the first in the lowest bits.

/// Writes a bit stream, which can be truncated to an earlier length.
#[derive(Debug, Default, Clone)]
pub(super) struct BitWriter {
    bytes: Vec<u8>,
    len: usize,
}

impl BitWriter {
    /// Adds the lowest `count` bits of `value`; at most 16.
    pub(super) fn push(&mut self, value: u32, count: u32) {
        for bit in 0..count {
            let at = self.len % 8;
            if at == 0 {
                self.bytes.push(0);
            }
            if value >> bit & 1 == 1
                && let Some(last) = self.bytes.last_mut()
            {
                *last |= 1 << at;
            }
            self.len += 1;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Truncates the stream to its first `len` bits.
    pub(super) fn truncate(&mut self, len: usize) {
        self.len = len.min(self.len);
        self.bytes.truncate(self.len.div_ceil(8));
        if !self.len.is_multiple_of(8)
            && let Some(last) = self.bytes.last_mut()
        {
            *last &= (1 << (self.len % 8)) - 1;
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.len = 0;
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> BitReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The next `count` bits; none at the end of the stream.
    pub(super) fn pull(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for bit in 0..count {
            let byte = *self.bytes.get(self.at / 8)?;
            value |= u32::from(byte >> (self.at % 8) & 1) << bit;
            self.at += 1;
        }
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_written_is_read_and_what_was_cut_off_never_was(
            kept in prop::collection::vec((any::<u16>(), 0..=16u32), 0..40),
            cut in prop::collection::vec((any::<u16>(), 0..=16u32), 0..10),
            again in prop::collection::vec((any::<u16>(), 0..=16u32), 0..10),
        ) {
            let mut writer = BitWriter::default();
            kept.iter().for_each(|(value, count)| writer.push((*value).into(), *count));
            let len = writer.len();
            cut.iter().for_each(|(value, count)| writer.push((*value).into(), *count));
            writer.truncate(len);
            again.iter().for_each(|(value, count)| writer.push((*value).into(), *count));
            let mut reader = BitReader::new(writer.bytes());
            for (value, count) in kept.iter().chain(&again) {
                prop_assert_eq!(reader.pull(*count), Some(u32::from(*value) & ((1 << count) - 1)));
            }
            prop_assert_eq!(reader.pull(8), None);
        }
    }
}
