//! Control group of a machine (cgroup v2, in the kernel's admin guide): its QEMU, its TPM and its machine
//! process share one, which limits and counts what they use together.
//!
//! Groups lie below `whimbrel` at the root of the hierarchy, named by the number of the machine's user, and
//! not below the group of the daemon's unit: systemd could not start that unit again while machines are left
//! there, because a group that passes controllers on takes no process of its own.
//!
//! Limits leave room for all that a machine does: they hold a QEMU that a guest has broken, or that grows
//! without end. Without cgroup v2, or a part of it, a machine runs all the same, and `whimbrel doctor` says
//! which limits are missing.

use crate::machine_user::MachineUser;
use rustix::fs::{Mode, OFlags, statfs};
use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Where cgroup v2 is mounted, by itself or beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Magic number of its file system (linux/magic.h).
const MAGIC: u64 = 0x6367_7270;
/// Group that has those of all machines.
const PARENT: &str = "whimbrel";
/// Controllers that limit a machine, with what they limit.
const CONTROLLERS: [(&str, &str); 3] = [("memory", "memory"), ("pids", "processes"), ("cpu", "CPU time")];

/// Memory beside that of the guest: QEMU's own, translated code, and what the machine process caches.
const MEMORY_BESIDE: u64 = 2 << 30;
/// Processes and threads of a machine. Its QEMU alone may have 1,024.
const PROCESSES: u32 = 2_048;
/// Processors beside the virtual ones, for disks, the network and captures.
const PROCESSORS_BESIDE: u64 = 2;
/// Microseconds in which a group may use its processor time: the kernel's default.
const PERIOD: u64 = 100_000;

/// Time for killed processes to end, and between looks whether they have.
const END: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(2);

/// Most that the processes of one machine may use together.
#[derive(Debug, Clone, Copy)]
pub struct GroupLimits {
    /// Guest memory in bytes.
    pub memory: u64,
    /// Number of virtual CPUs.
    pub cpus: u32,
}

impl GroupLimits {
    /// Files of a group, and what to write to them.
    fn files(self) -> [(&'static str, String); 4] {
        // A guest's memory counts twice at most: while pages of it are copied to be sent.
        let memory = self.memory.saturating_mul(2).saturating_add(MEMORY_BESIDE);
        let time = (u64::from(self.cpus) + PROCESSORS_BESIDE) * PERIOD;
        [
            ("memory.max", memory.to_string()),
            ("pids.max", PROCESSES.to_string()),
            ("cpu.max", format!("{time} {PERIOD}")),
            ("memory.swap.max", memory.to_string()),
        ]
    }
}

/// Control group of one machine.
#[derive(Debug)]
pub struct ControlGroup {
    dir: PathBuf,
}

impl ControlGroup {
    /// Makes the group of a machine. None if this host has no cgroup v2, or does not let us make groups.
    pub fn create(user: MachineUser, limits: GroupLimits) -> Option<Self> {
        let mount = mount()?;
        let made = Self::create_in(mount, user, limits);
        made.inspect_err(|error| tracing::debug!(%error, "a machine has no control group")).ok()
    }

    fn create_in(mount: &Path, user: MachineUser, limits: GroupLimits) -> io::Result<Self> {
        let parent = mount.join(PARENT);
        make(&parent)?;
        pass_controllers_on(&[mount, &parent]);
        let group = Self { dir: parent.join(user.number().to_string()) };
        make(&group.dir)?;
        for (file, limit) in limits.files() {
            match write(&group.dir.join(file), &limit) {
                // The controller is not passed on.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::warn!(%error, file, limit, "cannot limit a machine"),
                Ok(()) => {}
            }
        }
        Ok(group)
    }

    /// The group of a machine, if it has one.
    pub fn of(user: MachineUser) -> Option<Self> {
        let dir = mount()?.join(PARENT).join(user.number().to_string());
        dir.is_dir().then_some(Self { dir })
    }

    /// The group that a process is in, if that is one of a machine.
    pub fn of_process(pid: u32) -> Option<Self> {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let name = groups
            .lines()
            .find_map(|line| line.strip_prefix("0::/")?.strip_prefix(PARENT)?.strip_prefix('/'))?;
        name.parse::<u32>().is_ok().then_some(Self { dir: mount()?.join(PARENT).join(name) })
    }

