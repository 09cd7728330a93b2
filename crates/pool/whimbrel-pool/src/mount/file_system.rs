//! The pool as a FUSE file system: one method for each call of the kernel.

use super::{
    attributes::{TTL, nanoseconds, of_folder, of_node, of_version},
    errno_of,
    file_sender::FileSender,
    inode::Inode,
    writer::{CloseKind, OpenWrite, close_kind},
};
use crate::{
    client::{Pool, ReadFile, WriteFile, WriteMode, WriteOptions},
    protocol::{MAX_NAME, NewNode, Node, NodeChange, NodeId, PoolStatus, VersionInfo},
};
use bytes::Bytes;
use std::{
    collections::{HashMap, hash_map::Entry::Vacant},
    ffi::{OsStr, OsString},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};
use whimbrel_core::lock;
use whimbrel_fuse::{
    Access, Attributes, Caller, DirEntry, Entry, Errno, FileKind, FileSystem, Opened, Result, SetAttributes,
    StatFs,
};

const VERSIONS: &str = ".versions";
/// Time for which a `statfs` result is reused.
const STATUS_AGE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub(super) enum Handle {
    Read(Arc<ReadFile>),
    Write(Arc<OpenWrite>),
    Folder(Arc<Vec<DirEntry>>),
}

#[derive(Debug, Default)]
pub(super) struct State {
    handles: HashMap<u64, Handle>,
    /// Keyed by inode, of the node or of the new file.
    pub(super) writers: HashMap<u64, Arc<OpenWrite>>,
    versions: HashMap<u64, (VersionInfo, Node)>,
    /// Names under which the kernel knows files, if there is a secret.
    pub(super) names: HashMap<NodeId, String>,
    status: Option<(Instant, PoolStatus)>,
}

impl State {
    /// Removes an open write without descriptors; it stays if another one joined meanwhile.
    pub(super) fn forget(&mut self, inode: u64, writing: &Arc<OpenWrite>) {
        let over = writing.opens.load(Ordering::Relaxed) == 0;
        self.writers.retain(|at, other| *at != inode || !over || !Arc::ptr_eq(other, writing));
    }
}

/// The files of a pool.
#[derive(Debug)]
pub struct PoolFiles {
    pub(super) pool: Pool,
    pub(super) options: WriteOptions,
    pub(super) state: Arc<Mutex<State>>,
    next: AtomicU64,
    sender: FileSender,
}

fn name_of(name: &OsStr) -> Result<&str> {
    match name.to_str() {
        Some(name) if name.len() <= MAX_NAME => Ok(name),
        Some(_) => Err(Errno::ENAMETOOLONG),
        None => Err(Errno::EINVAL),
    }
}

fn folder_of(inode: u64) -> Result<u64> {
    match Inode::of(inode) {
        Inode::Node(id) => Ok(id),
        // Old versions are read-only.
        _ => Err(Errno::EROFS),
    }
}

impl PoolFiles {
    /// The files of `pool`, written with `options`.
    pub fn new(pool: Pool, options: WriteOptions) -> Self {
        let state = Arc::new(Mutex::default());
        let sender = FileSender::start(pool.clone(), state.clone());
        Self { pool, options, state, next: AtomicU64::new(1), sender }
    }

