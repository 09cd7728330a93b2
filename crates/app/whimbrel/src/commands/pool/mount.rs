//! Mount of a pool: `whimbrel mount pool:MANAGER DIR`, until it is unmounted or a signal ends it.

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
use whimbrel_fuse::Mounted;
use whimbrel_pool::{
    ManagerAddress,
    client::{PoolOptions, Secret, WriteMode, WriteOptions},
    mount::{PoolMount, mount},
};

/// Interval at which the process checks whether the pool was unmounted.
const LOOK: Duration = Duration::from_millis(200);

/// Options for a pool.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for a pool")]
pub(crate) struct Args {
    /// Place of written data before it is sent to the pool
    #[arg(long, alias = "protocol", value_name = "MODE", default_value = "sliding-window")]
    write_mode: How,
    /// Size of the buffer of an open file, or of one local file with --write-mode incremental
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    buffer: ByteSize,
    /// Directory of local files [default: the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    spool: Option<PathBuf>,
    /// File with the secret that encrypts written data, as `whimbrel pool secret` creates it
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum How {
    /// Buffer in memory
    #[value(alias = "window")]
    SlidingWindow,
    /// Local files, each sent while the next one is written
    Incremental,
    /// One local file, sent after close has returned
    #[value(alias = "local")]
    CompleteLocal,
}

#[derive(Debug, Serialize)]
struct MountedPool {
    manager: String,
    mount: PathBuf,
}

impl Args {
    fn write(&self) -> WriteOptions {
        let usual = WriteOptions::default();
        let protocol = match self.write_mode {
            How::SlidingWindow => WriteMode::SlidingWindow,
            How::Incremental => WriteMode::Incremental { file: self.buffer.0 },
            How::CompleteLocal => WriteMode::CompleteLocal,
        };
        let buffer = match self.write_mode {
            How::SlidingWindow => usize::try_from(self.buffer.0).unwrap_or(usize::MAX),
            _ => usual.buffer,
        };
        WriteOptions { mode: protocol, buffer, spool: self.spool.clone().unwrap_or(usual.spool) }
    }

    /// Mounts the pool with the managers in `target`, which are separated by commas.
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
        runtime.block_on(wait_until_gone(&mounted));
        if let Err(error) = mounted.unmount() {
            context.output.remark(&format!("files were open: {error}"));
        }
        Ok(())
    }
}

/// Waits for a signal that ends the mount, or for the end of the mount itself.
async fn wait_until_gone(mounted: &Mounted) {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
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
}
