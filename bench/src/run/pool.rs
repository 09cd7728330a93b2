//! `fuse.null`, `oab.free`, `read.cold`, `fsch`, `cbch`, `saved`: the checkpoint pool, beside what its paper measured.
//!
//! Manager and benefactors run in this process with real sockets and TLS, all on this machine's processors; their data is on a
//! tmpfs, so that the disk of the machine is not what is measured. The client is a mount that `write` and `read` go through.

use super::{
    Context, Experiment, images,
    keeper::{Keeper, Peer, PeerKind},
};
use crate::harness::{Goal, Row, Samples, scratch};
use anyhow::{Context as _, Result, ensure};
use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{Read, Write},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch};
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_fuse::{
    Access, Attributes, Caller, DirEntry, Entry, Errno, FileKind, FileSystem, MountOptions, Mounted, Opened,
};
use whimbrel_pool::{
    benefactor::{Benefactor, BenefactorOptions},
    chunk::Cutting,
    client::{Pool, PoolOptions, WriteOptions},
    link::TlsDialer,
    manager::{Manager, ManagerOptions},
    mount::{PoolMount, mount},
    policy::Policy,
};
use whimbrel_wire::{Identity, PublicKey, Rights, Trust, TrustedPeer};

/// The experiments of the paper's pool, in the order in which `pool` does them.
pub(crate) const EXPERIMENTS: &[Experiment] = &[
    Experiment { rows: &["fuse.null"], about: "write to a mount that keeps nothing", run: null },
    Experiment {
        rows: &["oab.free", "read.cold"],
        about: "a GiB into a pool of four and back",
        run: bandwidth,
    },
    Experiment {
        rows: &["fsch", "cbch"],
        about: "cut and hash an image, and what is found again",
        run: cutting,
    },
    Experiment { rows: &["saved"], about: "two versions of an image: bytes kept", run: saved },
];

const GIB: usize = 1 << 30;
/// What a program writes at once.
const BLOCK: usize = 1 << 20;

/// A pool of four benefactors on a tmpfs.
struct Members {
    runtime: Runtime,
    dir: TempDir,
    address: whimbrel_pool::ManagerAddress,
    _leave: Vec<watch::Sender<bool>>,
}

fn admit(dir: &Path, name: &str, key: PublicKey) -> Result<()> {
    let rights = Rights::all();
    let peer =
        TrustedPeer { name: name.parse()?, key: Some(key), address: None, rights, read: None, write: None };
    Ok(Trust::load(dir)?.add(peer)?)
}

impl Members {
    fn start(benefactors: usize) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let dir = TempDir::new_in("/dev/shm")?;
        let data = dir.path().join("manager");
        Identity::load_or_create(&data)?;
        admit(&data, "client", Identity::load_or_create(&dir.path().join("client"))?.public_key())?;
        let mut options = ManagerOptions::new(data.clone(), "127.0.0.1:0".parse()?);
        options.interval = 1;
        let manager = runtime.block_on(Manager::open(options))?;
        let address = manager.address();
        runtime.spawn(manager.run());
        let mut leaves = Vec::new();
        for number in 0..benefactors {
            let name = format!("b{number}");
            let options = BenefactorOptions {
                name: name.parse()?,
                data: dir.path().join(&name),
                capacity: 8 << 30,
                keep_free: 0,
                listen: "127.0.0.1:0".parse()?,
                advertise: None,
                managers: vec![address.clone()],
                inventory_every: Duration::from_secs(3600),
            };
            let benefactor = runtime.block_on(Benefactor::open(options))?;
            admit(&data, &name, benefactor.key())?;
            let (leave, leaving) = watch::channel(false);
            leaves.push(leave);
            runtime.spawn(benefactor.run(leaving));
        }
        let members = Self { runtime, dir, address, _leave: leaves };
        let pool = members.pool()?;
        let deadline = Instant::now() + Duration::from_secs(30);
        while pool.block(pool.status())?.benefactors.len() < benefactors {
            ensure!(Instant::now() < deadline, "the benefactors did not come");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(members)
    }

