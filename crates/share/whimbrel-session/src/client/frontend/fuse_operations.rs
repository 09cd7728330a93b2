//! FUSE operations: the file system calls of the kernel, each a line or two over the session.

use crate::client::{
    content::file_content::FileHandle,
    namespace::{
        directory_cache::{errno_of_path_error, kernel_kind},
        eviction::NamesGuard,
        inodes::{InodeTable, NameLookup},
    },
    session::{Core, Session},
};
use crate::proto::{AttrChange, DeviceNumber, EntryKind, Name, Time, XattrAction};
use bytes::Bytes;
use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use whimbrel_core::lock;
use whimbrel_fuse::{
    Access, Attributes, Caller, DirEntry, Entry, Errno, FileKind, FileLock, FileSystem, Opened, Question,
    Result, SetAttributes, SetTime, StatFs,
};

/// `RENAME_NOREPLACE` of renameat2(2).
const NO_REPLACE: u32 = 1;
/// `SEEK_DATA` of lseek(2).
const SEEK_DATA: i32 = 3;
/// `SEEK_HOLE` of lseek(2).
const SEEK_HOLE: i32 = 4;

type Listing = Arc<Vec<(Name, u64, FileKind)>>;

/// A session as a file system.
pub struct FuseOperations {
    core: Arc<Core>,
    next: AtomicU64,
    files: RwLock<HashMap<u64, Arc<FileHandle>>>,
    dirs: RwLock<HashMap<u64, Listing>>,
}

impl FuseOperations {
    /// The file system of a session.
    pub fn new(session: &Session) -> Self {
        let core = session.core.clone();
        Self { core, next: AtomicU64::new(1), files: RwLock::default(), dirs: RwLock::default() }
    }

    /// The entry of an inode; counts one more reference of the kernel.
    fn entry(&self, _: &NamesGuard<'_>, id: u64) -> Result<Entry> {
        let attributes = self.core.attributes(id)?;
        if let Some(node) = self.core.inodes().get_mut(id) {
            node.refs += 1;
        }
        Ok(Entry::new(attributes).cached(self.core.kernel_ttl(id)))
    }

    fn insert_handle(&self, handle: FileHandle) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.files.write().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(handle));
        number
    }

    fn create_entry(
        &self,
        by: Caller,
        parent: u64,
        name: &OsStr,
        node: EntryKind,
        mode: u32,
    ) -> Result<Entry> {
        let (name, held) = (name_of(name)?, self.core.hold_names());
        let (mode, owner) = ((mode & 0o7777) as u16, (by.uid, by.gid));
        let id = self.core.create(&held, (parent, &name), node, mode, owner)?;
        self.entry(&held, id)
    }
}

fn name_of(name: &OsStr) -> Result<Name> {
    Name::new(name.as_bytes()).map_err(errno_of_path_error)
}

fn time_of(time: SystemTime) -> Time {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => Time { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() },
        Err(before) => {
            let before = before.duration();
            let whole = before.as_secs() as i64;
            match before.subsec_nanos() {
                0 => Time { seconds: -whole, nanos: 0 },
                nanos => Time { seconds: -whole - 1, nanos: 1_000_000_000 - nanos },
            }
        }
    }
}

fn kind_of(nodes: &InodeTable, id: u64) -> FileKind {
    nodes.get(id).map_or(FileKind::File, |node| kernel_kind(&node.attr))
}

fn set_time(time: SetTime) -> Time {
    match time {
        SetTime::Now => Time::now(),
        SetTime::At(time) => time_of(time),
    }
}

impl FileSystem for FuseOperations {
    fn lookup(&self, _: Caller, parent: u64, name: &OsStr) -> Result<Entry> {
        let held = self.core.hold_names();
        let id = self.core.lookup(&held, parent, &name_of(name)?)?;
        self.entry(&held, id)
    }

    fn negative_ttl(&self, parent: u64, name: &OsStr) -> Duration {
        let Ok(name) = name_of(name) else { return Duration::ZERO };
        let ttl = self.core.kernel_ttl(parent);
        // Leased names do not age.
        let known = self.core.ttl().max(ttl);
        self.core.inodes().cache_absent(parent, &name, known).min(ttl)
    }

    fn forget(&self, inode: u64, count: u64) {
        let mut nodes = self.core.inodes();
        if let Some(node) = nodes.get_mut(inode) {
            node.refs = node.refs.saturating_sub(count);
        }
        nodes.remove_unused(inode);
    }

    fn getattr(&self, _: Caller, inode: u64, _: Option<u64>) -> Result<(Attributes, Duration)> {
        self.core.revalidate(inode)?;
        Ok((self.core.attributes(inode)?, self.core.kernel_ttl(inode)))
    }

