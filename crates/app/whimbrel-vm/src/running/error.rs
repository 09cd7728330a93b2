//! Errors of a running machine, and of a machine that does not come to run.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};
use whimbrel_capture::CaptureError;
use whimbrel_store::StoreError;

/// Cause of a failure.
pub(super) type Cause = Box<dyn Error + Send + Sync>;

/// Failure of a running machine or of its start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what its fields are")]
pub enum RunningError {
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("QEMU failed: cannot {action}")]
    Qemu { action: &'static str, source: Cause },
    #[error("cannot access the memory of QEMU")]
    Memory { source: Cause },
    #[error("the disk {disk} failed")]
    Disk { disk: String, source: Cause },
    #[error("the network port {port} failed")]
    Port { port: String, source: Cause },
    #[error("the store failed: cannot {action}")]
    Store { action: &'static str, source: StoreError },
    #[error("cannot capture the state of the machine")]
    Capture { source: CaptureError },
    #[error("the guest did not shut down within {seconds} s")]
    StillRunning { seconds: u64 },
}

impl RunningError {
    /// Failure of `action` on a file.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    /// Failure of QEMU to do `action`.
    pub fn qemu(action: &'static str, source: impl Into<Cause>) -> Self {
        Self::Qemu { action, source: source.into() }
    }
}
