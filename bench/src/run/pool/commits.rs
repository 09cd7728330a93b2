//! `commits`, `restart`: how many files become visible in a second, and how soon a manager of many chunks
//! serves again.

use super::{Context, Members, Processes, claims::claim, postgres::Postgres};
use crate::harness::{Goal, Row, Samples, scratch};
use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use sqlx::{AssertSqlSafe, Connection as _};
use std::{path::Path, time::Instant};
use whimbrel_core::Digest;
use whimbrel_pool::{
    chunk_map::{self, ChunkRef},
    client::Pool,
    protocol::{
        Commit, CommitFile, MakeNode, NewNode, RegisterChunks, Reserve, ReserveSpace, WrittenChunk,
        get_numbers, put_written,
    },
};

const CLIENTS: u64 = 64;
/// Chunks of a file: a MiB in chunks of the default size.
const CHUNKS: u64 = 4;
const LENGTH: u32 = 256 << 10;

fn make(parent: u64, name: String, folder: bool) -> NewNode {
    NewNode { parent, name, folder, mode: 0o755, uid: 0, gid: 0 }
}

/// A client with a session, a folder, and the chunks of its files, which are registered.
struct Writer {
    pool: Pool,
    session: u64,
    folder: u64,
    chunks: Vec<u64>,
}

impl Writer {
    async fn new(pool: Pool, number: u64, files: u64, holder: u16) -> Result<Self> {
        let reserve = Reserve { session: 0, bytes: 0, unused: 0, width: 1, avoid: Vec::new() };
        let session = pool.call_manager::<ReserveSpace>(&reserve, Bytes::new()).await?.0.session;
        let written = |chunk: u64| WrittenChunk {
            digest: Digest::of(&[number, chunk].map(u64::to_le_bytes).concat()),
            length: LENGTH,
            stored: LENGTH,
            places: vec![holder],
        };
        let written: Vec<WrittenChunk> = (0..files * CHUNKS).map(written).collect();
        let (_, ids) = pool.call_manager::<RegisterChunks>(&session, put_written(&written)).await?;
        let chunks = get_numbers(&ids).context("no numbers")?;
        let made = make(whimbrel_fuse::ROOT, format!("rank{number}.{session}"), true);
        let folder = pool.call_manager::<MakeNode>(&made, Bytes::new()).await?.0.id;
        Ok(Self { pool, session, folder, chunks })
    }

    /// Commits a new file for each of the client's chunks, one after the other.
    async fn run(self) -> Result<()> {
        for (chunks, number) in self.chunks.chunks(CHUNKS as usize).zip(0..) {
            let piece =
                |chunk: &u64| ChunkRef { chunk: *chunk, length: LENGTH, encrypted: false, digest: None };
            let pieces: Vec<ChunkRef> = chunks.iter().map(piece).collect();
            let commit = Commit {
                session: self.session,
                number,
                node: None,
                make: make(self.folder, format!("step{number}"), false),
                size: CHUNKS * u64::from(LENGTH),
                modified: 0,
                copies: 1,
                sent: 0,
                base: 0,
            };
            self.pool.call_manager::<CommitFile>(&commit, chunk_map::encode(&pieces).into()).await?;
        }
        Ok(())
    }
}

/// Commits a second of 64 clients.
fn rate(members: &Members, files: u64) -> Result<f64> {
    let holder = members.pool()?;
    let number = holder.block(claim(&holder))?;
    let mut writers = Vec::new();
    for client in 0..CLIENTS {
        let pool = members.pool()?;
        writers.push(pool.clone().block(Writer::new(pool, client, files, number))?);
    }
    let begun = Instant::now();
    holder.block(async {
        let running: Vec<_> = writers.into_iter().map(|writer| tokio::spawn(writer.run())).collect();
        for one in running {
            one.await??;
        }
        anyhow::Ok(())
    })?;
    Ok((CLIENTS * files) as f64 / begun.elapsed().as_secs_f64())
}