    /// Puts a process into the group, with the processes that it starts from now on.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        write(&self.dir.join("cgroup.procs"), &pid.to_string())
    }

    /// File by which a process joins the group, once it writes `0`.
    pub(crate) fn entrance(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(self.dir.join("cgroup.procs"), flags, Mode::empty())?)
    }

    /// Processor time of its processes since it was made, also of those that have ended.
    pub fn cpu_time(&self) -> Option<Duration> {
        self.value("cpu.stat", "usage_usec").map(Duration::from_micros)
    }

    /// Whether the kernel has ended a process because the group had no more memory.
    pub fn ended_for_memory(&self) -> bool {
        // Without the controller of memory there is no such file, and no such end.
        self.value("memory.events", "oom_kill") > Some(0)
    }

    fn value(&self, file: &str, name: &str) -> Option<u64> {
        value(&fs::read_to_string(self.dir.join(file)).ok()?, name)
    }

    /// Ends what is left in the group, and removes it. A process in the group must not do that.
    pub fn remove(self) {
        let deadline = Instant::now() + END;
        while let Err(error) = fs::remove_dir(&self.dir) {
            if error.kind() == io::ErrorKind::NotFound {
                return;
            }
            if Instant::now() > deadline {
                tracing::warn!(group = %self.dir.display(), %error, "cannot remove a control group");
                return;
            }
            // Linux before 5.14 has no such file.
            let _ = write(&self.dir.join("cgroup.kill"), "1");
            thread::sleep(RETRY);
        }
    }
}

/// What limits of machines this host lacks, in words: nothing if all of them hold.
///
/// # Errors
/// If there is no cgroup v2.
pub fn missing_limits() -> Result<Vec<&'static str>, &'static str> {
    let mount = mount().ok_or("no cgroup v2")?;
    // What the groups of machines may have; before the first, what there is.
    let parent = mount.join(PARENT);
    let dir = if parent.is_dir() { parent.as_path() } else { mount };
    let offered = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
    let has = |name: &str| offered.split_whitespace().any(|offered| offered == name);
    Ok(CONTROLLERS.iter().filter(|(name, _)| !has(name)).map(|(_, what)| *what).collect())
}

fn mount() -> Option<&'static Path> {
    let is_there = |path: &&Path| statfs(*path).is_ok_and(|found| found.f_type as u64 == MAGIC);
    MOUNTS.map(Path::new).into_iter().find(is_there)
}

