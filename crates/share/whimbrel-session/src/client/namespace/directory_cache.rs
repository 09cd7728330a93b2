//! Directory cache: lookup, listing and attributes of names, and how long they are cached.
//!
//! One request brings a small directory completely, so that lookups of its other names, and of absent names,
//! are answered here. Large directories are listed in parts, all but the first at once.

use super::{eviction::NamesGuard, id_map::IdKind, inodes::NameLookup};
use crate::client::{
    connection::server_connection::CallFailure,
    session::{Core, errno_of},
};
use crate::proto::{
    Attr, Entry, Kind, List, ListCall, Lookup, LookupCall, Name, PathError, ReadlinkCall, RelPath, Time,
    unpack_entries,
};
use bytes::Bytes;
use std::time::{Duration, Instant};
use whimbrel_fuse::{Attributes, Errno, FileKind, ROOT, Result};

/// Most names of a directory that one lookup brings along.
pub(in crate::client) const MAX_LOOKUP_NAMES: u32 = 2048;
/// Entries in one part of a large directory.
const LIST_PART: u32 = 8192;
/// Most names of a directory that are accepted from a server: some gigabytes here.
const MAX_NAMES: u64 = 16 << 20;
/// Attempts to list a directory that changes here meanwhile.
const TRIES: usize = 8;

pub(in crate::client) fn errno_of_path_error(error: PathError) -> Errno {
    match error {
        PathError::Name => Errno::EINVAL,
        PathError::TooLong => Errno::ENAMETOOLONG,
    }
}

