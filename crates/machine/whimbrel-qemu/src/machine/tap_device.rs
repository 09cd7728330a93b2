//! Tap devices that a QEMU has, also one that an earlier process of the daemon started.

use rustix::{
    fd::OwnedFd,
    process::{PidfdGetfdFlags, pidfd_getfd},
};
use std::{fs, io};

/// Descriptor of the tap device of port `index`, copied from the process; none if it has no such device.
///
/// The kernel tells the name of a descriptor's device in `/proc/PID/fdinfo` (drivers/net/tun.c, `iff:`).
pub(super) fn of(process: &OwnedFd, pid: u32, index: usize) -> io::Result<Option<OwnedFd>> {
    let device = format!("iff:\tnet{index}");
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let entry = entry?;
        // A descriptor may be closed meanwhile.
        let info = fs::read_to_string(entry.path()).unwrap_or_default();
        if !info.lines().any(|line| line == device) {
            continue;
        }
        let number = entry.file_name().to_string_lossy().parse().map_err(io::Error::other)?;
        return Ok(Some(pidfd_getfd(process, number, PidfdGetfdFlags::empty())?));
    }
    Ok(None)
}