    fn setattr(
        &self,
        _: Caller,
        inode: u64,
        handle: Option<u64>,
        change: SetAttributes,
    ) -> Result<(Attributes, Duration)> {
        if let Some(size) = change.size {
            self.core.truncate(inode, size)?;
            if handle.is_none() {
                // A truncate by path has no close, so it ends here.
                self.core.close(inode)?;
            }
        }
        let set = AttrChange {
            mode: change.mode.map(|mode| (mode & 0o7777) as u16),
            uid: change.uid,
            gid: change.gid,
            atime: change.accessed.map(set_time),
            mtime: change.modified.map(set_time),
        };
        if set != AttrChange::default() {
            self.core.set_attr(inode, set)?;
        }
        Ok((self.core.attributes(inode)?, self.core.kernel_ttl(inode)))
    }

    fn readlink(&self, inode: u64) -> Result<Vec<u8>> {
        self.core.readlink(inode)
    }

    fn mknod(&self, by: Caller, parent: u64, name: &OsStr, mode: u32, device: u32) -> Result<Entry> {
        let node = match FileKind::of_mode(mode) {
            Some(FileKind::File) => EntryKind::File,
            Some(FileKind::Pipe) => EntryKind::Fifo,
            Some(FileKind::Socket) => EntryKind::Socket,
            Some(FileKind::CharDevice) => EntryKind::Char(DeviceNumber(device)),
            Some(FileKind::BlockDevice) => EntryKind::Block(DeviceNumber(device)),
            _ => return Err(Errno::EPERM),
        };
        self.create_entry(by, parent, name, node, mode)
    }

    fn mkdir(&self, by: Caller, parent: u64, name: &OsStr, mode: u32) -> Result<Entry> {
        self.create_entry(by, parent, name, EntryKind::Dir, mode)
    }

    fn symlink(&self, by: Caller, parent: u64, name: &OsStr, target: &Path) -> Result<Entry> {
        self.create_entry(by, parent, name, EntryKind::Symlink(target.as_os_str().as_bytes().to_vec()), 0o777)
    }

    fn unlink(&self, _: Caller, parent: u64, name: &OsStr) -> Result<()> {
        self.core.remove(parent, &name_of(name)?, false)
    }

    fn rmdir(&self, _: Caller, parent: u64, name: &OsStr) -> Result<()> {
        self.core.remove(parent, &name_of(name)?, true)
    }

    fn rename(&self, _: Caller, from: (u64, &OsStr), to: (u64, &OsStr), flags: u32) -> Result<()> {
        if flags & !NO_REPLACE != 0 {
            return Err(Errno::EINVAL);
        }
        let names = (name_of(from.1)?, name_of(to.1)?);
        self.core.rename((from.0, &names.0), (to.0, &names.1), flags & NO_REPLACE != 0)
    }

    fn link(&self, _: Caller, inode: u64, parent: u64, name: &OsStr) -> Result<Entry> {
        let held = self.core.hold_names();
        self.core.link(inode, parent, &name_of(name)?)?;
        self.entry(&held, inode)
    }

    fn open(&self, _: Caller, inode: u64, access: Access) -> Result<Opened> {
        let (opened, handle) = self.core.open(inode, access)?;
        Ok(Opened { handle: self.insert_handle(handle), ..opened })
    }

    fn create(
        &self,
        by: Caller,
        parent: u64,
        name: &OsStr,
        mode: u32,
        access: Access,
    ) -> Result<(Entry, Opened)> {
        let (wanted, held) = (name_of(name)?, self.core.hold_names());
        let (mode, owner) = ((mode & 0o7777) as u16, (by.uid, by.gid));
        let id = match self.core.create(&held, (parent, &wanted), EntryKind::File, mode, owner) {
            // Another program was faster; that matters only with `O_EXCL`.
            Err(Errno::EEXIST) if !access.exclusive() => self.core.lookup(&held, parent, &wanted)?,
            made => made?,
        };
        let entry = self.entry(&held, id)?;
        drop(held);
        let (opened, handle) = self.core.open(id, access)?;
        Ok((entry, Opened { handle: self.insert_handle(handle), ..opened }))
    }

    fn read(&self, inode: u64, handle: u64, offset: u64, size: u32) -> Result<Bytes> {
        let handle = self.files.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned();
        self.core.read(inode, handle.as_deref(), offset, size).map(Bytes::from)
    }

    fn write(&self, _: Caller, inode: u64, _: u64, offset: u64, data: &[u8]) -> Result<u32> {
        self.core.write(inode, offset, data)
    }

    fn flush(&self, _: Caller, inode: u64, _: u64) -> Result<()> {
        self.core.close(inode)
    }

    fn release(&self, inode: u64, handle: u64) -> Result<()> {
        self.files.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
        let owners = lock(&self.core.locks).of_handle(inode, handle);
        self.core.drop_locks(inode, owners);
        self.core.released(inode)
    }

    fn getlk(&self, inode: u64, owner: u64, lock: FileLock) -> Result<FileLock> {
        self.core.test_lock(inode, owner, lock)
    }

    fn setlk(
        &self,
        by: Caller,
        inode: u64,
        handle: u64,
        owner: u64,
        lock: FileLock,
        wait: bool,
    ) -> Result<()> {
        self.core.set_lock(by, inode, (handle, owner), lock, wait)
    }

