//! A slot: the place of one QEMU on a tmpfs, with the sockets it meets us on.
//!
//! A slot exists before its QEMU and is removed after it. Its name is random, so a slot left by a crash is
//! never taken for another machine's; `take_up` removes those that no machine owns.

use crate::{
    core::{directories::Directories, error::DaemonError},
    machine::record::RamFile,
};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use whimbrel_block::{BeforeSet, SwappableDevice};
use whimbrel_core::MachineConfig;
use whimbrel_nbd::Server;
use whimbrel_qemu::{ProcessIdentity, QemuProcess, Sharing};

/// The name of the RAM file in a slot.
const RAM: &str = "ram";
/// The QEMU that uses a slot: its pid and when it started.
const PROCESS: &str = "process";

/// The device state that a clone was loaded with: the first part of every state that is taken of it.
const LOADED: &str = "loaded";

/// What a later daemon must know of a QEMU. An empty file in its slot: it lasts as long as the QEMU does, and
/// costs no durable write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuntimeMark {
    /// Everything of an arriving machine is here and loaded.
    Whole,
    /// Its user paused it. Any other pause is an operation's, and ends with it.
    PausedByUser,
}

impl RuntimeMark {
    fn path(self, slot: &Path) -> PathBuf {
        slot.join(match self {
            RuntimeMark::Whole => "whole",
            RuntimeMark::PausedByUser => "paused-by-user",
        })
    }

    /// Whether a slot has it.
    pub(crate) fn is_on(self, slot: &Path) -> bool {
        self.path(slot).exists()
    }
}

/// How long a QEMU that was killed may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// The place of one QEMU.
pub(crate) struct RuntimeDir {
    id: String,
    dir: PathBuf,
    disks: Vec<SlotDisk>,
    /// Held so that other clones find it; none if the RAM file is this QEMU's alone.
    template: Option<Arc<File>>,
}

/// The NBD server of one disk. What it serves is set when the machine is known.
struct SlotDisk {
    switch: Arc<SwappableDevice>,
    _server: Server,
    socket: PathBuf,
}

impl RuntimeDir {
    /// A new slot whose disks read as zeros until they are set.
    pub(crate) fn create(layout: &Directories, config: &MachineConfig) -> Result<Self, DaemonError> {
        let id = format!("{:016x}", rand::random::<u64>());
        let dir = layout.slot(&id);
        fs::create_dir(&dir).map_err(|source| DaemonError::io("create", &dir, source))?;
        Self::serve(id, &dir, config, BeforeSet::Zeros).inspect_err(|_| drop(fs::remove_dir_all(&dir)))
    }

    /// The slot of a QEMU that lives: its disks wait until they are set.
    pub(crate) fn adopt(layout: &Directories, id: &str, config: &MachineConfig) -> Result<Self, DaemonError> {
        Self::serve(id.to_owned(), &layout.slot(id), config, BeforeSet::Wait)
    }

