//! `dsl.*`, `lan.*`: a suspended machine is resumed on the other side of a link; how long until it answers
//! there.
//!
//! From the beginning of `whimbrel resume alpha:NAME` at beta to the first answer that a client beside it
//! gets. The peer does what people do without us: it fetches the images of memory and disk with rsync and
//! resumes when they are there.

use super::awaited::{Arrival, arrive};
use super::delta::{export_to, located, tag};
use super::sites::{DSL, NAME, Sites, lan};
use super::tools::Rsync;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{GUEST, Machine};
use crate::run::Context;
use anyhow::Result;
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{GuestOptions, Work};
use whimbrel_testkit::lab::LinkConfig;

const MEMORY: ByteSize = ByteSize(512 << 20);
const LARGE: ByteSize = ByteSize(2 << 30);
/// Until the compiler is in full swing.
const WARM_UP: Duration = Duration::from_secs(20);
const APART: Duration = Duration::from_secs(10);
/// After that an experiment gives up.
const PATIENCE: Duration = Duration::from_secs(900);
const MB: f64 = 1e6;
/// rsync's block size: of those tried in `delta.rsync` the best for memory.
const BLOCK: Option<u32> = Some(4096);

/// `dsl.primed`.
pub(crate) fn primed(context: &Context) -> Result<Vec<Row>> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut peer = "";
    for _ in 0..context.times(3, 1) {
        let mut sites = Sites::start()?;
        start(&sites, MEMORY)?;
        sites.alpha().run(&["checkpoint", NAME, "--tag", &tag(0)])?;
        sleep(APART);
        sites.alpha().run(&["suspend", NAME, "--tag", &tag(1)])?;
        sites.beta().run(&["pull", &located(0)])?;
        sites.set_link(DSL);
        sites.restart_beta()?;
        ours.push(resume(&sites)?);
        sites.beta().discard(NAME)?;
        let (name, seconds) = copied(&sites, context)?;
        peer = name;
        theirs.push(seconds + resumed_here(&sites)?);
    }
    let answered = Samples::of(&ours, |it| it.answered);
    Ok(vec![
        Row::new("dsl.primed", "until it answers (the paper: 180 to 960 s)", "s", &answered)
            .goal(Goal::AtMost(60.0)),
        Row::new("dsl.primed", "beside rsync, then resume", "s", &answered)
            .against(peer, &Samples::new(theirs))
            .goal(Goal::PeerAtMost(0.2)),
        Row::new("dsl.primed", "sent until it answers", "MB", &Samples::of(&ours, |it| it.bytes as f64 / MB)),
    ])
}

/// `dsl.unprimed`.
pub(crate) fn unprimed(context: &Context) -> Result<Vec<Row>> {
    let ours = fresh(context.times(3, 1), MEMORY, DSL, &["--balloon", "auto"])?;
    Ok(rows_of("dsl.unprimed", "512 MiB, ballooned", &ours, 240.0).into())
}

/// `lan.unprimed`.
pub(crate) fn over_lan(context: &Context) -> Result<Vec<Row>> {
    let ours = fresh(context.times(5, 2), LARGE, lan(), &[])?;
    Ok(rows_of("lan.unprimed", "2 GiB", &ours, 3.0).into())
}

fn rows_of(row: &'static str, case: &str, ours: &[Arrival], goal: f64) -> [Row; 2] {
    let answered = Samples::of(ours, |it| it.answered);
    let sent = Samples::of(ours, |it| it.bytes as f64 / MB);
    [
        Row::new(row, format!("{case}, until it answers"), "s", &answered).goal(Goal::AtMost(goal)),
        Row::new(row, format!("{case}, sent until it answers"), "MB", &sent),
    ]
}

/// Arrivals of guests that beta has never heard of.
fn fresh(times: usize, memory: ByteSize, link: LinkConfig, how: &[&str]) -> Result<Vec<Arrival>> {
    let mut arrivals = Vec::new();
    for _ in 0..times {
        let sites = Sites::start()?;
        start(&sites, memory)?;
        let (suspended, ms) = sites.alpha().timed(&[&["suspend", NAME], how].concat())?;
        eprintln!("    suspended in {ms:.0} ms: {}", suspended["result"]);
        sites.set_link(link);
        arrivals.push(resume(&sites)?);
    }
    Ok(arrivals)
}

/// A guest that compiles, with an address, in full swing.
pub(super) fn start(sites: &Sites, memory: ByteSize) -> Result<()> {
    let address = Some(format!("{GUEST}/24"));
    let options = GuestOptions { address, buffer_mib: 1, work: Work::Compile };
    // Its kernel lies on its disk, as one that was installed: nothing of it but pages travels.
    Machine::installed(memory, options, sites.disk())?.run(sites.alpha(), NAME)?;
    sleep(WARM_UP);
    Ok(())
}

/// Resumes the machine at beta and waits until it answers.
fn resume(sites: &Sites) -> Result<Arrival> {
    arrive(sites, &[&["resume", &format!("alpha:{NAME}")]], PATIENCE)
}

/// Seconds in which rsync brings the images to a host that has the older ones. A quick run counts the bytes
/// on a fast link.
fn copied(sites: &Sites, context: &Context) -> Result<(&'static str, f64)> {
    let images = sites.disk().join("images");
    let (old, new) = (images.join("0"), images.join("1"));
    for (version, folder) in [(0, &old), (1, &new)] {
        fs::create_dir_all(folder)?;
        export_to(sites.alpha(), &tag(version), folder)?;
    }
    if context.quick {
        sites.set_link(super::sites::gigabit());
    }
    let rsync = Rsync::serve(sites, &images)?;
    let begun = Instant::now();
    let ((), bytes) = sites.counting(|| rsync.fetch(sites, "1", Some(&old), BLOCK))?;
    let took = begun.elapsed().as_secs_f64();
    eprintln!("    rsync: {bytes} bytes in {took:.1} s");
    Ok(match context.quick {
        true => ("rsync -z (computed from bytes), then resume", on_dsl(bytes)),
        false => ("rsync -z, then resume", took),
    })
}

/// How long the DSL line takes for so many bytes, both ways together: the least that it can be.
pub(super) fn on_dsl(bytes: u64) -> f64 {
    bytes as f64 * 8.0 / DSL.bits_per_second as f64
}

/// Seconds until the guest answers whose images are all here.
fn resumed_here(sites: &Sites) -> Result<f64> {
    let arrival = arrive(sites, &[&["resume", &tag(0), "--name", "here"]], PATIENCE)?;
    sites.beta().discard("here")?;
    Ok(arrival.answered)
}
