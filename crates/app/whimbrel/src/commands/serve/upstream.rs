//! A cache between: the directory that is served is itself a mount of another server's.
//!
//! The mount is this program once more, as `whimbrel mount --foreground` in a child process, so it has the
//! same cache, policies and control socket as every other. It is there before anything is served, and told to
//! write back and end when serving ends. If it ends first, so does the serving: nobody shall write into the
//! empty directory below.

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

/// How often it is looked whether the mount is there.
const LOOK: Duration = Duration::from_millis(50);

/// The mount that is served.
pub(super) struct Upstream {
    child: Child,
}

impl Upstream {
    /// Mounts `target` on `dir`, with `options` of `whimbrel mount`.
    pub(super) async fn start(target: &str, dir: &Path, options: &[String]) -> Result<Self, CliError> {
        let program = std::env::current_exe().map_err(CliError::io("find this program"))?;
        let below = device(dir).map_err(CliError::io("find the directory to mount on"))?;
        let mut command = Command::new(program);
        command.arg("mount").arg(target).arg(dir).args(options).arg("--foreground");
        // What is served over standard input and output has both for itself. Signals of a terminal are for us
        // alone.
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(CliError::io("start the mount of the other server"))?;
        let mut upstream = Self { child };
        while device(dir).is_ok_and(|found| found == below) {
            let ended =
                upstream.child.try_wait().map_err(CliError::io("look at the mount of the other server"))?;
            if let Some(status) = ended {
                return Err(gone(status));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(upstream)
    }

    /// Waits until it ends by itself, which is a failure.
    pub(super) async fn ended(&mut self) -> CliError {
        match self.child.wait().await {
            Ok(status) => gone(status),
            Err(source) => CliError::io("wait for the mount of the other server")(source),
        }
    }

    /// Has it write back and end.
    pub(super) async fn end(mut self) -> Result<(), CliError> {
        if let Some(id) = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
            // It may have ended just now.
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
