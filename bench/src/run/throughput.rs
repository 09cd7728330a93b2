//! `store.ingest`, `store.restore`: how fast memory goes into a store and comes back, on all processors.
//!
//! The content is that of a real guest's pages, each made unique by a number in its last words so that
//! nothing is found twice, and none is zero: every byte counted was hashed, compressed and written. Into the
//! store means durable, the commit included. Back means from the page cache of the packs into memory that is
//! allocated already, as a guest's is that was touched before, digests checked. (Into a new file on a tmpfs,
//! half of the time goes into the file.)

use super::{Context, images, ours::manifest};
use crate::harness::{Goal, Row, Samples, in_turn, scratch};
use anyhow::{Context as _, Result, ensure};
use std::{
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use tempfile::TempDir;
use whimbrel_core::{CapsuleId, EXTENT_PAGES, EXTENT_SIZE, PAGE_SIZE, PageRun, is_zero};
use whimbrel_image::ImageRef;
use whimbrel_store::{MasterKey, Options, Store};

const PAGES: u64 = (1 << 30) / PAGE_SIZE as u64;

/// Both rows: one preparation.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let (image, _) = images::pair(context)?;
    let memory = unique_pages(&image)?;
    let scratch = scratch("throughput")?;
    let (mut ingested, mut restored) = (Vec::new(), Vec::new());
    for _ in 0..context.times(5, 2) {
        let folder = TempDir::new_in(scratch.path())?;
        let store = Store::open(folder.path(), Options::create())?;
        let begun = Instant::now();
        let capsule = ingest(&store, &memory)?;
        ingested.push(rate(begun));
        // Another handle: no frame that was decoded before is still in its cache.
        restored.push(restore(&Store::open(folder.path(), Options::default())?, &capsule, &memory)?);
    }
    let row = |name, samples, goal| {
        Row::new(name, "1 GiB of non-zero pages", "MB/s", &Samples::new(samples)).goal(Goal::AtLeast(goal))
    };
    Ok(vec![row("store.ingest", ingested, 500.0), row("store.restore", restored, 1000.0)])
}

/// `encrypt.ingest`, `encrypt.restore`: the same with and without encryption, in turn.
pub(crate) fn encrypted(context: &Context) -> Result<Vec<Row>> {
    let (image, _) = images::pair(context)?;
    let memory = unique_pages(&image)?;
    let scratch = scratch("encrypted")?;
    let key: MasterKey = format!("{:064x}", 0x5eed).parse()?;
    let both = |key: Option<MasterKey>| -> Result<(f64, f64)> {
        let folder = TempDir::new_in(scratch.path())?;
        let options = Options { key, ..Options::create() };
        let store = Store::open(folder.path(), options.clone())?;
        let begun = Instant::now();
        let capsule = ingest(&store, &memory)?;
        let ingested = rate(begun);
        Ok((ingested, restore(&Store::open(folder.path(), options)?, &capsule, &memory)?))
    };
    let (sealed, plain) = in_turn(context.times(5, 5), || both(Some(key.clone())), || both(None))?;
    let row = |name, of: fn(&(f64, f64)) -> f64| {
        Row::new(name, "1 GiB of non-zero pages, encrypted", "MB/s", &Samples::of(&sealed, of))
            .against("not encrypted", &Samples::of(&plain, of))
            .goal(Goal::PeerAtLeast(0.8))
    };
    Ok(vec![row("encrypt.ingest", |rates| rates.0), row("encrypt.restore", |rates| rates.1)])
}

fn rate(begun: Instant) -> f64 {
    (PAGES * PAGE_SIZE as u64) as f64 / 1e6 / begun.elapsed().as_secs_f64()
}

/// A GiB of pages like those of `image`, none of them zero, no two alike.
fn unique_pages(image: &Path) -> Result<Vec<u8>> {
    let content = std::fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let used: Vec<&[u8]> = content.chunks_exact(PAGE_SIZE).filter(|page| !is_zero(page)).collect();
    ensure!(!used.is_empty(), "{} is all zeros", image.display());
    let mut memory = Vec::with_capacity(PAGES as usize * PAGE_SIZE);
    for number in 0..PAGES {
        memory.extend_from_slice(used[number as usize % used.len()]);
        let end = memory.len();
        memory[end - 8..].copy_from_slice(&(number + 1).to_le_bytes());
    }
    Ok(memory)
}

fn ingest(store: &Store, memory: &[u8]) -> Result<CapsuleId> {
    let writer = store.writer()?;
    let mut image = writer.image(None, PAGES)?;
    for run in PageRun::new(0, PAGES).chunks(EXTENT_PAGES as u64) {
        image.put(run, &memory[run.offset() as usize..][..run.bytes()])?;
    }
    let image = image.finish()?;
    let images = vec![ImageRef { name: "memory".into(), pages: PAGES, root: image.root, cuts: None }];
    Ok(writer.commit(&manifest(images, Vec::new()), &["kept".parse()?])?)
}

fn restore(store: &Store, capsule: &CapsuleId, memory: &[u8]) -> Result<f64> {
    let kept = store.manifest(capsule)?;
    let root = kept.image("memory").context("the capsule has no memory")?.root;
    let threads = std::thread::available_parallelism().map_or(2, |threads| threads.get());
    // Not zeros: those the kernel would only promise.
    let target: Vec<Mutex<Vec<u8>>> =
        memory.chunks(EXTENT_SIZE).map(|part| Mutex::new(vec![0xff; part.len()])).collect();
    let begun = Instant::now();
    store.image(root, PAGES).restore(threads, |run, data| {
        let extent = &target[(run.start / EXTENT_PAGES as u64) as usize];
        let within = run.offset() as usize % EXTENT_SIZE;
        locked(extent)[within..within + data.len()].copy_from_slice(data);
        Ok::<_, std::io::Error>(())
    })?;
    let rate = rate(begun);
    let same = target.iter().zip(memory.chunks(EXTENT_SIZE)).all(|(back, part)| *locked(back) == part);
    ensure!(same, "the store gave back something else than it was given");
    Ok(rate)
}

fn locked(extent: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    extent.lock().unwrap_or_else(PoisonError::into_inner)
}