    /// A client with nothing cached.
    fn pool(&self) -> Result<Pool> {
        let identity = Arc::new(Identity::load_or_create(&self.dir.path().join("client"))?);
        let dialer = TlsDialer::new(identity, "client".parse()?, ());
        let options = PoolOptions::new(vec![self.address.clone()]);
        Ok(Pool::new(options, Arc::new(dialer), self.runtime.handle().clone()))
    }

    fn mount(&self, at: &Path) -> Result<Mounted> {
        let write = WriteOptions { spool: self.dir.path().to_owned(), ..WriteOptions::default() };
        let options = PoolMount { source: "pool:bench".into(), write, others: false, read_only: false };
        Ok(mount(self.pool()?, at, options)?)
    }
}

/// Bytes that do not compress and are not found twice.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    out
}

fn rate(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / 1e6 / begun.elapsed().as_secs_f64()
}

fn write(path: &Path, data: &[u8]) -> Result<f64> {
    let begun = Instant::now();
    let mut file = File::create(path)?;
    data.chunks(BLOCK).try_for_each(|block| file.write_all(block))?;
    // Close returns the error of the commit, which dropping would not.
    file.sync_all()?;
    drop(file);
    Ok(rate(data.len(), begun))
}

/// Application bandwidth of a write of new data, and of reading it back through a mount that has nothing cached.
pub(crate) fn bandwidth(context: &Context) -> Result<Vec<Row>> {
    let members = Members::start(4)?;
    let pool = members.pool()?;
    let policy = Policy { copies: 1, cutting: Cutting::Fixed { size: 1 << 20 }, ..Policy::default() };
    pool.block(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)))?;
    let (mut written, mut read) = (Vec::new(), Vec::new());
    for seed in 0..context.times(5, 2) as u64 {
        let data = noise(GIB, seed + 1);
        let dir = TempDir::new()?;
        let writer = members.mount(dir.path())?;
        let name = format!("f{seed}");
        written.push(write(&dir.path().join(&name), &data)?);
        drop(writer);
        let reader = members.mount(dir.path())?;
        let begun = Instant::now();
        let (mut file, mut block, mut at) = (File::open(dir.path().join(&name))?, vec![0; BLOCK], 0);
        while at < data.len() {
            let count = file.read(&mut block)?;
            ensure!(count > 0 && block[..count] == data[at..at + count], "something else came back");
            at += count;
        }
        read.push(rate(data.len(), begun));
        drop((file, reader));
        pool.block(pool.remove(whimbrel_fuse::ROOT, &name, false))?;
    }
    let row = |row, samples, goal| {
        Row::new(row, "1 GiB, 4 benefactors, one copy", "MB/s", &Samples::new(samples))
            .goal(Goal::AtLeast(goal))
    };
    Ok(vec![row("oab.free", written, 500.0), row("read.cold", read, 400.0)])
}

/// A file system that takes everything and keeps nothing.
struct Null;

impl FileSystem for Null {
    fn lookup(&self, _caller: Caller, _parent: u64, _name: &OsStr) -> whimbrel_fuse::Result<Entry> {
        Err(Errno::ENOENT)
    }

    fn getattr(
        &self,
        _caller: Caller,
        inode: u64,
        _handle: Option<u64>,
    ) -> whimbrel_fuse::Result<(Attributes, Duration)> {
        let kind = if inode == whimbrel_fuse::ROOT { FileKind::Directory } else { FileKind::File };
        Ok((Attributes::new(inode, kind, 0o755), Duration::from_secs(60)))
    }

    fn create(
        &self,
        _caller: Caller,
        _parent: u64,
        _name: &OsStr,
        _mode: u32,
        _access: Access,
    ) -> whimbrel_fuse::Result<(Entry, Opened)> {
        Ok((Entry::new(Attributes::new(2, FileKind::File, 0o644)), Opened::direct(0)))
    }

