//! Line reader: lines of bounded length from a stream. Pure except for its input.

use std::io::{self, BufRead, Read};

/// Longest line accepted. The longest answer of QEMU (`query-qmp-schema`) is about 300 KB.
const MAX_LINE: u64 = 16 << 20;

/// Reads the next line into `line`, without its end. `false` at the end of the stream.
///
/// A line that is too long or truncated by the end of the stream is an error, never a shorter line.
pub(super) fn read_line(from: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    from.by_ref().take(MAX_LINE).read_until(b'\n', line)?;
    match line.pop() {
        None => Ok(false),
        Some(b'\n') => {
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            Ok(true)
        }
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "a truncated line, or one over 16 MiB")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_cut_off_by_the_end_is_not_taken_for_a_whole_one() {
        let mut from = &b"one\r\ntwo\nthr"[..];
        let mut line = Vec::new();
        assert!(read_line(&mut from, &mut line).unwrap());
        assert_eq!(line, b"one");
        assert!(read_line(&mut from, &mut line).unwrap());
        assert_eq!(line, b"two");
        assert!(read_line(&mut from, &mut line).is_err());
        assert!(!read_line(&mut &b""[..], &mut line).unwrap());
    }
}
