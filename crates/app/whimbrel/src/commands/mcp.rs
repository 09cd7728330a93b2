//! `whimbrel mcp`: the API for language models, by the Model Context Protocol over standard input and output.

use crate::{context::Context, error::CliError, mcp};

const EXAMPLES: &str = "\
Examples:
  whimbrel mcp                                 look only: machines, capsules, logs, operations
  whimbrel mcp --allow-changes                 also launch, checkpoint, suspend, resume, delete, …
  whimbrel --host https://10.0.0.1 --token-file ci.token --fingerprint sha256:… mcp --allow-changes

A client starts it by itself; its settings name the command:
  { \"mcpServers\": { \"whimbrel\": { \"command\": \"whimbrel\", \"args\": [\"mcp\"] } } }

The tools are the calls of the API that the user or token may make. With the token of a role or a
scope the daemon refuses everything else, whatever a model asks for.";

/// Serve the API to a language model on stdin and stdout (MCP)
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Offer also the calls that change or delete something
    #[arg(long)]
    allow_changes: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        mcp::serve(context.client.clone(), self.allow_changes).await
    }
}
