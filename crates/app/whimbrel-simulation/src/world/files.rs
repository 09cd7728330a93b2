//! Descriptors of the program under test, and its calls on files.

use super::{
    World, baton,
    calls::{enter, enter_disk},
    disk::{DiskNode, Errno, File, ROOT},
    faults::DiskCall,
    hosts::HostId,
    me,
    schedule::{ProcessId, Wait},
    with,
};
use std::collections::BTreeMap;

pub(crate) type Inode = u64;

/// First simulated descriptor: those below are real.
pub(crate) const FIRST: i32 = 10_000;
/// Folder that the disk of host N is seen at, as `PREFIX` and N.
const PREFIX: &str = "/sim/h";

/// Cost in nanoseconds of a call that reads, changes names, and syncs.
const READ: u64 = 2_000;
const CHANGE: u64 = 5_000;
const SYNC: u64 = 1_500_000;

/// An open file, which several descriptors may share.
#[derive(Debug, Clone, Copy)]
struct OpenFile {
    host: HostId,
    inode: Inode,
    at: u64,
    appends: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    /// Process and open file of each descriptor.
    all: BTreeMap<i32, (ProcessId, u64)>,
    open: BTreeMap<u64, OpenFile>,
    next: u64,
}

impl Descriptors {
    fn open_file(&self, fd: i32) -> Result<OpenFile, Errno> {
        let (_, id) = self.all.get(&fd).ok_or(libc::EBADF)?;
        self.open.get(id).copied().ok_or(libc::EBADF)
    }

    fn seek(&mut self, fd: i32, at: u64) {
        let open = self.all.get(&fd).and_then(|(_, id)| self.open.get_mut(id));
        open.into_iter().for_each(|open| open.at = at);
    }

    fn free(&self) -> i32 {
        (FIRST..).find(|fd| !self.all.contains_key(fd)).unwrap_or(i32::MAX)
    }
}

/// A file or folder that a path means.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    host: HostId,
    from: Inode,
    path: String,
}

/// The simulated file that a path means; none if it is a real one.
pub(crate) fn resolve(dirfd: i32, path: &str) -> Option<Place> {
    if let Some(rest) = path.strip_prefix(PREFIX) {
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        return Some(Place { host: host.parse().ok()?, from: ROOT, path: path.to_owned() });
    }
    if dirfd < FIRST || path.starts_with('/') {
        return None;
    }
    let open = with(|world| world.descriptors.open_file(dirfd)).ok()?;
    Some(Place { host: open.host, from: open.inode, path: path.to_owned() })
}

/// A call on a place of a disk, whose path a trace shows.
fn enter_at(place: &Place, kind: DiskCall, call: &'static str, detail: u64, cost: u64) -> Result<(), Errno> {
    with(|world| world.story.path(&place.path));
    enter_disk(place.host, kind, call, detail, cost)
}

pub(crate) fn open(place: &Place, flags: i32) -> Result<i32, Errno> {
    let creates = flags & libc::O_CREAT != 0;
    let kind = if creates { DiskCall::Change } else { DiskCall::Read };
    enter_at(place, kind, "open", flags as u64, READ)?;
    with(|world| {
        if world.faults.refuses_descriptor() {
            world.log("no descriptor is free");
            return Err(libc::EMFILE);
        }
        let disk = &mut world.hosts[place.host].disk;
        let inode = match disk.look_up(place.from, &place.path) {
            Ok(_) if creates && flags & libc::O_EXCL != 0 => return Err(libc::EEXIST),
            Err(libc::ENOENT) if creates && disk.used >= disk.capacity => return Err(libc::ENOSPC),
            Err(libc::ENOENT) if creates => {
                disk.create(place.from, &place.path, DiskNode::File(File::default()))?
            }
            found => found?,
        };
        let is_folder = matches!(disk.node(inode)?, DiskNode::Folder(_));
        if flags & libc::O_DIRECTORY != 0 && !is_folder {
            return Err(libc::ENOTDIR);
        }
        if flags & libc::O_TRUNC != 0 {
            disk.truncate(inode, 0)?;
        }
        Ok(world.new_descriptor(place.host, inode, flags & libc::O_APPEND != 0))
    })
}

