//! Measures a table: `cargo run --release -p whimbrel-hashcache --example lookup -- [pages of content]
//! [folder]`.
//!
//! Fills a table for that many pages with as many digests, then looks up digests that are in it and digests
//! that are not, in random order, on one core; then the same with a full table. Then pages are read from a
//! file.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_hashcache::{Geometry, HashCache, Location, OnMissing, SourceKind};

type Failure = Box<dyn std::error::Error>;

/// Repetitions: the best wall-clock time counts, and the total processor time.
const ROUNDS: usize = 10;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

/// Digest derived from a number, as uniform as a real one.
fn digest(number: u64) -> Digest {
    let mut random = Random(number.wrapping_mul(0xd6e8_feb8_6659_fd93));
    let mut bytes = [0; 32];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    Digest(bytes)
}

fn rate(count: usize, time: Duration) -> String {
    format!("{:6.1} M/s", count as f64 / time.as_secs_f64() / 1e6)
}

/// Looks up `count` digests numbered from `base` below `end` in random order; returns the number found.
fn measure(name: &str, cache: &HashCache, base: u64, end: u64) {
    let mut random = Random(7);
    let wanted: Vec<Digest> = (0..1 << 20).map(|_| digest(base + random.next() % (end - base))).collect();
    let (mut one, mut many, mut processor, mut found) = (Duration::MAX, Duration::MAX, Duration::ZERO, 0);
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let hits = wanted.iter().filter(|digest| black_box(cache.lookup(digest)).is_some()).count();
        one = one.min(begin.elapsed());
        let (begin, used) = (Instant::now(), processor_time());
        for part in wanted.chunks(4096) {
            found += cache.lookup_many(part).iter().flatten().count();
        }
        many = many.min(begin.elapsed());
        processor += processor_time().saturating_sub(used);
        assert_eq!(found % hits.max(1), 0);
    }
    let share = found as f64 / ROUNDS as f64 / wanted.len() as f64;
    println!(
        "{name:<24} one by one {}  batches {}, a second of processor time {}  found {:5.1} %",
        rate(wanted.len(), one),
        rate(wanted.len(), many),
        rate(ROUNDS * wanted.len(), processor),
        share * 100.0
    );
}

/// Processor time of this thread, to the kernel's tick, because the host may have other work.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0))
}

fn fill(cache: &HashCache, source: whimbrel_hashcache::SourceId, from: u64, to: u64) -> Duration {
    let begin = Instant::now();
    for number in from..to {
        let location = Location { source, offset: number % (1 << 38) * 4096 };
        cache.record_page(&digest(number), location);
    }
    begin.elapsed()
}

fn tables(folder: &Path, pages: u64) -> Result<(), Failure> {
    let path = folder.join("lookup.cache");
    let cache = HashCache::open_seeded(&path, OnMissing::Create(Geometry::for_pages(pages)), 1)?;
    let file = folder.join("nothing");
    std::fs::write(&file, b"")?;
    let source = cache.register(&file, SourceKind::Raw)?;
    let time = fill(&cache, source, 0, pages);
    let stats = cache.stats();
    println!(
        "{pages} pages, table {:.1} MiB: {} entries kept, {} evicted, {:.2} bytes a page kept, insert {}",
        stats.bytes as f64 / 1048576.0,
        stats.used,
        stats.evictions,
        stats.bytes as f64 / stats.used as f64,
        rate(pages as usize, time)
    );
    measure("at its size, there", &cache, 0, pages);
    measure("at its size, not there", &cache, 1 << 40, 2 << 40);
    fill(&cache, source, pages, 3 * pages);
    let stats = cache.stats();
    println!("after three times as many: {:.2} bytes a page kept", stats.bytes as f64 / stats.used as f64);
    measure("overfull, newest third", &cache, 2 * pages, 3 * pages);
    measure("overfull, not there", &cache, 1 << 40, 2 << 40);
    Ok(())
}

fn pages(folder: &Path) -> Result<(), Failure> {
    const MIB: usize = 256;
    let mut random = Random(3);
    let mut image = vec![0u8; MIB << 20];
    image.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    let file = folder.join("image");
    std::fs::write(&file, &image)?;
    let digests: Vec<Digest> = image.chunks_exact(PAGE_SIZE).map(Digest::of).collect();
    let geometry = Geometry::for_pages(digests.len() as u64);
    let cache = HashCache::open_seeded(&folder.join("get.cache"), OnMissing::Create(geometry), 1)?;
    let begin = Instant::now();
    cache.add(&file, SourceKind::Raw, None, &|_| std::ops::ControlFlow::Continue(()))?;
    println!("add {MIB} MiB: {:.0} MB/s", image.len() as f64 / 1e6 / begin.elapsed().as_secs_f64());
    let mut page = [0; PAGE_SIZE];
    let mut reader = cache.reader();
    let begin = Instant::now();
    let found = digests.iter().filter(|digest| reader.get(digest, &mut page)).count();
    let time = begin.elapsed();
    println!(
        "get in order, verified:  {:.2} M pages/s, {found} of {}",
        found as f64 / time.as_secs_f64() / 1e6,
        digests.len()
    );
    let shuffled: Vec<_> =
        (0..digests.len()).map(|_| digests[random.next() as usize % digests.len()]).collect();
    let begin = Instant::now();
    let found = shuffled.iter().filter(|digest| reader.get(digest, &mut page)).count();
    let time = begin.elapsed();
    println!(
        "get at random, verified: {:.2} M pages/s, {found} of {}",
        found as f64 / time.as_secs_f64() / 1e6,
        shuffled.len()
    );
    Ok(())
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let count = args.next().map_or(Ok(1 << 22), |count| count.parse())?;
    let folder = match args.next() {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    tables(folder.path(), count)?;
    pages(folder.path())
}
