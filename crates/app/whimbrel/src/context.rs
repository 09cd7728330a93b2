//! Context of a command: the client of the daemon, and the output for the user.

use crate::{cli::Cli, output::Output};
use whimbrel_client::Client;

pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) output: Output,
}

impl Context {
    /// Context that the global options describe.
    pub(crate) fn new(cli: &Cli) -> Self {
        Self { client: Client::new(cli.socket()), output: Output { json: cli.json, quiet: cli.quiet } }
    }
}
