//! Confinement of child processes: what QEMU and its tools give up between fork and exec.
//!
//! They read what guests, other hosts and image files contain, so a flaw in them must not be one in this
//! process. Each machine's QEMU and each tool gets a user and a directory of its own, no network and no
//! capability: it cannot trace, mount, kill others or open files of other users.
//!
//! Nothing given up here can be had back: the bounding set is empty and `no_new_privs` is set, so that no
//! program with more rights can be executed.

use crate::{
    control_group::ControlGroup, file_access::FileAccess, launch::TapDevices, machine_user::MachineUser,
};
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{Gid, Uid},
    io::{Errno, FdFlags},
    process::{Resource, Rlimit},
    thread::{CapabilitySet, CapabilitySets, LinkNameSpaceType, UnshareFlags},
};
use std::{io, os::unix::process::CommandExt, path::Path, process::Command, sync::Arc};

/// Most open files of a QEMU. It needs two for each queue of each device, 14 disks with a queue for each of
/// up to 288 virtual CPUs, and some forty more.
const MACHINE_FILES: u64 = 16 << 10;
/// Most threads of a QEMU: a virtual CPU each, and 64 workers.
const MACHINE_THREADS: u64 = 1 << 10;
/// Longest file that a QEMU with less memory can write: its log, or the state of its devices.
const MACHINE_FILE_LENGTH: u64 = 256 << 20;
/// First user number for tools: far above any that a user database or container hands out.
const FIRST_TOOL_USER: u32 = 0x7000_0000;

/// Rights that a child process retains.
#[derive(Debug)]
pub(crate) struct Confinement {
    limits: Vec<(Resource, u64)>,
    own: Option<OwnUser>,
    /// Files that it may open; all that its user may, if none.
    files: Option<FileAccess>,
    /// Descriptors that the program inherits under the same numbers.
    inherited: Vec<OwnedFd>,
    /// Network namespace that it enters, with tap devices that it inherits as well and cannot open again; one
    /// of its own if none.
    network: Option<Arc<TapDevices>>,
    /// A socket that it inherits too; there is no path to open it by.
    socket: Option<Arc<OwnedFd>>,
}

/// A user of its own, and the directory that it works in.
#[derive(Debug)]
pub(crate) struct OwnUser {
    user: u32,
    groups: Vec<Gid>,
    dir: OwnedFd,
    limits: Vec<(Resource, u64)>,
    /// Entrance of the control group that it joins, if there is one.
    group: Option<OwnedFd>,
}

impl OwnUser {
    /// The user of a machine with so many bytes of memory, in its runtime directory.
    pub(crate) fn of_machine(user: MachineUser, dir: OwnedFd, memory: u64) -> Self {
        let groups = MachineUser::groups().into_iter().map(Gid::from_raw).collect();
        // The kernel counts the threads of a user, and this user has no other process. A longer file could
        // take the memory that was promised to other machines.
        let limits =
            vec![(Resource::Nproc, MACHINE_THREADS), (Resource::Fsize, memory.max(MACHINE_FILE_LENGTH))];
        let enter = |group: ControlGroup| {
            group.entrance().inspect_err(|error| tracing::warn!(%error, "cannot open a control group")).ok()
        };
        let group = ControlGroup::of(user).and_then(enter);
        Self { user: user.number(), groups, dir, limits, group }
    }
}

impl Confinement {
    /// For a QEMU with these descriptors. Without a user of its own it keeps that of this process.
    pub(crate) fn of_machine(own: Option<OwnUser>, inherited: Vec<OwnedFd>) -> Self {
        // A core file would have the memory of the guest in it.
        let mut limits = vec![(Resource::Core, 0), (Resource::Nofile, MACHINE_FILES)];
        limits.extend(own.iter().flat_map(|own| own.limits.clone()));
        Self { limits, own, files: None, inherited, network: None, socket: None }
    }

    /// For a tool that runs as `user` in the directory `dir`, both of its own.
    pub(crate) fn of_tool(user: u32, dir: OwnedFd, limits: Vec<(Resource, u64)>) -> Self {
        let own = OwnUser { user, groups: Vec::new(), dir, limits: Vec::new(), group: None };
        Self { limits, own: Some(own), files: None, inherited: Vec::new(), network: None, socket: None }
    }

    /// With a user of its own, `program` opens only what it needs to start, its directory and the files that
    /// it inherits.
    pub(crate) fn with_files_of(mut self, program: &Path) -> io::Result<Self> {
        if let Some(own) = &self.own {
            self.files = FileAccess::new(program, own.dir.as_fd(), &self.inherited)?;
        }
        Ok(self)
    }

    /// In this network, if there is one.
    pub(crate) fn in_network_of(mut self, network: Option<Arc<TapDevices>>) -> Self {
        self.network = network;
        self
    }

