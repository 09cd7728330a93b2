//! Runtime directory: the tmpfs folder of one QEMU with its sockets and memory file.
//!
//! It exists before its QEMU and is removed after it. Its name is random, so one left by a crash is never
//! taken for another machine's; `recovery` removes those that no machine owns.

use super::{RamFile, Reservation, RunningError, Template, served_disk::ServedDisk};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use std::{
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::{
            fs::{MetadataExt, OpenOptionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use whimbrel_block::{BeforeSet, SwappableDevice};
use whimbrel_core::{ByteSize, DiskConfig, MachineConfig};
use whimbrel_qemu::{
    ControlGroup, GroupLimits, MachineUser, ProcessError, ProcessIdentity, QemuProcess, Sharing, Tpm,
};

/// Directory of the QEMU's user, with its sockets. All else is closed to it.
const QEMU_DIR: &str = "qemu";

/// Name of the memory file.
const RAM: &str = "ram";
/// File with the pid and start time of the QEMU.
const PROCESS: &str = "process";

/// File with the pid and start time of the machine process that has the QEMU, or is about to get it.
const MACHINE_PROCESS: &str = "machine-process";

/// Socket of that process, on which it passes the machine.
const SWAP: &str = "swap";
/// Socket of that process, on which it reports.
const REPORT: &str = "report";

/// Directory in which the TPM of the machine works, and the file with its pid and start time.
const TPM: &str = "tpm";
const TPM_PROCESS: &str = "tpm-process";

/// Longest content of that file: two numbers.
const PROCESS_MAX: u64 = 64;

/// File with the device state that a clone was loaded with: the first part of every state saved later.
const LOADED_STATE: &str = "loaded";

/// A fact about a QEMU that a later daemon must know: an empty file in its runtime directory, which lasts as
/// long as the QEMU and costs no durable write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeMark {
    /// An incoming machine is complete and loaded.
    Complete,
    /// The user paused the machine. Any other pause belongs to an operation and ends with it.
    PausedByUser,
    /// The guest has shut down while no daemon had it.
    ShutDown,
    /// The guest requests something, which only the daemon can do.
    Wanted,
}

impl RuntimeMark {
    fn path(self, slot: &Path) -> PathBuf {
        slot.join(match self {
            RuntimeMark::Complete => "whole",
            RuntimeMark::PausedByUser => "paused-by-user",
            RuntimeMark::ShutDown => "shut-down",
            RuntimeMark::Wanted => "wanted",
        })
    }

    /// Whether the mark is set in this runtime directory.
    pub fn is_on(self, slot: &Path) -> bool {
        self.path(slot).exists()
    }

    /// Sets or removes the mark.
    pub(crate) fn set(self, slot: &Path, on: bool) -> Result<(), RunningError> {
        let path = self.path(slot);
        let done = match on {
            true => File::create(&path).map(drop),
            false => fs::remove_file(&path),
        };
        match done {
            Err(error) if on || error.kind() != std::io::ErrorKind::NotFound => {
                Err(RunningError::io("write", &path, error))
            }
            _ => Ok(()),
        }
    }
}

/// Longest time for a killed QEMU to end.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// Runtime directory of one QEMU, with the servers of its disks.
pub struct RuntimeDir {
    id: String,
    dir: PathBuf,
    disks: Vec<ServedDisk>,
    /// Held so that other clones find it; none if the memory file is this QEMU's alone.
    template: Option<Arc<Template>>,
    /// Memory that was promised to this QEMU alone.
    _memory: Reservation,
}

impl RuntimeDir {
    /// Creates a runtime directory whose disks read as zeros until they are set.
    pub fn create(
        runtime_dirs: &Path,
        config: &MachineConfig,
        memory: Reservation,
    ) -> Result<Self, RunningError> {
        let number = rand::random::<u64>();
        let id = format!("{number:016x}");
        let dir = runtime_dirs.join(&id);
        let user = MachineUser::of_random(number);
        let made = fs::create_dir(&dir)
            .and_then(|()| user.make_dir(&dir.join(QEMU_DIR)))
            .and_then(|()| config.tpm.map_or(Ok(()), |_| user.make_dir(&dir.join(TPM))))
            .map_err(|source| RunningError::io("create", &dir, source));
        let limits = GroupLimits { memory: config.memory.0, cpus: config.cpus };
        made.and_then(|()| {
            ControlGroup::create(user, limits);
            Self::serve(id, &dir, (config, memory), BeforeSet::Zeros)
        })
        .inspect_err(|_| drop(remove_slot(&dir)))
    }

    /// Opens the runtime directory of a live QEMU, whose disks wait until they are set.
    pub fn adopt(
        runtime_dirs: &Path,
        id: &str,
        config: &MachineConfig,
        memory: Reservation,
    ) -> Result<Self, RunningError> {
        Self::serve(id.to_owned(), &runtime_dirs.join(id), (config, memory), BeforeSet::Wait)
    }

    fn serve(
        id: String,
        dir: &Path,
        (config, memory): (&MachineConfig, Reservation),
        before: BeforeSet,
    ) -> Result<Self, RunningError> {
        memory.taken_by(dir.join(RAM));
        let qemu_dir = qemu_dir(dir);
        let user = MachineUser::of_dir(&qemu_dir).map_err(|e| RunningError::io("examine", &qemu_dir, e))?;
        let serve = |(index, disk): (usize, &DiskConfig)| {
            ServedDisk::serve(disk_socket(&qemu_dir, index), user, (disk.size.0, before))
        };
        let disks = config.disks.iter().enumerate().map(serve).collect::<Result<_, RunningError>>()?;
        Ok(Self { id, dir: dir.to_owned(), disks, template: None, _memory: memory })
    }

    /// Directory of a QEMU whose disks another process serves on `listeners`, until this one does.
    pub(crate) fn passed(
        runtime_dirs: &Path,
        id: &str,
        (config, memory): (&MachineConfig, Reservation),
        listeners: Vec<UnixListener>,
    ) -> Self {
        let dir = runtime_dirs.join(id);
        memory.taken_by(dir.join(RAM));
        let qemu_dir = qemu_dir(&dir);
        let passed = |(index, (disk, listener)): (usize, (&DiskConfig, UnixListener))| {
            ServedDisk::passed(disk_socket(&qemu_dir, index), disk.size.0, listener)
        };
        let disks = config.disks.iter().zip(listeners).enumerate().map(passed).collect();
        Self { id: id.to_owned(), dir, disks, template: None, _memory: memory }
    }

    /// Serves one more disk, which waits until it is set.
    pub(super) fn add_disk(&mut self, size: ByteSize) -> Result<(), RunningError> {
        let socket = disk_socket(&self.qemu_dir(), self.disks.len());
        let served = ServedDisk::serve(socket, self.user()?, (size.0, BeforeSet::Wait))?;
        self.disks.push(served);
        Ok(())
    }

    /// Serves the disks from this one on no more. Nobody reads them.
    pub(super) fn remove_disks_from(&mut self, index: usize) {
        for disk in self.disks.drain(index.min(self.disks.len())..) {
            drop(disk.device().close());
            // One that stays is replaced by the next disk in this place.
            let _ = fs::remove_file(disk.socket());
        }
    }

    /// Servers of the disks.
    pub(crate) fn disks(&mut self) -> &mut [ServedDisk] {
        &mut self.disks
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Directory of the sockets, in which QEMU works.
    pub(super) fn qemu_dir(&self) -> PathBuf {
        qemu_dir(&self.dir)
    }

    /// Directory in which its TPM works.
    pub(super) fn tpm_dir(&self) -> PathBuf {
        tpm_dir(&self.dir)
    }

    /// User that its processes run as; none if that is this process's own.
    pub(super) fn user(&self) -> Result<Option<MachineUser>, RunningError> {
        let dir = self.qemu_dir();
        MachineUser::of_dir(&dir).map_err(|source| RunningError::io("examine", &dir, source))
    }

    /// Starts its TPM. Returns the connection for QEMU.
    pub(super) fn start_tpm(&self) -> Result<Arc<OwnedFd>, RunningError> {
        let tpm =
            Tpm::start(&self.tpm_dir()).map_err(|source| RunningError::qemu("start the TPM", source))?;
        write_process(&self.dir.join(TPM_PROCESS), tpm.process)?;
        Ok(tpm.control)
    }

    /// Ends its TPM at once, if it has one.
    pub(super) fn kill_tpm(&self) {
        recorded_process(&self.dir, TPM_PROCESS).ok().flatten().iter().for_each(QemuProcess::kill);
    }

    /// Path of the memory file.
    pub fn ram(&self) -> PathBuf {
        self.dir.join(RAM)
    }

    /// Creates the memory file, all holes, unless it is there as a link: to a template, or to the memory of a
    /// QEMU that could not load its state. QEMU would create it too, but not for its own user only.
    pub(super) fn create_ram(&self, size: ByteSize) -> Result<PathBuf, RunningError> {
        let path = self.ram();
        if !path.exists() {
            let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
            let made = file.and_then(|file| file.set_len(size.0));
            made.map_err(|source| RunningError::io("create", &path, source))?;
        }
        Ok(path)
    }

    /// Records that the memory file is a link to this template.
    pub fn hold_template(&mut self, template: Arc<Template>) {
        self.template = Some(template);
    }

    pub(super) fn ram_file(&self) -> RamFile {
        self.template.as_ref().map_or(RamFile::Own, |_| RamFile::Template)
    }

    /// Saves the device state that the QEMU was loaded with, for a later daemon.
    pub(super) fn save_loaded_state(&self, device_state: &[u8]) -> Result<(), RunningError> {
        let path = self.dir.join(LOADED_STATE);
        fs::write(&path, device_state).map_err(|source| RunningError::io("write", &path, source))
    }

    pub(super) fn loaded_state(&self) -> Result<Vec<u8>, RunningError> {
        let path = self.dir.join(LOADED_STATE);
        fs::read(&path).map_err(|source| RunningError::io("read", &path, source))
    }

    /// Sets or removes a mark.
    pub(super) fn mark(&self, mark: RuntimeMark, on: bool) -> Result<(), RunningError> {
        mark.set(&self.dir, on)
    }

    pub(super) fn sockets(&self) -> Vec<PathBuf> {
        self.disks.iter().map(|disk| disk.socket().to_owned()).collect()
    }

    pub(super) fn swappable_disk(&self, disk: usize) -> &Arc<SwappableDevice> {
        self.disks[disk].device()
    }

    /// Records the QEMU that uses the directory, for `sweep`.
    pub(super) fn record_process(&self, process: ProcessIdentity) {
        if let Err(error) = write_process(&self.dir.join(PROCESS), process) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(
                slot = self.id,
                error,
                "could not record a QEMU; a restarted daemon will not find it"
            );
        }
    }

    /// Removes the directory, whose processes have ended.
    pub fn remove(self) {
        end_recorded(&self.dir, TPM_PROCESS);
        self.disks.iter().for_each(|disk| drop(disk.device().close()));
        drop(self.disks);
        if let Err(error) = remove_slot(&self.dir) {
            tracing::warn!(slot = self.id, %error, "could not remove a runtime directory");
        }
    }
}

/// Directory of the TPM in a runtime directory.
pub(super) fn tpm_dir(slot: &Path) -> PathBuf {
    slot.join(TPM)
}

/// Socket of a disk in the directory of its QEMU.
fn disk_socket(qemu_dir: &Path, index: usize) -> PathBuf {
    qemu_dir.join(format!("disk{index}"))
}

impl From<RamFile> for Sharing {
    fn from(file: RamFile) -> Self {
        match file {
            RamFile::Own => Self::Shared,
            RamFile::Template => Self::Private,
        }
    }
}

/// Socket of the screen of a machine with a screen, in its runtime directory.
pub fn display_socket(slot: &Path) -> PathBuf {
    whimbrel_qemu::display_in(&qemu_dir(slot))
}

/// Directory of the sockets; the runtime directory itself if an earlier version started the QEMU.
fn qemu_dir(slot: &Path) -> PathBuf {
    let own = slot.join(QEMU_DIR);
    if own.is_dir() { own } else { slot.to_owned() }
}

/// Removes every runtime directory that `is_owned` rejects and ends its QEMU: one that was prestarted, or was
/// to become a machine, when its daemon died. It never ran.
pub fn sweep(runtime_dirs: &Path, is_owned: impl Fn(&str) -> bool) -> Result<(), RunningError> {
    let failed = |source| RunningError::io("read", runtime_dirs, source);
    for entry in fs::read_dir(runtime_dirs).map_err(failed)?.flatten() {
        if !is_owned(&entry.file_name().to_string_lossy()) {
            let path = entry.path();
            end(&path);
            let removed = if path.is_dir() { remove_slot(&path) } else { fs::remove_file(&path) };
            removed.map_err(|source| RunningError::io("remove", &path, source))?;
        }
    }
    Ok(())
}

/// Control group of the processes of a runtime directory, if they have one.
pub fn control_group(slot: &Path) -> Option<ControlGroup> {
    MachineUser::of_dir(&qemu_dir(slot)).ok().flatten().and_then(ControlGroup::of)
}

/// Removes a runtime directory whose processes have ended, with their control group.
fn remove_slot(slot: &Path) -> io::Result<()> {
    // Named by the directory.
    let group = control_group(slot);
    group.into_iter().for_each(ControlGroup::remove);
    fs::remove_dir_all(slot)
}

/// Last output of the QEMU of a runtime directory.
pub fn last_output(slot: &Path) -> String {
    whimbrel_qemu::last_output(&qemu_dir(slot).join("qemu.log"), 0)
}

/// Ends the recorded processes of a runtime directory that still live: QEMU, and who has it.
pub fn end(slot: &Path) {
    end_machine_process(slot);
    for name in [TPM_PROCESS, PROCESS] {
        end_recorded(slot, name);
    }
}

/// Ends the process that a file of a runtime directory names, if it still lives. False if it does not end.
fn end_recorded(slot: &Path, name: &str) -> bool {
    let process = match recorded_process(slot, name) {
        Ok(Some(process)) => process,
        Ok(None) => return true,
        // The process may live: for want of a descriptor, for example, nobody can tell.
        Err(error) => {
            tracing::error!(slot = %slot.display(), name, %error, "cannot look for a process");
            return false;
        }
    };
    process.kill();
    let has_ended = process.wait(END_TIMEOUT);
    if !has_ended {
        tracing::error!(slot = %slot.display(), name, "a process was killed but does not end");
    }
    has_ended
}

/// Path of the memory file in a runtime directory.
pub fn ram_path(slot: &Path) -> PathBuf {
    slot.join(RAM)
}

/// Socket on which a machine process passes the machine of a runtime directory.
pub fn swap_socket(slot: &Path) -> PathBuf {
    slot.join(SWAP)
}

/// Socket on which the process that has a machine reports.
pub(crate) fn report_socket(slot: &Path) -> PathBuf {
    slot.join(REPORT)
}

/// Records the machine process that is about to get the machine of a runtime directory.
pub fn record_machine_process(slot: &Path, process: ProcessIdentity) -> Result<(), RunningError> {
    write_process(&slot.join(MACHINE_PROCESS), process)
}

fn write_process(path: &Path, process: ProcessIdentity) -> Result<(), RunningError> {
    let written = fs::write(path, format!("{} {}", process.pid, process.start_time));
    written.map_err(|source| RunningError::io("write", path, source))
}

/// The machine process that is recorded in a runtime directory, if it lives for certain.
pub(crate) fn machine_process(slot: &Path) -> Option<QemuProcess> {
    recorded_process(slot, MACHINE_PROCESS).ok().flatten()
}

/// Whether a machine process that lives, or may, is recorded in a runtime directory.
pub fn has_machine_process(slot: &Path) -> bool {
    !matches!(recorded_process(slot, MACHINE_PROCESS), Ok(None))
}

/// Ends the recorded machine process of a runtime directory and waits for its end, and removes the record.
/// Until then it may act on the machine. False if it does not end.
pub fn end_machine_process(slot: &Path) -> bool {
    if !end_recorded(slot, MACHINE_PROCESS) {
        return false;
    }
    // Absent for most QEMUs.
    let wanted = RuntimeMark::Wanted.path(slot);
    [MACHINE_PROCESS, SWAP, REPORT].iter().for_each(|file| drop(fs::remove_file(slot.join(file))));
    drop(fs::remove_file(wanted));
    true
}

/// Ends every machine process of these runtime directories. Their machines are to be adopted.
///
/// # Errors
/// If one does not end.
pub fn end_machine_processes(runtime_dirs: &Path) -> Result<(), RunningError> {
    for entry in fs::read_dir(runtime_dirs).into_iter().flatten().flatten() {
        let slot = entry.path();
        if !end_machine_process(&slot) {
            let source = io::Error::other("it was killed, but does not end");
            return Err(RunningError::io("end the machine process of", &slot, source));
        }
    }
    Ok(())
}

/// Ends the QEMU of an unused runtime directory and removes the directory.
pub fn clear(slot: &Path) {
    end(slot);
    match remove_slot(slot) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(slot = %slot.display(), %error, "could not remove a runtime directory");
        }
        _ => {}
    }
}

