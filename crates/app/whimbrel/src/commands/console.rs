//! `whimbrel console`: attaches the terminal to the serial port of a machine.

use crate::{
    context::Context,
    error::CliError,
    output,
    terminal::{Escape, RawMode, Typed},
};
use std::io::{IsTerminal, Read, Write};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    select,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use whimbrel_client::RawStream;
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel console web
  whimbrel console web --log          print the end of the console log, without attaching
  echo reboot | whimbrel console web

Leave with Ctrl-], or with ~. at the beginning of a line (~~ types one ~).";

/// Attach to the serial console of a machine
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Print the end of the console log and exit
    #[arg(long)]
    log: bool,
    /// Length of the part of the log to print
    #[arg(long, value_name = "SIZE", default_value = "64K", requires = "log")]
    bytes: ByteSize,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        if self.log {
            return output::write(&context.client.console_log(&self.name, self.bytes.0).await?);
        }
        let console = context.client.console(&self.name).await?;
        if std::io::stdin().is_terminal() {
            context.output.remark(&format!("attached to {}; Ctrl-] or ~. leaves", self.name));
        }
        let raw = RawMode::enable_raw_mode().map_err(CliError::io("make the terminal raw"))?;
        let outcome = attach(console, keyboard(), raw.is_some()).await;
        if raw.is_some() {
            drop(raw);
            context.output.remark("");
        }
        outcome
    }
}

/// Reads standard input in a thread of its own: a read of a terminal cannot be cancelled, and the thread may
/// still be in it when the process ends. The queue is bounded, so the reader waits for a slow guest.
fn keyboard() -> mpsc::Receiver<Vec<u8>> {
    let (send, receive) = mpsc::channel(16);
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count) = std::io::stdin().read(&mut buffer) {
            if count == 0 || send.blocking_send(buffer[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    receive
}

/// Copies bytes both ways until the user leaves, the machine ends or a signal arrives. The end of an input
/// that is not a terminal does not end it, because the guest may still answer.
async fn attach(
    console: RawStream,
    mut typed: mpsc::Receiver<Vec<u8>>,
    terminal: bool,
) -> Result<(), CliError> {
    let (mut printed, mut keys) = tokio::io::split(console);
    let mut escape = Escape::new();
    let mut buffer = vec![0; 16 << 10];
    let mut terminate = signal(SignalKind::terminate()).map_err(CliError::io("watch for signals"))?;
    let mut hang_up = signal(SignalKind::hangup()).map_err(CliError::io("watch for signals"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CliError::io("watch for signals"))?;
    let mut typing = true;
    loop {
        select! {
            count = printed.read(&mut buffer) => match count.map_err(CliError::io("read the console"))? {
                0 => return Ok(()),
                count => print(&buffer[..count])?,
            },
            piece = typed.recv(), if typing => {
                typing = piece.is_some();
                let typed = piece.map(|piece| if terminal { escape.feed(&piece) } else { Typed::Send(piece) });
                match typed {
                    Some(Typed::Send(bytes)) => send(&mut keys, &bytes).await?,
                    Some(Typed::Leave(bytes)) => return send(&mut keys, &bytes).await,
                    None => {}
                }
            }
            _ = terminate.recv() => return Ok(()),
            _ = hang_up.recv() => return Ok(()),
            _ = interrupt.recv() => return Err(CliError::Interrupted { operation: None }),
        }
    }
}

async fn send(keys: &mut (impl AsyncWriteExt + Unpin), bytes: &[u8]) -> Result<(), CliError> {
    keys.write_all(bytes).await.map_err(CliError::io("write to the console"))?;
    keys.flush().await.map_err(CliError::io("write to the console"))
}

fn print(bytes: &[u8]) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(CliError::io("write to the terminal"))
}
