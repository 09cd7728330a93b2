//! `whimbrel dial-stdio`: connects standard input and output to the daemon. Another host runs it over ssh.
//!
//! Only bytes are copied; the daemon speaks the protocol. Nothing else may go to standard output. Errors go
//! to standard error, which ssh carries to the other host.

use crate::{context::Context, error::CliError};
use std::io::{self, IsTerminal};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, copy_buf};

/// Buffer for one system call.
const BUFFER: usize = 256 << 10;

/// Connect standard input and output to the daemon, for another host
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        refuse_terminal()?;
        let daemon = context.client.wire().await?;
        let (input, output) =
            whimbrel_wire::stdio().map_err(CliError::io("use standard input and output"))?;
        relay(input, output, daemon).await.map_err(CliError::io("copy bytes to the other host"))
    }
}

/// Fails if a person runs what another host should run.
pub(super) fn refuse_terminal() -> Result<(), CliError> {
    if !io::stdin().is_terminal() && !io::stdout().is_terminal() {
        return Ok(());
    }
    Err(CliError::Usage {
        problem: "this command talks to another host and not to a terminal".to_owned(),
        hint: "mount a directory from another host with `whimbrel mount HOST:/PATH DIR`, or trust this host there: \
               `whimbrel trust add NAME --ssh DESTINATION`"
            .to_owned(),
    })
}

/// Copies bytes both ways until the daemon closes its side. The end of the input is passed on, because the
/// daemon may still answer.
async fn relay(
    input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin,
    daemon: impl AsyncRead + AsyncWrite,
) -> io::Result<()> {
    let (from_daemon, mut to_daemon) = tokio::io::split(daemon);
    let (mut input, mut from_daemon) =
        (BufReader::with_capacity(BUFFER, input), BufReader::with_capacity(BUFFER, from_daemon));
    let inward = async {
        // An error ends the input as well. If the daemon is gone, the other direction ends.
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
    async fn answers_after_the_end_of_the_input_still_arrive() {
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
