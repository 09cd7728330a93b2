//! Confinement of child processes: what QEMU and its tools give up between fork and exec.
//!
//! They read what guests, other hosts and image files contain, so a flaw in them must not be one in this
//! process. A machine's QEMU keeps its user, because its sockets, its memory and its state are files of that
//! user, but no capability: it cannot trace, mount, kill others or open files of other users. A tool needs no
//! file at all: it gets a user of its own that owns nothing, and no network.
//!
//! Nothing given up here can be had back: the bounding set is empty and `no_new_privs` is set, so that no
//! program with more rights can be executed.

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{Gid, Uid},
    io::{Errno, FdFlags},
    process::{Resource, Rlimit},
    thread::{CapabilitySet, CapabilitySets, UnshareFlags},
};
use std::{io, os::unix::process::CommandExt, process::Command};

/// Most open files of a QEMU. It needs two for each queue of each device, 14 disks with a queue for each of
/// up to 288 virtual CPUs, and some forty more.
const MACHINE_FILES: u64 = 16 << 10;
/// First user number for tools: far above any that a user database or container hands out.
const FIRST_TOOL_USER: u32 = 0x7000_0000;

/// Rights that a child process retains.
#[derive(Debug)]
pub(crate) struct Confinement {
    limits: Vec<(Resource, u64)>,
    tool: Option<Tool>,
    /// Descriptor that the program inherits under the same number.
    inherited: Option<OwnedFd>,
}

#[derive(Debug)]
struct Tool {
    user: u32,
    dir: OwnedFd,
}

impl Confinement {
    /// For a QEMU, which inherits `device` if there is one.
    pub(crate) fn of_machine(device: Option<OwnedFd>) -> Self {
        // A core file would have the memory of the guest in it.
        let limits = vec![(Resource::Core, 0), (Resource::Nofile, MACHINE_FILES)];
        Self { limits, tool: None, inherited: device }
    }

    /// For a tool that runs as `user` in the directory `dir`, both of its own.
    pub(crate) fn of_tool(user: u32, dir: OwnedFd, limits: Vec<(Resource, u64)>) -> Self {
        Self { limits, tool: Some(Tool { user, dir }), inherited: None }
    }

    /// Applies it to a process that `command` starts.
    pub(crate) fn apply_to(self, command: &mut Command) {
        let confine = move || self.confine().map_err(io::Error::from);
        // SAFETY: the closure runs in the forked child, where only async-signal-safe calls are allowed. It
        // makes plain system calls on data that was prepared before the fork; it neither allocates nor takes
        // a lock, and the conversion of its errors copies an integer.
        unsafe { command.pre_exec(confine) };
    }

    fn confine(&self) -> Result<(), Errno> {
        for (resource, limit) in &self.limits {
            // A container may have less, and raising that is not ours.
            let most = rustix::process::getrlimit(*resource).maximum.unwrap_or(u64::MAX);
            let limit = Some(most.min(*limit));
            rustix::process::setrlimit(*resource, Rlimit { current: limit, maximum: limit })?;
        }
        if let Some(Tool { dir, .. }) = &self.tool {
            rustix::process::fchdir(dir.as_fd())?;
            // SAFETY: file descriptors stay shared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWIPC) }?;
        }
        empty_bounding_set()?;
        if let Some(Tool { user, .. }) = &self.tool {
            let (uid, gid) = (Uid::from_raw(*user), Gid::from_raw(*user));
            rustix::thread::set_thread_groups(&[])?;
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        }
        let none = CapabilitySet::empty();
        let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
        rustix::thread::set_capabilities(None, sets)?;
        rustix::thread::set_no_new_privs(true)?;
        match &self.inherited {
            Some(fd) => rustix::io::fcntl_setfd(fd, FdFlags::empty()),
            None => Ok(()),
        }
    }
}

/// A user number for a tool, different from that of other tools that run now.
pub(crate) fn tool_user() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    // Another daemon on this host starts elsewhere.
    FIRST_TOOL_USER + ((std::process::id() << 12).wrapping_add(serial) & 0x0fff_ffff)
}

/// Removes every capability that the kernel knows, also those newer than this program.
fn empty_bounding_set() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        match rustix::thread::remove_capability_from_bounding_set(one) {
            // The first number that it does not know.
            Err(Errno::INVAL) => return Ok(()),
            removed => removed?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs::{self, File},
        os::unix::fs::PermissionsExt,
        process::Output,
    };

    fn run(confinement: Confinement, script: &str) -> Output {
        let mut command = Command::new("sh");
        confinement.apply_to(command.args(["-c", script]));
        command.output().unwrap()
    }

    fn text(output: &Output) -> String {
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    const STATUS: &str = "grep -E '^(Cap|NoNewPrivs|Uid|Gid|Groups)' /proc/self/status";

    fn assert_without_rights(status: &str) {
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert!(status.contains(&format!("{set}:\t0000000000000000")), "{status}");
        }
        assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    }

    #[test]
    fn a_machines_process_has_no_capability_and_dumps_no_core() {
        let output = run(Confinement::of_machine(None), &format!("{STATUS}; ulimit -c; ulimit -n"));
        let status = text(&output);
        assert_without_rights(&status);
        assert!(status.ends_with("0\n16384\n"), "{status}");
    }

    #[test]
    fn a_tool_owns_nothing_and_sees_no_network_and_no_file_of_root() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("secret"), "x").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let open = || OwnedFd::from(File::open(dir.path()).unwrap());
        let user = tool_user();
        let tool = || Confinement::of_tool(user, open(), vec![(Resource::Fsize, 4096)]);
        let status = text(&run(tool(), STATUS));
        assert_without_rights(&status);
        assert!(status.contains(&format!("Uid:\t{user}\t{user}\t{user}\t{user}")), "{status}");
        assert!(status.contains("Groups:\t \n") || status.contains("Groups:\t\n"), "{status}");
        let devices = text(&run(tool(), "tail -n +3 /proc/self/net/dev | cut -d: -f1"));
        assert!(devices.lines().all(|device| device.trim() == "lo"), "{devices}");
        assert!(!run(tool(), "cat secret").status.success(), "a directory of root is open to it");
        assert!(!run(tool(), "cat /etc/shadow").status.success());
        assert_ne!(tool_user(), user);
    }
}
