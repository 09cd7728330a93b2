//! `smp.migrate`: the downtime of a machine with four virtual CPUs, each of which writes, beside one that
//! writes as much with a single CPU. After every move the guest checks the content of its memory.

use super::Context;
use super::migrate::linked;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{Daemon, Machine, console, number};
use anyhow::{Context as _, Result, ensure};
use std::cell::Cell;
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{CheckResult, GuestOptions, Work};

const MEMORY: ByteSize = ByteSize(384 << 20);
const MBIT: u64 = 1000;
/// What all CPUs of a machine write together.
const REGION_MIB: u32 = 64;
const PAGES_PER_SECOND: u32 = 4000;
/// Time of writing before a move.
const WARM_UP: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(300);

/// A machine that goes to and fro, and stands still while the other one does.
struct Writer<'a> {
    name: &'static str,
    sides: [&'a Daemon; 2],
    moves: Cell<usize>,
}

/// The row.
pub(super) fn migrate(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let sides = [hosts.get("alpha")?, hosts.get("beta")?];
    let four = Writer::start("four", 4, sides)?;
    let one = Writer::start("one", 1, sides)?;
    let (ours, theirs) = in_turn(context.times(10, 3), || four.moved(), || one.moved())?;
    let row = Row::new("smp.migrate", "4 vCPUs, all writing; memory checked", "ms", &Samples::new(ours));
    Ok(vec![row.against("1 vCPU", &Samples::new(theirs)).goal(Goal::PeerAtMost(1.3))])
}

impl<'a> Writer<'a> {
    fn start(name: &'static str, cpus: u32, sides: [&'a Daemon; 2]) -> Result<Self> {
        let work = Work::Writers {
            count: cpus,
            region_mib: REGION_MIB / cpus,
            pages_per_second: PAGES_PER_SECOND / cpus,
        };
        let options = GuestOptions { address: None, buffer_mib: 32, work };
        Machine::small(MEMORY, options).run_with(sides[0], name, &["--cpus", &cpus.to_string()])?;
        sides[0].run(&["pause", name])?;
        Ok(Self { name, sides, moves: Cell::new(0) })
    }

    /// Downtime of the next move, in milliseconds.
    fn moved(&self) -> Result<f64> {
        let turn = self.moves.replace(self.moves.get() + 1);
        let [here, there] = [self.sides[turn % 2], self.sides[(turn + 1) % 2]];
        here.run(&["unpause", self.name])?;
        sleep(WARM_UP);
        let moved = here.json(&["migrate", self.name, there.name(), "--throttle", "off"])?;
        let mut guest = console(there, self.name)?;
        guest.wait_ready(PATIENCE)?;
        let found = guest.check().context("the guest does not answer")?;
        ensure!(matches!(found.ram, CheckResult::Good(_)) && found.steady, "memory was lost: {found:?}");
        drop(guest);
        there.run(&["pause", self.name])?;
        number(&moved, "downtime_ms")
    }
}
