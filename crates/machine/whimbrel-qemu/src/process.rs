//! QEMU process: started in a session of its own, and found again after a restart of the daemon.
//!
//! A pid alone identifies nothing, because pids are reused. A process is identified by pid and start time
//! together, and a pidfd refers to it, so no signal ever reaches another process. QEMU outlives this process
//! (own session, no parent-death signal, output to a file). Dropping a [`QemuProcess`] does not affect QEMU.

use crate::{confinement::Confinement, reaper::reap};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Most bytes of QEMU's output that an error quotes.
const MAX_WORDS: u64 = 4 << 10;

/// Permission for pages of 2 MiB.
///
/// QEMU requests them for all guest memory, including the 2 MiB for ACPI tables of which it uses a sixteenth,
/// and for translated code: 3 MB more for an idle guest. Without them, finding translated code is a little
/// slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// Default of the process and the kernel.
    Allowed,
    /// No huge pages, for one of many processes that have to be small.
    Forbidden,
}

/// Identity of a process, unique within a boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Process id of QEMU.
    pub pid: u32,
    /// Start time in clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start_time: u64,
}

impl ProcessIdentity {
    /// Identity of the process that has this number now.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, start_time: start_time(pid)? })
    }
}

/// Cause of a process that could not be started or found again.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The program could not be started.
    #[error("cannot start {program}")]
    Spawn {
        /// Path of the program.
        program: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The log file for its output could not be opened.
    #[error("cannot open {path}")]
    Log {
        /// Path of the log file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// There is no such process, or another one has its pid.
    #[error("process {pid} has ended", pid = identity.pid)]
    Gone {
        /// Identity of the missing process.
        identity: ProcessIdentity,
    },
    /// The kernel does not allow access to the process.
    #[error("cannot inspect process {pid}")]
    Inspect {
        /// Process id of QEMU.
        pid: u32,
        /// Cause reported by the kernel.
        source: io::Error,
    },
}

/// QEMU process, a child or adopted.
#[derive(Debug)]
pub struct QemuProcess {
    identity: ProcessIdentity,
    pidfd: OwnedFd,
    log: PathBuf,
    log_start: u64,
}

impl QemuProcess {
    /// Starts `program` confined, and appends its output to the file `log`.
    pub(crate) fn spawn(
        program: &Path,
        args: &[OsString],
        log: &Path,
        huge_pages: HugePages,
        confinement: Confinement,
    ) -> Result<Self, ProcessError> {
        let no_log = |source| ProcessError::Log { path: log.to_owned(), source };
        let output = OpenOptions::new().create(true).append(true).open(log).map_err(no_log)?;
        let log_start = output.metadata().map_err(no_log)?.len();
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(output.try_clone().map_err(no_log)?)
            .stderr(output.try_clone().map_err(no_log)?);
        confinement.apply_to(&mut command);
        let prepare = move || {
            rustix::process::setsid()?;
            match huge_pages {
                HugePages::Allowed => Ok(()),
                // Remains set across the exec that follows (prctl(2), PR_SET_THP_DISABLE).
                HugePages::Forbidden => Ok(rustix::thread::disable_transparent_huge_pages(true)?),
            }
        };
        // SAFETY: the closure runs in the forked child, where only async-signal-safe calls are allowed. It
        // makes two plain system calls; it neither allocates nor takes a lock, and the conversion of its
        // errors copies an integer.
        unsafe { command.pre_exec(prepare) };
        let child =
            command.spawn().map_err(|source| ProcessError::Spawn { program: program.to_owned(), source })?;
        let pid = child.id();
        let reaped = Self::open(pid, log, log_start).and_then(|process| {
            let failed = |source| ProcessError::Inspect { pid, source };
            let pidfd = process.pidfd().map_err(failed)?;
            Ok((process, pidfd))
        });
        match reaped {
            Ok((process, pidfd)) => {
                reap(child, pidfd).map_err(|source| ProcessError::Inspect { pid, source })?;
                Ok(process)
            }
            Err(error) => {
                // Without a handle it could not be ended later. The pid is still valid, because it is an
                // unreaped child.
                drop(Reaped(child));
                Err(error)
            }
        }
    }

    /// Adopts a process that an earlier process of the daemon started.
    pub fn adopt(identity: ProcessIdentity, log: &Path) -> Result<Self, ProcessError> {
        let log_start = fs::metadata(log).map_or(0, |meta| meta.len());
        let process = Self::open(identity.pid, log, log_start).map_err(|error| match error {
            ProcessError::Inspect { source, .. } if source.raw_os_error() == Some(NO_SUCH_PROCESS) => {
                ProcessError::Gone { identity }
            }
            error => error,
        })?;
        // The pidfd was opened before the start time was read: if the times agree, it is the pidfd of that
        // process.
        if process.identity != identity || !process.is_alive() {
            return Err(ProcessError::Gone { identity });
        }
        Ok(process)
    }

    /// Copy of the descriptor of the process.
    pub(crate) fn pidfd(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Process of which another one has passed a descriptor.
    pub(crate) fn from_parts(
        identity: ProcessIdentity,
        pidfd: OwnedFd,
        log: &Path,
    ) -> Result<Self, ProcessError> {
        let log_start = fs::metadata(log).map_or(0, |meta| meta.len());
        let process = Self { identity, pidfd, log: log.to_owned(), log_start };
        if process.is_alive() { Ok(process) } else { Err(ProcessError::Gone { identity }) }
    }

    fn open(pid: u32, log: &Path, log_start: u64) -> Result<Self, ProcessError> {
        let look = |source: io::Error| ProcessError::Inspect { pid, source };
        let gone = || look(io::Error::from_raw_os_error(NO_SUCH_PROCESS));
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|errno| look(errno.into()))?;
        let start_time = start_time(pid).map_err(look)?;
        Ok(Self { identity: ProcessIdentity { pid, start_time }, pidfd, log: log.to_owned(), log_start })
    }

    /// Identity to store, to adopt the process later.
    pub fn identity(&self) -> ProcessIdentity {
        self.identity
    }

    /// Whether the process has not ended yet.
    pub fn is_alive(&self) -> bool {
        !self.wait(Duration::ZERO)
    }

    /// Waits for the end of the process; returns whether it ended within `timeout`.
    pub fn wait(&self, timeout: Duration) -> bool {
        has_ended(&self.pidfd, Some(timeout))
    }

    /// Ends the process at once. The guest is not notified. A process that has ended already is no error.
    pub fn kill(&self) {
        if let Err(errno) = pidfd_send_signal(&self.pidfd, Signal::KILL) {
            tracing::debug!(%errno, pid = self.identity.pid, "cannot kill");
        }
    }

    /// Last output of the process (at most 4 KiB), to quote in an error.
    pub fn last_output(&self) -> String {
        last_output(&self.log, self.log_start)
    }
}

/// The end of the log of a QEMU (at most 4 KiB), from byte `start` on; nothing if it cannot be read.
pub fn last_output(log: &Path, start: u64) -> String {
    let tail = || -> io::Result<String> {
        let mut log = File::open(log)?;
        let end = log.metadata()?.len();
        log.seek(SeekFrom::Start(end.saturating_sub(MAX_WORDS).max(start)))?;
        let mut bytes = Vec::new();
        log.take(MAX_WORDS).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    tail().unwrap_or_default()
}

/// Child process that is killed and reaped when dropped.
#[derive(Debug)]
pub(crate) struct Reaped(pub(crate) Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the QEMU at `path` without a machine, to ask it something over the socket that is returned (QMP).
/// The process ends with this thread, also if that is killed.
pub(crate) fn spawn_to_ask(path: &Path, options: &[&str]) -> io::Result<(Reaped, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let output = OwnedFd::from(theirs.try_clone()?);
    let mut command = Command::new(path);
    command
        .args(["-machine", "none", "-nodefaults", "-display", "none", "-qmp", "stdio"])
        .args(options)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::from(output))
        .stderr(Stdio::null());
    let end_with_parent = || Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?);
    // SAFETY: the closure makes one system call; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(end_with_parent) };
    Ok((Reaped(command.spawn()?), ours))
}

const NO_SUCH_PROCESS: i32 = rustix::io::Errno::SRCH.raw_os_error();

/// Waits for the end of a process, at most `timeout`; returns whether it ended.
fn has_ended(pidfd: &OwnedFd, timeout: Option<Duration>) -> bool {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, left.as_ref()) {
            Ok(ready) => return ready > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                tracing::warn!(%errno, "cannot poll a pidfd");
                return false;
            }
        }
    }
}

