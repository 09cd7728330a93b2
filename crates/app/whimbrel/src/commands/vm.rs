//! `whimbrel vm`: has one machine from the end of a daemon to the start of the next. A daemon runs it when it
//! stops, and for the case that it is killed.

use crate::error::CliError;
use std::path::PathBuf;

/// Serve one machine until the next daemon takes it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Runtime directory of the machine
    slot: PathBuf,
}

impl Args {
    /// Has the machine until another process takes it, or it ends.
    pub(crate) fn run(self) -> Result<(), CliError> {
        whimbrel_daemon::hold_machine(&self.slot).map_err(|error| CliError::Daemon(Box::new(error)))
    }
}