/// The process that a file of a runtime directory names, if it still lives. Only a file of this user names
/// one: what another user wrote must not make us kill a process.
///
/// # Errors
/// If the kernel does not let us look: the process may live.
fn recorded_process(slot: &Path, name: &str) -> io::Result<Option<QemuProcess>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(slot.join(name), flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != rustix::process::geteuid().as_raw() {
        tracing::warn!(slot = %slot.display(), "ignoring a record of a process that is not our own");
        return Ok(None);
    }
    let mut text = String::new();
    // What is no text names no process.
    let Ok(_) = file.take(PROCESS_MAX).read_to_string(&mut text) else { return Ok(None) };
    let numbers =
        text.split_once(' ').and_then(|(pid, start)| Some((pid.parse().ok()?, start.parse().ok()?)));
    let Some((pid, start_time)) = numbers else { return Ok(None) };
    match QemuProcess::adopt(ProcessIdentity { pid, start_time }, &qemu_dir(slot).join("qemu.log")) {
        Ok(process) => Ok(Some(process)),
        Err(ProcessError::Inspect { source, .. }) => Err(source),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        os::unix::fs::{chown, symlink},
        process::{Child, Command},
    };

    /// A sleeping process, and a runtime directory whose record names it.
    fn recorded() -> (tempfile::TempDir, PathBuf, Child) {
        let dir = tempfile::tempdir().expect("a directory");
        let child = Command::new("sleep").arg("600").spawn().expect("a process");
        let log = dir.path().join("log");
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("a living process");
        let start_time = stat.split(' ').nth(21).expect("its start time").parse().expect("a number");
        let identity = ProcessIdentity { pid: child.id(), start_time };
        assert!(QemuProcess::adopt(identity, &log).is_ok(), "{stat}");
        let record = dir.path().join(PROCESS);
        fs::write(&record, format!("{} {start_time}", child.id())).expect("a record");
        (dir, record, child)
    }

    #[test]
    fn a_process_that_another_users_file_names_is_not_killed() {
        let (dir, record, mut child) = recorded();
        chown(&record, Some(65_534), None).expect("a file of another user");
        end(dir.path());
        chown(&record, Some(0), None).expect("a file of ours");
        let elsewhere = dir.path().join("elsewhere");
        fs::rename(&record, &elsewhere).expect("another place");
        symlink(&elsewhere, &record).expect("a link");
        end(dir.path());
        assert!(child.try_wait().expect("a status").is_none(), "it was killed");

        fs::rename(&elsewhere, &record).expect("the right place");
        let reaped = std::thread::spawn(move || child.wait());
        end(dir.path());
        assert!(!reaped.join().expect("a thread").expect("a status").success());
    }
}
