//! `fuse.null`, `oab.*`, `read.*`: how fast a program writes to a pool and reads it back.

use super::{BLOCK, Context, GIB, Members, noise, rate, write};
use crate::harness::{Goal, Row, Samples};
use anyhow::{Result, ensure};
use std::{
    ffi::OsStr,
    fs::File,
    io::Read,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_fuse::{
    Access, Attributes, Caller, DirEntry, Entry, Errno, FileKind, FileSystem, MountOptions, Mounted, Opened,
};
use whimbrel_pool::policy::Policy;

/// Application bandwidth of a write of new data, and of reading it back through a mount that has nothing
/// cached: with the default policy, and with one copy.
pub(crate) fn bandwidth(context: &Context) -> Result<Vec<Row>> {
    let default = there_and_back(context, Policy::default())?;
    let one = there_and_back(context, Policy { copies: 1, ..Policy::default() })?;
    let row = |row, case: &str, samples: &Samples, goal| {
        let case = format!("1 GiB, 4 benefactors, {case}");
        Row::new(row, case, "MB/s", samples).goal(Goal::AtLeast(goal))
    };
    Ok(vec![
        row("oab.default", "default policy (2 copies)", &default[0], 300.0),
        row("read.default", "default policy (2 copies)", &default[1], 700.0),
        row("oab.one", "one copy", &one[0], 1000.0),
        row("read.one", "one copy", &one[1], 1200.0),
    ])
}

/// Megabytes a second of writes until `close` returns, and of reads.
fn there_and_back(context: &Context, policy: Policy) -> Result<[Samples; 2]> {
    let members = Members::start(4)?;
    let pool = members.pool()?;
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
    Ok([Samples::new(written), Samples::new(read)])
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
