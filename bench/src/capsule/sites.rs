//! Two places with a host each, `alpha` and `beta`, and one link between them: every byte from one to the
//! other crosses it.
//!
//! The link is the test kit's emulator on the IP layer. The switch that the lab would join them with is
//! unplugged, so there is no other way. Guests stand on a bridge of their host's with the same addresses at
//! both places.

use crate::harness::{Sweeper, scratch};
use crate::hosts::{Daemon, introduce};
use anyhow::{Result, ensure};
use std::net::Ipv4Addr;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;
use tempfile::TempDir;
use whimbrel_testkit::lab::{Lab, LinkConfig, LinkEmulator, Namespace, Process};

/// Where the hosts are on the link.
pub(super) const ALPHA: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
pub(super) const BETA: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
/// The paper's line (section 5): 384 kbit/s both ways, 20 ms there and back; dummynet's queue of 50 packets.
pub(super) const DSL: LinkConfig =
    LinkConfig { delay: Duration::from_millis(10), bits_per_second: 384_000, loss: 0.0, queue: 50 * 1500 };
/// Name of the machine that the experiments move.
pub(super) const NAME: &str = "builder";

/// 100 Mbit/s, 1 ms there and back.
pub(super) fn lan() -> LinkConfig {
    LinkConfig::new(100, Duration::from_micros(500))
}

/// 1 Gbit/s, 1 ms there and back.
pub(super) fn gigabit() -> LinkConfig {
    LinkConfig::new(1000, Duration::from_micros(500))
}

/// The two hosts and the link. All of it is gone when this is dropped, or when this process is killed.
pub(super) struct Sites {
    daemons: Vec<Daemon>,
    link: LinkEmulator,
    lab: Lab,
    disk: TempDir,
    _memory: TempDir,
    _sweeper: Sweeper,
}

impl Sites {
    /// Starts both hosts; the link is a fast one.
    pub(super) fn start() -> Result<Self> {
        let lab = Lab::with_hosts(&["alpha", "beta"])?;
        let (alpha, beta) = (lab.host("alpha"), lab.host("beta"));
        for host in ["alpha", "beta"] {
            lab.unplug(host)?;
        }
        let link = LinkEmulator::between((alpha, ALPHA), (beta, BETA), gigabit(), 1)?;
        let disk = scratch("sites")?;
        let memory = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
        let sweeper = Sweeper::over(&[disk.path(), memory.path()])?;
        let start = |host, address| Daemon::start(host, address, disk.path(), memory.path());
        let daemons = vec![start(alpha, ALPHA)?, start(beta, BETA)?];
        introduce(&daemons)?;
        // A client that asks a guest that is not there yet must not wait a second before it asks again.
        for host in [alpha, beta] {
            host.run(|| std::fs::write("/proc/sys/net/ipv4/neigh/br0/retrans_time_ms", "20"))?;
        }
        Ok(Self { daemons, link, lab, disk, _memory: memory, _sweeper: sweeper })
    }

    pub(super) fn alpha(&self) -> &Daemon {
        &self.daemons[0]
    }

    pub(super) fn beta(&self) -> &Daemon {
        &self.daemons[1]
    }

    /// A fresh daemon at beta, which remembers nothing of the link; the store stays.
    pub(super) fn restart_beta(&mut self) -> Result<()> {
        self.daemons[1].restart()
    }

    /// A beta that has nothing, not even its old key.
    pub(super) fn fresh_beta(&mut self) -> Result<()> {
        self.alpha().run(&["trust", "rm", "beta"])?;
        self.daemons[1].renew()?;
        introduce(&self.daemons)
    }

    /// From here on the link is like this.
    pub(super) fn set_link(&self, config: LinkConfig) {
        self.link.change(config);
    }

    /// Bytes that the link has delivered so far, both ways.
    pub(super) fn link_bytes(&self) -> u64 {
        self.link.bytes().iter().sum()
    }

    /// Bytes that cross the link during `work`, and what came of it.
    pub(super) fn counting<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
        let before = self.link_bytes();
        let done = work()?;
        // What is still on its way belongs to it.
        sleep(Duration::from_millis(100));
        Ok((done, self.link_bytes() - before))
    }

    /// A folder on a disk that lasts as long as the sites.
    pub(super) fn disk(&self) -> &Path {
        self.disk.path()
    }

    /// The network of a host.
    pub(super) fn network(&self, host: &str) -> &Namespace {
        self.lab.host(host)
    }

    /// Starts a program in the network of a host.
    pub(super) fn program(&self, host: &str, command: std::process::Command) -> Result<Process> {
        Ok(self.lab.host(host).command(command)?)
    }
}

/// Fails unless `what` is there.
pub(super) fn check_whole(whole: &serde_json::Value, what: &str) -> Result<()> {
    ensure!(whole["result"]["whole"] == true, "not all of {what} came: {whole}");
    Ok(())
}
