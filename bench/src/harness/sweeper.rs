//! Folders that must go also when this process is killed and can no longer remove them.

use anyhow::{Context as _, Result};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Waits for the end of its standard input, which comes from us or from the kernel that ends us, then removes
/// its arguments. Whoever still writes there was killed with us and may be in the way for a moment, hence the
/// repeats.
const SWEEP: &str = r#"cat; for _ in $(seq 100); do rm -rf -- "$@" && exit; sleep 0.1; done"#;

/// A child that removes folders when it is dropped, or when this process ends.
pub(crate) struct Sweeper(Child);

impl Sweeper {
    /// From here on these folders are gone when the value is.
    pub(crate) fn over(folders: &[&Path]) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", SWEEP, "sweeper"]).args(folders);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // In a group of its own a Ctrl-C at the terminal does not end it with us.
        Ok(Self(command.process_group(0).spawn().context("cannot start a shell")?))
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // Whether it could remove everything or not, there is nobody left to try again.
        let _ = self.0.wait();
    }
}