    /// Sends the closed files that an earlier mount left in the spool folder, in the background.
    pub(super) fn send_left(&self) {
        self.sender.send_left(&self.options);
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn insert_handle(&self, handle: Handle) -> u64 {
        let number = self.number();
        lock(&self.state).handles.insert(number, handle);
        number
    }

    fn handle(&self, number: u64) -> Result<Handle> {
        lock(&self.state).handles.get(&number).cloned().ok_or(Errno::EBADF)
    }

    fn writer(&self, inode: u64) -> Option<Arc<OpenWrite>> {
        lock(&self.state).writers.get(&inode).cloned()
    }

    fn writing(&self, handle: u64) -> Result<Arc<OpenWrite>> {
        match self.handle(handle)? {
            Handle::Write(writing) => Ok(writing),
            _ => Err(Errno::EBADF),
        }
    }

    /// Attributes of a file being written: those of its node, with the current size.
    fn writing_attributes(&self, inode: u64, writing: &OpenWrite) -> Result<Attributes> {
        let known = writing.file.node().map(|id| self.call(self.pool.node(id)));
        let base = match known {
            Some(Ok(node)) => of_node(&node),
            _ => {
                let (make, now) = (&writing.make, SystemTime::now());
                let new = Attributes::new(inode, FileKind::File, make.mode as u16);
                Attributes { uid: make.uid, gid: make.gid, accessed: now, modified: now, changed: now, ..new }
            }
        };
        let size = writing.file.size();
        let links = if writing.is_unlinked() { 0 } else { 1 };
        Ok(Attributes { inode, size, allocated: size, links, ..base })
    }

    fn attributes(&self, inode: u64) -> Result<(Attributes, Duration)> {
        if let Some(writing) = self.writer(inode) {
            return Ok((self.writing_attributes(inode, &writing)?, Duration::ZERO));
        }
        let attributes = match Inode::of(inode) {
            Inode::Node(id) => of_node(&self.call(self.pool.node(id))?),
            at @ (Inode::Versions(id) | Inode::VersionsOf(id)) => {
                of_folder(at, &self.call(self.pool.node(id))?)
            }
            Inode::Version(id) => {
                let state = lock(&self.state);
                let (version, node) = state.versions.get(&id).ok_or(Errno::ESTALE)?;
                of_version(version, node)
            }
            Inode::New(_) => return Err(Errno::ESTALE),
        };
        Ok((attributes, TTL))
    }

    /// A version in the version folder of a file, by its number.
    fn version(&self, file: u64, name: &str) -> Result<Entry> {
        let node = self.call(self.pool.node(file))?;
        let versions = self.call(self.pool.versions(file))?;
        let version = versions.into_iter().find(|version| version.number.to_string() == name);
        let version = version.ok_or(Errno::ENOENT)?;
        let attributes = of_version(&version, &node);
        lock(&self.state).versions.insert(version.id, (version, node));
        Ok(Entry::new(attributes).cached(TTL))
    }

    fn pending(&self, parent: u64, name: &str) -> Option<(u64, Arc<OpenWrite>)> {
        let state = lock(&self.state);
        let mut new = state.writers.iter().filter(|(inode, _)| matches!(Inode::of(**inode), Inode::New(_)));
        let is_it = |w: &OpenWrite| w.make.parent == parent && w.make.name == name && !w.is_unlinked();
        new.find(|(_, w)| is_it(w) && w.file.node().is_none()).map(|(inode, w)| (*inode, w.clone()))
    }

    /// Opens a file for writing, or joins its open write.
    fn write_handle(&self, inode: u64, node: Node, empty: bool) -> Result<Arc<OpenWrite>> {
        loop {
            if let Some(writing) = self.join(inode) {
                if empty {
                    writing.file.set_size(0).map_err(|error| errno_of(&error))?;
                }
                return Ok(writing);
            }
            let (parent, name) = (node.parent, node.name.clone());
            let make = NewNode { parent, name, folder: false, mode: node.mode, uid: node.uid, gid: node.gid };
            let base = Some(node.clone());
            let opened = WriteFile::open(&self.pool, make.clone(), base, empty, self.options.clone());
            // No lock was held during the call, so another open may have been faster; join it.
            let opened = Arc::new(OpenWrite::new(self.call(opened)?, make));
            if let Vacant(free) = lock(&self.state).writers.entry(inode) {
                free.insert(opened.clone());
                return Ok(opened);
            }
        }
    }

    /// The open write of a file, with one more descriptor.
    fn join(&self, inode: u64) -> Option<Arc<OpenWrite>> {
        let state = lock(&self.state);
        let writing = state.writers.get(&inode)?;
        writing.opens.fetch_add(1, Ordering::Relaxed);
        Some(writing.clone())
    }

    fn release_writer(&self, inode: u64, writing: &Arc<OpenWrite>) {
        if writing.opens.fetch_sub(1, Ordering::Relaxed) == 1 {
            if writing.file.mode() == WriteMode::CompleteLocal {
                return self.sender.send(inode, writing.clone());
            }
            // Commits only what no close has committed; nobody can receive an error any more.
            if writing.file.is_changed() && self.commit(inode, writing).is_err() {
                tracing::warn!(name = writing.make.name, "written data is lost: the commit failed");
            }
            lock(&self.state).forget(inode, writing);
        }
    }

    fn commit(&self, inode: u64, writing: &Arc<OpenWrite>) -> Result<()> {
        if writing.is_unlinked() {
            return Ok(());
        }
        if writing.file.mode() == WriteMode::CompleteLocal && writing.file.close_locally() {
            self.sender.send(inode, writing.clone());
            return Ok(());
        }
        writing.file.commit().map(drop).map_err(|error| errno_of(&error))
    }

    fn entries(&self, inode: u64) -> Result<Vec<DirEntry>> {
        let (here, nodes) = match Inode::of(inode) {
            Inode::Node(folder) | Inode::Versions(folder) => (folder, self.call(self.pool.list(folder))?),
            Inode::VersionsOf(file) => return self.version_entries(inode, file),
            _ => return Err(Errno::ENOTDIR),
        };
        let old = matches!(Inode::of(inode), Inode::Versions(_));
        let parent = self.call(self.pool.node(here))?.parent.max(1);
        let mut entries = dots(inode, if old { here } else { parent });
        for node in nodes.into_iter().filter(|node| !(old && node.folder)) {
            let (at, kind) = match (old, node.folder) {
                (true, _) => (Inode::VersionsOf(node.id), FileKind::Directory),
                (_, true) => (Inode::Node(node.id), FileKind::Directory),
                _ => (Inode::Node(node.id), FileKind::File),
            };
            let next = entries.len() as u64 + 1;
            entries.push(DirEntry { inode: at.number(), kind, name: node.name.into(), next });
        }
        Ok(entries)
    }

    fn version_entries(&self, inode: u64, file: u64) -> Result<Vec<DirEntry>> {
        let folder = self.call(self.pool.node(file))?.parent;
        let mut entries = dots(inode, Inode::Versions(folder).number());
        for version in self.call(self.pool.versions(file))? {
            let (inode, next) = (Inode::Version(version.id).number(), entries.len() as u64 + 1);
            let name = version.number.to_string().into();
            entries.push(DirEntry { inode, kind: FileKind::File, name, next });
        }
        Ok(entries)
    }
}

fn dots(here: u64, parent: u64) -> Vec<DirEntry> {
    let dot =
        |inode, name: &str, next| DirEntry { inode, kind: FileKind::Directory, name: name.into(), next };
    vec![dot(here, ".", 1), dot(parent, "..", 2)]
}

impl FileSystem for PoolFiles {
    fn lookup(&self, _caller: Caller, parent: u64, name: &OsStr) -> Result<Entry> {
        let name = name_of(name)?;
        let folder = match Inode::of(parent) {
            Inode::Node(folder) if name == VERSIONS => {
                let node = self.call(self.pool.node(folder))?;
                return Ok(Entry::new(of_folder(Inode::Versions(folder), &node)).cached(TTL));
            }
            Inode::Node(folder) => folder,
            Inode::Versions(folder) => {
                let node = self.call(self.pool.lookup(folder, name))?;
                let found = Entry::new(of_folder(Inode::VersionsOf(node.id), &node)).cached(TTL);
                return if node.folder { Err(Errno::ENOENT) } else { Ok(found) };
            }
            Inode::VersionsOf(file) => return self.version(file, name),
            _ => return Err(Errno::ENOTDIR),
        };
        if let Some((inode, writing)) = self.pending(folder, name) {
            return Ok(Entry::new(self.writing_attributes(inode, &writing)?));
        }
        let node = self.lookup_node(folder, name)?;
        match self.writer(Inode::Node(node.id).number()) {
            Some(writing) => Ok(Entry::new(self.writing_attributes(node.id, &writing)?)),
            None => Ok(Entry::new(of_node(&node)).cached(TTL)),
        }
    }