    fn read(
        &self,
        _inode: u64,
        _handle: u64,
        _offset: u64,
        _size: u32,
    ) -> whimbrel_fuse::Result<bytes::Bytes> {
        Ok(bytes::Bytes::new())
    }

    fn write(
        &self,
        _caller: Caller,
        _inode: u64,
        _handle: u64,
        _offset: u64,
        data: &[u8],
    ) -> whimbrel_fuse::Result<u32> {
        Ok(data.len() as u32)
    }

    fn readdir(
        &self,
        _inode: u64,
        _handle: u64,
        _offset: u64,
        _add: &mut dyn FnMut(DirEntry) -> bool,
    ) -> whimbrel_fuse::Result<()> {
        Ok(())
    }
}

/// What FUSE itself costs: table 1 of the paper.
pub(crate) fn null(context: &Context) -> Result<Vec<Row>> {
    let (dir, data) = (TempDir::new()?, noise(GIB, 1));
    let _mounted = Mounted::new(Null, dir.path(), &MountOptions::new("null", "null"))?;
    let once = |_| write(&dir.path().join("f"), &data);
    let rates: Vec<f64> = (0..context.times(10, 3)).map(once).collect::<Result<_>>()?;
    let row = Row::new("fuse.null", "1 GiB, 1 MiB at once", "MB/s", &Samples::new(rates));
    Ok(vec![row.goal(Goal::AtLeast(2500.0))])
}

/// Cutting and hashing on one core, and what each way finds in a later image of the same guest.
pub(crate) fn cutting(context: &Context) -> Result<Vec<Row>> {
    let (first, later) = images::pair(context)?;
    let (first, later) = (fs::read(first)?, fs::read(later)?);
    let ways: [(&'static str, &str, Cutting, f64); 6] = [
        ("fsch", "1 MiB", Cutting::Fixed { size: 1 << 20 }, 4000.0),
        ("fsch", "256 KiB", Cutting::Fixed { size: 256 << 10 }, 4000.0),
        ("cbch", "FastCDC, 256 KiB on average", Cutting::Content { average: 256 << 10 }, 1500.0),
        ("cbch", "m=20 k=14 p=20, the paper's", Cutting::Window { window: 20, bits: 14, advance: 20 }, 0.0),
        (
            "cbch",
            "m=20 k=14 p=1, the paper's overlap",
            Cutting::Window { window: 20, bits: 14, advance: 1 },
            0.0,
        ),
        ("cbch", "pages", Cutting::Pages { average: 1 }, 0.0),
    ];
    let mut rows = Vec::new();
    for (name, case, way, goal) in ways {
        let known: std::collections::HashSet<Digest> =
            digests(way, &first).into_iter().map(|(d, _)| d).collect();
        let mut rates = Vec::new();
        let mut found = 0;
        for _ in 0..context.times(5, 2) {
            let begun = Instant::now();
            let chunks = digests(way, &later);
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

fn digests(way: Cutting, mut data: &[u8]) -> Vec<(Digest, usize)> {
    let mut out = Vec::with_capacity(data.len() / PAGE_SIZE);
    while !data.is_empty() {
        let (chunk, rest) = data.split_at(way.cut(data));
        out.push((Digest::of(chunk), chunk.len()));
        data = rest;
    }
    out
}

/// Bytes kept of two versions of an image, beside restic and borg on the same files.
pub(crate) fn saved(context: &Context) -> Result<Vec<Row>> {
    let (first, later) = images::pair(context)?;
    let mut rows = Vec::new();
    for (case, cutting) in [("content", Cutting::default()), ("pages", Cutting::Pages { average: 1 })] {
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
fn kept(cutting: Cutting, versions: [&Path; 2]) -> Result<f64> {
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
