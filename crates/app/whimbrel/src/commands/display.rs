//! `whimbrel display`: opens the screen of a machine to VNC viewers of this computer.

use crate::{context::Context, error::CliError};
use std::net::{Ipv4Addr, SocketAddr};
use tokio::{
    net::{TcpListener, TcpStream},
    select,
    signal::unix::{SignalKind, signal},
};
use whimbrel_client::Client;
use whimbrel_core::MachineName;

/// First port of VNC: screen 0 of a computer.
const FIRST_PORT: u16 = 5900;
/// Ports that are tried when the user names none.
const PORTS: u16 = 100;

const EXAMPLES: &str = "\
Examples:
  whimbrel display desk
  whimbrel display desk --listen 127.0.0.1:5950
  whimbrel --host https://server:7443 --token-file token display desk

Point a VNC viewer at the address that is printed (`vncviewer 127.0.0.1:5900`). It asks for no password, so whoever
reaches the address sees the screen and may type: by default only users of this computer do. The web page of a host
shows screens as well. All viewers of a machine see the same.";

/// Show the screen of a machine in a VNC viewer
///
/// The machine needs a screen: `--display` or `--profile desktop` of `run` and `launch`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Address for viewers [default: the first free port of 127.0.0.1 from 5900 on]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        // Refused now, and not to the first viewer, which could not say why.
        drop(context.client.display(&self.name).await?);
        let listener = self.listener().await?;
        let address = listener.local_addr().map_err(CliError::io("read the address for viewers"))?;
        let name = &self.name;
        context
            .output
            .remark(&format!("the screen of {name} is at {address} for VNC viewers; Ctrl-C ends this"));
        let mut terminate = signal(SignalKind::terminate()).map_err(CliError::io("watch for signals"))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(CliError::io("watch for signals"))?;
        loop {
            select! {
                viewer = listener.accept() => {
                    let (viewer, _) = viewer.map_err(CliError::io("wait for viewers"))?;
                    tokio::spawn(show(context.client.clone(), self.name.clone(), viewer));
                }
                _ = terminate.recv() => return Ok(()),
                _ = interrupt.recv() => return Ok(()),
            }
        }
    }

    async fn listener(&self) -> Result<TcpListener, CliError> {
        let failed = CliError::io("listen for viewers");
        if let Some(address) = self.listen {
            return TcpListener::bind(address).await.map_err(failed);
        }
        for port in FIRST_PORT..FIRST_PORT + PORTS {
            if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
                return Ok(listener);
            }
        }
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)
    }
}

/// Connects a viewer, until it or the screen ends.
async fn show(client: Client, name: MachineName, mut viewer: TcpStream) {
    match client.display(&name).await {
        // A viewer that has gone is the end, however it went.
        Ok(mut screen) => drop(tokio::io::copy_bidirectional(&mut viewer, &mut screen).await),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "a viewer could not be connected")
        }
    }
}
