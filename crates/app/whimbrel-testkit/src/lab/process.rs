//! Child process that ends when its value is dropped, or when this process is killed.
//!
//! It leads a process group, so dropping the value ends its own children too, unless they left the group. The
//! one `unsafe` is the request to the kernel to kill the child with this process.

use super::{LabError, Namespace};
use nix::{
    sys::{
        prctl,
        signal::{Signal, killpg},
    },
    unistd::Pid,
};
use std::{
    ops::{Deref, DerefMut},
    os::unix::process::CommandExt,
    process::{Child, Command},
};

/// Running child process, killed and reaped when dropped.
pub struct Process {
    child: Child,
    // The kernel kills the child when the thread that started it ends: that thread is the namespace's.
    _namespace: Namespace,
}

impl Process {
    /// Starts `command` from the calling thread, which must be the thread of `namespace`.
    pub(super) fn start(mut command: Command, namespace: Namespace) -> Result<Self, LabError> {
        // SAFETY: between fork and exec only prctl is called, which is async-signal-safe and allocates
        // nothing.
        unsafe { command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?)) };
        let child = command.process_group(0).spawn().map_err(LabError::system("start a process"))?;
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
        // The group has ended already or is killed now; in both cases the child can be reaped.
        let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}
