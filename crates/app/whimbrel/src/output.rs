//! Output of results to stdout, as text or as one JSON value, and of remarks to stderr.
//!
//! Guests, peers and file names have words in it. A terminal obeys control characters, so they are made
//! visible there; a file or a program gets results as they are.

use crate::error::CliError;
use serde::Serialize;
use std::{
    borrow::Cow,
    io::{IsTerminal, Write},
};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
    pub(crate) quiet: bool,
}

impl Output {
    /// Prints the result of a command: `value` for programs, `text` of it for people.
    pub(crate) fn result<T: Serialize + ?Sized>(
        &self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), CliError> {
        let text = if self.json {
            let mut text = serde_json::to_string_pretty(value)
                .map_err(|error| CliError::io("write the result")(error.into()))?;
            text.push('\n');
            text
        } else {
            text(value)
        };
        write(text.as_bytes())
    }

    /// Prints a part of the result early, as a line of JSON. Prints nothing if quiet, so that the result is
    /// the only value.
    pub(crate) fn event<T: Serialize>(&self, value: &T) -> Result<(), CliError> {
        if !self.json || self.quiet {
            return Ok(());
        }
        self.line(value)
    }

    /// Prints one value of a result that goes on, as a line of JSON.
    pub(crate) fn line<T: Serialize>(&self, value: &T) -> Result<(), CliError> {
        let text =
            serde_json::to_string(value).map_err(|error| CliError::io("write the result")(error.into()))?;
        write(format!("{text}\n").as_bytes())
    }

    pub(crate) fn remark(&self, text: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr(), "{}", printable(text));
        }
    }
}

/// Writes to stdout, with control characters made visible on a terminal.
pub(crate) fn write(bytes: &[u8]) -> Result<(), CliError> {
    match std::io::stdout().is_terminal() {
        true => write_as_is(printable(&String::from_utf8_lossy(bytes)).as_bytes()),
        false => write_as_is(bytes),
    }
}

/// Writes to stdout and flushes, so that a full disk or a broken pipe is an error and not lost at exit.
pub(crate) fn write_as_is(bytes: &[u8]) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(CliError::io("write the result"))
}

/// Text in which whatever a terminal would obey or show in another order is visible as its code. Line ends,
/// also those of serial ports, and tabs stay.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for letter in text.replace("\r\n", "\n").chars() {
        match is_obeyed(letter) {
            true => shown.extend(letter.escape_unicode()),
            false => shown.push(letter),
        }
    }
    Cow::Owned(shown)
}

fn is_obeyed(letter: char) -> bool {
    // Marks of direction: UAX #9, section 2.
    let directs =
        matches!(letter, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    directs || (letter.is_control() && !matches!(letter, '\n' | '\t'))
}

/// Result of a command that removes names.
#[derive(Debug, Serialize)]
pub(crate) struct Removed {
    removed: Vec<String>,
}

impl Removed {
    pub(crate) fn one(name: &impl ToString) -> Self {
        Self { removed: vec![name.to_string()] }
    }

    pub(crate) fn many(names: &[impl ToString]) -> Self {
        Self { removed: names.iter().map(ToString::to_string).collect() }
    }

    /// Formats a line for each name, like `web: deleted`.
    pub(crate) fn sentence(&self, what: &str) -> String {
        self.removed.iter().map(|name| format!("{name}: {what}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_obeys_nothing_that_a_guest_or_a_peer_wrote() {
        let text = "boot\r\n\tok \u{1b}]0;title\u{7} \u{9b}2J a\rb \u{8}\u{7f} \u{202e}txt";
        let shown = printable(text);
        assert!(!shown.contains(is_obeyed), "{shown:?}");
        assert!(shown.starts_with("boot\n\tok \\u{1b}]0;title\\u{7}"), "{shown:?}");
        assert!(matches!(printable("plain ünïcode\n\t"), Cow::Borrowed(_)));
    }
}
