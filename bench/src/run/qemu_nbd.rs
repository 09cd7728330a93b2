//! `qemu-nbd`, QEMU's own NBD server: the peer of ours, and the disk of a guest that is only made use of.

use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A running server. Ended with the value.
pub(crate) struct QemuNbd {
    child: Child,
    socket: PathBuf,
}

impl QemuNbd {
    /// Serves `disk` at `socket`; what is written is written to it.
    pub(crate) fn writable(disk: &Path, socket: &Path) -> Result<Self> {
        // The host's page cache on both sides, and no translation of its own between.
        Self::start(&["--cache=writeback", "--discard=unmap", "--shared=4"], disk, socket)
    }

    /// Serves `disk` at `socket` and leaves it as it is: what is written is forgotten at the end.
    pub(crate) fn snapshot(disk: &Path, socket: &Path) -> Result<Self> {
        Self::start(&["--snapshot"], disk, socket)
    }

    fn start(options: &[&str], disk: &Path, socket: &Path) -> Result<Self> {
        let mut command = Command::new("qemu-nbd");
        command.args(options).args(["--persistent", "--format=raw", "--socket"]).arg(socket).arg(disk);
        let child = command.stdin(Stdio::null()).spawn().context("cannot start qemu-nbd")?;
        let server = Self { child, socket: socket.to_owned() };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !socket.exists() {
            ensure!(Instant::now() < deadline, "qemu-nbd does not listen");
            sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        // Both fail only if it has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
