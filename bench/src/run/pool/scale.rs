//! `scale.files`, `scale.clients`: what a manager of many files needs, and how several clients share many
//! benefactors (figure 8).

use super::{Context, Processes, claims::claim, noise, processes::Mount, rate, write};
use crate::harness::{Goal, Row, Samples, scratch};
use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use std::{
    fs::{self, File},
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_core::Digest;
use whimbrel_pool::{
    chunk_map::{self, ChunkRef},
    client::Pool,
    policy::Policy,
    protocol::{
        Commit, CommitFile, EndSession, FindGarbage, Inventory, MakeNode, NewNode, RegisterChunks, Reserve,
        ReserveSpace, WrittenChunk, get_numbers, put_aged, put_written,
    },
};

/// Chunks of a file, as it would have 25 MB of the usual ones.
const CHUNKS: u64 = 100;
const LENGTH: u32 = 256 << 10;
/// Files of one folder, and of one message to the manager.
const FOLDER: u64 = 1000;
const BATCH: u64 = 100;
/// Chunks a benefactor lists at once.
const LISTED: usize = 20_000;

fn digest(chunk: u64) -> Digest {
    Digest::of(&chunk.to_le_bytes())
}

/// Commits files, as a client would that has written them to that benefactor.
async fn fill(pool: Pool, files: u64) -> Result<()> {
    let holder = claim(&pool).await?;
    let make = |parent, name: String, folder| NewNode { parent, name, folder, mode: 0o755, uid: 0, gid: 0 };
    let mut folder = 0;
    for first in (0..files).step_by(BATCH as usize) {
        if first % FOLDER == 0 {
            let made = make(whimbrel_fuse::ROOT, format!("d{}", first / FOLDER), true);
            folder = pool.call_manager::<MakeNode>(&made, Bytes::new()).await?.0.id;
        }
        // It is lost when it is silent for long.
        claim(&pool).await?;
        let reserve = Reserve { session: 0, bytes: 0, unused: 0, width: 1, avoid: Vec::new() };
        let session = pool.call_manager::<ReserveSpace>(&reserve, Bytes::new()).await?.0.session;
        let written = |chunk| {
            let (length, stored, places) = (LENGTH, LENGTH, vec![holder]);
            WrittenChunk { digest: digest(chunk), length, stored, places }
        };
        let written: Vec<WrittenChunk> = (first * CHUNKS..(first + BATCH) * CHUNKS).map(written).collect();
        let (_, ids) = pool.call_manager::<RegisterChunks>(&session, put_written(&written)).await?;
        let ids = get_numbers(&ids).context("no numbers")?;
        for (at, chunks) in ids.chunks(CHUNKS as usize).enumerate() {
            let pieces: Vec<ChunkRef> = chunks
                .iter()
                .map(|chunk| ChunkRef { chunk: *chunk, length: LENGTH, encrypted: false, digest: None })
                .collect();
            let commit = Commit {
                session,
                number: at as u32,
                node: None,
                make: make(folder, format!("f{}", first + at as u64), false),
                size: CHUNKS * u64::from(LENGTH),
                modified: 0,
                copies: 1,
                sent: 0,
                base: 0,
            };
            pool.call_manager::<CommitFile>(&commit, chunk_map::encode(&pieces).into()).await?;
        }
        pool.call_manager::<EndSession>(&session, Bytes::new()).await?;
    }
    Ok(())
}

/// Seconds that lists of chunks take the manager, as the benefactor sends them.
async fn inventory(pool: Pool, files: u64, lists: usize) -> Result<Vec<f64>> {
    claim(&pool).await?;
    let mut all: Vec<(Digest, u32)> = (0..files * CHUNKS).map(|chunk| (digest(chunk), 1000)).collect();
    all.sort_unstable();
    let mut times = Vec::new();
    for list in all.chunks(LISTED).take(lists) {
        let header = Inventory { from: list[0].0.0, to: list[list.len() - 1].0.0, age: 0 };
        let begun = Instant::now();
        let (_, go) = pool.call_manager::<FindGarbage>(&header, put_aged(list)).await?;
        times.push(begun.elapsed().as_secs_f64() * 1000.0);
        ensure!(go.iter().all(|byte| *byte == 0), "chunks of committed files were given up");
    }
    Ok(times)
}

/// Milliseconds of `open` for files that this client never saw.
fn opens(mount: &Mount, files: u64, count: u64) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    for step in 0..count {
        let file = (step * 7919 + 13) % files;
        let path = mount.path.join(format!("d{}/f{file}", file / FOLDER));
        let begun = Instant::now();
        drop(File::open(path)?);
        times.push(begun.elapsed().as_secs_f64() * 1000.0);
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// A manager with very many files: its memory, and how long an open takes.
pub(crate) fn files(context: &Context) -> Result<Vec<Row>> {
    let files = context.times(100_000, 10_000) as u64;
    let pool = Processes::start(0, scratch("pool")?)?;
    let begun = Instant::now();
    pool.ask(async move |pool: Pool| fill(pool, files).await)?;
    let filled = files as f64 / begun.elapsed().as_secs_f64();
    let mount = pool.mount("mnt")?;
    let times = opens(&mount, files, 2000)?;
    let p99 = times[times.len() * 99 / 100];
    let lists = pool.ask(async move |pool: Pool| inventory(pool, files, 50).await)?;
    let one = |value| Samples::new(vec![value]);
    let case = |what: &str| format!("{files} files, {} M chunks: {what}", files * CHUNKS / 1_000_000);
    let memory = pool.manager_memory()?;
    Ok(vec![
        Row::new("scale.files", case("manager's memory"), "MiB", &one(memory)).goal(Goal::AtMost(1024.0)),
        Row::new("scale.files", case("99 of 100 opens"), "ms", &one(p99)).goal(Goal::AtMost(5.0)),
        Row::new("scale.files", case("half of the opens"), "ms", &one(times[times.len() / 2])),
        Row::new("scale.files", case("a list of 20,000 chunks judged"), "ms", &Samples::new(lists)),
        Row::new("scale.files", case("commits"), "files/s", &one(filled)),
    ])
}

const CLIENTS: u64 = 7;
const BENEFACTORS: usize = 20;
const FILE: usize = 100_000_000;

/// Megabytes a second of all, and of each client that writes `files` files beside the others.
fn together(mounts: &[Mount], files: u64, seed: u64) -> Result<(f64, Vec<f64>)> {
    let contents: Vec<Vec<u8>> = (0..mounts.len() as u64).map(|client| noise(FILE, seed + client)).collect();
    let begun = Instant::now();
    let each: Result<Vec<f64>> = std::thread::scope(|scope| {
        let running: Vec<_> = mounts
            .iter()
            .zip(contents)
            .zip(0_u64..)
            .map(|((mount, mut data), client)| {
                scope.spawn(move || -> Result<f64> {
                    let (mut busy, mut bytes) = (Duration::ZERO, 0);
                    for file in 0..files {
                        // New content every time, made while no clock runs.
                        data.chunks_mut(4096).for_each(|page| page[0] = page[0].wrapping_add(1 + file as u8));
                        let path = mount.path.join(format!("c{seed}.N{client}.T{file}"));
                        let begun = Instant::now();
                        write(&path, &data)?;
                        busy += begun.elapsed();
                        bytes += data.len();
                        fs::remove_file(path)?;
                    }
                    Ok(bytes as f64 / 1e6 / busy.as_secs_f64())
                })
            })
            .collect();
        running.into_iter().map(|one| one.join().map_err(|_| anyhow::anyhow!("a client died"))?).collect()
    });
    Ok((rate(FILE * files as usize * mounts.len(), begun), each?))
}

/// Seven clients and twenty benefactors, all of them processes on the processors of this machine.
pub(crate) fn clients(context: &Context) -> Result<Vec<Row>> {
    let pool = Processes::start(BENEFACTORS, TempDir::new_in("/dev/shm")?)?;
    ensure!(pool.width() == BENEFACTORS, "not all benefactors are there");
    let policy = Policy { copies: 1, ..Policy::default() };
    pool.ask(async move |pool: Pool| Ok(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)).await?))?;
    let mounts: Vec<Mount> =
        (0..CLIENTS).map(|number| pool.mount(&format!("m{number}"))).collect::<Result<_>>()?;
    let files = context.times(5, 2) as u64;
    let (_, alone) = together(&mounts[..1], files * 2, 1000)?;
    let (all, each) = together(&mounts, files, 2000)?;
    let slowest = each.iter().copied().fold(f64::INFINITY, f64::min);
    let fair = each.iter().sum::<f64>() / each.len() as f64;
    let one = |value| Samples::new(vec![value]);
    let share =
        Row::new("scale.clients", "the slowest client beside the mean", "%", &one(slowest * 100.0 / fair));
    Ok(vec![
        Row::new("scale.clients", "7 clients, 20 benefactors, all together", "MB/s", &one(all))
            .against("one client", &Samples::new(alone)),
        share.goal(Goal::AtLeast(50.0)),
    ])
}