    fn serve(id: String, dir: &Path, config: &MachineConfig, before: BeforeSet) -> Result<Self, DaemonError> {
        let serve = |(index, disk): (usize, &whimbrel_core::DiskConfig)| {
            let socket = dir.join(format!("disk{index}"));
            let switch = Arc::new(SwappableDevice::new(disk.size.0, before));
            let server = whimbrel_nbd::bind(&socket).and_then(|listener| {
                whimbrel_nbd::serve(switch.clone(), listener, whimbrel_nbd::Options::default())
            });
            let server = server.map_err(|source| DaemonError::io("serve a disk on", &socket, source))?;
            Ok(SlotDisk { switch, _server: server, socket })
        };
        let disks = config.disks.iter().enumerate().map(serve).collect::<Result<_, DaemonError>>()?;
        Ok(Self { id, dir: dir.to_owned(), disks, template: None })
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn ram(&self) -> PathBuf {
        self.dir.join(RAM)
    }

    /// The RAM file is this template, which was given its name here.
    pub(crate) fn hold(&mut self, template: Arc<File>) {
        self.template = Some(template);
    }

    /// Whose the RAM file is.
    pub(crate) fn ram_file(&self) -> RamFile {
        self.template.as_ref().map_or(RamFile::Own, |_| RamFile::Template)
    }

    /// Keeps the device state that the QEMU was loaded with for a later daemon.
    pub(crate) fn keep_loaded(&self, device_state: &[u8]) -> Result<(), DaemonError> {
        let path = self.dir.join(LOADED);
        fs::write(&path, device_state).map_err(|source| DaemonError::io("write", &path, source))
    }

    /// The device state that the QEMU was loaded with.
    pub(crate) fn loaded(&self) -> Result<Vec<u8>, DaemonError> {
        let path = self.dir.join(LOADED);
        fs::read(&path).map_err(|source| DaemonError::io("read", &path, source))
    }

    /// Marks the slot, or takes the mark away.
    pub(crate) fn mark(&self, mark: RuntimeMark, on: bool) -> Result<(), DaemonError> {
        let path = mark.path(&self.dir);
        let done = match on {
            true => File::create(&path).map(drop),
            false => fs::remove_file(&path),
        };
        match done {
            Err(error) if on || error.kind() != std::io::ErrorKind::NotFound => {
                Err(DaemonError::io("write", &path, error))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn sockets(&self) -> Vec<PathBuf> {
        self.disks.iter().map(|disk| disk.socket.clone()).collect()
    }

    pub(crate) fn switch(&self, disk: usize) -> &Arc<SwappableDevice> {
        &self.disks[disk].switch
    }

    /// Notes the QEMU that uses the slot, for `sweep`.
    pub(crate) fn note(&self, process: ProcessIdentity) {
        let path = self.dir.join(PROCESS);
        if let Err(error) = fs::write(&path, format!("{} {}", process.pid, process.start_time)) {
            tracing::warn!(slot = self.id, %error, "a QEMU could not be noted; it is not found if the daemon dies");
        }
    }

    /// Removes the slot. Its QEMU has ended.
    pub(crate) fn remove(self) {
        self.disks.iter().for_each(|disk| drop(disk.switch.close()));
        drop(self.disks);
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!(slot = self.id, %error, "a slot is left over");
        }
    }
}

impl From<RamFile> for Sharing {
    fn from(file: RamFile) -> Self {
        match file {
            RamFile::Own => Self::Shared,
            RamFile::Template => Self::Private,
        }
    }
}

/// Removes every slot that `is_owned` does not claim, and ends the QEMU in it: one that was started ahead, or
/// was to become a machine, when its daemon died. It never ran.
pub(crate) fn sweep(layout: &Directories, is_owned: impl Fn(&str) -> bool) -> Result<(), DaemonError> {
    let dir = layout.slots();
    for entry in fs::read_dir(&dir).map_err(|source| DaemonError::io("read", &dir, source))?.flatten() {
        if !is_owned(&entry.file_name().to_string_lossy()) {
            let path = entry.path();
            end(&path);
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(|source| DaemonError::io("remove", &path, source))?;
        }
    }
    Ok(())
}

/// Ends the QEMU that was noted in a slot, if it still lives.
pub(crate) fn end(slot: &Path) {
    if let Some(process) = noted(slot) {
        process.kill();
        if !process.wait(END_TIMEOUT) {
            tracing::error!(slot = %slot.display(), "a QEMU was killed and does not end");
        }
    }
}

/// Ends the QEMU of a slot that nobody has, and removes the slot.
pub(crate) fn clear(slot: &Path) {
    end(slot);
    match fs::remove_dir_all(slot) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(slot = %slot.display(), %error, "a slot is left over");
        }
        _ => {}
    }
}

/// The QEMU that was noted in a slot, if it still lives.
fn noted(slot: &Path) -> Option<QemuProcess> {
    let text = fs::read_to_string(slot.join(PROCESS)).ok()?;
    let (pid, start_time) = text.split_once(' ')?;
    let identity = ProcessIdentity { pid: pid.parse().ok()?, start_time: start_time.parse().ok()? };
    QemuProcess::adopt(identity, &slot.join("qemu.log")).ok()
}
