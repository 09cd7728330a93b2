//! `session.fsx`: random operations on one file against a model of it, as fsx does, while links are cut: four
//! sizes of operations, under every way in which a mount can keep data.
//!
//! The link is fast and short: bytes count here, not time, and a million operations that each wait 32 ms
//! take nine hours.

use super::far::{FAST, Far, Near};
use crate::harness::{Chance, Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate};
use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    time::Instant,
};
use whimbrel_session::client::Policy;

/// Largest size of the file.
const SIZE: u64 = 2 << 20;
/// Offsets and lengths are multiples of these; with 1 they are anything.
const UNITS: [u64; 4] = [1, 512, 4096, 65_536];
/// Longest single operation.
const LONGEST: u64 = 128 << 10;
/// Operations between two cuts of the link.
const CUT_EVERY: u64 = 20_000;

/// One file and what it should be.
struct Model<'a> {
    near: &'a Near,
    file: File,
    content: Vec<u8>,
    chance: Chance,
    unit: u64,
}

impl Model<'_> {
    fn new(near: &Near, unit: u64) -> Result<Model<'_>> {
        let file = Self::open(near)?;
        Ok(Model { near, file, content: Vec::new(), chance: Chance(unit), unit })
    }

    fn open(near: &Near) -> Result<File> {
        let mut options = OpenOptions::new();
        Ok(options.read(true).write(true).create(true).truncate(false).open(near.path.join("fsx"))?)
    }

    fn range(&mut self) -> (u64, usize) {
        let offset = self.chance.below(SIZE / self.unit) * self.unit;
        let longest = LONGEST.min(SIZE - offset).max(self.unit);
        (offset, ((1 + self.chance.below(longest / self.unit)) * self.unit) as usize)
    }

    fn step(&mut self) -> Result<()> {
        let (offset, len) = self.range();
        let at = offset as usize;
        match self.chance.below(100) {
            0..35 => {
                let byte = self.chance.below(256) as u8;
                let data: Vec<u8> = (0..len).map(|at| byte.wrapping_add(at as u8)).collect();
                self.file.write_all_at(&data, offset)?;
                self.content.resize(self.content.len().max(at + len), 0);
                self.content[at..at + len].copy_from_slice(&data);
            }
            35..80 => self.compare(at, len)?,
            80..88 => {
                self.file.set_len(offset)?;
                self.content.resize(at, 0);
            }
            88..94 => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&self.file, hole, offset, len as u64)?;
                let end = self.content.len().min(at + len);
                if at < end {
                    self.content[at..end].fill(0);
                }
            }
            94..96 => self.file.sync_all()?,
            _ => self.file = Self::open(self.near)?,
        }
        Ok(())
    }

    fn compare(&self, at: usize, len: usize) -> Result<()> {
        let mut out = vec![0; len];
        let mut read = 0;
        while read < len {
            match self.file.read_at(&mut out[read..], (at + read) as u64)? {
                0 => break,
                more => read += more,
            }
        }
        let from = at.min(self.content.len());
        let expected = &self.content[from..self.content.len().min(from + len)];
        ensure!(out[..read] == *expected, "{read} bytes at {at} are not the {} expected", expected.len());
        Ok(())
    }
}

/// Differences of one combination: none or one, because a run ends with the first.
fn run(far: &Far, near: &Near, unit: u64, steps: u64) -> Result<()> {
    let mut model = Model::new(near, unit)?;
    for number in 0..steps {
        if number % CUT_EVERY == CUT_EVERY - 1 {
            far.cut();
        }
        model.step().with_context(|| format!("operation {number} in units of {unit}"))?;
    }
    model.file.sync_all()?;
    near.flush()?;
    ensure!(fs::read(far.served().join("fsx"))? == model.content, "the server has other bytes");
    Ok(())
}

/// What was not as on a local disk. The policies take turns on all processors.
pub(crate) fn fsx(context: &Context) -> Result<Vec<Row>> {
    let steps = if context.quick { 2_000 } else { 1_000_000 };
    let policies = [Some(Policy::Through), Some(Policy::Back), None];
    let different = std::thread::scope(|scope| {
        let runs = policies.map(|policy| scope.spawn(move || differences(policy, steps)));
        runs.into_iter().map(|run| run.join().expect("a thread that ends")).sum::<Result<f64>>()
    })?;
    let case = format!("{steps} operations each, 4 units, through, back and no cache, links cut");
    let row = Row::new("session.fsx", case, "differences", &Samples::new(vec![different]));
    Ok(vec![row.goal(Goal::AtMost(0.0))])
}

/// The differences of all units under one policy; `None` keeps nothing on this side.
fn differences(policy: Option<Policy>, steps: u64) -> Result<f64> {
    let name = policy.map_or("no cache".to_owned(), |policy| policy.to_string());
    let mut different = 0.0;
    for unit in UNITS {
        let far = Far::new(1000, |_| Ok(()))?;
        far.change(FAST);
        let near = match policy {
            Some(policy) => far.mount("cache", policy)?,
            None => far.mount_without_cache()?,
        };
        let begun = Instant::now();
        let done = run(&far, &near, unit, steps).and_then(|()| near.end());
        eprintln!("    {name}, units of {unit}: {:.0} s", begun.elapsed().as_secs_f64());
        if let Err(error) = done {
            println!("session.fsx: {name}: {error:#}");
            different += 1.0;
        }
    }
    Ok(different)
}
