//! `whimbrel serve --stdio`: what another host's ssh runs here.
//!
//! Only bytes are carried, between standard input and output and the daemon; the daemon speaks. Nothing else may
//! go to standard output, and what fails is told on standard error, which ssh takes to the other host.

use crate::{context::Context, failure::Failure};
use std::io::{self, IsTerminal};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, copy_buf};

const EXAMPLES: &str = "\
Examples:
  ssh root@beta whimbrel serve --stdio    what the daemon runs that trusts beta with --ssh root@beta

To let a key of ssh do this and nothing else, write in authorized_keys on beta:
  restrict,command=\"whimbrel serve --stdio\" ssh-ed25519 AAAA...";

/// Much for one system call, little for a process.
const BUFFER: usize = 256 << 10;

/// Let the host whose ssh runs this talk to the daemon here
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Over standard input and output
    #[arg(long, required = true)]
    stdio: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        if io::stdin().is_terminal() || io::stdout().is_terminal() {
            return Err(Failure::Usage {
                problem: "this speaks to a host, not to a terminal".to_owned(),
                hint: "trust this host on another one: `whimbrel trust add NAME --ssh DESTINATION`"
                    .to_owned(),
            });
        }
        let daemon = context.client.wire().await?;
        let (input, output) = whimbrel_wire::stdio().map_err(Failure::io("use standard input and output"))?;
        relay(input, output, daemon).await.map_err(Failure::io("carry bytes to the other host"))
    }
}

/// Carries bytes both ways until the daemon has ended its side. The end of the input is passed on to it, for it may
/// still have something to say.
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
