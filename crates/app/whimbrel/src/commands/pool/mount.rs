//! Mounting a pool: `whimbrel mount pool:MANAGER DIR`. It stays until it is unmounted or told to end.

use super::{failed, open, runtime};
use crate::{context::Context, error::CliError};
use clap::ValueEnum;
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::signal::unix::{SignalKind, signal};
use whimbrel_core::ByteSize;
use whimbrel_pool::{
    ManagerAddress,
    client::{PoolOptions, Secret, WriteMode, WriteOptions},
    mount::{PoolMount, mount},
};

/// How often it is looked whether somebody has unmounted it.
const LOOK: Duration = Duration::from_millis(200);

/// How a pool is written to.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Of a pool")]
pub(crate) struct Args {
    /// What stands between a program and the pool
    #[arg(long, value_name = "HOW", default_value = "window")]
    protocol: How,
    /// Bytes of a file under way in memory, or of one local file with --protocol incremental
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    buffer: ByteSize,
    /// Folder of local files, the usual one for temporary files unless given
    #[arg(long, value_name = "DIR")]
    spool: Option<PathBuf>,
    /// File of a secret that seals what is written, as `whimbrel pool secret` makes it
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
}

/// What stands between a program and the pool.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum How {
    /// A buffer in memory
    Window,
    /// Local files, each sent while the next is written
    Incremental,
    /// One local file, sent after close has returned
    Local,
}

/// What is printed when a pool is mounted.
#[derive(Debug, Serialize)]
struct MountedPool {
    manager: String,
    mount: PathBuf,
}

impl Args {
    fn write(&self) -> WriteOptions {
        let usual = WriteOptions::default();
        let protocol = match self.protocol {
            How::Window => WriteMode::SlidingWindow,
            How::Incremental => WriteMode::Incremental { file: self.buffer.0 },
            How::Local => WriteMode::CompleteLocal,
        };
        let buffer = match self.protocol {
            How::Window => usize::try_from(self.buffer.0).unwrap_or(usize::MAX),
            _ => usual.buffer,
        };
        WriteOptions { protocol, buffer, spool: self.spool.clone().unwrap_or(usual.spool) }
    }

    /// Mounts the pool whose managers `target` names, commas between them.
    pub(crate) fn run(
        self,
        target: &str,
        dir: &Path,
        (keys, others): (&Path, bool),
        context: &Context,
    ) -> Result<(), CliError> {
        let managers: Result<Vec<ManagerAddress>, _> = target.split(',').map(str::parse).collect();
        let managers = managers.map_err(|error| CliError::Usage {
            problem: error.to_string(),
            hint: "write pool:HOST:PORT/KEY as `whimbrel pool manager` prints it".to_owned(),
        })?;
        let runtime = runtime()?;
        let secret = self.secret.as_deref().map(Secret::load).transpose();
        let secret = secret.map_err(CliError::io("read the secret"))?.map(Arc::new);
        let pool = open(PoolOptions { secret, ..PoolOptions::new(managers) }, keys, &runtime)?;
        pool.block(pool.status()).map_err(CliError::Pool)?;
        let options =
            PoolMount { source: format!("pool:{target}"), write: self.write(), others, read_only: false };
        let mut mounted = mount(pool, dir, options).map_err(failed)?;
        let said = MountedPool { manager: target.to_owned(), mount: mounted.path().to_owned() };
        context.output.result(&said, |said| format!("mounted on {}\n", said.mount.display()))?;
        runtime.block_on(async {
            let (Ok(mut term), Ok(mut int)) =
                (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
            else {
                return;
            };
            loop {
                tokio::select! {
                    _ = term.recv() => return,
                    _ = int.recv() => return,
                    () = tokio::time::sleep(LOOK) => if mounted.is_gone() { return },
                }
            }
        });
        if let Err(error) = mounted.unmount() {
            context.output.remark(&format!("files were open: {error}"));
        }
        Ok(())
    }
}
