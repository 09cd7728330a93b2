//! `whimbrel serve`: serves directories for sessions of other hosts.

mod audit;
mod exports;
mod grants;
mod upstream;

use super::{
    dial_stdio,
    serve::{exports::ExportServer, upstream::Upstream},
};
use crate::{
    argument_types::DurationArg, context::Context, end_signal::told_to_end, error::CliError,
    metrics::MetricsListener,
};
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use whimbrel_core::ByteSize;
use whimbrel_session::server::ExportAccess;
use whimbrel_wire::PublicKey;

const EXAMPLES: &str = "\
Examples:
  whimbrel serve /vms --listen 0.0.0.0:7788 --allow KEY    let the holder of that key mount /vms
  whimbrel serve /vms --stdio             run over ssh by `whimbrel mount ada@state:/vms DIR`
  whimbrel serve /srv/vms --listen 0.0.0.0:7788 --allow KEY --upstream ada@state:/vms \\
      --mount-option=--attr-timeout=session    cache a distant server for a whole network

`whimbrel session key` prints the key of a user who mounts.

To limit an ssh key to one directory, or to the daemon, write in authorized_keys:
  restrict,command=\"whimbrel serve /vms --stdio\" ssh-ed25519 AAAA...
  restrict,command=\"whimbrel dial-stdio\" ssh-ed25519 AAAA...";

/// Serve directories to other hosts
///
/// Clients can open only these directories. Names are resolved beneath them without following symlinks.
/// Clients have the rights of the user who runs this command.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directories to serve
    #[arg(value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// Serve one client over standard input and output
    #[arg(long, required_unless_present = "listen")]
    stdio: bool,
    /// Serve over TLS, to hosts with trusted keys
    #[arg(long, value_name = "ADDRESS:PORT", requires = "dirs", conflicts_with = "stdio")]
    listen: Option<SocketAddr>,
    /// Let the holder of a key mount these directories, now and later (repeatable)
    #[arg(long, value_name = "KEY", requires = "listen")]
    allow: Vec<PublicKey>,
    /// Like --allow, but without changes (repeatable)
    #[arg(long, value_name = "KEY", requires = "listen")]
    allow_read: Vec<PublicKey>,
    /// Let clients set owners and the bits that run a program as its owner or group
    #[arg(long, requires = "listen")]
    root: bool,
    /// Most space that all files in each of these directories may take; more is refused with EDQUOT
    #[arg(long, value_name = "SIZE", requires = "listen")]
    quota: Option<ByteSize>,
    /// Directory of the own key and of the trusted keys [default: ~/.config/whimbrel]
    #[arg(long, alias = "keys", value_name = "DIR", requires = "listen")]
    keys_dir: Option<PathBuf>,
    /// Mount a directory of another server, with a cache, on the directory that is served
    #[arg(long, value_name = "TARGET", requires = "dirs")]
    upstream: Option<String>,
    /// Option of `whimbrel mount` for --upstream, like --mount-option=--write=back (repeatable)
    #[arg(long, alias = "with", value_name = "OPTION", requires = "upstream", allow_hyphen_values = true)]
    mount_option: Vec<String>,
    /// Refuse all changes
    #[arg(long, requires = "dirs")]
    read_only: bool,
    /// End sessions that were idle for this long
    #[arg(long, value_name = "DURATION", default_value = "24h", requires = "dirs")]
    idle_timeout: DurationArg,
    #[arg(long, hide = true, value_name = "HOURS", requires = "dirs")]
    idle: Option<u32>,
    #[command(flatten)]
    metrics: MetricsListener,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        if self.stdio {
            dial_stdio::refuse_terminal()?;
        }
        if let Some(target) = self.upstream.clone() {
            return self.serve_upstream(&target, context).await;
        }
        match self.dirs.is_empty() {
            // Written in authorized_keys, and called by older hosts.
            true => dial_stdio::Args {}.run(context).await,
            false => self.serve_dirs(context).await,
        }
    }

    /// Serves a mount of another server. The mount and the server end together.
    async fn serve_upstream(self, target: &str, context: &Context) -> Result<(), CliError> {
        let [dir] = &self.dirs[..] else {
            return Err(CliError::Usage {
                problem: "--upstream needs exactly one directory to mount on".to_owned(),
                hint: "name that directory".to_owned(),
            });
        };
        let end = told_to_end()?;
        let mut upstream = Upstream::start(target, dir, &self.mount_option).await?;
        let ended = tokio::select! {
            served = self.serve_dirs(context) => Some(served),
            failure = upstream.ended() => return Err(failure),
            () = end => None,
        };
        let written = upstream.end().await;
        match (ended, written) {
            (Some(served), written) => served.and(written),
            (None, Err(failure)) => Err(failure),
            // The thread that serves waits forever.
            (None, Ok(())) => std::process::exit(0),
        }
    }

    async fn serve_dirs(self, context: &Context) -> Result<(), CliError> {
        let (dirs, read_only, keys, root) = (self.dirs, self.read_only, self.keys_dir, self.root);
        let readers = self.allow_read.into_iter().map(|key| (key, ExportAccess::Read));
        let allow = self.allow.into_iter().map(|key| (key, ExportAccess::Write)).chain(readers).collect();
        let idle =
            self.idle.map_or(self.idle_timeout.0, |hours| Duration::from_secs(u64::from(hours) * 3600));
        let (quota, metrics) = (self.quota, self.metrics);
        let serving = ExportServer { dirs, read_only, keys, allow, root, quota, idle, metrics };
        let output = context.output;
        // Two threads, because many clients read files at once.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(CliError::io("start the runtime"))?;
        let listen = self.listen;
        let served = tokio::task::spawn_blocking(move || {
            let served = match listen {
                Some(address) => runtime.block_on(serving.listen(address, |text| output.remark(text))),
                None => runtime.block_on(serving.stdio()),
            };
            runtime.shutdown_background();
            served
        });
        served.await.map_err(|error| CliError::Session(Box::new(error)))?
    }
}
