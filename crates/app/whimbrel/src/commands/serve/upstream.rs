//! Upstream: the directory that is served is itself a mount of another server, so this host is a cache for a
//! network.
//!
//! A child process runs `whimbrel mount --foreground`, with the same cache, policies and control socket as
//! every other mount. Serving starts after the mount, and ends it with a write-back. If the mount ends first,
//! serving ends, so that nobody writes into the empty directory below.

use crate::error::CliError;
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::process::{Child, Command};

/// Interval at which the mount is polled.
const LOOK: Duration = Duration::from_millis(50);

pub(super) struct Upstream {
    child: Child,
}

impl Upstream {
    /// Mounts `target` on `dir` with `options` of `whimbrel mount`.
    pub(super) async fn start(target: &str, dir: &Path, options: &[String]) -> Result<Self, CliError> {
        let program = std::env::current_exe().map_err(CliError::io("find this program"))?;
        let below = device(dir).map_err(CliError::io("find the directory to mount on"))?;
        let mut command = Command::new(program);
        command.arg("mount").arg(target).arg(dir).args(options).arg("--foreground");
        // Standard input and output may belong to the client, and signals of the terminal are for this
        // process.
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(CliError::io("start the mount of the other server"))?;
        let mut upstream = Self { child };
        while device(dir).is_ok_and(|found| found == below) {
            let ended =
                upstream.child.try_wait().map_err(CliError::io("poll the mount of the other server"))?;
            if let Some(status) = ended {
                return Err(gone(status));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(upstream)
    }

    /// Waits until the mount ends by itself, which is an error.
    pub(super) async fn ended(&mut self) -> CliError {
        match self.child.wait().await {
            Ok(status) => gone(status),
            Err(source) => CliError::io("wait for the mount of the other server")(source),
        }
    }

    /// Ends the mount after a write-back.
    pub(super) async fn end(mut self) -> Result<(), CliError> {
        if let Some(id) = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
            // The process may have ended a moment ago.
            let _ = kill_process(id, Signal::TERM);
        }
        let status =
            self.child.wait().await.map_err(CliError::io("wait for the mount of the other server"))?;
        if status.success() { Ok(()) } else { Err(gone(status)) }
    }
}

fn device(dir: &Path) -> io::Result<u64> {
    fs::metadata(dir).map(|found| found.dev())
}

fn gone(status: ExitStatus) -> CliError {
    CliError::Session(format!("the mount of the other server ended: {status}").into())
}
