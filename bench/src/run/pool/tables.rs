//! `similarity`, `application`, `application.pause`: tables 3, 4 and 5 of the paper, over checkpoints of a
//! BLAST that runs ([`super::blast`]).

use super::{
    Context, Members, Place, Processes,
    blast::Blast,
    cutting::digests,
    rate,
    window::{Cut, ours, paper},
    write,
};
use crate::harness::{Goal, Row, Samples, in_turn, scratch};
use anyhow::{Result, ensure};
use std::{
    collections::HashSet,
    fs,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_core::Digest;
use whimbrel_pool::{chunk::Chunking, client::Pool, policy::Policy};
use whimbrel_testkit::lab::Lab;

/// Between two checkpoints of tables 3 and 4; a third of it for table 5.
const INTERVAL: Duration = Duration::from_secs(6);
/// More than BLAST gets done while checkpoints are taken.
const ENDLESS: usize = 20_000;

/// The ways of tables 3 and 4, and ours.
fn ways() -> Vec<(String, Cut)> {
    let fixed = |name: &str, size| (format!("FsCH {name}"), ours(Chunking::Fixed { size }));
    let mut ways = vec![fixed("1 KiB", 1 << 10), fixed("256 KiB", 256 << 10), fixed("1 MiB", 1 << 20)];
    ways.push(("CbCH overlap, m=20 k=14".to_owned(), paper(20, 14, 1)));
    for bits in [8, 10, 12, 14] {
        for m in [20, 32, 64, 128, 256] {
            ways.push((format!("CbCH no overlap, m={m} k={bits}"), paper(m, bits, m)));
        }
    }
    ways.push(("FastCDC, 256 KiB on average".to_owned(), ours(Chunking::default())));
    ways.push(("FastCDC, 16 KiB on average".to_owned(), ours(Chunking::Content { average: 16 << 10 })));
    ways.push(("page by page".to_owned(), ours(Chunking::Pages { average: 1 })));
    ways
}

/// What of each checkpoint is in the one before, and how fast that is found out.
fn judge(way: &Cut, series: &[Vec<u8>]) -> (Samples, Samples) {
    let (mut known, mut found, mut speed) = (HashSet::<Digest>::new(), Vec::new(), Vec::new());
    for (at, checkpoint) in series.iter().enumerate() {
        let begun = Instant::now();
        let chunks = digests(way, checkpoint);
        speed.push(rate(checkpoint.len(), begun));
        if at > 0 {
            let same = chunks.iter().filter(|(digest, _)| known.contains(digest));
            let same: usize = same.map(|(_, length)| length).sum();
            found.push(same as f64 * 100.0 / checkpoint.len() as f64);
        }
        known = chunks.into_iter().map(|(digest, _)| digest).collect();
    }
    (Samples::new(found), Samples::new(speed))
}

/// Tables 3 and 4.
pub(crate) fn similarity(context: &Context) -> Result<Vec<Row>> {
    let mut blast = Blast::start(ENDLESS)?;
    let mut series = Vec::new();
    for _ in 0..context.times(40, 8) {
        sleep(INTERVAL);
        ensure!(!blast.is_done()?, "blastp ended too early");
        series.push(blast.checkpoint(|memory| Ok(memory.to_vec()))?);
    }
    drop(blast);
    let size = series.iter().map(Vec::len).sum::<usize>() as f64 / series.len() as f64 / 1e6;
    let mut rows = Vec::new();
    for (name, way) in ways() {
        let (found, speed) = judge(&way, &series);
        rows.push(Row::new("similarity", format!("{name}: found in the one before"), "%", &found));
        rows.push(Row::new("similarity", format!("{name}: speed"), "MB/s", &speed));
    }
    rows.push(Row::new("similarity", "size of a checkpoint of BLAST", "MB", &Samples::new(vec![size])));
    Ok(rows)
}

/// What a run of the program with checkpoints cost.
struct Ran {
    seconds: f64,
    /// Seconds that the program stood still.
    stood: f64,
    checkpoints: u64,
    bytes: u64,
}

impl Ran {
    /// Milliseconds that the program stood still for a checkpoint, in the mean.
    fn pause(&self) -> f64 {
        self.stood * 1e3 / self.checkpoints as f64
    }
}

/// Runs the program with checkpoints in `folder`.
fn run(questions: usize, folder: &Path) -> Result<Ran> {
    let mut blast = Blast::start(questions)?;
    let (begun, mut stood, mut bytes, mut number) = (Instant::now(), Duration::ZERO, 0, 0);
    loop {
        let next = Instant::now() + INTERVAL / 3;
        while Instant::now() < next {
            if blast.is_done()? {
                ensure!(number > 1, "the run was too short for checkpoints");
                let (seconds, stood) = (begun.elapsed().as_secs_f64(), stood.as_secs_f64());
                return Ok(Ran { seconds, stood, checkpoints: number, bytes });
            }
            sleep(Duration::from_millis(5));
        }
        let stop = Instant::now();
        bytes += blast.checkpoint(|memory| {
            write(&folder.join(format!("blast.N1.T{number}")), memory)?;
            Ok(memory.len() as u64)
        })?;
        stood += stop.elapsed();
        number += 1;
    }
}

/// How long the program stands still for a checkpoint that is synced, in a pool and on the local disk.
pub(crate) fn application_pause(context: &Context) -> Result<Vec<Row>> {
    let questions = context.times(200, 100);
    let disk = scratch("application")?;
    let pieces = Chunking::Fixed { size: 64 << 10 };
    let ways = [
        ("default policy", Policy::default()),
        ("one copy, pieces of 64 KiB", Policy { copies: 1, cutting: pieces, ..Policy::default() }),
    ];
    let mut rows = Vec::new();
    for (name, policy) in ways {
        let members = Members::start(4)?;
        let pool = members.pool()?;
        pool.block(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)))?;
        let dir = TempDir::new()?;
        let mount = members.mount(dir.path())?;
        let (ours, local) =
            in_turn(context.times(5, 2), || run(questions, dir.path()), || run(questions, disk.path()))?;
        drop(mount);
        let case = format!("BLAST, a checkpoint every 2 s, 4 benefactors, {name}");
        let row = Row::new("application.pause", case, "ms", &Samples::of(&ours, Ran::pause));
        let row = row.against("the local disk", &Samples::of(&local, Ran::pause));
        rows.push(if rows.is_empty() { row.goal(Goal::PeerAtMost(0.75)) } else { row });
    }
    Ok(rows)
}

