//! `whimbrel mount`.

use super::{pool::mount as pool_mount, session::mount as session_mount};
use crate::{context::Context, error::CliError, session_dirs};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  whimbrel mount ada@state.example:/vms /mnt/vms                 by ssh; nothing to set up there but the program
  whimbrel mount ada@state:/vms /mnt/vms --write back            write at local speed, send it later
  whimbrel mount state:7788:/vms /mnt/vms --key KEY              by TLS, where `whimbrel serve /vms --listen` runs
  whimbrel mount state:/gold /mnt/gold --write none --rule '*.redo=back' --fresh session
  whimbrel session show vms                                      how it is doing
  whimbrel mount pool:MANAGER /mnt/ckpt                          a checkpoint pool; see `whimbrel pool --help`
  umount /mnt/vms                                                writes back and ends it

What is read stays in a cache on this disk, and is there at the next mount. Under --write back a sync makes data durable
here; what the server does not have yet survives a crash and is written back by the next mount of the same target.
Signals to its process: USR1 writes back, USR2 forgets what is clean, TERM ends it.";

/// Mount a directory of a server, with a cache on this disk, or a checkpoint pool
#[derive(Debug, clap::Args)]
// The options below come of structures that are groups by themselves, one of the same name as this.
#[group(skip)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    // Not a doc comment: that would take the brackets for a link.
    #[arg(help = "[USER@]HOST:/PATH by ssh, HOST:PORT:/PATH by TLS with --key, or pool:HOST:PORT/KEY")]
    target: String,
    /// The directory to mount on
    dir: PathBuf,
    #[command(flatten)]
    session: session_mount::MountSession,
    #[command(flatten)]
    pool: pool_mount::Args,
}

impl Args {
    pub(crate) fn run(self, context: &Context) -> Result<(), CliError> {
        let Some(managers) = self.target.strip_prefix("pool:") else {
            return self.session.run(&self.target, &self.dir, context);
        };
        let keys = session_dirs::keys(self.session.keys.as_deref());
        self.pool.run(managers, &self.dir, (&keys, self.session.others), context)
    }
}
