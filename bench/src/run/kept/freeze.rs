//! `freeze.max`: how long a protected guest stands still at most, whatever its standby and the link do.
//!
//! The guest is watched while it is copied for the first time, in windows of epochs after that, and while the
//! standby's daemon stands still again and again. A second guest changes whole pages, which is several times
//! what the link carries: whether it can be protected at all is not asked, only that it runs. It is watched
//! in windows too, from the wish to protect it until some time after that was given up.

use super::stops::StopWatch;
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use crate::run::protect::{NAME, Site};
use anyhow::Result;
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::{ByteSize, PAGE_SIZE};
use whimbrel_testkit::guest::Work;

/// What the guest writes to, in MiB, and its memory beside that.
const REGION_MIB: u32 = 1024;
const REGION_MIB_QUICK: u32 = 256;
const REST_MIB: u32 = 256;
const PAGES_PER_SECOND: u32 = 20_000;
const MBIT: u64 = 100;
/// Until the guest has filled what it writes to.
const WARM_UP: Duration = Duration::from_secs(20);
const WINDOW: Duration = Duration::from_secs(20);
/// How long the standby stands still and goes on, in turn. A lease that it does not lose by that.
const STANDS: Duration = Duration::from_millis(1500);
const LEASE: [&str; 2] = ["--lease", "10s"];

/// The rows.
pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let region_mib = if context.quick { REGION_MIB_QUICK } else { REGION_MIB };
    let site = site(region_mib, 64)?;
    let watch = StopWatch::start(site.alpha()?, NAME)?;
    site.protect(&LEASE)?;
    let mut longest = vec![watch.end()?];
    eprintln!("    copied for the first time: {:.0} ms", longest[0]);
    let (mut slow, times) = (Vec::new(), context.times(5, 1));
    for _ in 0..times {
        longest.push(window(&site, false)?);
        slow.push(window(&site, true)?);
    }
    let case = format!("{region_mib} MiB written at 20k pages/s over {MBIT} Mbit/s");
    let row = |case: String, longest: Vec<f64>| {
        let longest = Samples::new(longest);
        Row::new("freeze.max", case, "ms", &longest).percentile(100, &longest).goal(Goal::AtMost(500.0))
    };
    let stands = format!("{case}, the standby stands still half of the time");
    let whole = format!("{case}, whole pages");
    drop(site);
    Ok(vec![row(case, longest), row(stands, slow), row(whole, hopeless(region_mib, times)?)])
}

/// A guest at work, behind a slow link to its standby.
fn site(region_mib: u32, bytes_per_page: u32) -> Result<Site> {
    let work = Work::Dirty { region_mib, pages_per_second: PAGES_PER_SECOND, bytes_per_page };
    let site = Site::small(ByteSize(u64::from(region_mib + REST_MIB) << 20), work)?;
    sleep(WARM_UP);
    site.hosts.lab.limit("beta", MBIT)?;
    Ok(site)
}

/// The longest stops of a guest that changes whole pages, in windows until its first copy has ended or was
/// given up, and in one more; in `times` windows at least.
fn hopeless(region_mib: u32, times: usize) -> Result<Vec<f64>> {
    let site = site(region_mib, PAGE_SIZE as u32)?;
    let alpha = site.alpha()?;
    let look = || {
        let watch = StopWatch::start(alpha, NAME)?;
        sleep(WINDOW);
        watch.end()
    };
    let mut longest: Vec<f64> = Vec::new();
    let ended = std::thread::scope(|scope| {
        let protect = scope.spawn(|| alpha.run(&[&["protect", NAME, "beta"], &LEASE[..]].concat()));
        while !protect.is_finished() {
            longest.push(look()?);
        }
        anyhow::Ok(protect.join().expect("a thread that ends"))
    })?;
    longest.push(look()?);
    while longest.len() < times {
        longest.push(look()?);
    }
    let said = ended.map_or_else(|error| format!("{error:#}"), |_| "it is protected".to_owned());
    eprintln!("    whole pages: longest stops {longest:.0?} ms; {said}");
    Ok(longest)
}

/// The longest stop in a window of epochs, while the standby stands still now and then if that is asked.
fn window(site: &Site, stands: bool) -> Result<f64> {
    let watch = StopWatch::start(site.alpha()?, NAME)?;
    let beta = site.hosts.get("beta")?;
    for _ in 0..WINDOW.as_millis() / (2 * STANDS.as_millis()) {
        if stands {
            beta.stop_daemon()?;
        }
        sleep(STANDS);
        if stands {
            beta.continue_daemon()?;
        }
        sleep(STANDS);
    }
    let longest = watch.end()?;
    eprintln!("    stands still: {stands}; longest stop {longest:.0} ms; {}", site.figures()?);
    Ok(longest)
}