/// Commits a second by both databases, on a disk.
pub(crate) fn commits(context: &Context) -> Result<Vec<Row>> {
    let files = context.times(200, 50) as u64;
    let mut rows = Vec::new();
    for (name, goal) in [("SQLite", 2000.0), ("PostgreSQL", 1000.0)] {
        let mut rates = Vec::new();
        for _ in 0..context.times(3, 1) {
            let dir = scratch("pool")?;
            // The folder of the experiment is not open for the user of PostgreSQL.
            let server =
                (name == "PostgreSQL").then(|| Postgres::start(Path::new("/var/tmp"))).transpose()?;
            let database = server.as_ref().map(|server| server.url.clone());
            let members = Members::start_at(0, dir, database)?;
            rates.push(rate(&members, files)?);
        }
        let case = format!("{name}, {CLIENTS} clients, new files of {CHUNKS} chunks");
        let rates = Samples::new(rates);
        rows.push(Row::new("commits", case, "commits/s", &rates).goal(Goal::AtLeast(goal)));
    }
    Ok(rows)
}

/// Fills the database of a manager that does not run: files of 100 chunks with two copies each.
async fn fill(database: &Path, chunks: u64) -> Result<()> {
    let url = format!("sqlite://{}", database.display());
    let mut connection = sqlx::SqliteConnection::connect(&url).await?;
    let numbers = |most: u64| {
        format!("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {most})")
    };
    let files = chunks / 100;
    let map: Vec<ChunkRef> =
        (1..=100).map(|chunk| ChunkRef { chunk, length: LENGTH, encrypted: false, digest: None }).collect();
    let map: String = chunk_map::encode(&map).iter().map(|byte| format!("{byte:02x}")).collect();
    let size = 100 * u64::from(LENGTH);
    for text in [
        "BEGIN".to_owned(),
        "INSERT INTO benefactor (id, key, name, address, capacity, used, free, chunks, draining, lost, faults, seen, owed)
             VALUES (1, randomblob(32), 'b1', 'h:1', 1, 1, 1, 1, 0, 0, 0, 0, 0), (2, randomblob(32), 'b2', 'h:2', 1, 1, 1, 1, 0, 0, 0, 0, 0)".to_owned(),
        format!("{} INSERT INTO chunk (id, digest, length, stored, refs, freed, want, doomed)
             SELECT i, randomblob(32), {LENGTH}, {LENGTH}, 1, 0, 2, 0 FROM n", numbers(chunks)),
        format!("{} INSERT INTO place (chunk, benefactor, since) SELECT i, b, 0 FROM n, (SELECT 1 b UNION SELECT 2)", numbers(chunks)),
        format!("{} INSERT INTO node (id, parent, name, folder, mode, uid, gid, size, modified, changed, version)
             SELECT i + 1, 1, 'f' || i, 0, 420, 0, 0, {size}, 0, 0, i FROM n", numbers(files)),
        format!("{} INSERT INTO version (id, node, number, size, created, chunks, sent, pinned, map, copies)
             SELECT i, i + 1, 1, {size}, 0, 100, 0, 0, x'{map}', 2 FROM n", numbers(files)),
        format!("UPDATE counter SET value = value + {chunks} WHERE name IN ('chunk', 'node', 'version', 'benefactor')"),
        "COMMIT".to_owned(),
        "PRAGMA wal_checkpoint(TRUNCATE)".to_owned(),
    ] {
        sqlx::query(AssertSqlSafe(text)).execute(&mut connection).await?;
    }
    Ok(connection.close().await?)
}

/// Seconds from the start of a killed manager with ten million chunks until it has answered a client.
pub(crate) fn restart(context: &Context) -> Result<Vec<Row>> {
    let chunks = context.times(10_000_000, 1_000_000) as u64;
    let mut pool = Processes::start(0, scratch("pool")?)?;
    pool.kill_manager();
    let database = pool.dir.path().join("manager/pool.db");
    tokio::runtime::Runtime::new()?.block_on(fill(&database, chunks))?;
    let mut times = Vec::new();
    for round in 0..context.times(3, 1) {
        let begun = Instant::now();
        pool.start_manager()?;
        let found = pool.ask(async move |pool: Pool| {
            let made = make(whimbrel_fuse::ROOT, format!("after{round}"), true);
            pool.call_manager::<MakeNode>(&made, Bytes::new()).await?;
            Ok(pool.find("f77").await?.size)
        })?;
        times.push(begun.elapsed().as_secs_f64());
        ensure!(found == 100 * u64::from(LENGTH), "the file is another one");
        pool.kill_manager();
    }
    let case = format!("a killed manager with {} M chunks, until it has answered", chunks / 1_000_000);
    Ok(vec![Row::new("restart", case, "s", &Samples::new(times)).goal(Goal::AtMost(5.0))])
}
