//! TPM of a machine: a process of swtpm (github.com/stefanberger/swtpm) with a connection to QEMU.
//!
//! It parses what the guest sends to its TPM, so it is confined as QEMU is: the machine's user, a directory
//! of its own, no network, no capability, and swtpm's own filter of system calls. It ends when QEMU closes
//! the connection.
//!
//! Its permanent state is one file, which it replaces as a whole when a command has changed it, before it
//! answers. All else, and that state once more, is in QEMU's device state (section `tpm-emulator`): a swtpm
//! without a file gets all of it when QEMU loads a device state, and writes the file then.

use crate::{
    confinement::{Confinement, OwnUser},
    machine_user::MachineUser,
    probe::program,
    process::{HugePages, ProcessError, ProcessIdentity, QemuProcess},
};
use rustix::fs::{Mode, OFlags};
use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

/// File with the permanent state, in the TPM's directory.
pub const TPM_STATE: &str = "tpm2-00.permall";
/// Program of the TPM.
const PROGRAM: &str = "swtpm";
/// File of its output, in the same directory.
const LOG: &str = "log";

/// TPM that waits for its QEMU.
#[derive(Debug)]
pub struct Tpm {
    /// Process to record, so that it can be ended later.
    pub process: ProcessIdentity,
    /// Connection for the `tpm` of [`crate::LaunchSpec`]. The TPM ends when no process has it any more.
    pub control: Arc<OwnedFd>,
}

/// Cause of a TPM that could not be started.
#[derive(Debug, thiserror::Error)]
pub enum TpmError {
    /// The program is not installed.
    #[error("this host has no swtpm, which is the TPM of machines: install the package swtpm")]
    NotFound,
    /// The process could not be started.
    #[error("cannot start swtpm")]
    Process(#[from] ProcessError),
    /// What it is to work with could not be made.
    #[error("cannot prepare {what}")]
    Io {
        /// Name of the part.
        what: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
}

impl Tpm {
    /// Path of the program.
    pub fn find() -> Result<PathBuf, TpmError> {
        program(PROGRAM).ok_or(TpmError::NotFound)
    }

    /// Starts a TPM with the state in `dir`, or a new one if there is none. The directory is its own from now
    /// on: what lies there is input from outside.
    pub fn start(dir: &Path) -> Result<Self, TpmError> {
        let program = Self::find()?;
        let (control, theirs) = UnixStream::pair().map_err(io_error("its connection"))?;
        let (own, state) = match MachineUser::of_dir(dir).map_err(io_error("its directory"))? {
            Some(user) => {
                let opened = user.open_dir(dir).and_then(|()| {
                    Ok(rustix::fs::open(dir, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
                });
                let opened = opened.map_err(io_error("its directory"))?;
                (Some(OwnUser::of_machine(user, opened, 0)), Path::new("."))
            }
            None => (None, dir),
        };
        let words = ["socket", "--tpm2", "--terminate", "--tpmstate"];
        let mut arguments: Vec<OsString> = words.iter().map(OsString::from).collect();
        let mut place = OsString::from("dir=");
        place.push(state);
        let connection = format!("type=unixio,clientfd={}", theirs.as_raw_fd());
        arguments.extend([place, "--ctrl".into(), connection.into()]);
        let confinement = Confinement::of_machine(own, Vec::new()).with_files_of(&program);
        let confinement = confinement.map_err(io_error("the list of files that it may open"))?;
        let confinement = confinement.with_socket(Some(Arc::new(theirs.into())));
        let process =
            QemuProcess::spawn(&program, &arguments, &dir.join(LOG), HugePages::Forbidden, confinement)?;
        Ok(Self { process: process.identity(), control: Arc::new(control.into()) })
    }
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> TpmError {
    move |source| TpmError::Io { what, source }
}
