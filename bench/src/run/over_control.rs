//! `migrate.downtime.*`, case `over control`: what clients see of a move, less what they see of a guest that
//! stops and goes on where it is (see `control`). Both guests run all the time and are interrupted in turn.
//!
//! Three clients: one who asks a thousand times a second, a hundred who fetch files, six players of a game.
//! `migrate.downtime.hosts` is how long no CPU ran, as the hosts say.

use super::Context;
use super::control::Control;
use super::downtime::{played, served};
use super::migrate::{linked, watch_at};
use crate::guest::GuestPlan;
use crate::harness::{Goal, Row, Samples, in_turn};
use crate::hosts::{GUEST, Hosts, Machine, number};
use anyhow::{Context as _, Result};
use std::cell::Cell;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};
use whimbrel_testkit::lab::Lab;

const MEMORY: ByteSize = ByteSize(512 << 20);
const MBIT: u64 = 1000;
/// Address of the control guest.
const CONTROL: &str = "10.77.0.101";
const NAME: &str = "web";
/// What a move may add to what clients see, in milliseconds.
const ADDED: f64 = 8.0;

/// What clients saw of one interruption, and how long no CPU ran, in milliseconds.
struct Seen {
    clients: f64,
    hosts: f64,
}

/// A way to look at a guest of this address while something interrupts it, which returns how long no CPU ran.
type Look = fn(&Lab, &str, &mut dyn FnMut() -> Result<f64>) -> Result<Seen>;

/// All rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let hosts = linked(MBIT)?;
    let control = Control::start(&hosts.lab, &GuestPlan::small(MEMORY, options(CONTROL)))?;
    Machine::small(MEMORY, options(GUEST)).run(hosts.get("alpha")?, NAME)?;
    let pair = Pair { hosts: &hosts, control: &control, at: Cell::new(0) };
    let (idle, udp) = (pair.measure(context.times(20, 2), asked)?, pair.measure(context.times(20, 2), game)?);
    let web = pair.measure(context.times(40, 2), files)?;
    let still = |case, seen: &[(Seen, Seen)], most| {
        let stood = Samples::of(seen, |(ours, _)| ours.hosts);
        Row::new("migrate.downtime.hosts", case, "ms", &stood).goal(Goal::AtMost(most))
    };
    let mut rows = vec![still("idle", &idle, 6.0), still("web", &web, 8.0)];
    rows.extend(over_control("migrate.downtime.idle", &idle));
    rows.extend(over_control("migrate.downtime.web", &web));
    rows.extend(over_control("migrate.downtime.udp", &udp));
    let added = added(&web);
    let case = format!("over control, web, the worst of {}", added.count());
    let worst = Row::new("migrate.downtime.p99", case, "ms", &added).percentile(99, &added);
    rows.push(worst.goal(Goal::AtMost(ADDED)));
    Ok(rows)
}

fn options(guest: &str) -> GuestOptions {
    GuestOptions { address: Some(format!("{guest}/24")), buffer_mib: 16, work: Work::Idle }
}

/// The guest that moves and the one that does not.
struct Pair<'a> {
    hosts: &'a Hosts,
    control: &'a Control,
    /// Host of the guest that moves.
    at: Cell<usize>,
}

impl Pair<'_> {
    /// Looks at both in turn.
    fn measure(&self, times: usize, look: Look) -> Result<Vec<(Seen, Seen)>> {
        let lab = &self.hosts.lab;
        let ours = || look(lab, GUEST, &mut || self.migrate()).context("a move");
        let control = || look(lab, CONTROL, &mut || self.control.interrupt()).context("the control");
        let (ours, control) = in_turn(times, ours, control)?;
        Ok(ours.into_iter().zip(control).collect())
    }

    fn migrate(&self) -> Result<f64> {
        let sides = ["alpha", "beta"];
        let (from, to) = (sides[self.at.get()], sides[1 - self.at.get()]);
        let moved = self.hosts.get(from)?.json(&["migrate", NAME, to])?;
        self.at.set(1 - self.at.get());
        number(&moved, "downtime_ms")
    }
}

fn asked(lab: &Lab, guest: &str, interrupt: &mut dyn FnMut() -> Result<f64>) -> Result<Seen> {
    let moved = watch_at(lab, guest, interrupt)?;
    Ok(Seen { clients: moved.seen_ms, hosts: moved.believed_ms })
}

fn game(lab: &Lab, guest: &str, interrupt: &mut dyn FnMut() -> Result<f64>) -> Result<Seen> {
    let mut hosts = 0.0;
    let clients = played(lab, guest, || {
        hosts = interrupt()?;
        Ok(())
    })?;
    Ok(Seen { clients, hosts })
}

fn files(lab: &Lab, guest: &str, interrupt: &mut dyn FnMut() -> Result<f64>) -> Result<Seen> {
    let mut hosts = 0.0;
    let (report, from, to) = served(lab, guest, || {
        hosts = interrupt()?;
        Ok(())
    })?;
    Ok(Seen { clients: report.events.silence(from, to).as_secs_f64() * 1e3, hosts })
}

/// By how much clients waited longer for the guest that moved than for the other one, of each turn.
fn added(seen: &[(Seen, Seen)]) -> Samples {
    Samples::of(seen, |(ours, control)| ours.clients - control.clients)
}

fn over_control(row: &'static str, seen: &[(Seen, Seen)]) -> [Row; 3] {
    let control = Samples::of(seen, |(_, control)| control.clients);
    [
        Row::new(row, "over control", "ms", &added(seen)).goal(Goal::AtMost(ADDED)),
        Row::new(row, "beside the control guest", "ms", &Samples::of(seen, |(ours, _)| ours.clients))
            .against("control guest", &control),
        Row::new(
            row,
            "of that no CPU of the control guest ran",
            "ms",
            &Samples::of(seen, |(_, it)| it.hosts),
        ),
    ]
}
