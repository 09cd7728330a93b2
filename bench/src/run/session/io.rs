//! `session.io`: a benchmark in the manner of SPECseis: a trace is generated with much I/O, then read and
//! computed on in several phases with less and less of it.

use super::{
    documents::think,
    far::{Line, seconds},
    scenario::{self, Cache, Ran, Work},
};
use crate::harness::{Goal, Row};
use crate::run::Context;
use anyhow::{Result, ensure};
use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    os::unix::fs::FileExt,
    path::Path,
};

const PIECE: usize = 256 << 10;
const MADE: [&str; 4] = ["trace", "stack-0", "stack-1", "stack-2"];

pub(super) fn velocities(server: &Path) -> Result<()> {
    let model: Vec<u8> = (0..8u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    Ok(fs::write(server.join("model"), model)?)
}

/// The first phase: the trace is made.
fn generate(dir: &Path, mib: usize) -> Result<()> {
    let model = fs::read(dir.join("model"))?;
    let mut trace = BufWriter::with_capacity(PIECE, File::create(dir.join("trace"))?);
    for number in 0..mib << 20 >> 18 {
        let from = number * 7919 % (model.len() - PIECE);
        trace.write_all(&think(model[from..from + PIECE].to_vec(), 4))?;
    }
    Ok(trace.into_inner()?.sync_all()?)
}

/// A later phase reads the half of the one before it, and computes the more.
fn stack(dir: &Path, mib: usize, phase: usize, passes: u8) -> Result<()> {
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
    Ok(output.sync_all()?)
}

/// Four phases over so many MiB of trace.
struct Seismic(usize);

impl Work for Seismic {
    const ROW: &'static str = "session.io";
    const PARTS: &'static [&'static str] = &["phase 1", "phase 4"];

    fn what(&self) -> String {
        format!("{} MiB of trace", self.0)
    }

    fn fill(&self, dir: &Path) -> Result<()> {
        velocities(dir)
    }

    fn run(&self, dir: &Path) -> Result<Ran> {
        Ran::of(|| {
            let first = seconds(|| generate(dir, self.0))?;
            stack(dir, self.0, 0, 8)?;
            stack(dir, self.0, 1, 16)?;
            Ok(vec![first, seconds(|| stack(dir, self.0, 2, 60))?])
        })
    }

    fn clean(&self, dir: &Path) -> Result<()> {
        for name in MADE.iter().filter(|name| dir.join(name).exists()) {
            fs::remove_file(dir.join(name))?;
        }
        Ok(())
    }

    fn compare(&self, local: &Path, served: &Path) -> Result<()> {
        for name in MADE {
            let same = fs::read(local.join(name))? == fs::read(served.join(name))?;
            ensure!(same, "another {name} came about on the server");
        }
        Ok(())
    }

    fn goal(&self, line: Line, cache: Cache) -> Option<Goal> {
        (line.is_wan() && cache == Cache::Warm).then_some(Goal::PeerAtMost(1.05))
    }
}

/// The same run at every place.
pub(crate) fn runs(context: &Context) -> Result<Vec<Row>> {
    scenario::rows(&Seismic(if context.quick { 24 } else { 96 }), context.times(5, 3))
}
