//! What happens to a host in the middle of a move, and how it is undone.

use crate::harness::Chance;
use crate::hosts::{Daemon, Hosts};
use anyhow::Result;
use std::time::Duration;

/// Disk of a host's data: more than what two machines and their capsules take.
const DATA_MIB: u32 = 768;

/// One fault. Source and target are the two hosts of the move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disturbance {
    Nothing,
    /// The user ends the command.
    Cancel,
    /// A daemon is killed; the next one starts at once.
    Kill(Side),
    /// A daemon stands still for a while.
    Stop(Side),
    /// A cable is out for a while.
    Cable(Side),
    /// The disk of a host's data is full for a while.
    FullDisk(Side),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Target,
}

impl Disturbance {
    pub(super) const ALL: [Self; 10] = [
        Self::Nothing,
        Self::Cancel,
        Self::Kill(Side::Source),
        Self::Kill(Side::Target),
        Self::Stop(Side::Source),
        Self::Stop(Side::Target),
        Self::Cable(Side::Source),
        Self::Cable(Side::Target),
        Self::FullDisk(Side::Source),
        Self::FullDisk(Side::Target),
    ];

    pub(super) fn any(chance: &mut Chance) -> Self {
        Self::ALL[chance.below(Self::ALL.len() as u64) as usize]
    }

    /// Lets it happen, and lets it last for `span`.
    pub(super) fn strike(self, hosts: &mut Hosts, (from, to): (&str, &str), span: Duration) -> Result<()> {
        let host = |side| if side == Side::Source { from } else { to };
        match self {
            Self::Nothing | Self::Cancel => Ok(()),
            Self::Kill(side) => {
                let daemon = hosts.get_mut(host(side))?;
                daemon.end_daemon()?;
                std::thread::sleep(span);
                daemon.begin()
            }
            Self::Stop(side) => {
                let daemon = hosts.get(host(side))?;
                daemon.stop_daemon()?;
                std::thread::sleep(span);
                daemon.continue_daemon()
            }
            Self::Cable(side) => {
                hosts.lab.unplug(host(side))?;
                std::thread::sleep(span);
                Ok(hosts.lab.replug(host(side))?)
            }
            Self::FullDisk(side) => {
                let (daemon, ballast) = (hosts.get(host(side))?, ballast(hosts.get(host(side))?));
                let fill = format!("head -c {DATA_MIB}M /dev/zero > {ballast} 2>/dev/null; true");
                daemon.inside("sh", &["-c", &fill])?;
                std::thread::sleep(span);
                daemon.inside("rm", &["-f", &ballast])
            }
        }
    }
}

fn ballast(daemon: &Daemon) -> String {
    format!("{}/ballast", daemon.data().display())
}

/// Gives each host a disk of its own for its data, small enough to be filled.
pub(super) fn limit_disks(hosts: &mut Hosts, names: &[&str]) -> Result<()> {
    for name in names {
        let daemon = hosts.get_mut(name)?;
        let (size, data) = (format!("size={DATA_MIB}m"), daemon.data().display().to_string());
        daemon.inside("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", &data])?;
        daemon.end_daemon()?;
        daemon.begin()?;
    }
    hosts.introduce()
}