    fn forget(&self, inode: u64, _count: u64) {
        match Inode::of(inode) {
            Inode::Version(id) => drop(lock(&self.state).versions.remove(&id)),
            Inode::Node(id) => drop(lock(&self.state).names.remove(&id)),
            _ => {}
        }
    }

    fn getattr(&self, _caller: Caller, inode: u64, handle: Option<u64>) -> Result<(Attributes, Duration)> {
        match handle.map(|handle| self.handle(handle)) {
            Some(Ok(Handle::Write(writing))) => {
                Ok((self.writing_attributes(inode, &writing)?, Duration::ZERO))
            }
            _ => self.attributes(inode),
        }
    }

    fn setattr(
        &self,
        _caller: Caller,
        inode: u64,
        handle: Option<u64>,
        change: SetAttributes,
    ) -> Result<(Attributes, Duration)> {
        let id = match Inode::of(inode) {
            Inode::Node(id) => Some(id),
            Inode::New(_) => self.writer(inode).and_then(|writing| writing.file.node()),
            _ => return Err(Errno::EROFS),
        };
        if let Some(size) = change.size {
            let open = handle.and_then(|handle| self.writing(handle).ok()).or_else(|| self.writer(inode));
            match (open, id) {
                (Some(writing), _) => writing.file.set_size(size).map_err(|error| errno_of(&error))?,
                (None, Some(id)) => {
                    let node = self.call(self.pool.node(id))?;
                    if node.folder {
                        return Err(Errno::EISDIR);
                    }
                    let writing = self.write_handle(inode, node, size == 0)?;
                    let done = writing.file.set_size(size).map_err(|error| errno_of(&error));
                    let done = done.and_then(|()| writing.file.commit().map_err(|error| errno_of(&error)));
                    self.release_writer(inode, &writing);
                    done?;
                }
                (None, None) => return Err(Errno::ESTALE),
            }
        }
        let modified = change.modified.map(|time| nanoseconds(time.or_now(SystemTime::now())));
        let rest = NodeChange { mode: change.mode, uid: change.uid, gid: change.gid, modified };
        if let (Some(id), true) = (id, rest != NodeChange::default()) {
            self.call(self.pool.change(id, rest))?;
        }
        self.getattr(_caller, inode, handle)
    }

