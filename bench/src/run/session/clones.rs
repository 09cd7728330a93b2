//! `session.clone.*`: golden machines of a state server 32 ms and 30 Mbit/s away are cloned on a host that
//! lacks them (figure 6 and table 2 of the paper).
//!
//! Three hosts: `alpha` has the golden machines and lies behind the line; `beta` and `gamma` are on one LAN
//! of 100 Mbit/s. A router joins both, so what gamma asks of alpha shares the line with everybody else. Time
//! is from the begin of `whimbrel clone --match` at gamma until the last clone answers on its console.

use super::far::ONE_WAY;
use crate::harness::{Goal, Row, Samples, Sweeper, scratch};
use crate::hosts::{Daemon, Machine, console, introduce};
use crate::run::Context;
use anyhow::{Result, anyhow, bail, ensure};
use std::{
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::GuestOptions;
use whimbrel_testkit::lab::{Lab, LinkConfig, LinkEmulator};

/// The paper's machines; their disk is that of the Debian guest, of 1.6 GB.
const MEMORY: ByteSize = ByteSize(320 << 20);
const STATE: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
pub(super) const LAN: u64 = 100;
pub(super) const WAN: u64 = 30;
pub(super) const MACHINE: &str = "320 MiB, disk of 1.6 GB";
/// How many at once.
const COUNT: usize = 8;
const PATIENCE: Duration = Duration::from_secs(300);
/// What a machine touches in its first seconds is noted after them.
const NOTED: Duration = Duration::from_secs(12);

/// The hosts. All of it is gone when this is dropped, or when this process is killed.
pub(super) struct Campus {
    /// Alpha, beta, and those that clone.
    pub(super) daemons: Vec<Daemon>,
    pub(super) line: LinkEmulator,
    _lab: Lab,
    disk: TempDir,
    _memory: TempDir,
    _sweeper: Sweeper,
}

impl Campus {
    pub(super) fn start() -> Result<Self> {
        Self::with(&["gamma"])
    }

    /// With these hosts that clone.
    pub(super) fn with(cloning: &[&str]) -> Result<Self> {
        let near = [&["beta"], cloning].concat();
        let lab = Lab::with_hosts(&[&["alpha", "router"], &near[..]].concat())?;
        lab.unplug("alpha")?;
        let (alpha, router) = (lab.host("alpha"), lab.host("router"));
        let line = LinkEmulator::between((alpha, STATE), (router, ROUTER), fast(), 1)?;
        router.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1"))?;
        // The segment it would be on is behind the line.
        alpha.ip("link set br0 down")?;
        alpha.ip(&format!("route add 10.77.0.0/24 via {ROUTER}"))?;
        for name in &near {
            lab.host(name).ip(&format!("route add {STATE} via {}", router.address()))?;
            lab.limit(name, LAN)?;
        }
        let disk = scratch("clones")?;
        let memory = tempfile::Builder::new().prefix("wb").tempdir_in("/dev/shm")?;
        let sweeper = Sweeper::over(&[disk.path(), memory.path()])?;
        let start = |name: &str, address| Daemon::start(lab.host(name), address, disk.path(), memory.path());
        let near = near.iter().map(|name| start(name, lab.host(name).address()));
        let daemons = std::iter::once(start("alpha", STATE)).chain(near).collect::<Result<Vec<_>>>()?;
        introduce(&daemons)?;
        Ok(Self { daemons, line, _lab: lab, disk, _memory: memory, _sweeper: sweeper })
    }

    fn gamma(&self) -> &Daemon {
        &self.daemons[2]
    }

    /// A gamma that has nothing, not even its old key.
    pub(super) fn fresh_gamma(&mut self) -> Result<()> {
        self.fresh(2)
    }

    /// Makes a host one that has nothing, not even its old key.
    pub(super) fn fresh(&mut self, at: usize) -> Result<()> {
        let (before, rest) = self.daemons.split_at_mut(at);
        let Some((host, after)) = rest.split_first_mut() else { bail!("there is no host {at}") };
        let others = || before.iter().chain(&*after);
        others().try_for_each(|other| other.run(&["trust", "rm", host.name()]).map(drop))?;
        host.renew()?;
        let key = host.key()?;
        for other in others() {
            other.run(&["trust", "add", host.name(), &key, host.address()])?;
            host.run(&["trust", "add", other.name(), &other.key()?, other.address()])?;
        }
        Ok(())
    }

    /// A Debian guest that has been up, under this tag and with these labels at alpha. It was tried once:
    /// what it touches when it goes on is known.
    pub(super) fn register(&self, tag: &str, labels: &[&str]) -> Result<()> {
        let alpha = &self.daemons[0];
        let options = GuestOptions { buffer_mib: 1, ..GuestOptions::default() };
        Machine::installed(MEMORY, options, self.disk.path())?.run(alpha, "seed")?;
        alpha.run(&["suspend", "seed"])?;
        alpha.run(&["resume", "seed"])?;
        console(alpha, "seed")?.wait_ready(PATIENCE)?;
        thread::sleep(NOTED);
        let labels = ["os=debian", "release=12"].iter().chain(labels).flat_map(|label| ["--label", label]);
        alpha.run(&["checkpoint", "seed", "--tag", tag].into_iter().chain(labels).collect::<Vec<_>>())?;
        alpha.discard("seed")
    }

    /// Seconds until so many clones at gamma of what is wanted have answered.
    pub(super) fn clone(&self, wanted: &str, from: &[&str], count: usize) -> Result<f64> {
        let before = self.bytes();
        let seconds = clone_on(self.gamma(), wanted, from, count)?;
        eprintln!("    {} bytes over the line", self.bytes() - before);
        Ok(seconds)
    }

    fn bytes(&self) -> u64 {
        self.line.bytes().iter().sum()
    }
}

/// Seconds until so many clones at this host of what is wanted have answered.
pub(super) fn clone_on(host: &Daemon, wanted: &str, from: &[&str], count: usize) -> Result<f64> {
    let begun = Instant::now();
    let many = count.to_string();
    let wanted = format!("ram>=256M,os=debian,{wanted}");
    let words = ["clone", "--match", &wanted, "--count", &many, "--prefix", "twin"];
    host.run(&[&words[..], from].concat())?;
    let returned = begun.elapsed().as_secs_f64();
    let names: Vec<String> = (1..=count).map(|number| format!("twin-{number}")).collect();
    thread::scope(|scope| {
        let answer = |name| Ok(console(host, name)?.wait_ready(PATIENCE)?);
        let waiting: Vec<_> = names.iter().map(|name| scope.spawn(move || answer(name))).collect();
        let panicked = |_| Err(anyhow!("a thread that waited for a clone panicked"));
        waiting.into_iter().try_for_each(|one| one.join().unwrap_or_else(panicked))
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    eprintln!("    {count} {from:?}: running after {returned:.2} s, answered after {seconds:.2} s");
    names.iter().try_for_each(|name| host.discard(name))?;
    Ok(seconds)
}

/// For what is not measured.
fn fast() -> LinkConfig {
    LinkConfig::new(1000, Duration::from_micros(100))
}

/// What any of the golden machines is.
const ANY: &str = "release>=12";

/// Seconds of each kind of cloning.
#[derive(Default)]
struct Times {
    first: Vec<f64>,
    next: Vec<f64>,
    sequence: [Vec<f64>; 2],
    eight: [Vec<f64>; 2],
    lan: Vec<f64>,
}

/// Each kind once.
fn round(campus: &mut Campus, times: &mut Times) -> Result<()> {
    let alpha = ["--from", "alpha"];
    campus.fresh_gamma()?;
    let mut cold = vec![campus.clone(ANY, &alpha, 1)?];
    times.first.push(cold[0]);
    for _ in 1..COUNT {
        cold.push(campus.clone(ANY, &[], 1)?);
    }
    times.sequence[0].push(cold.iter().sum());
    let warm: Vec<f64> = (0..COUNT).map(|_| campus.clone(ANY, &[], 1)).collect::<Result<_>>()?;
    times.sequence[1].push(warm.iter().sum());
    times.next.extend(warm);
    times.eight[1].push(campus.clone(ANY, &[], COUNT)?);
    campus.fresh_gamma()?;
    times.eight[0].push(campus.clone(ANY, &alpha, COUNT)?);
    campus.fresh_gamma()?;
    let before = campus.bytes();
    times.lan.push(campus.clone(ANY, &["--from", "beta"], 1)?);
    let sent = campus.bytes() - before;
    ensure!(sent < 1 << 20, "{sent} bytes crossed the line though beta has everything");
    Ok(())
}

/// The rows: first and next clone over the line, eight one after the other and at once with caches cold and
/// warm, and the first one beside a host that has the golden machine.
pub(crate) fn clones(context: &Context) -> Result<Vec<Row>> {
    let mut campus = Campus::start()?;
    campus.register("debian-base", &[])?;
    campus.daemons[1].run(&["pull", "alpha:debian-base"])?;
    campus.line.change(LinkConfig::new(WAN, ONE_WAY));
    let mut times = Times::default();
    for _ in 0..context.times(5, 2) {
        round(&mut campus, &mut times)?;
    }
    let Times { first, next, sequence: [sequence_cold, sequence_warm], eight: [eight_cold, eight_warm], lan } =
        times;
    let row = |name, case: String, seconds| Row::new(name, case, "s", &Samples::new(seconds));
    let line = format!("{} ms, {WAN} Mbit/s", 2 * ONE_WAY.as_millis());
    let near = format!("{MACHINE}, of a host on a LAN of {LAN} Mbit/s");
    let in_turn = |caches: &str| format!("{COUNT} one after the other, caches {caches}");
    let at_once = |caches: &str| format!("{COUNT} at once, caches {caches}");
    Ok(vec![
        row("session.clone.first", format!("{MACHINE}, {line}"), first).goal(Goal::AtMost(40.0)),
        row("session.clone.next", format!("{MACHINE}, caches warm"), next).goal(Goal::AtMost(1.0)),
        row("session.clone.lan", near, lan).goal(Goal::AtMost(5.0)),
        row("session.clone.sequence", in_turn(&format!("cold, {line}")), sequence_cold),
        row("session.clone.sequence", in_turn("warm"), sequence_warm),
        row("session.clone.eight", at_once(&format!("cold, {line}")), eight_cold),
        row("session.clone.eight", at_once("warm"), eight_warm).goal(Goal::AtMost(4.0)),
    ])
}
