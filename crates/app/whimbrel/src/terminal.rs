//! Terminal of a console: raw mode while a guard lives, and the escape keys.

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use std::io::{self, IsTerminal};

/// Code of Ctrl-], the escape key of telnet and virsh.
const CTRL_BRACKET: u8 = 0x1d;

/// Raw mode of standard input. Dropping it restores the previous mode, also in a panic.
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Switches standard input to raw mode; none if it is not a terminal.
    pub(crate) fn enable_raw_mode() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Drain, &raw)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

/// Position in the typed line, for the escape `~.` at its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Typing {
    LineStart,
    AfterTilde,
    InLine,
}

/// Finder of the keys that leave the console: Ctrl-], or `~.` at the start of a line (`~~` types one `~`).
#[derive(Debug)]
pub(crate) struct Escape {
    typing: Typing,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Typed {
    Send(Vec<u8>),
    Leave(Vec<u8>),
}

impl Escape {
    pub(crate) fn new() -> Self {
        Self { typing: Typing::LineStart }
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Typed {
        let mut out = Vec::with_capacity(bytes.len() + 1);
        for &byte in bytes {
            match (self.typing, byte) {
                (_, CTRL_BRACKET) | (Typing::AfterTilde, b'.') => return Typed::Leave(out),
                (Typing::LineStart, b'~') => self.typing = Typing::AfterTilde,
                (Typing::AfterTilde, b'~') => self.put(&mut out, b"~"),
                (Typing::AfterTilde, byte) => self.put(&mut out, &[b'~', byte]),
                (_, byte) => self.put(&mut out, &[byte]),
            }
        }
        Typed::Send(out)
    }

    fn put(&mut self, out: &mut Vec<u8>, bytes: &[u8]) {
        out.extend_from_slice(bytes);
        self.typing = match bytes.last() {
            Some(b'\r' | b'\n') => Typing::LineStart,
            _ => Typing::InLine,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(pieces: &[&[u8]]) -> (Vec<u8>, bool) {
        let (mut escape, mut sent) = (Escape::new(), Vec::new());
        for piece in pieces {
            match escape.feed(piece) {
                Typed::Send(bytes) => sent.extend(bytes),
                Typed::Leave(bytes) => {
                    sent.extend(bytes);
                    return (sent, true);
                }
            }
        }
        (sent, false)
    }

    #[test]
    fn the_escape_is_seen_at_a_line_start_only_and_across_pieces() {
        assert_eq!(feed(&[b"ls\r~", b".x"]), (b"ls\r".to_vec(), true));
        assert_eq!(feed(&[b"~."]), (vec![], true));
        assert_eq!(feed(&[b"cd ~.\r"]), (b"cd ~.\r".to_vec(), false));
        assert_eq!(feed(&[b"a\x1db"]), (b"a".to_vec(), true));
    }

    #[test]
    fn no_typed_byte_is_lost() {
        assert_eq!(feed(&[b"~~/x\r"]), (b"~/x\r".to_vec(), false));
        assert_eq!(feed(&[b"~", b"/x\r"]), (b"~/x\r".to_vec(), false));
        let every: Vec<u8> = (0..=255).filter(|byte| *byte != CTRL_BRACKET && *byte != b'~').collect();
        assert_eq!(feed(&[&every]), (every.clone(), false));
    }
}
