//! Output of results to stdout, as text or as one JSON value, and of remarks to stderr.

use crate::error::CliError;
use serde::Serialize;
use std::io::Write;

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
        let text =
            serde_json::to_string(value).map_err(|error| CliError::io("write the result")(error.into()))?;
        write(format!("{text}\n").as_bytes())
    }

    pub(crate) fn remark(&self, text: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }
}

/// Writes to stdout and flushes, so that a full disk or a broken pipe is an error and not lost at exit.
pub(crate) fn write(bytes: &[u8]) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(CliError::io("write the result"))
}

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
