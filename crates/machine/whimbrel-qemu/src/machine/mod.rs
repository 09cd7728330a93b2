//! QEMU under control: its process, its control connection, its device state.
//!
//! Dropping a [`Qemu`] leaves the machine running; [`Qemu::quit`] or [`Qemu::kill`] ends it. QEMU serves one
//! control connection at a time, so there is one `Qemu` for each machine.

mod cdrom;
mod control;
mod device_state;
mod held_pipe;
mod hotplug;
mod incoming_state;
mod parts;
mod tap_device;

pub use control::{BalloonStats, Status};
pub use hotplug::HotplugError;
pub use parts::{QemuDescriptors, QemuState};

use crate::{
    launch::{LaunchError, LaunchSpec, Sharing, agent_in, guest_in, log_in, qmp_in},
    machine_user::QemuDir,
    process::{HugePages, ProcessIdentity, QemuProcess},
    qmp::Qmp,
};
use device_state::DeviceStateCache;
use incoming_state::Incoming;
pub use incoming_state::VmIdentity;
use serde_json::json;
use std::{
    fs, io,
    os::{fd::OwnedFd, unix::net::UnixStream},
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
    dir: QemuDir,
    state_cache: DeviceStateCache,
    /// Connection of a QEMU that was told to read a state, see [`Qemu::expect_state`].
    incoming: Option<Incoming>,
}

impl Qemu {
    /// Starts `binary` as `spec` says. The machine is paused, or waits for [`Qemu::load`] if it is incoming.
    ///
    /// On failure nothing is left running.
    pub fn launch(binary: &Path, spec: &LaunchSpec) -> Result<Self, LaunchError> {
        spec.check()?;
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
        let (inside, confinement) = spec.confined(binary)?;
        let process = QemuProcess::spawn(binary, &inside.argv()?, &spec.log(), huge_pages, confinement)?;
        match take_control(&process, spec) {
            Ok((qmp, dir, state_cache)) => Ok(Self { qmp, process, dir, state_cache, incoming: None }),
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
        let dir = QemuDir::of(dir).map_err(dir_error)?;
        let state_cache = DeviceStateCache::new(&dir, sharing)?;
        Ok(Self { qmp, process, dir, state_cache, incoming: None })
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

    /// Descriptor of the process, by which the network namespace of its tap devices is entered.
    pub fn network(&self) -> io::Result<OwnedFd> {
        self.process.pidfd()
    }

    /// The process's descriptor of the tap device of network port `index`, if it has one.
    pub fn tap_device(&self, index: usize) -> io::Result<Option<OwnedFd>> {
        tap_device::of(&self.process.pidfd()?, self.pid(), index)
    }

    /// Unix socket of the port for the guest agent ([`LaunchSpec::guest_socket`]).
    pub fn guest_socket(&self) -> PathBuf {
        guest_in(self.dir.path())
    }

    /// Unix socket of the port for qemu-ga ([`LaunchSpec::agent_socket`]), if the machine has one.
    pub fn agent_socket(&self) -> PathBuf {
        agent_in(self.dir.path())
    }

    /// Runtime directory of this QEMU.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Connects to a QEMU that was just started. Closes its directory to it, unless it is incoming and has to
/// make one more socket.
fn take_control(
    process: &QemuProcess,
    spec: &LaunchSpec,
) -> Result<(Qmp, QemuDir, DeviceStateCache), LaunchError> {
    let qmp = connect(process, &spec.qmp_socket(), START_TIMEOUT)?;
    wait_for_network_sockets(process, spec)?;
    let dir = QemuDir::of(&spec.dir).map_err(dir_error)?;
    let state_cache = DeviceStateCache::new(&dir, spec.ram.sharing)?;
    if !spec.incoming {
        dir.close().map_err(dir_error)?;
    }
    Ok((qmp, dir, state_cache))
}

/// Waits for the sockets that QEMU makes in a thread beside its start.
fn wait_for_network_sockets(process: &QemuProcess, spec: &LaunchSpec) -> Result<(), LaunchError> {
    let deadline = Instant::now() + START_TIMEOUT;
    let sockets = if spec.network.is_some() { 0 } else { spec.config.nics.len() };
    while !(0..sockets).all(|index| spec.net_socket(index).exists()) {
        if !process.is_alive() {
            return Err(LaunchError::Rejected { words: process.last_output() });
        }
        if Instant::now() > deadline {
            return Err(LaunchError::Silent { after: START_TIMEOUT, words: process.last_output() });
        }
        thread::sleep(START_POLL);
    }
    Ok(())
}

fn dir_error(source: io::Error) -> LaunchError {
    LaunchError::Io { what: "the runtime directory of qemu", source }
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
