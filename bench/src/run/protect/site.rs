//! Three hosts, a guest at work on the first, and what its protection says of itself.

use super::guest;
use crate::hosts::{Daemon, GUEST, Hosts, Machine};
use crate::run::stores;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{DebianGuest, GuestOptions, Work};
use whimbrel_testkit::lab::Namespace;

pub(in crate::run) const NAME: &str = "web";
const MEMORY: ByteSize = ByteSize(512 << 20);
const PATIENCE: Duration = Duration::from_secs(60);

/// `alpha` with the guest, `beta` to stand by, `gamma` to decide.
pub(in crate::run) struct Site {
    pub(in crate::run) hosts: Hosts,
}

impl Site {
    /// The hosts alone.
    pub(super) fn bare() -> Result<Self> {
        Ok(Self { hosts: Hosts::start(&["alpha", "beta", "gamma"])? })
    }

    /// With the Debian guest at this work.
    pub(super) fn at_work(load: &str) -> Result<Self> {
        let site = Self::bare()?;
        let DebianGuest { kernel, initrd, .. } = DebianGuest::get()?;
        // The kernel's command line has no other place for a word of our own than behind the last option.
        let address = Some(format!("{GUEST}/24 load={load}"));
        let options = GuestOptions { address, buffer_mib: 1, ..GuestOptions::default() };
        let disks = vec![guest::disk()?];
        Machine { memory: MEMORY, boot: Some((kernel, initrd)), options, disks }.run(site.alpha()?, NAME)?;
        Ok(site)
    }

    /// With redis and PostgreSQL in a guest of their own.
    pub(super) fn with_stores() -> Result<Self> {
        let site = Self::bare()?;
        stores::machine(GUEST)?.run(site.alpha()?, NAME)?;
        Ok(site)
    }

    /// With the small guest.
    pub(in crate::run) fn small(memory: ByteSize, work: Work) -> Result<Self> {
        Self::bare()?.with_small(memory, work)
    }

    /// The same, where machines have no processes of their own.
    pub(in crate::run) fn small_without_processes(memory: ByteSize, work: Work) -> Result<Self> {
        let mut site = Self::bare()?;
        for name in ["alpha", "beta", "gamma"] {
            let host = site.hosts.get_mut(name)?;
            host.refuse_machine_processes();
            host.restart()?;
        }
        site.with_small(memory, work)
    }

    fn with_small(self, memory: ByteSize, work: Work) -> Result<Self> {
        let address = Some(format!("{GUEST}/24"));
        let options = GuestOptions { address, buffer_mib: 1, work };
        Machine::small(memory, options).run(self.alpha()?, NAME)?;
        Ok(self)
    }

    pub(in crate::run) fn alpha(&self) -> Result<&Daemon> {
        self.hosts.get("alpha")
    }

    pub(super) fn client(&self) -> &Namespace {
        self.hosts.lab.host("client")
    }

    /// Protects the guest, and waits until some epochs are through.
    pub(in crate::run) fn protect(&self, more: &[&str]) -> Result<()> {
        protect(self.alpha()?, "beta", more)
    }

    /// What the protection says of itself.
    pub(in crate::run) fn figures(&self) -> Result<Value> {
        Ok(protection(self.alpha()?)?["figures"].clone())
    }

    /// Ends the protection.
    pub(in crate::run) fn unprotect(&self) -> Result<()> {
        self.alpha()?.run(&["unprotect", NAME]).map(drop)
    }
}

/// Protects the guest of `host` at `standby`, and waits until some epochs are through.
pub(super) fn protect(host: &Daemon, standby: &str, more: &[&str]) -> Result<()> {
    protect_for(host, standby, 10, more)
}

/// The same, until so many are.
pub(super) fn protect_for(host: &Daemon, standby: &str, epochs: u64, more: &[&str]) -> Result<()> {
    host.run(&[&["protect", NAME, standby, "--witness", "gamma"], more].concat())?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = protection(host)?;
        if now["state"]["kind"] == "protected" && now["epoch"].as_u64() >= Some(epochs) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no epochs come through: {now}");
        sleep(Duration::from_millis(20));
    }
}

/// What `host` says of the guest's protection.
pub(super) fn protection(host: &Daemon) -> Result<Value> {
    let machines = host.json(&["ps"])?;
    let mut machines = machines.as_array().context("`ps` without a list")?.iter();
    Ok(machines.find(|one| one["name"] == NAME).map_or(Value::Null, |one| one["protection"].clone()))
}

/// A number of these figures.
pub(in crate::run) fn figure(figures: &Value, name: &str) -> Result<f64> {
    figures[name].as_f64().with_context(|| format!("no number {name} in {figures}"))
}