impl World {
    fn new_descriptor(&mut self, host: HostId, inode: Inode, appends: bool) -> i32 {
        let process = self.process(me());
        let files = &mut self.descriptors;
        let (fd, id) = (files.free(), files.next);
        files.next += 1;
        files.open.insert(id, OpenFile { host, inode, at: 0, appends });
        files.all.insert(fd, (process, id));
        fd
    }

    fn close_descriptor(&mut self, fd: i32) {
        let Some((_, id)) = self.descriptors.all.remove(&fd) else { return };
        if self.descriptors.all.values().any(|(_, other)| *other == id) {
            return;
        }
        let Some(open) = self.descriptors.open.remove(&id) else { return };
        if let Ok(file) = self.hosts[open.host].disk.file(open.inode) {
            file.locks.retain(|(holder, _)| *holder != id);
            self.schedule.wake_all(Wait::Lock(open.host, open.inode));
        }
    }

    pub(crate) fn close_all(&mut self, process: ProcessId) {
        let of = |(_, (owner, _)): &(&i32, &(ProcessId, u64))| *owner == process;
        let fds: Vec<i32> = self.descriptors.all.iter().filter(of).map(|(fd, _)| *fd).collect();
        fds.into_iter().for_each(|fd| self.close_descriptor(fd));
    }
}

pub(crate) fn close(fd: i32) {
    enter("close", fd as u64);
    with(|world| world.close_descriptor(fd));
}

pub(crate) fn duplicate(fd: i32) -> Result<i32, Errno> {
    with(|world| {
        let (process, id) = *world.descriptors.all.get(&fd).ok_or(libc::EBADF)?;
        let new = world.descriptors.free();
        world.descriptors.all.insert(new, (process, id));
        Ok(new)
    })
}

fn open_file(fd: i32) -> Result<OpenFile, Errno> {
    with(|world| world.descriptors.open_file(fd))
}

/// Reads at a position, or where the last read ended.
pub(crate) fn read(fd: i32, out: &mut [u8], at: Option<u64>) -> Result<usize, Errno> {
    let open = open_file(fd)?;
    enter_disk(open.host, DiskCall::Read, "read", out.len() as u64, READ)?;
    with(|world| {
        let from = at.unwrap_or(open.at);
        let n = world.hosts[open.host].disk.read(open.inode, from, out)?;
        if at.is_none() {
            world.descriptors.seek(fd, from + n as u64);
        }
        Ok(n)
    })
}

/// Writes at a position, or where the last write ended.
pub(crate) fn write(fd: i32, bytes: &[u8], at: Option<u64>) -> Result<usize, Errno> {
    let open = open_file(fd)?;
    let cost = 3_000 + bytes.len() as u64 / 4;
    enter_disk(open.host, DiskCall::Change, "write", bytes.len() as u64, cost)?;
    with(|world| {
        let disk = &mut world.hosts[open.host].disk;
        let end = if open.appends { disk.size(open.inode) } else { open.at };
        let from = at.unwrap_or(end);
        let n = disk.write(open.inode, from, bytes)?;
        if at.is_none() {
            world.descriptors.seek(fd, from + n as u64);
        }
        Ok(n)
    })
}

pub(crate) fn sync(fd: i32) -> Result<(), Errno> {
    let open = open_file(fd)?;
    let synced = enter_disk(open.host, DiskCall::Sync, "sync", open.inode, SYNC);
    with(|world| {
        let disk = &mut world.hosts[open.host].disk;
        if synced.is_err() {
            disk.fail_sync(open.inode);
        }
        synced.and_then(|()| disk.sync(open.inode))
    })
}

pub(crate) fn truncate(fd: i32, length: u64) -> Result<(), Errno> {
    let open = open_file(fd)?;
    enter_disk(open.host, DiskCall::Change, "truncate", length, CHANGE)?;
    with(|world| world.hosts[open.host].disk.truncate(open.inode, length))
}

