//! `whimbrel logs`: what a machine printed on its serial port.

use crate::{context::Context, error::CliError, output};
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel logs web
  whimbrel logs web --bytes 1M | less
  whimbrel logs web -f            go on until the machine ends, or Ctrl-C

`whimbrel console` types as well.";

/// Print the console log of a machine
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Print the last 64K, and what the machine prints from now on
    #[arg(short, long, conflicts_with = "bytes")]
    follow: bool,
    /// Length of the part of the log to print
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    bytes: ByteSize,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        if !self.follow {
            return output::write(&context.client.console_log(&self.name, self.bytes.0).await?);
        }
        let mut printed = context.client.console_output(&self.name).await?;
        while let Some(bytes) = printed.next().await? {
            output::write(&bytes)?;
        }
        Ok(())
    }
}