    fn mknod(&self, caller: Caller, parent: u64, name: &OsStr, mode: u32, _device: u32) -> Result<Entry> {
        if FileKind::of_mode(mode).is_some_and(|kind| kind != FileKind::File) {
            return Err(Errno::EPERM);
        }
        let (entry, opened) =
            self.create(caller, parent, name, mode, Access { flags: libc::O_WRONLY | libc::O_EXCL })?;
        let writing = self.writing(opened.handle)?;
        let made = writing.file.commit().map_err(|error| errno_of(&error));
        self.release(entry.attributes.inode, opened.handle)?;
        Ok(Entry::new(of_node(&made?.ok_or(Errno::EIO)?)))
    }

    fn mkdir(&self, caller: Caller, parent: u64, name: &OsStr, mode: u32) -> Result<Entry> {
        let (parent, name) = (folder_of(parent)?, name_of(name)?.to_owned());
        let Caller { uid, gid, .. } = caller;
        let make = NewNode { parent, name, folder: true, mode: mode & 0o7777, uid, gid };
        Ok(Entry::new(of_node(&self.call(self.pool.make(&make))?)).cached(TTL))
    }

    fn unlink(&self, _caller: Caller, parent: u64, name: &OsStr) -> Result<()> {
        let (parent, name) = (folder_of(parent)?, name_of(name)?);
        if let Some((_, writing)) = self.pending(parent, name) {
            writing.unlinked.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let node = self.call(self.pool.lookup(parent, name))?;
        self.call(self.pool.remove(parent, name, false))?;
        let state = lock(&self.state);
        let open = state.writers.values().filter(|writing| writing.file.node() == Some(node.id));
        open.for_each(|writing| writing.unlinked.store(true, Ordering::Relaxed));
        Ok(())
    }

    fn rmdir(&self, _caller: Caller, parent: u64, name: &OsStr) -> Result<()> {
        self.call(self.pool.remove(folder_of(parent)?, name_of(name)?, true))
    }

    fn rename(&self, _caller: Caller, from: (u64, &OsStr), to: (u64, &OsStr), flags: u32) -> Result<()> {
        if flags & !libc::RENAME_NOREPLACE != 0 {
            return Err(Errno::EINVAL);
        }
        let from = (folder_of(from.0)?, name_of(from.1)?);
        let to = (folder_of(to.0)?, name_of(to.1)?);
        if self.pending(from.0, from.1).is_some() {
            // A new file is not in the pool until it is closed.
            return Err(Errno::EBUSY);
        }
        let replace = flags & libc::RENAME_NOREPLACE == 0;
        if !self.pool.encrypts() {
            return self.call(self.pool.rename(from, to, replace));
        }
        self.rename_sealed(from, to, replace)
    }

    fn open(&self, _caller: Caller, inode: u64, access: Access) -> Result<Opened> {
        if !access.writes() {
            let opened = match Inode::of(inode) {
                Inode::Node(id) => {
                    let node = self.named(id)?;
                    self.call(self.pool.open_named(node.version, &node.name))
                }
                Inode::Version(id) => self.call(self.pool.open(id)),
                Inode::New(_) => {
                    let node =
                        self.writer(inode).and_then(|writing| writing.file.node()).ok_or(Errno::EBUSY)?;
                    let node = self.call(self.pool.node(node))?;
                    self.call(self.pool.open_named(node.version, &node.name))
                }
                _ => return Err(Errno::EISDIR),
            };
            return Ok(Opened::direct(self.insert_handle(Handle::Read(Arc::new(opened?)))));
        }
        let writing = match Inode::of(inode) {
            Inode::Node(id) => {
                let node = self.named(id)?;
                self.write_handle(inode, node, access.truncates())?
            }
            Inode::New(_) => self.join(inode).ok_or(Errno::ESTALE)?,
            _ => return Err(Errno::EROFS),
        };
        Ok(Opened::direct(self.insert_handle(Handle::Write(writing))))
    }

    fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        mode: u32,
        access: Access,
    ) -> Result<(Entry, Opened)> {
        let (parent, name) = (folder_of(parent)?, name_of(name)?);
        if name == VERSIONS {
            return Err(Errno::EEXIST);
        }
        match self.call(self.pool.lookup(parent, name)) {
            // Another client was faster, or the kernel did not know the file.
            Ok(_) if access.exclusive() => return Err(Errno::EEXIST),
            Ok(node) => {
                let (inode, attributes) = (Inode::Node(node.id).number(), of_node(&node));
                return Ok((Entry::new(attributes), self.open(caller, inode, access)?));
            }
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
        let Caller { uid, gid, .. } = caller;
        let make = NewNode { parent, name: name.to_owned(), folder: false, mode: mode & 0o7777, uid, gid };
        let opened = WriteFile::open(&self.pool, make.clone(), None, true, self.options.clone());
        let writing = Arc::new(OpenWrite::new(self.call(opened)?, make));
        let inode = Inode::New(self.number()).number();
        let entry = Entry::new(self.writing_attributes(inode, &writing)?);
        lock(&self.state).writers.insert(inode, writing.clone());
        Ok((entry, Opened::direct(self.insert_handle(Handle::Write(writing)))))
    }

    fn read(&self, _inode: u64, handle: u64, offset: u64, size: u32) -> Result<Bytes> {
        match self.handle(handle)? {
            Handle::Read(file) => self.call(file.read_at(offset, size as usize)),
            Handle::Write(writing) => {
                writing.file.read_at(offset, size as usize).map_err(|error| errno_of(&error))
            }
            Handle::Folder(_) => Err(Errno::EISDIR),
        }
    }

    fn write(&self, _caller: Caller, _inode: u64, handle: u64, offset: u64, data: &[u8]) -> Result<u32> {
        let writing = self.writing(handle)?;
        writing.file.write_at(offset, data).map_err(|error| errno_of(&error))?;
        Ok(data.len() as u32)
    }

    fn flush(&self, caller: Caller, inode: u64, handle: u64) -> Result<()> {
        let Ok(Handle::Write(writing)) = self.handle(handle) else { return Ok(()) };
        // The kernel passes no process for descriptors that it closes itself.
        let closing = match caller.pid {
            0 => CloseKind::Done,
            pid => close_kind(pid, &writing.make.name),
        };
        match closing {
            CloseKind::Done => self.commit(inode, &writing),
            CloseKind::StillOpen => Ok(()),
            CloseKind::Killed => {
                tracing::info!(name = writing.make.name, "the writer was killed; its data is discarded");
                writing.file.abandon();
                Ok(())
            }
        }
    }

    fn release(&self, inode: u64, handle: u64) -> Result<()> {
        let handle = lock(&self.state).handles.remove(&handle);
        if let Some(Handle::Write(writing)) = handle {
            self.release_writer(inode, &writing);
        }
        Ok(())
    }

    fn fsync(&self, _inode: u64, handle: u64, _data_only: bool) -> Result<()> {
        match self.handle(handle)? {
            Handle::Write(writing) => writing.file.sync().map_err(|error| errno_of(&error)),
            _ => Ok(()),
        }
    }

    fn opendir(&self, _caller: Caller, inode: u64) -> Result<u64> {
        let entries = Arc::new(self.entries(inode)?);
        Ok(self.insert_handle(Handle::Folder(entries)))
    }

    fn readdir(
        &self,
        _inode: u64,
        handle: u64,
        offset: u64,
        add: &mut dyn FnMut(DirEntry) -> bool,
    ) -> Result<()> {
        let Handle::Folder(entries) = self.handle(handle)? else { return Err(Errno::ENOTDIR) };
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        let _ = entries.iter().skip(skip).all(|entry| add(entry.clone()));
        Ok(())
    }

    fn releasedir(&self, _inode: u64, handle: u64) -> Result<()> {
        lock(&self.state).handles.remove(&handle);
        Ok(())
    }

    fn statfs(&self, _inode: u64) -> Result<StatFs> {
        let known = lock(&self.state).status.clone().filter(|(at, _)| at.elapsed() < STATUS_AGE);
        let status = match known {
            Some((_, status)) => status,
            None => {
                let status = self.call(self.pool.status())?;
                lock(&self.state).status = Some((Instant::now(), status.clone()));
                status
            }
        };
        let online = || status.benefactors.iter().filter(|benefactor| benefactor.state == "online");
        let free: u64 = online().map(|benefactor| benefactor.free).sum();
        let used: u64 = online().map(|benefactor| benefactor.used).sum();
        let files = u64::from(u32::MAX);
        let files_free = files - status.files.min(files);
        Ok(StatFs { total: used + free, free, files, files_free, block: 4096, name_max: MAX_NAME as u32 })
    }

    fn setxattr(&self, _caller: Caller, inode: u64, name: &OsStr, value: &[u8], _flags: i32) -> Result<()> {
        self.set_attribute(inode, name, value)
    }

    fn getxattr(&self, _caller: Caller, inode: u64, name: &OsStr) -> Result<Vec<u8>> {
        self.get_attribute(inode, name)
    }

    fn listxattr(&self, _caller: Caller, inode: u64) -> Result<Vec<OsString>> {
        self.list_attributes(inode)
    }

    fn removexattr(&self, _caller: Caller, inode: u64, name: &OsStr) -> Result<()> {
        self.remove_attribute(inode, name)
    }
}
