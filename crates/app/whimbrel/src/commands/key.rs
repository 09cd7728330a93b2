//! `whimbrel key`: prints the public key of the host.

use crate::{context::Context, error::CliError};
use serde::Serialize;
use whimbrel_core::HostName;

const EXAMPLES: &str = "\
Examples:
  whimbrel key
  ssh alpha whimbrel trust add beta \"$(whimbrel key)\" 10.0.0.2:7400";

/// Print the public key of this host
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {}

#[derive(Debug, Serialize)]
struct Key {
    name: HostName,
    public_key: String,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let host = context.client.host().await?;
        if host.public_key.is_empty() {
            return Err(CliError::NoKey { name: host.name });
        }
        let key = Key { name: host.name, public_key: host.public_key };
        context.output.result(&key, |key| format!("{}\n", key.public_key))
    }
}
