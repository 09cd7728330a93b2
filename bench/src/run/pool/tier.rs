//! `tier`: checkpoints into a pool whose chunks lie in an S3 store, beside the same pool without one.
//!
//! Two benefactors, one copy, a series of files of which three quarters were in the one before. Everything is
//! on one tmpfs of this machine, so that what is compared is the way and not a disk that two kinds of pool
//! use a different number of times. A file counts as written when `close` has returned: it is durable at the
//! benefactors then, and full packs travel meanwhile and afterwards. It is read back by a mount that has
//! nothing cached, when every full pack is where it belongs. The last pack of each benefactor, 8 MiB at most,
//! is not full and lies with it.

use super::{
    BLOCK, Context, Processes, noise,
    processes::Before,
    rate,
    s3::{S3, segments},
    write,
};
use crate::harness::{Row, Samples};
use anyhow::{Result, ensure};
use std::{
    fs::File,
    io::Read,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_pool::{client::Pool, policy::Policy};
use whimbrel_testkit::lab::Namespace;

const MIB: usize = 1 << 20;
const BENEFACTORS: usize = 2;
const PATIENCE: Duration = Duration::from_secs(120);

/// A series of states of one program, each made anew when it is needed.
struct Series {
    length: usize,
    size: usize,
}

impl Series {
    /// Calls `each` with every file in turn.
    fn each(&self, mut each: impl FnMut(&str, &[u8]) -> Result<()>) -> Result<()> {
        let mut data = noise(self.size, 1);
        for step in 0..self.length {
            each(&format!("app.N1.T{step}"), &data)?;
            for (at, piece) in data.chunks_mut(MIB).enumerate().skip(step % 4).step_by(4) {
                piece.copy_from_slice(&noise(piece.len(), (step * self.size + at + 2) as u64));
            }
        }
        Ok(())
    }

    fn bytes(&self) -> f64 {
        (self.length * self.size) as f64
    }
}

/// Megabytes a second of each file, both ways.
#[derive(Default)]
struct Speed {
    written: Vec<f64>,
    read: Vec<f64>,
}

/// What the store had to do with it.
#[derive(Default)]
struct Store {
    /// Seconds after the last file until every full pack was there.
    behind: Vec<f64>,
    /// Requests for a GiB that is kept there, and for a GiB that was read.
    to_keep: Vec<f64>,
    to_read: Vec<f64>,
    /// Percent of the files' bytes.
    kept: Vec<f64>,
}

fn read(path: &Path, expected: &[u8]) -> Result<f64> {
    let begun = Instant::now();
    let (mut file, mut block, mut at) = (File::open(path)?, vec![0; BLOCK], 0);
    while at < expected.len() {
        let count = file.read(&mut block)?;
        ensure!(count > 0 && block[..count] == expected[at..at + count], "something else came back");
        at += count;
    }
    Ok(rate(expected.len(), begun))
}

fn write_all(pool: &Processes, series: &Series, speed: &mut Speed) -> Result<()> {
    let policy = Policy { copies: 1, ..Policy::default() };
    pool.ask(async move |pool: Pool| Ok(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)).await?))?;
    let mount = pool.mount("writer")?;
    series.each(|name, data| {
        speed.written.push(write(&mount.path.join(name), data)?);
        Ok(())
    })
}

fn read_all(pool: &Processes, series: &Series, speed: &mut Speed) -> Result<()> {
    let mount = pool.mount("reader")?;
    series.each(|name, data| {
        speed.read.push(read(&mount.path.join(name), data)?);
        Ok(())
    })
}

fn without(series: &Series, speed: &mut Speed) -> Result<()> {
    let pool = Processes::start(BENEFACTORS, TempDir::new_in("/dev/shm")?)?;
    write_all(&pool, series, speed)?;
    read_all(&pool, series, speed)
}

/// Waits until no benefactor has more full segments than it may keep, which takes it at most a report.
fn settle(pool: &Processes, keep_here: u64) -> Result<f64> {
    let begun = Instant::now();
    for number in 0..BENEFACTORS {
        let chunks = pool.dir.path().join(format!("b{number}/chunks"));
        loop {
            let here = segments(&chunks)?;
            // The last one is not full.
            let full = here.split_last().map_or(0, |(_, full)| full.iter().sum::<u64>());
            if full <= keep_here {
                break;
            }
            ensure!(begun.elapsed() < PATIENCE, "packs do not come to the store");
            sleep(Duration::from_millis(20));
        }
    }
    Ok(begun.elapsed().as_secs_f64())
}

fn with(series: &Series, keep_here: u64, speed: &mut Speed, store: &mut Store) -> Result<()> {
    let (namespace, dir) = (Namespace::new()?, TempDir::new_in("/dev/shm")?);
    let server = S3::start(&namespace, &dir.path().join("s3"))?;
    let before = Before { url: &|name: &str| server.url(name), keep_here };
    let pool = Processes::before(&namespace, BENEFACTORS, dir, &before)?;
    let begun = server.requests()?;
    write_all(&pool, series, speed)?;
    store.behind.push(settle(&pool, keep_here)?);
    let written = server.requests()?;
    let kept =
        (0..BENEFACTORS).map(|number| server.packed(&format!("b{number}"))).sum::<Result<u64>>()? as f64;
    ensure!(kept > 0.0, "nothing came to the store");
    read_all(&pool, series, speed)?;
    let gib = f64::from(1 << 30);
    store.to_keep.push((written - begun) as f64 / (kept / gib));
    store.to_read.push((server.requests()? - written) as f64 / (series.bytes() / gib));
    store.kept.push(100.0 * kept / series.bytes());
    Ok(())
}

/// All packs in the store and nowhere else, and the newest of them here too: what it costs beside the same
/// pool without a store.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let series = Series { length: context.times(8, 3), size: context.times(256, 128) * MIB };
    let keeps = [("in the store alone", 0), ("the newest 64 MiB of each here", 64 * MIB as u64)];
    let (mut plain, mut tiers) = (Speed::default(), keeps.map(|_| (Speed::default(), Store::default())));
    for _ in 0..context.times(3, 1) {
        without(&series, &mut plain)?;
        for ((_, keep_here), (speed, store)) in keeps.iter().zip(&mut tiers) {
            with(&series, *keep_here, speed, store)?;
        }
    }
    let (plain_written, plain_read) = (Samples::new(plain.written), Samples::new(plain.read));
    let mut rows = Vec::new();
    for ((name, _), (speed, store)) in keeps.iter().zip(tiers) {
        let row = |what: &str, unit, values| {
            let case = format!("{} files of {} MiB, {name}: {what}", series.length, series.size / MIB);
            Row::new("tier", case, unit, &Samples::new(values))
        };
        rows.extend([
            row("written", "MB/s", speed.written).against("no tier", &plain_written),
            row("then until all full packs are there", "s", store.behind),
            row("read back", "MB/s", speed.read).against("no tier", &plain_read),
            row("requests a GiB kept there", "requests", store.to_keep),
            row("requests a GiB read back", "requests", store.to_read),
            row("kept there of what was written", "%", store.kept),
        ]);
    }
    Ok(rows)
}
