//! Files that a confined process may open: a Landlock ruleset (Landlock in the kernel's userspace-api
//! manual).
//!
//! A user of its own keeps a process from files of others. This keeps it from files of everybody too: it
//! opens programs and libraries, facts about the processors, its own directory and what is passed to it,
//! and nothing else. It binds and connects no TCP port, and neither signals nor traces what is not confined
//! with it.
//!
//! The rules are made before the fork, but for `/proc/self`, which means another process after it. What a
//! kernel does not know is left out; a kernel without Landlock restricts nothing (`whimbrel doctor` says
//! so).

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, Scope,
};
use rustix::{
    fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    io::Errno,
};
use std::{ffi::CStr, io, path::Path};

/// Newest rights that the rules use. Older kernels enforce those that they know.
const RIGHTS: ABI = ABI::V6;
/// Programs, libraries and firmware of the usual distributions.
const PROGRAMS: [&str; 8] = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/nix/store", "/gnu/store"];
/// Configuration of the libraries that QEMU is linked with.
const CONFIGURATION: [&str; 7] = [
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/qemu",
    "/etc/ssl",
    "/etc/pki",
    "/etc/gnutls",
    "/etc/crypto-policies",
];
/// What libraries read of the machine that they run on.
const FACTS: [&str; 9] = [
    "/sys/devices/system",
    "/sys/bus",
    "/sys/kernel/mm",
    "/sys/module",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/filesystems",
    "/proc/sys",
];
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/kvm"];

/// Rights to files that a process gives itself before it executes a program.
#[derive(Debug)]
pub(crate) struct FileAccess {
    ruleset: OwnedFd,
}

/// Whether this kernel restricts which files a process opens.
pub fn restricts_files() -> bool {
    let ruleset = Ruleset::default().handle_access(AccessFs::Execute).and_then(Ruleset::create);
    ruleset.is_ok_and(|ruleset| Option::<OwnedFd>::from(ruleset).is_some())
}

impl FileAccess {
    /// For `program`, which works in the directory `own` and opens these files by their descriptors; none if
    /// the kernel has no Landlock.
    pub(crate) fn new(program: &Path, own: BorrowedFd, files: &[OwnedFd]) -> io::Result<Option<Self>> {
        Self::rules(program, own, files).map_err(io::Error::other)
    }

    fn rules(program: &Path, own: BorrowedFd, files: &[OwnedFd]) -> Result<Option<Self>, RulesetError> {
        let ruleset = Ruleset::default()
            .handle_access(AccessFs::from_all(RIGHTS))?
            .handle_access(AccessNet::from_all(RIGHTS))?
            .scope(Scope::from_all(RIGHTS))?
            .create()?;
        let read = AccessFs::from_read(RIGHTS);
        let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
        let mut ruleset = allow(ruleset, PROGRAMS, read)?;
        ruleset = allow(ruleset, installed_with(program), read)?;
        ruleset = allow(ruleset, CONFIGURATION, read)?;
        ruleset = allow(ruleset, FACTS, read)?;
        ruleset = allow(ruleset, DEVICES, device)?;
        ruleset = ruleset.add_rule(PathBeneath::new(own, AccessFs::from_all(RIGHTS)))?;
        let data = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
        for file in files {
            ruleset = ruleset.add_rule(PathBeneath::new(file.as_fd(), data))?;
        }
        let fd: Option<OwnedFd> = ruleset.into();
        Ok(fd.map(|ruleset| Self { ruleset }))
    }

    /// Restricts this thread, for ever. It neither allocates nor takes a lock, so a forked child may call it.
    /// `no_new_privs` is set already.
    pub(crate) fn enforce(&self) -> Result<(), Errno> {
        const SELF: &CStr = c"/proc/self";
        // SAFETY: the path is a C string; the call returns a new descriptor or -1.
        let fd = unsafe { libc::open(SELF.as_ptr(), libc::O_PATH | libc::O_CLOEXEC | libc::O_DIRECTORY) };
        if fd >= 0 {
            // SAFETY: the descriptor is new, and nobody else has it.
            let process = unsafe { OwnedFd::from_raw_fd(fd) };
            let rule = PathBeneathAttr {
                allowed_access: (AccessFs::ReadFile | AccessFs::ReadDir).bits(),
                parent_fd: process.as_raw_fd(),
            };
            // SAFETY: `rule` has the layout of `struct landlock_path_beneath_attr` and outlives the call.
            check(unsafe {
                libc::syscall(
                    libc::SYS_landlock_add_rule,
                    self.ruleset.as_raw_fd(),
                    RULE_PATH_BENEATH,
                    &raw const rule,
                    0,
                )
            })?;
        }
        // SAFETY: the call takes a descriptor and flags; no memory is passed.
        check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.ruleset.as_raw_fd(), 0) })
    }
}

/// Kind of a rule for a file or for what is below a directory (linux/landlock.h).
const RULE_PATH_BENEATH: libc::c_int = 1;

/// `struct landlock_path_beneath_attr` (linux/landlock.h).
#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: libc::c_int,
}

fn check(result: libc::c_long) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::PERM)),
    }
}

/// The directory with the program, its libraries and its firmware, where it is not one of [`PROGRAMS`].
fn installed_with(program: &Path) -> Option<&Path> {
    let dir = program.parent()?;
    let prefix = if dir.ends_with("bin") { dir.parent()? } else { dir };
    // The whole file system would be no restriction.
    prefix.parent().map(|_| prefix)
}

/// Adds a rule for each of these paths that exists.
fn allow<P: AsRef<Path>>(
    mut ruleset: RulesetCreated,
    paths: impl IntoIterator<Item = P>,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    for path in paths {
        if let Ok(fd) = PathFd::new(path) {
            ruleset = ruleset.add_rule(PathBeneath::new(fd, access))?;
        }
    }
    Ok(ruleset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_at_the_top_of_the_file_system_does_not_open_all_of_it() {
        let installed = |program: &'static str| installed_with(Path::new(program)).and_then(Path::to_str);
        assert_eq!(installed("/opt/qemu/bin/qemu-system-x86_64"), Some("/opt/qemu"));
        assert_eq!(installed("/srv/build/qemu-system-x86_64"), Some("/srv/build"));
        assert_eq!(installed("/bin/qemu-system-x86_64"), None);
        assert_eq!(installed("/qemu-system-x86_64"), None);
        assert_eq!(installed("qemu-system-x86_64"), None);
    }
}
