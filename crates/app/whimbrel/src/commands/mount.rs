//! `whimbrel mount`: mounts a directory of a server, or a pool.

use super::{pool::mount as pool_mount, session::mount as session_mount};
use crate::{context::Context, error::CliError, session_dirs};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  whimbrel mount ada@state.example:/vms /mnt/vms           over ssh; the server needs this program
  whimbrel mount ada@state:/vms /mnt/vms --write back      write at local speed, and send later
  whimbrel mount state:7788:/vms /mnt/vms --key KEY        over TLS, from `whimbrel serve --listen`
  whimbrel mount state:/gold /mnt/gold --write none --rule '*.redo=back' --attr-timeout session
  whimbrel session show vms                                show the state of the mount
  whimbrel mount pool:MANAGER /mnt/ckpt                    a pool; see `whimbrel pool --help`
  umount /mnt/vms                                          write back, and end the session

Data that was read stays in the cache on this disk for the next mount. With --write back, a sync makes data durable \
on this host; unsent data survives a crash, and the next mount of the same target sends it. Signals to the process: \
USR1 writes back, USR2 drops unmodified data, TERM unmounts.";

/// Mount a directory of a server with a cache on this disk, or a pool
#[derive(Debug, clap::Args)]
// The options below come from structs that are groups of their own, and one has the name of this one.
#[group(skip)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    // Not a doc comment, because that would read the brackets as a link.
    #[arg(help = "[USER@]HOST:/PATH over ssh, HOST:PORT:/PATH over TLS with --key, or pool:HOST:PORT/KEY")]
    target: String,
    /// Directory to mount on
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
        let keys = session_dirs::keys(self.session.keys_dir.as_deref());
        self.pool.run(managers, &self.dir, (&keys, self.session.allow_other), context)
    }
}
