//! A QEMU under control: its process, its control connection, its device state.
//!
//! Dropping a [`Qemu`] leaves the machine running; [`Qemu::quit`] or [`Qemu::kill`] ends it. QEMU serves one
//! control connection at a time, so there is one `Qemu` a machine.

mod control;
mod device_state;
mod incoming_state;

pub use control::{BalloonStats, Status};

use crate::{
    launch::{LaunchError, LaunchSpec, Sharing, guest_in, log_in, qmp_in},
    process::{HugePages, ProcessIdentity, QemuProcess},
    qmp::Qmp,
};
use device_state::DeviceStateCache;
use incoming_state::Incoming;
pub use incoming_state::VmIdentity;
use serde_json::json;
use std::{
    fs, io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// How long a QEMU may take until it answers. It takes 50 ms; a loaded host needs patience.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a starting QEMU is tried.
const START_POLL: Duration = Duration::from_millis(1);
/// How long an adopted QEMU may take until it answers: it runs, so there is nothing to wait for.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(5);

/// A running QEMU.
#[derive(Debug)]
pub struct Qemu {
    qmp: Qmp,
    process: QemuProcess,
    dir: PathBuf,
    saver: DeviceStateCache,
    /// Told to read a state ahead of it.
    incoming: Option<Incoming>,
}

impl Qemu {
    /// Starts `binary` as `spec` says. The machine is paused, or waits for [`Qemu::load`] if it is incoming.
    ///
    /// On failure nothing is left running.
    pub fn launch(binary: &Path, spec: &LaunchSpec) -> Result<Self, LaunchError> {
        let argv = spec.argv()?;
        // A socket left by an earlier QEMU would be tried in vain, or worse, answer.
        match fs::remove_file(spec.qmp_socket()) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(LaunchError::Io { what: "room for the control socket", source });
            }
            _ => {}
        }
        // Machines that share their memory file are clones: many at once, whose size counts more than their
        // speed.
        let huge_pages = match spec.ram.sharing {
            Sharing::Shared => HugePages::Allowed,
            Sharing::Private => HugePages::Forbidden,
        };
        let process = QemuProcess::spawn(binary, &argv, &spec.log(), huge_pages)?;
        let made = connect(&process, &spec.qmp_socket(), START_TIMEOUT)
            .and_then(|qmp| Ok((qmp, DeviceStateCache::new(spec.ram.sharing)?)));
        match made {
            Ok((qmp, saver)) => Ok(Self { qmp, process, dir: spec.dir.clone(), saver, incoming: None }),
            Err(error) => {
                process.kill();
                Err(error)
            }
        }
    }

    /// Takes up a QEMU that an earlier run of this program started in slot directory `dir`.
    ///
    /// The head of its device state is not known any more: [`Qemu::prepare_device_state`] or
    /// [`Qemu::set_head`] it.
    pub fn adopt(dir: &Path, identity: ProcessIdentity, sharing: Sharing) -> Result<Self, LaunchError> {
        let process = QemuProcess::adopt(identity, &log_in(dir))?;
        let qmp = connect(&process, &qmp_in(dir), ADOPT_TIMEOUT)?;
        Ok(Self { qmp, process, dir: dir.to_owned(), saver: DeviceStateCache::new(sharing)?, incoming: None })
    }

    /// The control connection, for what has no method here.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// The process.
    pub fn process(&self) -> &QemuProcess {
        &self.process
    }

    /// Its process id, to map its memory.
    pub fn pid(&self) -> u32 {
        self.process.identity().pid
    }

    /// The unix socket of the port that a program inside the guest may have opened
    /// ([`LaunchSpec::guest_socket`]).
    pub fn guest_socket(&self) -> PathBuf {
        guest_in(&self.dir)
    }

    /// Its slot directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Connects to a QEMU that may not listen yet, and asks of it what every state of ours needs.
fn connect(process: &QemuProcess, socket: &Path, timeout: Duration) -> Result<Qmp, LaunchError> {
    let deadline = Instant::now() + timeout;
    let stream = loop {
        // Looked at before the attempt: one that fails after its end is then never mistaken for slowness.
        let alive = process.is_alive();
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(_) if !alive => return Err(LaunchError::Rejected { words: process.words() }),
            Err(_) if Instant::now() > deadline => {
                return Err(LaunchError::Silent { after: timeout, words: process.words() });
            }
            Err(_) => thread::sleep(START_POLL),
        }
    };
    let negotiate = || {
        let qmp = Qmp::over(stream)?;
        let on = |name| json!({"capability": name, "state": true});
        let capabilities = json!({"capabilities": [on("x-ignore-shared"), on("events")]});
        qmp.execute("migrate-set-capabilities", capabilities)?;
        Ok(qmp)
    };
    negotiate().map_err(|error| {
        // It listens before it has made its devices, so the rejection may come this late.
        if process.wait(Duration::from_secs(1)) {
            LaunchError::Rejected { words: process.words() }
        } else {
            LaunchError::Qmp(error)
        }
    })
}
