//! A file being written through the mount: one for all descriptors of it here.

use crate::{client::WriteFile, protocol::NewNode};
use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

/// An open file.
#[derive(Debug)]
pub(super) struct OpenWrite {
    pub(super) file: WriteFile,
    pub(super) make: NewNode,
    /// Descriptors.
    pub(super) opens: AtomicU32,
    /// Its name was removed before it was committed: nobody is to see it.
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

/// Set in the flags of a task that is ending (`PF_EXITING` of the kernel).
const EXITING: u64 = 0x4;

/// What the closing of a descriptor means for the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseKind {
    /// Its writer is done.
    Done,
    /// Its writer was killed: it was not closed by its program.
    Killed,
    /// Others may still write it: the last descriptor decides.
    Goes,
}

/// What it means that the process `pid` closes a descriptor of a file called `name`.
///
/// A process that replaces its program closes what is marked so while the kernel holds a lock that most of
/// `/proc/PID` waits for (`exec_update_lock`), and it waits for our answer: to look there would be a deadlock
/// that no signal ends. Only `status` is read without that lock, so it is asked first. Nobody hears of an
/// error of such a close, hence nothing is lost by leaving it to the last.
pub(super) fn closing(pid: u32, name: &str) -> CloseKind {
    // A process that is killed may be one that was only started by the one that writes.
    if is_replaced(pid) || is_held(pid, name) {
        CloseKind::Goes
    } else if is_killed(pid) {
        CloseKind::Killed
    } else {
        CloseKind::Done
    }
}

/// The value of a line of `/proc/PID/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Whether a process has left its program and has no other yet: its memory is new and has no code in it.
fn is_replaced(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    field(&status, "VmExe") == Some("0 kB")
}

/// Whether a process is ending because of a signal: then what it closes was not closed by its program.
fn is_killed(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    killed(&stat)
}

/// Processes above one that are looked at.
const ABOVE: usize = 8;

/// Whether a process, or one above it, has more descriptors through which it may write a file called `name`.
/// A shell that redirects closes copies of the one it holds, and so do the programs it starts one after the
/// other, as in `(first; second) >file`: the file is not complete for that. Should it be another file of that
/// name, the last descriptor commits.
fn is_held(pid: u32, name: &str) -> bool {
    let mut at = Some(pid);
    for _ in 0..ABOVE {
        match at.filter(|pid| *pid > 1) {
            // What it has open cannot be seen now: it may hold the file.
            Some(pid) if is_replaced(pid) || holds_another(pid, name) => return true,
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

/// The line `flags:` of proc_pid_fdinfo(5), in octal; the lowest two bits are the access mode.
fn is_writable(pid: u32, descriptor: &str) -> bool {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    flags.and_then(|text| u64::from_str_radix(text.trim(), 8).ok()).is_some_and(|flags| flags & 0o3 != 0)
}

/// `/proc/PID/stat`: the name may hold anything, so fields are counted behind its last parenthesis.
fn killed(stat: &str) -> bool {
    let Some((_, rest)) = stat.rsplit_once(')') else { return false };
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // The state is field 3 of proc(5), flags are field 9, the exit code is field 52.
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
        assert!(!is_replaced(std::process::id()));
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