fn start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::from_raw_os_error(NO_SUCH_PROCESS),
        _ => error,
    })?;
    parse_start_time(&stat)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unknown form of stat file"))
}

/// Parses field 22 of `/proc/PID/stat`. The second field is a name with any characters, so count after its
/// end.
fn parse_start_time(stat: &[u8]) -> Option<u64> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[name_end + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn spawn(program: &str, args: &[&str], log: &Path, huge_pages: HugePages) -> QemuProcess {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let confinement = Confinement::of_machine(None, Vec::new());
        QemuProcess::spawn(Path::new(program), &args, log, huge_pages, confinement).unwrap()
    }

    #[test]
    fn a_process_name_full_of_brackets_does_not_shift_the_fields() {
        let mut stat = b"7 (a) b) ( 1) S".to_vec();
        (4..22).for_each(|field| stat.extend(format!(" {field}").bytes()));
        stat.extend(b" 4711 23 24\n");
        assert_eq!(parse_start_time(&stat), Some(4711));
        assert_eq!(parse_start_time(b"7 (a) S 1 2"), None);
        assert_eq!(parse_start_time(b""), None);
    }

    #[test]
    fn huge_pages_are_forbidden_to_the_program_and_not_only_before_it_is_one() {
        let dir = tempfile::tempdir().unwrap();
        for (huge_pages, expected) in [(HugePages::Allowed, "1"), (HugePages::Forbidden, "0")] {
            let log = dir.path().join(expected);
            let process = spawn("grep", &["^THP_enabled:", "/proc/self/status"], &log, huge_pages);
            assert!(process.wait(Duration::from_secs(10)));
            assert_eq!(process.last_output().split_whitespace().last(), Some(expected), "{huge_pages:?}");
        }
    }

    #[test]
    fn a_process_that_was_traced_by_this_program_is_no_zombie_in_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let process = spawn("sleep", &["100"], &log, HugePages::Allowed);
        let pid = process.identity().pid;
        let status = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let until = |what: &str, done: &dyn Fn() -> bool| {
            let deadline = Instant::now() + Duration::from_secs(10);
            while !done() {
                assert!(Instant::now() < deadline, "{what}: {}", status());
                thread::sleep(Duration::from_millis(5));
            }
        };
        let traced = nix::unistd::Pid::from_raw(pid.cast_signed());
        nix::sys::ptrace::attach(traced).unwrap();
        until("it does not stop", &|| status().contains("(tracing stop)"));
        // A waiter for any state change would be notified of the stop, and needs time for that.
        thread::sleep(Duration::from_millis(50));
        nix::sys::ptrace::detach(traced, None).unwrap();
        process.kill();
        until("it stays a zombie", &|| status().is_empty());
    }

    #[test]
    fn another_process_with_the_same_pid_is_not_adopted() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let process = spawn("sleep", &["100"], &log, HugePages::Allowed);
        let identity = process.identity();
        assert!(QemuProcess::adopt(identity, &log).unwrap().is_alive());
        let stranger = ProcessIdentity { start_time: identity.start_time + 1, ..identity };
        assert!(matches!(QemuProcess::adopt(stranger, &log), Err(ProcessError::Gone { .. })));
        process.kill();
        assert!(process.wait(Duration::from_secs(10)));
        assert!(matches!(QemuProcess::adopt(identity, &log), Err(ProcessError::Gone { .. })));
    }
}
