//! `hashcache.*`: how fast the table of the hash cache answers, and how large it is.
//!
//! The table is made for four million pages (16 GiB of content) and filled with as many digests, so it is far
//! larger than the processor's caches. Digests are asked for in random order on one thread.

use crate::harness::{Goal, Row, Samples, scratch};
use crate::run::Context;
use anyhow::Result;
use std::hint::black_box;
use std::time::Instant;
use whimbrel_core::Digest;
use whimbrel_hashcache::{Geometry, HashCache, Location, OnMissing, SourceKind};

/// Digests asked for in one round.
const ROUND: u64 = 1 << 20;

/// Both rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let pages: u64 = if context.quick { 1 << 20 } else { 1 << 22 };
    let folder = scratch("lookup")?;
    let path = folder.path().join("table");
    let cache = HashCache::open_seeded(&path, OnMissing::Create(Geometry::for_pages(pages)), 1)?;
    let file = folder.path().join("source");
    std::fs::write(&file, b"")?;
    let source = cache.register(&file, SourceKind::Raw)?;
    for number in 0..pages {
        cache.record_page(&digest(number), Location { source, offset: number * 4096 });
    }
    let stats = cache.stats();
    let size = Samples::new(vec![stats.bytes as f64 / stats.used as f64]);
    let rounds = context.times(10, 5);
    let there = measure(&cache, rounds, 0, pages);
    let absent = measure(&cache, rounds, 1 << 40, 1 << 40);
    let row =
        |case, rate: &Samples| Row::new("hashcache.lookup", case, "M/s", rate).goal(Goal::AtLeast(10.0));
    Ok(vec![
        row("pages that are there", &there),
        row("pages that are not", &absent),
        Row::new("hashcache.size", format!("{pages} pages"), "bytes/page", &size).goal(Goal::AtMost(20.0)),
    ])
}

/// Million lookups a second of digests numbered from `base`, `count` of them.
fn measure(cache: &HashCache, rounds: usize, base: u64, count: u64) -> Samples {
    let wanted: Vec<Digest> = (0..ROUND).map(|at| digest(base + mix(at) % count)).collect();
    let round = |_| {
        let begun = Instant::now();
        for digest in &wanted {
            black_box(cache.lookup(digest));
        }
        ROUND as f64 / begun.elapsed().as_secs_f64() / 1e6
    };
    Samples::new((0..rounds).map(round).collect())
}

/// A digest as uniform as a real one, made from its number.
fn digest(number: u64) -> Digest {
    let mut bytes = [0; 32];
    let words = bytes.chunks_exact_mut(8).zip(0u64..);
    words.for_each(|(word, at)| word.copy_from_slice(&mix(number.wrapping_mul(4) + at).to_le_bytes()));
    Digest(bytes)
}

/// SplitMix64.
fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