fn make(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Lets the groups in each of these groups have limits. A controller that version 1 has, or that a container
/// does not get, is left out.
fn pass_controllers_on(groups: &[&Path]) {
    for group in groups {
        let file = group.join("cgroup.subtree_control");
        let passed = fs::read_to_string(&file).unwrap_or_default();
        for (controller, _) in CONTROLLERS {
            if !passed.split_whitespace().any(|passed| passed == controller)
                && let Err(error) = write(&file, &format!("+{controller}"))
            {
                tracing::debug!(group = %group.display(), controller, %error, "a controller is not passed on");
            }
        }
    }
}

/// Writes to a file of the kernel, which takes the whole of it at once and is never made.
fn write(file: &Path, text: &str) -> io::Result<()> {
    use std::io::Write;
    fs::OpenOptions::new().write(true).open(file)?.write_all(text.as_bytes())
}

/// Number in the line of a name.
fn value(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::confinement::{Confinement, OwnUser};
    use std::{fs::File, process::Command};

    /// Group of a user of its own, if this host has cgroup v2; removed when dropped.
    struct OwnGroup(MachineUser, tempfile::TempDir);

    impl OwnGroup {
        fn new(number: u64) -> Option<(Self, ControlGroup)> {
            let user = MachineUser::of_random(u64::from(std::process::id()) << 4 | number);
            let group = ControlGroup::create(user, GroupLimits { memory: 64 << 20, cpus: 1 })?;
            Some((Self(user, tempfile::tempdir().unwrap()), group))
        }

        /// A shell in the group, as the QEMU of the machine would be.
        fn shell(&self, script: &str) -> Command {
            let place = self.1.path().join("place");
            if !place.exists() {
                self.0.make_dir(&place).unwrap();
            }
            let own = OwnUser::of_machine(self.0, OwnedFd::from(File::open(&place).unwrap()), 64 << 20);
            let mut command = Command::new("sh");
            Confinement::of_machine(Some(own), Vec::new()).apply_to(command.args(["-c", script]));
            command
        }
    }

    impl Drop for OwnGroup {
        fn drop(&mut self) {
            ControlGroup::of(self.0).into_iter().for_each(ControlGroup::remove);
        }
    }

    #[test]
    fn a_group_is_made_below_that_of_all_machines_with_limits_of_its_machine() {
        let mount = tempfile::tempdir().unwrap();
        let user = MachineUser::of_random(7);
        let dir = mount.path().join(PARENT).join(user.number().to_string());
        fs::create_dir_all(&dir).unwrap();
        // The host lacks the controller of processor time.
        for file in ["memory.max", "pids.max"] {
            fs::write(dir.join(file), "").unwrap();
        }
        for group in [mount.path(), dir.parent().unwrap()] {
            fs::write(group.join("cgroup.subtree_control"), "").unwrap();
        }
        ControlGroup::create_in(mount.path(), user, GroupLimits { memory: 1 << 30, cpus: 2 }).unwrap();
        let read = |file: &str| fs::read_to_string(dir.join(file)).unwrap();
        assert_eq!((read("memory.max"), read("pids.max")), ((4_u64 << 30).to_string(), "2048".into()));
        assert!(!dir.join("cpu.max").exists());
        let limits = GroupLimits { memory: u64::MAX, cpus: 4 }.files();
        assert_eq!(limits[0].1, u64::MAX.to_string());
        assert_eq!(limits[2].1, "600000 100000");
        // A plain file has the last of the words, which the kernel takes one by one.
        for group in [mount.path(), dir.parent().unwrap()] {
            assert!(fs::read_to_string(group.join("cgroup.subtree_control")).unwrap().starts_with("+cpu"));
        }
    }

    #[test]
    fn what_a_machine_starts_is_in_its_group_and_ends_with_it() {
        let Some((own, group)) = OwnGroup::new(1) else { return eprintln!("this host has no cgroup v2") };
        let mut shell = own.shell("while :; do :; done & sleep 60").spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while group.cpu_time().unwrap() < Duration::from_millis(50) {
            assert!(Instant::now() < deadline, "no processor time is counted");
            thread::sleep(RETRY);
        }
        assert_eq!(ControlGroup::of_process(shell.id()).unwrap().dir, group.dir);
        assert!(ControlGroup::of_process(std::process::id()).is_none(), "this process is no machine's");
        let members = fs::read_to_string(group.dir.join("cgroup.procs")).unwrap();
        assert!(members.lines().count() >= 2, "{members:?}");
        let waited = thread::spawn(move || shell.wait());
        let dir = group.dir.clone();
        group.remove();
        assert!(!waited.join().unwrap().unwrap().success(), "it was not ended");
        assert!(!dir.exists());
        assert!(ControlGroup::of(own.0).is_none());
    }

    #[test]
    fn a_group_holds_its_processes_and_its_memory() {
        let Some((own, group)) = OwnGroup::new(2) else { return eprintln!("this host has no cgroup v2") };
        let missing = missing_limits().unwrap();
        if missing.contains(&"processes") || missing.contains(&"memory") {
            return eprintln!("this host does not limit {missing:?}");
        }
        write(&group.dir.join("pids.max"), "20").unwrap();
        let bomb = own.shell("for n in $(seq 100); do sleep 3 & done; wait").output().unwrap();
        assert!(group.value("pids.events", "max") > Some(0), "a hundred processes were started: {bomb:?}");
        assert!(!group.ended_for_memory());
        write(&group.dir.join("pids.max"), "max").unwrap();
        write(&group.dir.join("memory.max"), &(48 << 20).to_string()).unwrap();
        // A last line without an end is kept whole.
        let hog = own.shell("head -c 300000000 /dev/zero | tail -n 1 | wc -c").output().unwrap();
        assert_ne!(String::from_utf8_lossy(&hog.stdout).trim(), "300000000");
        assert!(group.ended_for_memory());
    }

    #[test]
    fn a_value_is_that_of_its_own_line() {
        let text = "oom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!((value(text, "oom"), value(text, "oom_kill")), (Some(3), Some(2)));
        assert_eq!((value(text, "low"), value("", "oom"), value("oom x", "oom")), (None, None, None));
    }
}
