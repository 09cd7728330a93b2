//! What every command gets: the daemon, and how to speak to the user.

use crate::{cli::Cli, output::Output};
use whimbrel_client::Client;

/// The surroundings of one command.
pub(crate) struct Context {
    /// The host daemon.
    pub(crate) client: Client,
    /// Where and how results and progress are shown.
    pub(crate) output: Output,
}

impl Context {
    /// As the global options say.
    pub(crate) fn new(cli: &Cli) -> Self {
        Self { client: Client::new(cli.socket()), output: Output { json: cli.json, quiet: cli.quiet } }
    }
}
