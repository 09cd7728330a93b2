//! `scrub`: how fast a benefactor checks what it has by a tenth of a core.
//!
//! Processor time decides that, not the disk: the thread that scrubs is measured, with the time that the
//! kernel takes for its reads. The rate of the disk is told beside it.

use super::{Context, noise};
use crate::harness::{Goal, Row, Samples, scratch};
use anyhow::{Result, ensure};
use bytes::Bytes;
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};
use whimbrel_core::Digest;
use whimbrel_image::pack_frame::{Encoder, Kind};
use whimbrel_pool::benefactor::{ChunkStore, Scrub, ScrubOptions};

/// The default average of a chunk.
const CHUNK: usize = 256 << 10;
/// Chunks that are stored at once.
const BATCH: usize = 16;
/// What the scrub may take of a core.
const SHARE: f64 = 0.1;

/// Processor time of this thread in seconds.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn fill(store: &ChunkStore, chunks: usize) -> Result<()> {
    let bytes = noise(CHUNK + chunks * 8, 7);
    let mut batch = Vec::with_capacity(BATCH);
    for number in 0..chunks {
        let raw = &bytes[number * 8..number * 8 + CHUNK];
        let mut frame = Vec::with_capacity(CHUNK + 64);
        Encoder::store_head(Kind::Blob, raw, &[CHUNK], &mut frame)?;
        frame.extend(raw);
        batch.push((Digest::of(raw), Bytes::from(frame)));
        if batch.len() == BATCH || number + 1 == chunks {
            store.put(&batch)?;
            batch.clear();
        }
    }
    store.flush(&[])?;
    Ok(())
}

/// Megabytes a second by a tenth of a core, and as fast as the disk goes.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let chunks = context.times(8192, 1024);
    let dir = scratch("pool")?;
    let store = ChunkStore::open(&dir.path().join("chunks"), 1 << 40, 0)?;
    fill(&store, chunks)?;
    let used = store.usage().used;
    let (mut by_share, mut by_disk) = (Vec::new(), Vec::new());
    for round in 0..context.times(5, 3) {
        let data = dir.path().join(round.to_string());
        std::fs::create_dir(&data)?;
        // All of it is due at once.
        let mut scrub = Scrub::open(&data, ScrubOptions { every: Duration::ZERO, rate: u64::MAX });
        let (begun, before) = (Instant::now(), processor_time());
        let damaged = scrub.tick(&store);
        let (spent, took) = (processor_time() - before, begun.elapsed().as_secs_f64());
        let report = scrub.report(used);
        ensure!(damaged.is_empty() && report.bytes == used, "the scrub has not read all: {report:?}");
        by_share.push(used as f64 / 1e6 / spent * SHARE);
        by_disk.push(used as f64 / 1e6 / took);
    }
    let size = format!("{} GiB in chunks of 256 KiB on the disk", used >> 30);
    Ok(vec![
        Row::new("scrub", format!("{size}, by a tenth of a core"), "MB/s", &Samples::new(by_share))
            .goal(Goal::AtLeast(500.0)),
        Row::new("scrub", format!("{size}, as fast as the disk"), "MB/s", &Samples::new(by_disk)),
    ])
}
