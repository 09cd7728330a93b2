//! `fsch`, `cbch`, `saved`: how fast files are cut and hashed, and what is found again.

use super::{
    Context, Members, images, rate,
    window::{Cut, ours, paper},
};
use crate::{
    harness::{Goal, Row, Samples, scratch},
    run::keeper::{Keeper, Peer, PeerKind},
};
use anyhow::{Context as _, Result, ensure};
use std::{
    collections::HashSet,
    fs,
    path::Path,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_pool::{chunk::Chunking, policy::Policy};

/// Cutting and hashing on one core, and what each way finds in a later image of the same guest.
pub(crate) fn cutting(context: &Context) -> Result<Vec<Row>> {
    let (first, later) = images::pair(context)?;
    let (first, later) = (fs::read(first)?, fs::read(later)?);
    let ways: [(&'static str, &str, Cut, f64); 6] = [
        ("fsch", "1 MiB", ours(Chunking::Fixed { size: 1 << 20 }), 4000.0),
        ("fsch", "256 KiB", ours(Chunking::Fixed { size: 256 << 10 }), 4000.0),
        ("cbch", "FastCDC, 256 KiB on average", ours(Chunking::Content { average: 256 << 10 }), 1500.0),
        ("cbch", "m=20 k=14 p=20, the paper's", paper(20, 14, 20), 0.0),
        ("cbch", "m=20 k=14 p=1, the paper's overlap", paper(20, 14, 1), 0.0),
        ("cbch", "pages", ours(Chunking::Pages { average: 1 }), 0.0),
    ];
    let mut rows = Vec::new();
    for (name, case, way, goal) in ways {
        let known: HashSet<Digest> = digests(&way, &first).into_iter().map(|(d, _)| d).collect();
        let mut rates = Vec::new();
        let mut found = 0;
        for _ in 0..context.times(5, 2) {
            let begun = Instant::now();
            let chunks = digests(&way, &later);
            rates.push(rate(later.len(), begun));
            found =
                chunks.iter().filter(|(digest, _)| known.contains(digest)).map(|(_, length)| length).sum();
        }
        let share = found as f64 * 100.0 / later.len() as f64;
        let speed = Row::new(name, case, "MB/s", &Samples::new(rates));
        rows.push(if goal > 0.0 { speed.goal(Goal::AtLeast(goal)) } else { speed });
        rows.push(Row::new(name, format!("{case}: found"), "%", &Samples::new(vec![share])));
    }
    Ok(rows)
}

/// Chunks, with their length.
pub(super) fn digests(way: &Cut, mut data: &[u8]) -> Vec<(Digest, usize)> {
    let mut out = Vec::with_capacity(data.len() / PAGE_SIZE);
    while !data.is_empty() {
        let (chunk, rest) = data.split_at(way(data));
        out.push((Digest::of(chunk), chunk.len()));
        data = rest;
    }
    out
}

/// Bytes kept of two versions of an image, beside restic and borg on the same files.
pub(crate) fn saved(context: &Context) -> Result<Vec<Row>> {
    let (first, later) = images::pair(context)?;
    let mut rows = Vec::new();
    for (case, cutting) in [("content", Chunking::default()), ("pages", Chunking::Pages { average: 1 })] {
        let ours = Samples::new(vec![kept(cutting, [&first, &later])?]);
        for kind in [PeerKind::Restic, PeerKind::Borg] {
            let scratch = scratch("pool")?;
            let mut peer = Peer::new(kind, scratch.path())?;
            let empty = peer.bytes()?;
            peer.save(&first, "first")?;
            peer.save(&later, "later")?;
            let theirs = Samples::new(vec![(peer.bytes()? - empty) as f64 / 1e6]);
            let row = Row::new("saved", format!("two images, {case}"), "MB", &ours);
            rows.push(row.against(peer.name(), &theirs).goal(Goal::PeerAtMost(1.0)));
        }
    }
    Ok(rows)
}

/// Megabytes that a pool of one benefactor holds of two versions of a file.
fn kept(cutting: Chunking, versions: [&Path; 2]) -> Result<f64> {
    let members = Members::start(1)?;
    let pool = members.pool()?;
    pool.block(
        pool.set_policy(whimbrel_fuse::ROOT, Some(Policy { copies: 1, cutting, ..Policy::default() })),
    )?;
    let dir = TempDir::new()?;
    let _mounted = members.mount(dir.path())?;
    for version in versions {
        fs::copy(version, dir.path().join("image")).context("cannot write to the pool")?;
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let status = pool.block(pool.status())?;
        // What a benefactor says of itself is a second old.
        let member = status.benefactors.first().context("no benefactor")?;
        if member.chunks >= status.chunks {
            return Ok(member.used as f64 / 1e6);
        }
        ensure!(Instant::now() < deadline, "the benefactor holds less than it should");
        std::thread::sleep(Duration::from_millis(200));
    }
}
