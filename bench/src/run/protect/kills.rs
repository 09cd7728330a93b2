//! `lost`, `split`: hosts of a redis and a PostgreSQL die at random instants, over and over, and clients
//! check their own histories.
//!
//! Victims in turn: the QEMU, the daemon alone, the host with all its processes, its cable for a while (a
//! partition of the primary from everybody). A campaign has more, in an order of its seed. What takes over is
//! protected by the host that died, once it is back. Lost is a write that was acknowledged and is not there
//! afterwards. Whether both hosts answered is read from the switch, which learns on which port a sender is:
//! after the guest's address has come to the new host's port it must not be seen on the old one's again.
//!
//! A cycle waits for nothing but what it is about: a takeover, all histories, the old host's word that it has
//! let go, a first copy.

use super::site::{NAME, Site, protect_for};
use super::takeover::wait_running;
use crate::harness::{Chance, Goal, Row, Samples};
use crate::hosts::{Daemon, GUEST};
use crate::run::Context;
use crate::run::stores::{Histories, Kind, Sums};
use anyhow::{Context as _, Result, ensure};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};
use whimbrel_testkit::lab::{Lab, Process};

const PATIENCE: Duration = Duration::from_secs(60);
/// Epochs before a host may die.
const EPOCHS: u64 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::run) enum Victim {
    Qemu,
    Daemon,
    Host,
    Cable,
    /// The QEMU is asked to end, as when its host shuts down.
    AskedQemu,
    /// The QEMU stands still.
    StoppedQemu,
    /// The QEMU, while the witness has just been started again.
    QemuAndWitness,
}

const VICTIMS: [Victim; 4] = [Victim::Qemu, Victim::Daemon, Victim::Host, Victim::Cable];

/// All victims of a campaign.
pub(in crate::run) const ALL_VICTIMS: [Victim; 7] = [
    Victim::Qemu,
    Victim::Daemon,
    Victim::Host,
    Victim::Cable,
    Victim::AskedQemu,
    Victim::StoppedQemu,
    Victim::QemuAndWitness,
];

/// What came of a series of kills.
pub(in crate::run) struct Kills {
    pub(in crate::run) sums: Sums,
    pub(in crate::run) split: u32,
    /// Kills by victim.
    pub(in crate::run) of: BTreeMap<Victim, usize>,
}

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let kills = context.times(1000, 12);
    let mut chance = Chance(0x2545_f491_4f6c_dd1d);
    let done = disturb(&mut chance, |kill, _| (kill < kills).then(|| VICTIMS[kill % VICTIMS.len()]))?;
    let Kills { sums, split, of } = done;
    let [redis, postgres] = sums.written;
    let of: Vec<String> = of.iter().map(|(victim, count)| format!("{count} {victim:?}")).collect();
    let case = format!(
        "{} kills ({}), {redis} writes of redis, {postgres} transactions of PostgreSQL",
        kills,
        of.join(", ")
    );
    let split_case = format!("{kills} kills, by the switch's table of senders");
    let lost = sums.lost.iter().sum::<u64>() as f64;
    Ok(vec![
        Row::new("lost", case, "writes", &Samples::new(vec![lost])).goal(Goal::AtMost(0.0)),
        Row::new("split", split_case, "kills", &Samples::new(vec![f64::from(split)])).goal(Goal::AtMost(0.0)),
    ])
}

/// Kills what `next` says, after so many kills, until it says nothing.
pub(in crate::run) fn disturb(
    chance: &mut Chance,
    next: impl Fn(usize, &mut Chance) -> Option<Victim>,
) -> Result<Kills> {
    let mut site = Site::with_stores()?;
    let clients = Histories::start(site.client(), &Kind::BOTH);
    clients.check()?;
    let switch = Switch::watch(&site.hosts.lab)?;
    let (mut primary, mut standby) = ("alpha", "beta");
    protect_for(site.hosts.get(primary)?, standby, EPOCHS, &[])?;
    let (mut split, mut kill, mut of) = (0, 0, BTreeMap::new());
    while let Some(victim) = next(kill, chance) {
        kill += 1;
        *of.entry(victim).or_default() += 1;
        // Over some epochs, and anywhere within one.
        sleep(Duration::from_micros(chance.below(400_000)));
        switch.forget();
        let mut spans = Spans::begin();
        strike(&mut site, primary, victim)?;
        wait_running(site.hosts.get(standby)?)?;
        spans.next("runs");
        clients.check().with_context(|| site.hosts.get(standby).map_or(String::new(), Daemon::account))?;
        spans.next("checked");
        restore(&mut site, primary, victim)?;
        wait_empty(site.hosts.get(primary)?)?;
        spans.next("let go");
        if switch.was_seen_again(primary, standby) {
            split += 1;
            eprintln!("    {victim:?}: the guest was seen at {primary} after it was at {standby}");
        }
        (primary, standby) = (standby, primary);
        protect_for(site.hosts.get(primary)?, standby, EPOCHS, &[])?;
        spans.next("protected");
        let sums = clients.sums();
        eprintln!("    {kill}, {victim:?}: {}; {sums:?}, {split} split", spans.0.join(", "));
    }
    Ok(Kills { sums: clients.sums(), split, of })
}

