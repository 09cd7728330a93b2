//! Parts of a controlled QEMU, for another process that goes on with it: its descriptors, and the state
//! that they do not say.
//!
//! The control connection is passed as it is, so QEMU sees no other client and no event is lost. Whoever
//! has the parts may be unrelated to QEMU.

use super::{Qemu, device_state::DeviceStateCache, dir_error};
use crate::{
    launch::{LaunchError, Sharing, log_in},
    machine_user::QemuDir,
    process::{ProcessIdentity, QemuProcess},
    qmp::{Qmp, QmpError, QmpState},
    state::{StateError, StreamHeader},
};
use serde::{Deserialize, Serialize};
use std::{io, os::fd::OwnedFd, os::unix::net::UnixStream, path::PathBuf};

/// Descriptors of a controlled QEMU.
#[derive(Debug)]
pub struct QemuDescriptors {
    /// Descriptor of the process.
    pub pidfd: OwnedFd,
    /// Socket of the control connection.
    pub qmp: OwnedFd,
}

/// State of a suspended QEMU connection, in plain types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuState {
    /// Runtime directory of this QEMU.
    pub dir: PathBuf,
    /// Identity of the process.
    pub identity: ProcessIdentity,
    /// Whether guest memory is mapped privately.
    pub private_memory: bool,
    /// Header of the device state, if it is known.
    pub head: Option<Vec<u8>>,
    /// Place in the control connection.
    pub qmp: QmpState,
}

impl Qemu {
    /// Copies of the descriptors.
    pub fn descriptors(&self) -> io::Result<QemuDescriptors> {
        Ok(QemuDescriptors { pidfd: self.process.pidfd()?, qmp: self.qmp.socket()? })
    }

    /// Whether guest memory is mapped privately.
    pub fn has_private_memory(&self) -> bool {
        self.state_cache.sharing() == Sharing::Private
    }

    /// Stops using the control connection of a paused machine and returns the state that goes with the
    /// descriptors. [`Qemu::resume_control`] takes the machine back.
    ///
    /// # Errors
    /// If the machine runs, or a device state is being loaded or saved; then nothing has changed.
    pub fn suspend(&mut self) -> Result<QemuState, StateError> {
        if self.qmp.is_running() {
            return Err(StateError::NotPaused);
        }
        if self.incoming.is_some() || self.state_cache.is_saving() {
            return Err(StateError::Busy);
        }
        self.state_cache.forget_pipe();
        Ok(QemuState {
            dir: self.dir.path().to_owned(),
            identity: self.process.identity(),
            private_memory: self.has_private_memory(),
            head: self.head().map(|head| head.as_bytes().to_vec()),
            qmp: self.qmp.suspend(),
        })
    }

    /// Uses the control connection again after [`Qemu::suspend`], because nobody else does. `others_read`
    /// says whether another process may have read it meanwhile.
    pub fn resume_control(&mut self, state: QmpState, others_read: bool) -> Result<(), QmpError> {
        self.qmp.resume(if others_read { QmpState::unknown() } else { state })
    }

    /// QEMU of which another process has passed the parts.
    pub fn from_parts(descriptors: QemuDescriptors, state: QemuState) -> Result<Self, LaunchError> {
        let QemuState { dir, identity, private_memory, head, qmp } = state;
        let process = QemuProcess::from_parts(identity, descriptors.pidfd, &log_in(&dir))?;
        let dir = QemuDir::of(&dir).map_err(dir_error)?;
        let sharing = if private_memory { Sharing::Private } else { Sharing::Shared };
        let mut state_cache = DeviceStateCache::new(&dir, sharing)?;
        // The small blocks are located by the first save. A header that cannot be read is taken anew.
        state_cache.loaded = head.and_then(|head| StreamHeader::parse(&head).ok());
        let qmp = Qmp::from_parts(UnixStream::from(descriptors.qmp), qmp)?;
        Ok(Self { qmp, process, dir, state_cache, incoming: None })
    }
}