    /// With this socket, if there is one.
    pub(crate) fn with_socket(mut self, socket: Option<Arc<OwnedFd>>) -> Self {
        self.socket = socket;
        self
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
        if let Some(OwnUser { dir, group, .. }) = &self.own {
            if let Some(group) = group {
                rustix::io::write(group, b"0")?;
            }
            rustix::process::fchdir(dir.as_fd())?;
            let own = match &self.network {
                Some(_) => UnshareFlags::NEWIPC,
                None => UnshareFlags::NEWNET | UnshareFlags::NEWIPC,
            };
            // SAFETY: file descriptors stay shared.
            unsafe { rustix::thread::unshare_unsafe(own) }?;
        }
        if let Some(network) = &self.network {
            let namespace = network.namespace.as_fd();
            rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
        }
        empty_bounding_set()?;
        if let Some(OwnUser { user, groups, .. }) = &self.own {
            let (uid, gid) = (Uid::from_raw(*user), Gid::from_raw(*user));
            rustix::thread::set_thread_groups(groups)?;
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        }
        let none = CapabilitySet::empty();
        let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
        rustix::thread::set_capabilities(None, sets)?;
        rustix::thread::set_no_new_privs(true)?;
        if let Some(files) = &self.files {
            files.enforce()?;
        }
        let taps = self.network.iter().flat_map(|network| &network.taps);
        let sockets = self.socket.iter().map(AsRef::as_ref);
        self.inherited
            .iter()
            .chain(taps)
            .chain(sockets)
            .try_for_each(|fd| rustix::io::fcntl_setfd(fd, FdFlags::empty()))
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
    use rustix::fs::{Mode, OFlags};
    use std::{
        fs::{self, File},
        os::{fd::AsRawFd, unix::fs::PermissionsExt},
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
        let limits = format!("{STATUS}; ulimit -c; ulimit -n");
        let status = text(&run(Confinement::of_machine(None, Vec::new()), &limits));
        assert_without_rights(&status);
        assert!(status.ends_with("0\n16384\n"), "{status}");
    }

    #[test]
    fn a_machines_user_has_its_directory_what_is_passed_to_it_and_no_network() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let (user, place) = (MachineUser::of_random(0x1234), dir.path().join("place"));
        user.make_dir(&place).unwrap();
        let passed = dir.path().join("passed");
        fs::write(&passed, "content").unwrap();
        crate::machine_user::share_with_machines(&passed, 0o640).unwrap();
        let fd = rustix::fs::open(&passed, OFlags::PATH, Mode::empty()).unwrap();
        let script = format!(
            "{STATUS}; cat /proc/self/fd/{}; wc -l < /proc/self/net/dev; ulimit -f; touch made; cat {} || echo closed",
            fd.as_raw_fd(),
            passed.display(),
        );
        let own = OwnUser::of_machine(user, OwnedFd::from(File::open(&place).unwrap()), 1 << 30);
        let status = text(&run(Confinement::of_machine(Some(own), vec![fd]), &script));
        assert_without_rights(&status);
        let number = user.number();
        assert!(status.contains(&format!("Uid:\t{number}\t{number}\t{number}\t{number}")), "{status}");
        // Two lines of titles and the loopback device; blocks of 512 bytes.
        assert!(status.ends_with("content3\n2097152\nclosed\n"), "{status}");
        assert!(!place.join("made").exists(), "its directory was not opened to it");
        assert_eq!(MachineUser::of_dir(&place).unwrap(), Some(user));
        assert_eq!(MachineUser::of_dir(dir.path()).unwrap(), None);
    }

    #[test]
    fn a_machines_process_opens_its_directory_and_what_is_passed_to_it_and_no_file_of_everybody() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (user, place) = (MachineUser::of_random(0x1235), dir.path().join("place"));
        user.make_dir(&place).unwrap();
        user.open_dir(&place).unwrap();
        let everybodys = dir.path().join("everybodys");
        let passed = dir.path().join("passed");
        for (file, content) in [(&everybodys, "public"), (&passed, "content")] {
            fs::write(file, content).unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
        }
        let fd = rustix::fs::open(&passed, OFlags::PATH, Mode::empty()).unwrap();
        let script = format!(
            "cat /proc/self/fd/{}; echo > made && cat made; cat {} || echo refused; cat /proc/1/status || echo refused; \
             read -r name < /proc/self/status && echo $name",
            fd.as_raw_fd(),
            everybodys.display(),
        );
        let confinement = |fd| {
            let own = OwnUser::of_machine(user, OwnedFd::from(File::open(&place).unwrap()), 1 << 30);
            Confinement::of_machine(Some(own), vec![fd])
        };
        let without = text(&run(confinement(fd.try_clone().unwrap()), &script));
        assert!(without.contains("public"), "it cannot read what everybody may: {without}");
        let with = text(&run(confinement(fd).with_files_of(Path::new("/bin/sh")).unwrap(), &script));
        match crate::restricts_files() {
            true => assert_eq!(with, "content\nrefused\nrefused\nName: sh\n"),
            false => eprintln!("this kernel has no Landlock"),
        }
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
