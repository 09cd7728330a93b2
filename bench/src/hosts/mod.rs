//! Hosts as a user has them: real daemons in network namespaces, driven by the command line.
//!
//! A [`Hosts`] and everything it started is gone when it is dropped, and also when this process is killed:
//! each daemon and its QEMUs are in a PID namespace, whose first process ends with us, and with it all the
//! others.

mod console;
mod daemon;
mod machine;
mod memory;

pub(crate) use console::console;
pub(crate) use daemon::{Daemon, Started, WEB, number, program};
pub(crate) use machine::Machine;
pub(crate) use memory::{Resident, allocated};

use crate::harness::{Sweeper, scratch};
use anyhow::{Context as _, Result};
use std::path::Path;
use tempfile::TempDir;
use whimbrel_testkit::lab::Lab;

/// Address that a guest may have on the lab's segment.
pub(crate) const GUEST: &str = "10.77.0.100";

/// Some hosts with a daemon each, and a host `client` without one, on one switch.
pub(crate) struct Hosts {
    daemons: Vec<Daemon>,
    pub(crate) lab: Lab,
    disk: TempDir,
    _memory: TempDir,
    _sweeper: Sweeper,
}

impl Hosts {
    /// Starts a daemon on each of these hosts and lets them trust each other.
    pub(crate) fn start(names: &[&str]) -> Result<Self> {
        let all: Vec<&str> = names.iter().copied().chain(["client"]).collect();
        let lab = Lab::with_hosts(&all)?;
        let disk = scratch("hosts")?;
        let memory = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
        let sweeper = Sweeper::over(&[disk.path(), memory.path()])?;
        let start = |name: &&str| {
            let place = lab.host(name);
            Daemon::start(place, place.address(), disk.path(), memory.path())
        };
        let daemons = names.iter().map(start).collect::<Result<Vec<_>>>()?;
        introduce(&daemons)?;
        Ok(Self { daemons, lab, disk, _memory: memory, _sweeper: sweeper })
    }

    /// The daemon of this host.
    pub(crate) fn get(&self, name: &str) -> Result<&Daemon> {
        self.daemons.iter().find(|daemon| daemon.name() == name).with_context(|| format!("no host {name}"))
    }

    /// The same, to restart it.
    pub(crate) fn get_mut(&mut self, name: &str) -> Result<&mut Daemon> {
        self.daemons
            .iter_mut()
            .find(|daemon| daemon.name() == name)
            .with_context(|| format!("no host {name}"))
    }

    /// Lets all of them trust each other again, after their data was exchanged.
    pub(crate) fn introduce(&self) -> Result<()> {
        introduce(&self.daemons)
    }

    /// A folder on a disk that lasts as long as the hosts.
    pub(crate) fn disk(&self) -> &Path {
        self.disk.path()
    }
}

/// Lets all of them trust each other.
pub(crate) fn introduce(daemons: &[Daemon]) -> Result<()> {
    for daemon in daemons {
        for other in daemons.iter().filter(|other| other.name() != daemon.name()) {
            daemon.run(&["trust", "add", other.name(), &other.key()?, other.address()])?;
        }
    }
    Ok(())
}
