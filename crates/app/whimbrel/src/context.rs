//! Context of a command: the client of the daemon, and the output for the user.

use crate::{cli::Cli, error::CliError, output::Output};
use std::{
    io::Read,
    path::{Path, PathBuf},
};
use whimbrel_api::{StopMode, StopRequest};
use whimbrel_client::{Client, ClientError, RemoteHost};
use whimbrel_core::MachineName;

/// Longest file with a token.
const TOKEN_MAX: u64 = 1024;

pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) output: Output,
    /// Name of the host that --host names.
    pub(crate) remote: Option<String>,
    /// Socket of the daemon here.
    pub(crate) socket: PathBuf,
}

impl Context {
    /// Context that the global options describe.
    pub(crate) fn new(cli: &Cli) -> Result<Self, CliError> {
        let client = match &cli.remote {
            Some(address) => {
                let token = cli.token_file.as_deref().ok_or_else(no_token).and_then(read_token)?;
                let (address, fingerprint) = (address.clone(), cli.fingerprint);
                Client::over_tls(RemoteHost { address, token, fingerprint })
            }
            None => Client::new(cli.socket()),
        };
        let remote = cli.remote.as_ref().map(|address| address.host.clone());
        Ok(Self {
            client,
            output: Output { json: cli.json, quiet: cli.quiet },
            remote,
            socket: cli.socket().to_owned(),
        })
    }

    /// Ends a machine that this command has made, and deletes it.
    pub(crate) async fn discard(&self, name: &MachineName) -> Result<(), ClientError> {
        let kill = StopRequest { mode: StopMode::Kill, ..StopRequest::default() };
        // The machine may have stopped already; one that runs is not deleted.
        let _ = self.client.stop(name, &kill).await;
        self.client.delete_machine(name).await
    }
}

/// Text of a token in a file.
pub(crate) fn read_token(path: &Path) -> Result<String, CliError> {
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(TOKEN_MAX).read_to_string(&mut text));
    read.map_err(CliError::io("read the file with the token"))?;
    Ok(text.trim().to_owned())
}

fn no_token() -> CliError {
    CliError::Usage {
        problem: "--host needs a token".to_owned(),
        hint: "`whimbrel token create NAME` on that host prints one: name a file with it by --token-file"
            .to_owned(),
    }
}
