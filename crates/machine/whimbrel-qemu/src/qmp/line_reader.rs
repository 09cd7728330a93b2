//! Line reader: lines of bounded length from a stream that arrives in pieces. Pure.

use std::io;

/// Longest line accepted. The longest answer of QEMU (`query-qmp-schema`) is about 300 KB.
pub(super) const MAX_LINE: usize = 16 << 20;

/// Bytes of a stream that were received and are not yet taken as lines.
#[derive(Debug, Default)]
pub(super) struct LineBuffer {
    bytes: Vec<u8>,
    /// Bytes at the front that have no line end.
    searched: usize,
}

impl LineBuffer {
    /// Starts with bytes that were received before.
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, searched: 0 }
    }

    /// Adds received bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Next complete line, without its end.
    ///
    /// # Errors
    /// If the line is too long.
    pub(super) fn next_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let found = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(end) = found.map(|at| at + self.searched) else {
            self.searched = self.bytes.len();
            let fits = self.searched < MAX_LINE;
            return if fits { Ok(None) } else { Err(invalid("a line over 16 MiB")) };
        };
        let mut line: Vec<u8> = self.bytes.drain(..=end).collect();
        self.searched = 0;
        line.pop();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        Ok(Some(line))
    }

    /// Ends the stream. A line that is truncated by its end is an error, never a shorter line.
    pub(super) fn end(&self) -> io::Result<()> {
        if self.bytes.is_empty() { Ok(()) } else { Err(invalid("a truncated line")) }
    }

    /// Bytes that belong to no complete line.
    pub(super) fn into_rest(self) -> Vec<u8> {
        self.bytes
    }
}

fn invalid(words: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_cut_off_by_the_end_is_not_taken_for_a_whole_one() {
        let mut lines = LineBuffer::new(b"one\r\ntw".to_vec());
        assert_eq!(lines.next_line().unwrap().unwrap(), b"one");
        assert!(lines.next_line().unwrap().is_none());
        lines.push(b"o\nthr");
        assert_eq!(lines.next_line().unwrap().unwrap(), b"two");
        assert!(lines.next_line().unwrap().is_none());
        lines.end().unwrap_err();
        assert_eq!(lines.into_rest(), b"thr");
        LineBuffer::default().end().unwrap();
    }

    #[test]
    fn a_line_without_an_end_is_refused_before_it_fills_the_memory() {
        let mut lines = LineBuffer::default();
        lines.push(&vec![b'x'; MAX_LINE]);
        lines.next_line().unwrap_err();
    }
}
