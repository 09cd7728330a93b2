//! An open write: one file being written through the mount, shared by all its descriptors on this host.

use crate::{client::WriteFile, protocol::NewNode};
use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

#[derive(Debug)]
pub(super) struct OpenWrite {
    pub(super) file: WriteFile,
    pub(super) make: NewNode,
    pub(super) opens: AtomicU32,
    /// Whether its name was removed before the commit, so that it must stay invisible.
    pub(super) unlinked: AtomicBool,
}

impl OpenWrite {
    pub(super) fn new(file: WriteFile, make: NewNode) -> Self {
        Self { file, make, opens: AtomicU32::new(1), unlinked: AtomicBool::new(false) }
    }

    pub(super) fn is_unlinked(&self) -> bool {
        self.unlinked.load(Ordering::Relaxed)
    }
}

/// Flag of a task that is exiting (`PF_EXITING` of the kernel).
const EXITING: u64 = 0x4;

/// Meaning of a closed descriptor for the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseKind {
    Done,
    /// The writer was killed, so its program did not close the file.
    Killed,
    /// Others may still write the file; the last descriptor decides.
    StillOpen,
}

/// The meaning of process `pid` closing a descriptor of the file `name`.
///
/// During exec, the kernel closes close-on-exec descriptors under a lock that most of `/proc/PID` needs
/// (`exec_update_lock`), and waits for the answer of this file system. Reading such a file would be a
/// deadlock that no signal ends. Only `status` needs no lock, so it is read first. No caller sees an error of
/// such a close, so the commit can be left to the last descriptor.
pub(super) fn close_kind(pid: u32, name: &str) -> CloseKind {
    // A killed process may be a child that the writer started.
    if is_in_exec(pid) || has_other_writer(pid, name) {
        CloseKind::StillOpen
    } else if is_killed(pid) {
        CloseKind::Killed
    } else {
        CloseKind::Done
    }
}

/// Value of a line in `/proc/PID/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Whether a process is inside exec: its new memory has no code yet.
fn is_in_exec(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    field(&status, "VmExe") == Some("0 kB")
}

/// Whether a process is exiting because of a signal, so that its program did not close the file.
fn is_killed(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    killed(&stat)
}

/// Number of ancestor processes that are checked.
const ANCESTORS: usize = 8;

/// Whether a process or an ancestor has another descriptor that can write a file called `name`. A shell
/// closes copies of the descriptor that it redirects to, and so do the programs it starts, as in `(first;
/// second) >file`; the file is not complete then. If it is another file with that name, the last descriptor
/// commits.
fn has_other_writer(pid: u32, name: &str) -> bool {
    let mut at = Some(pid);
    for _ in 0..ANCESTORS {
        match at.filter(|pid| *pid > 1) {
            // The descriptors of a process in exec cannot be read, so it may have the file open.
            Some(pid) if is_in_exec(pid) || holds_another(pid, name) => return true,
            Some(pid) => at = parent(pid),
            None => return false,
        }
    }
    false
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    field(&status, "PPid")?.parse().ok()
}

fn holds_another(pid: u32, name: &str) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let is_it = |entry: &fs::DirEntry| {
        let link = fs::read_link(entry.path()).unwrap_or_default();
        link.file_name().is_some_and(|last| last == name)
            && is_writable(pid, &entry.file_name().to_string_lossy())
    };
    descriptors.flatten().any(|entry| is_it(&entry))
}

/// Reads the line `flags:` of proc_pid_fdinfo(5), in octal; the lowest two bits are the access mode.
fn is_writable(pid: u32, descriptor: &str) -> bool {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    flags.and_then(|text| u64::from_str_radix(text.trim(), 8).ok()).is_some_and(|flags| flags & 0o3 != 0)
}

/// Parses `/proc/PID/stat`. The name may contain anything, so fields are counted after its last parenthesis.
fn killed(stat: &str) -> bool {
    let Some((_, rest)) = stat.rsplit_once(')') else { return false };
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // In proc(5) the state is field 3, the flags are field 9, and the exit code is field 52.
    let number = |field: usize| fields.get(field - 3).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    number(9) & EXITING != 0 && number(52) & 0x7f != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_status_are_found() {
        let status = "Name:\tVmExe:\nPPid:\t12\nVmExe:\t       0 kB\n";
        assert_eq!(field(status, "PPid"), Some("12"));
        assert_eq!(field(status, "VmExe"), Some("0 kB"));
        assert_eq!(field(status, "VmLib"), None);
        assert!(!is_in_exec(std::process::id()));
        assert_eq!(parent(std::process::id()), Some(std::os::unix::process::parent_id()));
    }

    #[test]
    fn a_living_process_is_not_killed_and_one_that_ends_by_a_signal_is() {
        assert!(!is_killed(std::process::id()));
        let stat = |flags: u64, code: u64| {
            let zeros = ["0"; 42].join(" ");
            format!("7 (a) b) R 1 2 3 4 5 {flags} {zeros} {code}")
        };
        assert!(killed(&stat(0x404, 9)));
        assert!(!killed(&stat(0x404, 0x100)), "exit(1)");
        assert!(!killed(&stat(0x400, 9)));
        assert!(!killed("garbage"));
    }
}
