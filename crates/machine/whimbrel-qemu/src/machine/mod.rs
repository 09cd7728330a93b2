//! QEMU under control: its process, its control connection, its device state.
//!
//! Dropping a [`Qemu`] leaves the machine running; [`Qemu::quit`] or [`Qemu::kill`] ends it. QEMU serves one
//! control connection at a time, so there is one `Qemu` for each machine.

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

/// Time in which a QEMU must answer after its start. It takes 50 ms, longer on a loaded host.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of connection attempts to a starting QEMU.
const START_POLL: Duration = Duration::from_millis(1);
/// Time in which an adopted QEMU must answer; it runs already.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(5);

/// Running QEMU under control.
#[derive(Debug)]
pub struct Qemu {
    qmp: Qmp,
    process: QemuProcess,
    dir: PathBuf,
    state_cache: DeviceStateCache,
    /// Connection of a QEMU that was told to read a state, see [`Qemu::expect_state`].
    incoming: Option<Incoming>,
}

impl Qemu {
    /// Starts `binary` as `spec` says. The machine is paused, or waits for [`Qemu::load`] if it is incoming.
    ///
    /// On failure nothing is left running.
    pub fn launch(binary: &Path, spec: &LaunchSpec) -> Result<Self, LaunchError> {
        let argv = spec.argv()?;
        // A socket of an earlier QEMU would be tried in vain, or worse, answer.
        match fs::remove_file(spec.qmp_socket()) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(LaunchError::Io { what: "the control socket", source });
            }
            _ => {}
        }
        // Machines with private memory are clones: many at once, whose memory size matters more than their
        // speed.
        let huge_pages = match spec.ram.sharing {
            Sharing::Shared => HugePages::Allowed,
            Sharing::Private => HugePages::Forbidden,
        };
        let process = QemuProcess::spawn(binary, &argv, &spec.log(), huge_pages)?;
        let made = connect(&process, &spec.qmp_socket(), START_TIMEOUT)
            .and_then(|qmp| Ok((qmp, DeviceStateCache::new(&spec.dir, spec.ram.sharing)?)));
        match made {
            Ok((qmp, saver)) => {
                Ok(Self { qmp, process, dir: spec.dir.clone(), state_cache: saver, incoming: None })
            }
            Err(error) => {
                process.kill();
                Err(error)
            }
        }
    }

    /// Adopts a QEMU that an earlier process of the daemon started in runtime directory `dir`.
    ///
    /// Its stream header is unknown: call [`Qemu::prepare_device_state`] or [`Qemu::set_head`].
    pub fn adopt(dir: &Path, identity: ProcessIdentity, sharing: Sharing) -> Result<Self, LaunchError> {
        let process = QemuProcess::adopt(identity, &log_in(dir))?;
        let qmp = connect(&process, &qmp_in(dir), ADOPT_TIMEOUT)?;
        Ok(Self {
            qmp,
            process,
            dir: dir.to_owned(),
            state_cache: DeviceStateCache::new(dir, sharing)?,
            incoming: None,
        })
    }

    /// Control connection, for commands without a method here.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Process of this QEMU.
    pub fn process(&self) -> &QemuProcess {
        &self.process
    }

    /// Process id, to map its memory.
    pub fn pid(&self) -> u32 {
        self.process.identity().pid
    }

    /// Unix socket of the port for the guest agent ([`LaunchSpec::guest_socket`]).
    pub fn guest_socket(&self) -> PathBuf {
        guest_in(&self.dir)
    }

    /// Runtime directory of this QEMU.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Connects to a QEMU that may not listen yet, and enables the capabilities that saving a state needs.
fn connect(process: &QemuProcess, socket: &Path, timeout: Duration) -> Result<Qmp, LaunchError> {
    let deadline = Instant::now() + timeout;
    let stream = loop {
        // Checked before the attempt, so that a failure after QEMU's end is not mistaken for slowness.
        let alive = process.is_alive();
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(_) if !alive => return Err(LaunchError::Rejected { words: process.last_output() }),
            Err(_) if Instant::now() > deadline => {
                return Err(LaunchError::Silent { after: timeout, words: process.last_output() });
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
        // QEMU listens before it has created its devices, so it may reject the command line this late.
        if process.wait(Duration::from_secs(1)) {
            LaunchError::Rejected { words: process.last_output() }
        } else {
            LaunchError::Qmp(error)
        }
    })
}