    fn unlock_all(&self, inode: u64, owner: u64) {
        self.core.drop_locks(inode, vec![owner]);
    }

    fn fsync(&self, inode: u64, _: u64, _: bool) -> Result<()> {
        self.core.fsync(inode)
    }

    fn opendir(&self, _: Caller, inode: u64) -> Result<u64> {
        self.core.evict_names();
        let held = self.core.hold_names();
        self.core.complete_directory(&held, inode)?;
        let mut nodes = self.core.inodes();
        let entries = nodes.dir(inode).ok_or(Errno::ENOTDIR)?.entries.clone();
        let mut listing: Vec<_> =
            entries.into_iter().map(|(name, id)| (name, id, kind_of(&nodes, id))).collect();
        drop(nodes);
        drop(held);
        listing.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.dirs.write().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(listing));
        Ok(number)
    }

    fn readdir(
        &self,
        inode: u64,
        handle: u64,
        offset: u64,
        add: &mut dyn FnMut(DirEntry) -> bool,
    ) -> Result<()> {
        let listing = self.dirs.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned();
        let listing = listing.ok_or(Errno::EBADF)?;
        let dots = [".", ".."].into_iter().map(|dot| (OsStr::new(dot), inode, FileKind::Directory));
        let names = listing.iter().map(|(name, id, kind)| (name.as_os(), *id, *kind));
        for (number, (name, inode, kind)) in dots.chain(names).enumerate().skip(offset as usize) {
            if !add(DirEntry { inode, kind, name: name.to_owned(), next: number as u64 + 1 }) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn releasedir(&self, _: u64, handle: u64) -> Result<()> {
        self.dirs.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
        Ok(())
    }

    fn fsyncdir(&self, inode: u64, _: u64) -> Result<()> {
        self.core.fsync_dir(inode)
    }

    /// Without extended attributes, ENOSYS makes the kernel stop asking: it would look for capabilities to
    /// drop before each write. There are none of those in any case.
    fn getxattr(&self, _: Caller, inode: u64, name: &OsStr) -> Result<Vec<u8>> {
        if !self.core.options.xattrs {
            return Err(Errno::ENOSYS);
        }
        if name.as_bytes().starts_with(b"security.") {
            return Err(Errno::ENODATA);
        }
        self.core.xattr(inode, name.as_bytes())
    }

    fn listxattr(&self, _: Caller, inode: u64) -> Result<Vec<OsString>> {
        if !self.core.options.xattrs {
            return Ok(Vec::new());
        }
        let names = self.core.xattr_names(inode)?;
        let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| OsStr::from_bytes(name).to_owned()).collect())
    }

    fn setxattr(&self, _: Caller, inode: u64, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        if !self.core.options.xattrs {
            return Err(Errno::ENOTSUP);
        }
        let action = XattrAction::Set(name.as_bytes().to_vec(), flags as u32);
        self.core.change_xattr(inode, action, value)
    }

    fn removexattr(&self, _: Caller, inode: u64, name: &OsStr) -> Result<()> {
        if !self.core.options.xattrs {
            return Err(Errno::ENOTSUP);
        }
        self.core.change_xattr(inode, XattrAction::Remove(name.as_bytes().to_vec()), &[])
    }

    fn fallocate(&self, inode: u64, _: u64, offset: u64, length: u64, mode: i32) -> Result<()> {
        self.core.fallocate(inode, offset, length, mode)
    }

    fn lseek(&self, inode: u64, _: u64, offset: i64, whence: i32) -> Result<i64> {
        match whence {
            SEEK_DATA | SEEK_HOLE => self.core.seek_content(inode, offset, whence == SEEK_DATA),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Whether names, attributes or content are in the cache, so that many requests which wait for the server
    /// do not hold this one up.
    fn answers_now(&self, question: Question<'_>) -> bool {
        match question {
            Question::Lookup(parent, name) => name_of(name).is_ok_and(|name| {
                let ttl = self.core.ttl_of(parent);
                self.core.inodes().look_up(parent, &name, ttl) != NameLookup::Ask
            }),
            Question::Attributes(inode) => {
                let ttl = self.core.ttl_of(inode);
                self.core.inodes().get(inode).is_none_or(|node| node.is_fresh(ttl))
            }
            Question::List(inode) => {
                let ttl = self.core.ttl_of(inode);
                self.core.inodes().is_complete(inode, ttl)
            }
            Question::Read(inode, offset, size) => self.core.has_content(inode, offset, size),
            Question::Handle => true,
            Question::Other => false,
        }
    }

    fn copy_file_range(&self, from: (u64, u64), to: (u64, u64), length: u64) -> Result<u32> {
        self.core.copy(from, to, length)
    }

    fn statfs(&self, _: u64) -> Result<StatFs> {
        let room = self.core.free_space()?;
        Ok(StatFs {
            total: room.total.saturating_mul(room.unit),
            free: room.available.saturating_mul(room.unit),
            files: room.files,
            files_free: room.files_free,
            block: 4096,
            name_max: 255,
        })
    }
}
