//! `session.io`: a benchmark in the manner of SPECseis: a trace is generated with much I/O, then read and computed on in several
//! phases with less and less of it.

use super::{
    documents::think,
    far::{Far, seconds},
};
use crate::harness::{Goal, Row, Samples, scratch};
use crate::run::Context;
use anyhow::{Result, ensure};
use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    os::unix::fs::FileExt,
    path::Path,
};
use whimbrel_session::client::Policy;

const PIECE: usize = 256 << 10;

fn velocities(server: &Path) -> Result<()> {
    let model: Vec<u8> = (0..8u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    Ok(fs::write(server.join("model"), model)?)
}

/// Four phases over `mib` of trace.
fn seismic(dir: &Path, mib: usize) -> Result<()> {
    let model = fs::read(dir.join("model"))?;
    let mut trace = BufWriter::with_capacity(PIECE, File::create(dir.join("trace"))?);
    for number in 0..mib << 20 >> 18 {
        let from = number * 7919 % (model.len() - PIECE);
        trace.write_all(&think(model[from..from + PIECE].to_vec(), 4))?;
    }
    trace.into_inner()?.sync_all()?;
    for (phase, passes) in [8u8, 16, 60].into_iter().enumerate() {
        let input = File::open(dir.join("trace"))?;
        let output = File::create(dir.join(format!("stack-{phase}")))?;
        let (mut piece, pieces) = (vec![0; PIECE], (mib << 20 >> 18) >> phase);
        for number in 0..pieces {
            // Traces of one point lie far from each other.
            let at = (number * 13 % pieces * PIECE) as u64;
            input.read_exact_at(&mut piece, at)?;
            let stacked = think(piece.clone(), passes);
            output.write_all_at(&stacked[..PIECE / 4], (number * PIECE / 4) as u64)?;
        }
        output.sync_all()?;
    }
    Ok(())
}

/// The same run on a local disk, on a mount with an empty cache, and on one with a full one.
pub(crate) fn runs(context: &Context) -> Result<Vec<Row>> {
    let mib = if context.quick { 24 } else { 96 };
    let (mut local, mut cold, mut warm) = (Vec::new(), Vec::new(), Vec::new());
    let far = Far::new(100, velocities)?;
    let plain = scratch("session-local")?;
    velocities(plain.path())?;
    for round in 0..context.times(5, 3) {
        local.push(seconds(|| seismic(plain.path(), mib))?);
        for times in [&mut cold, &mut warm] {
            let near = far.mount(&format!("cache-{round}"), Policy::Back)?;
            times.push(seconds(|| seismic(&near.path, mib))?);
            near.end()?;
        }
        let same = |name: &str| {
            Ok::<_, std::io::Error>(fs::read(plain.path().join(name))? == fs::read(far.served().join(name))?)
        };
        ensure!(same("trace")? && same("stack-2")?, "other results came about on the server");
    }
    let local = Samples::new(local);
    let case = |what: &str| format!("{mib} MiB of trace, 32 ms, 100 Mbit/s, {what}");
    let row = |what: &str, times| {
        Row::new("session.io", case(what), "s", &Samples::new(times)).against("local disk", &local)
    };
    Ok(vec![row("cold", cold), row("warm", warm).goal(Goal::PeerAtMost(1.1))])
}