impl Core {
    pub(in crate::client) fn lookup(&self, _: &NamesGuard<'_>, parent: u64, name: &Name) -> Result<u64> {
        for _ in 0..TRIES {
            let ttl = self.ttl_of(parent);
            match self.inodes().look_up(parent, name, ttl) {
                NameLookup::Node(id) => return Ok(id),
                NameLookup::Nothing => return Err(Errno::ENOENT),
                NameLookup::Ask => {}
            }
            self.walk_again();
            self.flush_changes(parent)?;
            let (dir, changes, large) = {
                let mut nodes = self.inodes();
                let path = nodes.path(parent).ok_or(Errno::ESTALE)?;
                let dir = nodes.dir(parent).ok_or(Errno::ENOTDIR)?;
                (path, dir.changes, dir.large)
            };
            let wanted =
                Lookup { dir, name: Some(name.clone()), list: if large { 0 } else { MAX_LOOKUP_NAMES } };
            let asked = Instant::now();
            let (found, packed) =
                self.connection.call::<LookupCall, _>(wanted).map_err(|fail| fail.errno())?;
            let entries = if found.listed { Some(entries_of(&packed)?) } else { None };
            if self.store_lookup(parent, name, changes, (found.attr, entries, asked), large) {
                return match self.inodes().dir(parent).and_then(|dir| dir.entries.get(name).copied()) {
                    Some(id) => Ok(id),
                    None => Err(Errno::ENOENT),
                };
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Stores the server's answer about a name, unless the directory was changed here meanwhile.
    fn store_lookup(
        &self,
        parent: u64,
        name: &Name,
        changes: u64,
        (attr, entries, asked): (Option<Attr>, Option<Vec<Entry>>, Instant),
        large: bool,
    ) -> bool {
        let mut nodes = self.inodes();
        let Some(dir) = nodes.dir(parent) else { return false };
        if dir.changes != changes {
            return false;
        }
        dir.large = large || entries.is_none();
        let updates = match (entries, attr) {
            (Some(entries), _) => nodes.store_listing(parent, entries, asked),
            (None, Some(attr)) => {
                let (id, known) = nodes.adopt(parent, name, attr, asked);
                if known { vec![(id, attr)] } else { Vec::new() }
            }
            (None, None) => {
                if let Some(id) = nodes.unlink(parent, name) {
                    nodes.remove_unused(id);
                }
                Vec::new()
            }
        };
        drop(nodes);
        self.evict_names();
        self.invalidate_kernel_names();
        for (id, attr) in updates {
            self.store_attr(id, attr, asked);
        }
        true
    }

    /// Stores attributes that the server reported when it was asked at this moment. They may lack changes
    /// that were made here, which stay.
    pub(in crate::client) fn store_attr(&self, id: u64, attr: Attr, asked: Instant) {
        let affected = self.is_affected(id);
        let Some(file) = self.inodes().get(id).map(|node| node.file) else { return };
        let record = file.and_then(|file| self.cache.file(file));
        let old = record.as_ref().is_some_and(|record| record.is_newer_than(&attr));
        let foreign = record.as_ref().is_some_and(|record| !old && record.base != attr.version());
        {
            let mut nodes = self.inodes();
            let Some(node) = nodes.get_mut(id) else { return };
            if !affected && node.changed_at.is_none_or(|changed| changed <= asked) {
                nodes.reported(id, asked);
                if let Some(node) = nodes.get_mut(id).filter(|_| !old) {
                    (node.attr, node.ctime) = (attr, None);
                }
            } else if foreign {
                // Somebody else wrote the content; the other attributes may be those before our change.
                let Attr { size, blocks, mtime, ctime, .. } = attr;
                node.attr = Attr { size, blocks, mtime, ctime, ..node.attr };
            }
        }
        if let (Some(file), Some(record)) = (file, record)
            && foreign
            && !record.dirty
        {
            self.adopt_version(file, &attr);
            self.invalidate_kernel_pages(id);
        }
    }

    /// Adopts the attributes of a file whose content this client has changed on the server, which was asked
    /// at this moment. Mode and owner may lack changes that were made here since, or that are unsent, which
    /// stay.
    pub(in crate::client) fn adopt_written(&self, id: u64, attr: Attr, asked: Instant) {
        let affected = self.is_affected(id);
        let mut nodes = self.inodes();
        let Some(node) = nodes.get_mut(id) else { return };
        let Attr { size, blocks, mtime, ctime, .. } = attr;
        node.attr = match affected || node.changed_at.is_some_and(|changed| changed > asked) {
            true => Attr { size, blocks, mtime, ctime, ..node.attr },
            false => Attr { links: node.attr.links, ..attr },
        };
    }

    /// Requests the attributes of an inode again if they are old.
    pub(in crate::client) fn revalidate(&self, id: u64) -> Result<()> {
        let ttl = self.ttl_of(id);
        if self.inodes().get(id).ok_or(Errno::ESTALE)?.is_fresh(ttl) {
            return Ok(());
        }
        self.walk_again();
        self.flush_changes(id)?;
        let Some(path) = self.inodes().path(id) else { return Ok(()) };
        if self.reread(id) {
            return Ok(());
        }
        let asked = Instant::now();
        let found = self.connection.call::<LookupCall, _>(Lookup { dir: path, name: None, list: 0 });
        let attr = match found {
            Ok((found, _)) => found.attr,
            // Old attributes are better than none while the server cannot be reached.
            Err(CallFailure::Unreachable) => return Ok(()),
            Err(fail) => return Err(fail.errno()),
        };
        let same = |attr: &Attr| self.inodes().get(id).is_some_and(|node| node.attr.ident == attr.ident);
        match attr.filter(same) {
            Some(attr) => {
                self.store_attr(id, attr, asked);
                Ok(())
            }
            None => {
                // Another file has the name by now, or none: the directory has to be listed again.
                let mut nodes = self.inodes();
                let parents: Vec<u64> = nodes
                    .get(id)
                    .into_iter()
                    .flat_map(|node| node.names.iter().map(|(parent, _)| *parent))
                    .collect();
                for parent in parents {
                    if let Some(dir) = nodes.dir(parent) {
                        dir.listed_at = None;
                    }
                }
                if let Some(node) = nodes.get_mut(id) {
                    node.reported_at =
                        Instant::now().checked_sub(Duration::from_secs(1 << 30)).or(node.reported_at);
                }
                Err(Errno::ESTALE)
            }
        }
    }

    /// The inode that a path leads to.
    pub(in crate::client) fn resolve(&self, held: &NamesGuard<'_>, path: &RelPath) -> Result<u64> {
        let names = path.as_bytes().split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        names
            .map(|name| Name::new(name).map_err(errno_of_path_error))
            .try_fold(ROOT, |at, name| self.lookup(held, at, &name?))
    }

    /// Makes the cached list of a directory's names complete.
    pub(in crate::client) fn complete_directory(&self, _: &NamesGuard<'_>, id: u64) -> Result<()> {
        for _ in 0..TRIES {
            let ttl = self.ttl_of(id);
            if self.inodes().is_complete(id, ttl) {
                return Ok(());
            }
            self.walk_again();
            self.flush_changes(id)?;
            let (path, changes) = {
                let mut nodes = self.inodes();
                let path = nodes.path(id).ok_or(Errno::ESTALE)?;
                (path, nodes.dir(id).ok_or(Errno::ENOTDIR)?.changes)
            };
            let asked = Instant::now();
            let entries = match self.listing(&path) {
                Ok(entries) => entries,
                Err(fail) if fail.is(crate::proto::code::STALE) => continue,
                Err(fail) => return Err(fail.errno()),
            };
            let mut nodes = self.inodes();
            let dir = nodes.dir(id).ok_or(Errno::ENOTDIR)?;
            if dir.changes != changes {
                continue;
            }
            dir.large = entries.len() > MAX_LOOKUP_NAMES as usize;
            let updates = nodes.store_listing(id, entries, asked);
            drop(nodes);
            self.evict_names();
            self.invalidate_kernel_names();
            for (id, attr) in updates {
                self.store_attr(id, attr, asked);
            }
            return Ok(());
        }
        Err(Errno::EAGAIN)
    }

    /// All entries of a directory: the first part gives their number, the others are requested at once.
    fn listing(&self, dir: &RelPath) -> std::result::Result<Vec<Entry>, CallFailure> {
        let first = List { dir: dir.clone(), listing: 0, from: 0, count: LIST_PART };
        let (head, packed) = self.connection.call::<ListCall, _>(first)?;
        let mut entries = unpack_entries(&packed).map_err(|_| CallFailure::InvalidReply)?;
        if head.total > MAX_NAMES || (head.next == 0 && head.total > 0) {
            return Err(CallFailure::InvalidReply);
        }
        let parts: Vec<List> = (head.next..head.total)
            .step_by(LIST_PART as usize)
            .map(|from| List { dir: dir.clone(), listing: head.listing, from, count: LIST_PART })
            .collect();
        let asked: Vec<_> = parts
            .into_iter()
            .map(|part| {
                let link = self.connection.clone();
                self.connection
                    .runtime()
                    .spawn(async move { link.send::<ListCall, _>(part, Bytes::new(), None).await.0 })
            })
            .collect();
        for part in asked {
            let (_, packed) =
                self.connection.runtime().block_on(part).map_err(|_| CallFailure::InvalidReply)??;
            entries.extend(unpack_entries(&packed).map_err(|_| CallFailure::InvalidReply)?);
        }
        Ok(entries)
    }

    pub(in crate::client) fn readlink(&self, id: u64) -> Result<Vec<u8>> {
        let path = {
            let nodes = self.inodes();
            if let Some(target) = nodes.get(id).and_then(|node| node.target.clone()) {
                return Ok(target);
            }
            nodes.path(id).ok_or(Errno::ESTALE)?
        };
        let (target, _) = self.connection.call::<ReadlinkCall, _>(path).map_err(|fail| fail.errno())?;
        if let Some(node) = self.inodes().get_mut(id) {
            node.target = Some(target.clone());
        }
        Ok(target)
    }

    /// Attributes of an inode for the kernel.
    pub(in crate::client) fn attributes(&self, id: u64) -> Result<Attributes> {
        let (attr, ctime, file, mtime, atime, named) = {
            let nodes = self.inodes();
            let node = nodes.get(id).ok_or(Errno::ESTALE)?;
            (node.attr, node.ctime, node.file, node.mtime, node.atime, id == ROOT || !node.names.is_empty())
        };
        let mut out = Attributes::new(id, kernel_kind(&attr), attr.mode);
        let (mut modified, mut size) = (attr.mtime, attr.size);
        let written = file.and_then(|file| self.cache.file(file)).filter(|record| record.dirty);
        let dirty = written.is_some();
        if let Some(record) = written {
            size = record.size;
            modified = record.mtime.or(mtime).unwrap_or(modified);
        }
        out.size = size;
        out.allocated = attr.blocks * 512;
        if let Some((number, _)) = attr.device() {
            (out.device, out.size, out.allocated) = (number.0, 0, 0);
        }
        out.links = if named { attr.links.max(1) } else { attr.links };
        (out.uid, out.gid) = self.options.id_map.to_local((attr.uid, attr.gid), self.server_ids);
        out.modified = system_time(modified);
        out.accessed = atime.map_or(out.modified, system_time);
        out.changed = system_time(ctime.map_or(attr.ctime, |here| here.max(attr.ctime)));
        if dirty {
            out.changed = out.changed.max(out.modified);
        }
        Ok(out)
    }

    /// Maps a local user and group to the server's numbers.
    pub(in crate::client) fn server_owner(
        &self,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<(Option<u32>, Option<u32>)> {
        let there = |who, number: Option<u32>| {
            let there =
                |number| self.options.id_map.to_server(who, number, self.server_ids).ok_or(Errno::EPERM);
            number.map(there).transpose()
        };
        Ok((there(IdKind::User, uid)?, there(IdKind::Group, gid)?))
    }

    /// Drops cached names, attributes and unmodified data.
    pub(in crate::client) fn invalidate(&self) -> Result<()> {
        self.flush_all(false)?;
        self.inodes().expire_all();
        self.invalidate_kernel_names();
        for (file, record) in self.cache.files() {
            if !record.dirty {
                self.cache.invalidate(file).map_err(errno_of)?;
            }
        }
        let ids = self.inodes().ids();
        for id in ids.into_iter().filter(|id| *id != ROOT) {
            let open = self.inodes().get(id).is_some_and(|node| node.file.is_some());
            if open {
                self.invalidate_kernel_pages(id);
            }
        }
        Ok(())
    }
}

/// Type of a file for the kernel.
pub(in crate::client) fn kernel_kind(attr: &Attr) -> FileKind {
    match attr.kind {
        Kind::File => FileKind::File,
        Kind::Dir => FileKind::Directory,
        Kind::Symlink => FileKind::Link,
        Kind::Fifo => FileKind::Pipe,
        Kind::Socket => FileKind::Socket,
        Kind::Device if attr.device().is_some_and(|(_, block)| block) => FileKind::BlockDevice,
        Kind::Device => FileKind::CharDevice,
    }
}

fn entries_of(packed: &[u8]) -> Result<Vec<Entry>> {
    unpack_entries(packed).map_err(|_| Errno::EIO)
}

fn system_time(time: Time) -> std::time::SystemTime {
    let nanos = Duration::from_nanos(u64::from(time.nanos));
    let whole = Duration::from_secs(time.seconds.unsigned_abs());
    let epoch = std::time::UNIX_EPOCH;
    let seconds = if time.seconds < 0 { epoch.checked_sub(whole) } else { epoch.checked_add(whole) };
    seconds.map_or(epoch, |at| at + nanos)
}
