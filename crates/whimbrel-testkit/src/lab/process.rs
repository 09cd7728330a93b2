//! A child process that ends with its value, or with this process if that is killed.

use super::{LabError, Namespace};
use nix::sys::{prctl, signal::Signal};
use std::{
    ops::{Deref, DerefMut},
    os::unix::process::CommandExt,
    process::{Child, Command},
};

/// A running child process. Dropping it kills and reaps it.
pub struct Process {
    child: Child,
    // The kernel kills the child when the thread that started it ends: that thread is the namespace's.
    _namespace: Namespace,
}

impl Process {
    /// Starts `command` from the calling thread, which must be the one of `namespace`.
    pub(super) fn start(mut command: Command, namespace: Namespace) -> Result<Self, LabError> {
        // SAFETY: between fork and exec only prctl is called, which is async-signal-safe and allocates nothing.
        unsafe { command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)) };
        let child = command.spawn().map_err(LabError::system("start a process"))?;
        Ok(Self { child, _namespace: namespace })
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.child
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Either it has ended already, or it is killed now; in both cases there is something to reap.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
