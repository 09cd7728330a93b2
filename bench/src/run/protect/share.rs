//! `share.first`: two machines from one disk are protected at one host, and the second first copy names what
//! the first one sent.
//!
//! Both have redis and PostgreSQL in them ([`crate::run::stores`]), an address each and a life of their own
//! since they booted.

use super::site::{NAME, Site};
use crate::harness::{Goal, Row, Samples};
use crate::hosts::number;
use crate::run::{Context, stores};
use anyhow::Result;

const TWIN: &str = "twin";
const TWIN_ADDRESS: &str = "10.77.0.101";
const MB: f64 = 1e6;

/// The row.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for _ in 0..context.times(10, 1) {
        let site = Site::with_stores()?;
        stores::machine(TWIN_ADDRESS)?.run(site.alpha()?, TWIN)?;
        let protect = |name| -> Result<f64> {
            let done = site.alpha()?.json(&["protect", name, "beta", "--witness", "gamma"])?;
            Ok(number(&done, "wire_bytes")? / MB)
        };
        first.push(protect(NAME)?);
        second.push(protect(TWIN)?);
        eprintln!("    first copies of {:.1} and {:.1} MB", first[first.len() - 1], second[second.len() - 1]);
    }
    let case = "a second machine from the same disk, 192 MiB and a disk of 105 MB";
    let row = Row::new("share.first", case, "MB", &Samples::new(second));
    let row = row.against("the first one", &Samples::new(first));
    Ok(vec![row.goal(Goal::PeerAtMost(0.25))])
}
