//! `whimbrel serve`: directories for sessions, or, without any, what another host's ssh runs here to reach
//! the daemon.
//!
//! For the daemon only bytes are carried, between standard input and output and the daemon; the daemon
//! speaks. Nothing else may go to standard output, and what fails is told on standard error, which ssh takes
//! to the other host.

mod exports;
mod upstream;

use super::serve::{exports::ExportServer, upstream::Upstream};
use crate::{context::Context, error::CliError};
use std::{
    io::{self, IsTerminal},
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, copy_buf},
    signal::unix::{SignalKind, signal},
};
use whimbrel_wire::PublicKey;

const EXAMPLES: &str = "\
Examples:
  whimbrel serve /vms --listen 0.0.0.0:7788 --allow KEY    let the holder of that key mount /vms
  whimbrel serve /vms --stdio             what `whimbrel mount ada@state:/vms DIR` runs there by ssh
  whimbrel serve /srv/vms --listen 0.0.0.0:7788 --allow KEY --upstream ada@state:/vms --with=--fresh=session
                                          a cache between for a whole network; any number one after the other
  ssh root@beta whimbrel serve --stdio    what the daemon runs that trusts beta with --ssh root@beta

`whimbrel session key` prints the key of who mounts.

To let a key of ssh do one of these and nothing else, write in authorized_keys:
  restrict,command=\"whimbrel serve /vms --stdio\" ssh-ed25519 AAAA...
  restrict,command=\"whimbrel serve --stdio\" ssh-ed25519 AAAA...";

/// Much for one system call, little for a process.
const BUFFER: usize = 256 << 10;

/// Let others mount directories of this host, or talk to its daemon
///
/// Only the directories named can be opened; names are resolved beneath them, following no symlink. What can
/// be read and written there is what the user who runs this can.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directories that sessions may open; none is for the daemon
    dirs: Vec<PathBuf>,
    /// Over standard input and output
    #[arg(long, required_unless_present = "listen")]
    stdio: bool,
    /// Over TLS, for hosts whose keys are trusted
    #[arg(long, value_name = "ADDRESS:PORT", requires = "dirs", conflicts_with = "stdio")]
    listen: Option<SocketAddr>,
    /// Let a key open sessions, now and later; may be given several times
    #[arg(long, value_name = "KEY", requires = "listen")]
    allow: Vec<PublicKey>,
    /// Folder of the own key and of the trusted ones, ~/.config/whimbrel unless given
    #[arg(long, value_name = "DIR", requires = "listen")]
    keys: Option<PathBuf>,
    /// Mount another server's directory on the one that is served, with a cache on this disk
    #[arg(long, value_name = "TARGET", requires = "dirs")]
    upstream: Option<String>,
    /// An option of `whimbrel mount` for that, like --with=--write=back; may be given several times
    #[arg(long, value_name = "OPTION", requires = "upstream", allow_hyphen_values = true)]
    with: Vec<String>,
    /// Let nothing be changed
    #[arg(long, requires = "dirs")]
    read_only: bool,
    /// End sessions that were not used for so many hours
    #[arg(long, value_name = "HOURS", default_value = "24", requires = "dirs")]
    idle: u64,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        if self.stdio && (io::stdin().is_terminal() || io::stdout().is_terminal()) {
            return Err(CliError::Usage {
                problem: "this speaks to a host, not to a terminal".to_owned(),
                hint: "mount a directory from another host with `whimbrel mount HOST:/PATH DIR`, or trust this host \
                       there: `whimbrel trust add NAME --ssh DESTINATION`"
                    .to_owned(),
            });
        }
        if let Some(target) = self.upstream.clone() {
            return self.serve_upstream(&target, context).await;
        }
        if !self.dirs.is_empty() {
            return self.serve_dirs(context).await;
        }
        let daemon = context.client.wire().await?;
        let (input, output) =
            whimbrel_wire::stdio().map_err(CliError::io("use standard input and output"))?;
        relay(input, output, daemon).await.map_err(CliError::io("carry bytes to the other host"))
    }
}

impl Args {
    /// Serves a mount until somebody ends one of the two; then the other ends as well.
    async fn serve_upstream(self, target: &str, context: &Context) -> Result<(), CliError> {
        let [dir] = &self.dirs[..] else {
            return Err(CliError::Usage {
                problem: "one directory is served of another server's".to_owned(),
                hint: "name the one to mount it on".to_owned(),
            });
        };
        let signals = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
        let [Ok(mut terminate), Ok(mut interrupt)] = signals else {
            return Err(CliError::io("hear signals")(io::ErrorKind::Other.into()));
        };
        let mut upstream = Upstream::start(target, dir, &self.with).await?;
        let ended = tokio::select! {
            served = self.serve_dirs(context) => Some(served),
            failure = upstream.ended() => return Err(failure),
            _ = terminate.recv() => None,
            _ = interrupt.recv() => None,
        };
        let written = upstream.end().await;
        match (ended, written) {
            (Some(served), written) => served.and(written),
            (None, Err(failure)) => Err(failure),
            // Who serves is a thread that waits for ever.
            (None, Ok(())) => std::process::exit(0),
        }
    }

    async fn serve_dirs(self, context: &Context) -> Result<(), CliError> {
        let (dirs, read_only, keys, allow) = (self.dirs, self.read_only, self.keys, self.allow);
        let serving =
            ExportServer { dirs, read_only, keys, allow, idle: Duration::from_secs(self.idle * 3600) };
        let output = context.output;
        // Files are read by many at once: several threads carry what they read.
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

/// Carries bytes both ways until the daemon has ended its side. The end of the input is passed on to it, for
/// it may still have something to say.
async fn relay(
    input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin,
    daemon: impl AsyncRead + AsyncWrite,
) -> io::Result<()> {
    let (from_daemon, mut to_daemon) = tokio::io::split(daemon);
    let (mut input, mut from_daemon) =
        (BufReader::with_capacity(BUFFER, input), BufReader::with_capacity(BUFFER, from_daemon));
    let inward = async {
        // However it ends, no more comes from there; a daemon that is gone ends the other direction.
        let _ = copy_buf(&mut input, &mut to_daemon).await;
        let _ = to_daemon.shutdown().await;
        std::future::pending().await
    };
    tokio::select! {
        outward = copy_buf(&mut from_daemon, &mut output) => outward.map(drop),
        never = inward => never,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, duplex};

    #[tokio::test]
    async fn last_words_after_the_end_of_the_input_still_arrive() {
        let (daemon, mut far_daemon) = duplex(64);
        let (output, mut heard) = duplex(64);
        let speak = async {
            let mut asked = Vec::new();
            far_daemon.read_to_end(&mut asked).await.unwrap();
            far_daemon.write_all(b"goodbye").await.unwrap();
            drop(far_daemon);
            asked
        };
        let (asked, relayed) = tokio::join!(speak, relay(&b"hello"[..], output, daemon));
        relayed.unwrap();
        let mut words = String::new();
        heard.read_to_string(&mut words).await.unwrap();
        assert_eq!((asked.as_slice(), words.as_str()), (&b"hello"[..], "goodbye"));
    }

    #[tokio::test]
    async fn a_daemon_that_ends_ends_the_relay_while_the_input_is_open() {
        let (_silent, input) = duplex(64);
        let (daemon, far_daemon) = duplex(64);
        drop(far_daemon);
        relay(input, tokio::io::sink(), daemon).await.unwrap();
    }
}
