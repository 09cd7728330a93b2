//! `micro.boot` and `uefi.migrate`: what the profiles of hardware are for, and what they cost.

use super::Context;
use super::migrate::linked;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{Daemon, Hosts, Machine, console, number};
use anyhow::{Context as _, Result, ensure};
use std::cell::Cell;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{BOOTED, CheckResult, GuestOptions, MicroGuest, Work};

const MEMORY: ByteSize = ByteSize(384 << 20);
const MBIT: u64 = 1000;
/// UEFI takes its time without hardware virtualisation, and the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often the console's log is looked at.
const LOOK: Duration = Duration::from_micros(500);
/// Time that a guest has between two moves.
const SETTLED: Duration = Duration::from_secs(1);

/// The row about the micro profile: a small Linux, from the command until its first program has spoken.
pub(super) fn micro(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha"])?;
    let alpha = hosts.get("alpha")?;
    let guest = MicroGuest::get()?;
    boot(alpha, &guest)?;
    let (mut spoken, mut started) = (Vec::new(), Vec::new());
    for _ in 0..context.times(20, 10) {
        let (command, all) = boot(alpha, &guest)?;
        started.push(command);
        spoken.push(all);
    }
    let row = |case: &str, samples| Row::new("micro.boot", case, "ms", &Samples::new(samples));
    Ok(vec![
        row("the command until init prints, TCG", spoken).goal(Goal::AtMost(400.0)),
        row("of that the command", started),
    ])
}

/// Milliseconds until the command was done, and until the guest spoke.
fn boot(host: &Daemon, guest: &MicroGuest) -> Result<(f64, f64)> {
    let text = |path: &std::path::Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
    let (kernel, initrd) = (text(&guest.kernel)?, text(&guest.initrd)?);
    let log = host.data().join("machines/web/console.log");
    let mut arguments = vec!["run", "web", "--profile", "micro", "--accel", "tcg", "--memory", "64M"];
    arguments.extend(["--kernel", &kernel, "--initrd", &initrd, "--append", guest.append]);
    let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
    let begun = Instant::now();
    host.run(&arguments)?;
    let command = ms(begun);
    while !std::fs::read(&log).is_ok_and(|text| text.windows(BOOTED.len()).any(|line| line == BOOTED)) {
        ensure!(begun.elapsed() < PATIENCE, "the guest does not boot: see {}", log.display());
        sleep(LOOK);
    }
    let all = ms(begun);
    host.discard("web")?;
    Ok((command, all))
}

/// The row about UEFI and a TPM: what flash memory and the TPM's state add to the downtime of a move.
pub(super) fn uefi(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let sides = [hosts.get("alpha")?, hosts.get("beta")?];
    let with = Traveller::start("desk", sides, &["--profile", "uefi", "--tpm"])?;
    let without = Traveller::start("server", sides, &[])?;
    let (ours, theirs) = in_turn(context.times(20, 10), || with.moved(), || without.moved())?;
    let added = ours.iter().zip(&theirs).map(|(ours, theirs)| ours - theirs).collect();
    let row = |case: &str, samples| Row::new("uefi.migrate", case, "ms", &Samples::new(samples));
    Ok(vec![
        row("downtime that UEFI and a TPM add", added).goal(Goal::AtMost(15.0)),
        row("downtime with UEFI and a TPM", ours).against("with a BIOS", &Samples::new(theirs)),
    ])
}

/// A machine that goes to and fro.
struct Traveller<'a> {
    name: &'static str,
    sides: [&'a Daemon; 2],
    moves: Cell<usize>,
}

impl<'a> Traveller<'a> {
    /// The small guest with this hardware.
    fn start(name: &'static str, sides: [&'a Daemon; 2], hardware: &[&str]) -> Result<Self> {
        let options = GuestOptions { address: None, buffer_mib: 32, work: Work::Idle };
        Machine::small(MEMORY, options).run_with(sides[0], name, hardware)?;
        Ok(Self { name, sides, moves: Cell::new(0) })
    }

    /// Downtime of the next move, in milliseconds.
    fn moved(&self) -> Result<f64> {
        let turn = self.moves.replace(self.moves.get() + 1);
        let [here, there] = [self.sides[turn % 2], self.sides[(turn + 1) % 2]];
        sleep(SETTLED);
        let moved = here.json(&["migrate", self.name, there.name(), "--throttle", "off"])?;
        let mut guest = console(there, self.name)?;
        guest.wait_ready(PATIENCE)?;
        let found = guest.check().context("the guest does not answer")?;
        ensure!(matches!(found.ram, CheckResult::Good(_)) && found.steady, "memory was lost: {found:?}");
        number(&moved, "downtime_ms")
    }
}
