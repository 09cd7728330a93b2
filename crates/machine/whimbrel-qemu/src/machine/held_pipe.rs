//! Held pipe: QEMU writes its device state into it, and stands still until this process makes room.
//!
//! `xen-save-devices-state` of a running machine stops it, drains and flushes its disks, writes the devices
//! and lets it go on. While the pipe has room for one page only, QEMU waits in that write: so one command
//! takes the place of `stop`, the saving and `cont`. If this process ends, QEMU's write fails, and the
//! machine goes on.
//!
//! The pipe has no name. QEMU gets its writing end as a descriptor (`add-fd`) and opens it anew in
//! `/proc/self/fd`, which never waits: an open of a named pipe would, for ever, once its reader is gone.

use crate::{
    machine_user::QemuDir,
    qmp::{Qmp, QmpError},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    pipe::{PipeFlags, fcntl_setpipe_size, pipe_with},
};
use std::{
    fs::File,
    io::{self, Read},
    os::fd::AsFd,
    time::Duration,
};

/// Least size of a pipe (fcntl(2), `F_SETPIPE_SZ`).
pub(super) const HELD_SIZE: usize = 4096;
/// Most that it may have without `CAP_SYS_RESOURCE` (`/proc/sys/fs/pipe-max-size`); larger states are read
/// while they are written.
const FREE_SIZE: usize = 1 << 20;
/// QEMU's set of descriptors for the writing end. A set of an earlier process is replaced.
const SET: u64 = 1;

/// Reading end of the pipe. QEMU keeps the other one until its control connection ends.
#[derive(Debug)]
pub(super) struct HeldPipe {
    end: File,
    /// Path by which QEMU opens the other end.
    path: String,
}

impl HeldPipe {
    /// Makes a pipe and passes its writing end to the QEMU that works in `dir`.
    pub(super) fn pass_to(qmp: &Qmp, dir: &QemuDir) -> Result<Self, QmpError> {
        // QEMU opens its end without this flag: its writes wait.
        let (end, writing_end) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(failed)?;
        fcntl_setpipe_size(&end, HELD_SIZE).map_err(failed)?;
        dir.give_descriptor(writing_end.as_fd()).map_err(QmpError::Io)?;
        let number = qmp.replace_descriptors(SET, writing_end.as_fd())?;
        Ok(Self { end: File::from(end), path: format!("/proc/self/fd/{number}") })
    }

    /// Path by which QEMU opens the other end.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Waits until QEMU has begun to write; false if it has not within `patience`, an error if it has ended.
    pub(super) fn wait(&self, patience: Duration) -> io::Result<bool> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() };
        let mut ends = [PollFd::new(&self.end, PollFlags::IN)];
        match poll(&mut ends, Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => Ok(false),
            Ok(_) if ends[0].revents().contains(PollFlags::IN) => Ok(true),
            Ok(_) => Err(io::ErrorKind::BrokenPipe.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes room for all that QEMU has to write.
    pub(super) fn release(&self) {
        // Fails if the user's pipes have too much together: then it is read a page at a time.
        let _ = fcntl_setpipe_size(&self.end, FREE_SIZE);
    }

    /// Takes what is there into `state`, which gets `most` bytes and one at most.
    pub(super) fn drain(&mut self, state: &mut Vec<u8>, most: usize) -> io::Result<()> {
        let room = (most + 1).saturating_sub(state.len());
        match Read::by_ref(&mut self.end).take(room as u64).read_to_end(state) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes the pipe ready for the next state; false if it cannot be.
    pub(super) fn hold(&mut self) -> bool {
        let mut rest = Vec::new();
        self.drain(&mut rest, 0).is_ok()
            && rest.is_empty()
            && fcntl_setpipe_size(&self.end, HELD_SIZE).is_ok()
    }
}

fn failed(errno: Errno) -> QmpError {
    QmpError::Io(errno.into())
}