/// Where the time of a cycle went.
struct Spans(Vec<String>, Instant);

impl Spans {
    fn begin() -> Self {
        Self(Vec::new(), Instant::now())
    }

    fn next(&mut self, until: &str) {
        self.0.push(format!("{until} {:.1} s", self.1.elapsed().as_secs_f64()));
        self.1 = Instant::now();
    }
}

fn strike(site: &mut Site, host: &str, victim: Victim) -> Result<()> {
    match victim {
        Victim::Qemu => signal_qemu(site.hosts.get(host)?, "-9"),
        Victim::AskedQemu => signal_qemu(site.hosts.get(host)?, "-TERM"),
        Victim::StoppedQemu => signal_qemu(site.hosts.get(host)?, "-STOP"),
        Victim::QemuAndWitness => {
            let witness = site.hosts.get_mut("gamma")?;
            witness.end_daemon().and_then(|()| witness.begin())?;
            signal_qemu(site.hosts.get(host)?, "-9")
        }
        Victim::Daemon => site.hosts.get_mut(host)?.end_daemon(),
        Victim::Host => site.hosts.get_mut(host)?.end(),
        Victim::Cable => Ok(site.hosts.lab.unplug(host)?),
    }
}

fn restore(site: &mut Site, host: &str, victim: Victim) -> Result<()> {
    match victim {
        Victim::Qemu | Victim::AskedQemu | Victim::StoppedQemu | Victim::QemuAndWitness => Ok(()),
        Victim::Daemon | Victim::Host => site.hosts.get_mut(host)?.begin(),
        Victim::Cable => Ok(site.hosts.lab.replug(host)?),
    }
}

/// Sends the guest's QEMU a signal, by the pid that it has in its host's PID namespace.
fn signal_qemu(host: &Daemon, signal: &str) -> Result<()> {
    let machines = host.json(&["ps"])?;
    let mut machines = machines.as_array().context("`ps` without a list")?.iter();
    let pid = machines.find(|one| one["name"] == NAME).and_then(|one| one["pid"].as_u64());
    let pid = pid.context("no process")?.to_string();
    let mut command = Command::new("nsenter");
    command.args(["--target", &host.pid()?.to_string(), "--pid", "--mount", "--", "kill", signal, &pid]);
    ensure!(command.status()?.success(), "the QEMU of {} gets no signal", host.name());
    Ok(())
}

/// Waits until the host has let the machine go.
fn wait_empty(host: &Daemon) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while host.json(&["ps"])?.as_array().is_none_or(|all| !all.is_empty()) {
        ensure!(Instant::now() < deadline, "{} keeps the machine: {}", host.name(), host.account());
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// On which port of the switch the guest was seen, one after the other.
pub(in crate::run) struct Switch {
    seen: Arc<Mutex<Vec<String>>>,
    _monitor: Process,
}

impl Switch {
    pub(in crate::run) fn watch(lab: &Lab) -> Result<Self> {
        let guest = lab.host("client").ip(&format!("neigh show {GUEST}"))?;
        let address = guest.split_whitespace().skip_while(|word| *word != "lladdr").nth(1);
        let address = address.context("the client does not know the guest's address")?.to_owned();
        let mut command = Command::new("bridge");
        command.args(["monitor", "fdb"]).stdout(Stdio::piped());
        let mut monitor = lab.switch().start(command)?;
        let lines = BufReader::new(monitor.stdout.take().context("no output")?).lines();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        spawn(move || {
            for line in lines.map_while(Result::ok).filter(|line| line.contains(&address)) {
                let mut words = line.split_whitespace().skip_while(|word| *word != "dev");
                if let (false, Some(port)) = (line.starts_with("Deleted"), words.nth(1)) {
                    log.lock().unwrap_or_else(PoisonError::into_inner).push(port.to_owned());
                }
            }
        });
        Ok(Self { seen, _monitor: monitor })
    }

    pub(in crate::run) fn forget(&self) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub(in crate::run) fn was_seen_again(&self, old: &str, new: &str) -> bool {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut after = seen.iter().skip_while(|port| **port != format!("to-{new}"));
        after.any(|port| *port == format!("to-{old}"))
    }
}