/// Table 5: the same program to the end, with checkpoints on the disk and in a pool of four benefactors
/// behind 1 Gbit/s each.
pub(crate) fn application(context: &Context) -> Result<Vec<Row>> {
    let questions = context.times(400, 100);
    let disk = scratch("application")?;
    let local = run(questions, disk.path())?;
    fs::remove_dir_all(disk.path())?;
    let mut rows = Vec::new();
    for (name, cutting) in [
        ("page by page", Chunking::Pages { average: 1 }),
        ("FsCH 64 KiB", Chunking::Fixed { size: 64 << 10 }),
    ] {
        let (ours, kept) = in_pool(questions, cutting)?;
        let one = |value| Samples::new(vec![value]);
        let row = |what: &str, unit, ours, theirs| {
            let case = format!("{name}: {what}");
            Row::new("application", case, unit, &one(ours)).against("the local disk", &one(theirs))
        };
        rows.push(row("BLAST with a checkpoint every 2 s, to the end", "s", ours.seconds, local.seconds));
        rows.push(row("of that it stood still for checkpoints", "s", ours.stood, local.stood));
        rows.push(row("kept of its checkpoints", "MB", kept as f64 / 1e6, local.bytes as f64 / 1e6));
    }
    Ok(rows)
}

/// A run in a pool, and the bytes that benefactors have in the end.
fn in_pool(questions: usize, cutting: Chunking) -> Result<(Ran, u64)> {
    let names = ["manager", "b0", "b1", "b2", "b3", "client"];
    let lab = Lab::with_hosts(&names)?;
    names.iter().try_for_each(|name| lab.limit(name, 1000))?;
    let place = |name: &&str| Place {
        namespace: (**lab.host(name)).clone(),
        address: format!("{}:7500", lab.host(name).address()),
    };
    let dir = TempDir::new_in("/dev/shm")?;
    let members = names[1..5].iter().map(place).collect();
    let pool = Processes::at(place(&"manager"), members, place(&"client"), dir)?;
    let policy = Policy { copies: 1, cutting, ..Policy::default() };
    pool.ask(async move |pool: Pool| Ok(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)).await?))?;
    let mount = pool.mount("mnt")?;
    let ours = run(questions, &mount.path)?;
    // What benefactors say of themselves is some seconds old.
    sleep(Duration::from_secs(15));
    Ok((ours, pool.status()?.benefactors.iter().map(|member| member.used).sum()))
}
