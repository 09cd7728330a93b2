//! The machine of a campaign: what it knows of itself, and where it is.

use crate::hosts::{Daemon, GUEST, Hosts, Machine};
use anyhow::{Context as _, Result, ensure};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{CheckResult, GuestOptions, Identity, TestAgent, Work};

pub(super) const NAME: &str = "web";
const MEMORY: ByteSize = ByteSize(192 << 20);
const DISK: ByteSize = ByteSize(32 << 20);
/// Time for two hosts to agree on who has the machine, and for the guest to answer then.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
/// How long one connection may stay without an answer: that of a guest which has just ended stays so.
const ONE_CONNECTION: Duration = Duration::from_secs(15);

/// Starts it on `host` with so many CPUs; it writes memory all the time.
pub(super) fn start(hosts: &Hosts, host: &str, cpus: u32) -> Result<()> {
    let work = Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 64 };
    let options = GuestOptions { address: Some(format!("{GUEST}/24")), buffer_mib: 8, work };
    let machine = Machine::small(MEMORY, options).with_blank_disk(hosts.disk(), DISK)?;
    machine.run_with(hosts.get(host)?, NAME, &["--cpus", &cpus.to_string()])
}

/// The test agent inside, over the network. A guest that is just being rebooted ends the first connections.
pub(in crate::run) fn agent(hosts: &Hosts) -> Result<TestAgent> {
    let (client, deadline) = (hosts.lab.host("client"), Instant::now() + PATIENCE);
    loop {
        let error = match client.connect(format!("{GUEST}:7000").parse()?, Duration::from_secs(2)) {
            Ok(stream) => {
                let mut agent = TestAgent::connected(stream)?;
                match agent.wait_ready(ONE_CONNECTION) {
                    Ok(()) => return Ok(agent),
                    Err(error) => error.to_string(),
                }
            }
            Err(error) => error.to_string(),
        };
        ensure!(Instant::now() < deadline, "the guest answers nowhere: {error}");
        sleep(Duration::from_millis(100));
    }
}

/// Reboots it, and waits until it has booted again.
pub(super) fn reboot(hosts: &Hosts) -> Result<()> {
    let mut inside = agent(hosts)?;
    let before = inside.state()?.boot;
    inside.reboot()?;
    drop(inside);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let boot = agent(hosts)?.state_within(ONE_CONNECTION).map(|now| now.boot);
        if boot.is_ok_and(|boot| boot != before) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the guest does not reboot");
        sleep(Duration::from_millis(100));
    }
}

/// State of the machine by the word of a host; none if it has none.
pub(super) fn state(host: &Daemon) -> Result<Option<String>> {
    let machines = host.json(&["ps"])?;
    let mut machines = machines.as_array().context("`ps` without a list")?.iter();
    let found = machines.find(|machine| machine["name"] == NAME);
    Ok(found.and_then(|machine| machine["state"]["kind"].as_str()).map(str::to_owned))
}

/// What is not the same life as before, if anything.
pub(super) fn broken(before: &Identity, after: &Identity) -> Option<&'static str> {
    let good = |check| matches!(check, CheckResult::Good(_));
    if before.nonce != after.nonce || before.boot != after.boot {
        Some("another life: its memory was lost")
    } else if after.counter < before.counter || !after.steady {
        Some("its memory went back in time")
    } else if !good(after.ram) || after.ram != before.ram {
        Some("its memory has other content")
    } else if !good(after.disk) {
        Some("its disk lost what it wrote")
    } else {
        None
    }
}

/// Ends it wherever it is, so that a new one can begin.
pub(super) fn remove(hosts: &Hosts, names: &[&str]) -> Result<()> {
    for name in names {
        let host = hosts.get(name)?;
        let deadline = Instant::now() + PATIENCE;
        while state(host)?.is_some() {
            let _ = host.run(&["stop", NAME, "--kill"]);
            let _ = host.run(&["resolve", NAME, "--discard"]);
            let _ = host.run(&["delete", NAME]);
            ensure!(Instant::now() < deadline, "{NAME} cannot be removed: {}", host.account());
            sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}