pub(crate) fn seek(fd: i32, offset: i64, whence: i32) -> Result<i64, Errno> {
    with(|world| {
        let open = world.descriptors.open_file(fd)?;
        let base = match whence {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => open.at,
            _ => world.hosts[open.host].disk.size(open.inode),
        };
        let at = (base as i64).checked_add(offset).filter(|at| *at >= 0).ok_or(libc::EINVAL)?;
        world.descriptors.seek(fd, at as u64);
        Ok(at)
    })
}

/// Inode, size and whether it is a folder.
pub(crate) fn status(place: &Place) -> Result<(Inode, u64, bool), Errno> {
    enter_at(place, DiskCall::Read, "status", 0, READ)?;
    with(|world| {
        let disk = &world.hosts[place.host].disk;
        let inode = disk.look_up(place.from, &place.path)?;
        Ok((inode, disk.size(inode), matches!(disk.node(inode)?, DiskNode::Folder(_))))
    })
}

pub(crate) fn rename(from: &Place, to: &Place) -> Result<(), Errno> {
    enter_at(to, DiskCall::Change, "rename", 0, CHANGE)?;
    if from.host != to.host || from.from != to.from {
        return Err(libc::EXDEV);
    }
    with(|world| world.hosts[from.host].disk.rename(from.from, &from.path, &to.path))
}

pub(crate) fn remove(place: &Place) -> Result<(), Errno> {
    enter_at(place, DiskCall::Change, "remove", 0, CHANGE)?;
    with(|world| world.hosts[place.host].disk.remove(place.from, &place.path))
}

pub(crate) fn make_folder(place: &Place) -> Result<(), Errno> {
    enter_at(place, DiskCall::Change, "mkdir", 0, CHANGE)?;
    with(|world| {
        let node = DiskNode::Folder(Default::default());
        world.hosts[place.host].disk.create(place.from, &place.path, node).map(drop)
    })
}

/// Entries of an open folder, in an order that the seed decides.
pub(crate) fn list(fd: i32) -> Result<Vec<(String, Inode, bool)>, Errno> {
    let open = open_file(fd)?;
    enter_disk(open.host, DiskCall::Read, "list", open.inode, READ)?;
    with(|world| {
        let mut entries = world.hosts[open.host].disk.list(open.inode)?;
        for at in (1..entries.len()).rev() {
            entries.swap(at, world.entropy.below(at as u64 + 1) as usize);
        }
        Ok(entries)
    })
}

pub(crate) fn lock(fd: i32, operation: i32) -> Result<(), Errno> {
    enter("lock", operation as u64);
    let (host, inode, id) = with(|world| {
        let open = world.descriptors.open_file(fd)?;
        let id = world.descriptors.all[&fd].1;
        world.hosts[open.host].disk.file(open.inode)?.locks.retain(|(holder, _)| *holder != id);
        world.schedule.wake_all(Wait::Lock(open.host, open.inode));
        Ok::<_, Errno>((open.host, open.inode, id))
    })?;
    let exclusive = operation & libc::LOCK_EX != 0;
    let unlocks = operation & libc::LOCK_UN != 0;
    loop {
        let locked = unlocks || take_lock(host, inode, id, exclusive)?;
        if locked {
            break;
        }
        if operation & libc::LOCK_NB != 0 {
            return Err(libc::EWOULDBLOCK);
        }
        baton::wait(Wait::Lock(host, inode), None);
    }
    baton::point();
    Ok(())
}

/// Takes the lock on a file, if it is free. Whether it was.
fn take_lock(host: HostId, inode: Inode, holder: u64, exclusive: bool) -> Result<bool, Errno> {
    with(|world| {
        let file = world.hosts[host].disk.file(inode)?;
        let is_free = file.locks.iter().all(|(_, other)| !other && !exclusive);
        if is_free {
            file.locks.push((holder, exclusive));
        }
        Ok(is_free)
    })
}

/// Copies the bytes of a file from an offset on; those past its end stay as they are.
pub(crate) fn copy_out(fd: i32, offset: u64, out: &mut [u8]) -> Result<(), Errno> {
    enter("map", out.len() as u64);
    with(|world| {
        let open = world.descriptors.open_file(fd)?;
        world.hosts[open.host].disk.read(open.inode, offset, out).map(drop)
    })
}
