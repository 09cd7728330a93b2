//! Checks of the kernel: rights of the user, version, devices and shared memory.

use super::{Check, CheckStatus};
use rustix::fs::{StatVfs, statfs, statvfs};
use std::fs;
use whimbrel_core::ByteSize;

/// Oldest Linux with `PAGEMAP_SCAN`, which finds dirty pages.
const KERNEL_MIN: (u32, u32) = (6, 7);
/// Magic number of tmpfs (linux/magic.h).
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Least shared memory for a useful machine.
const SHARED_MEMORY_MIN: u64 = 512 << 20;

pub(super) fn root() -> Check {
    let user = rustix::process::geteuid();
    if user.is_root() {
        Check::ok("root", "yes")
    } else {
        let found = format!("user {}", user.as_raw());
        Check::bad(
            "root",
            CheckStatus::Fail,
            found,
            "run the daemon as root: it traces QEMU and opens tap devices",
        )
    }
}

pub(super) fn version() -> Check {
    let release = read("/proc/sys/kernel/osrelease");
    match parse_version(&release) {
        Some(version) if version >= KERNEL_MIN => Check::ok("kernel", release),
        _ => {
            let fix = "use Linux 6.7 or newer: dirty pages are found with PAGEMAP_SCAN";
            Check::bad("kernel", CheckStatus::Fail, release, fix)
        }
    }
}

/// Parses the major and minor version of a release like `6.12.0-rc1` or `6.1.0-18-amd64`.
fn parse_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

pub(super) fn shared_memory() -> Check {
    const NAME: &str = "/dev/shm";
    let mounted = statfs(NAME).is_ok_and(|found| found.f_type as u64 == TMPFS_MAGIC);
    match statvfs(NAME) {
        Ok(found) if mounted => {
            let (free, size) = space(&found);
            let text = format!("{free} of {size} free");
            if free.0 >= SHARED_MEMORY_MIN {
                return Check::ok(NAME, text);
            }
            let fix = "mount -o remount,size=80% /dev/shm: guest memory is stored there";
            Check::bad(NAME, CheckStatus::Warn, text, fix)
        }
        _ => Check::bad(
            NAME,
            CheckStatus::Fail,
            "no tmpfs",
            "mount -t tmpfs tmpfs /dev/shm: guest memory is stored there",
        ),
    }
}

fn space(found: &StatVfs) -> (ByteSize, ByteSize) {
    let bytes = |blocks: u64| ByteSize(blocks.saturating_mul(found.f_frsize));
    (bytes(found.f_bavail), bytes(found.f_blocks))
}

pub(super) fn tun() -> Check {
    let fix = "modprobe tun: without it machines have no network";
    device("/dev/net/tun", fix)
}

pub(super) fn fuse() -> Check {
    let fix = "modprobe fuse: without it nothing can be mounted";
    device("/dev/fuse", fix)
}

pub(super) fn landlock() -> Check {
    match whimbrel_qemu::restricts_files() {
        true => Check::ok("landlock", "yes"),
        false => {
            let fix =
                "add landlock to the kernel parameter lsm=: without it QEMU may read what every user may";
            Check::bad("landlock", CheckStatus::Warn, "no", fix)
        }
    }
}

pub(super) fn control_groups() -> Check {
    let fix = "mount cgroup v2 with the controllers memory, pids and cpu: without them a QEMU that has been broken into \
               can take all of the host";
    match whimbrel_qemu::missing_limits() {
        Ok(missing) if missing.is_empty() => Check::ok("cgroup", "limits machines"),
        Ok(missing) => {
            Check::bad("cgroup", CheckStatus::Warn, format!("no limit of {}", missing.join(", ")), fix)
        }
        Err(what) => Check::bad("cgroup", CheckStatus::Warn, what, fix),
    }
}

/// Checks that a device can be opened which only some functions need.
fn device(path: &'static str, fix: &str) -> Check {
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => Check::ok(path, "opens"),
        Err(error) => Check::bad(path, CheckStatus::Warn, error.to_string(), fix),
    }
}

/// Content of a small kernel file, empty if it cannot be read.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert!(parse_version("6.12.0-rc1") > Some(KERNEL_MIN));
        assert!(parse_version("6.1.0-18-amd64") < Some(KERNEL_MIN));
        assert_eq!(parse_version("6.18"), Some((6, 18)));
        assert_eq!((parse_version(""), parse_version("linux")), (None, None));
    }
}
