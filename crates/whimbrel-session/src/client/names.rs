//! Names: look-up, listing, and every change of them.
//!
//! Under write-through a change is made on the server first and here when it was. Under write-back it is made here, with a
//! record in the journal, and on the server later in the same order; for that the whole directory has to be known, so
//! that what the server would refuse is refused now.

use super::{
    link::Fail,
    nodes::Known,
    policy::Policy,
    session::{Core, errno_of},
};
use crate::{
    cache::FileRecord,
    proto::{
        Attr, Entry, Ident, Kind, List, ListCall, Lookup, LookupCall, Name, Op, PathError, ReadlinkCall,
        RelPath, Time, Version, unpack_entries,
    },
};
use bytes::Bytes;
use std::time::{Duration, Instant};
use whimbrel_fuse::{Attributes, Errno, FileKind, ROOT, Result};

/// Names of a directory that come along with the look-up of one.
const SMALL: u32 = 2048;
/// Entries of one part of a large directory; all parts but the first are asked for at once.
const PART: u32 = 8192;
/// How often a directory is listed again that changes here meanwhile.
const TRIES: usize = 8;

pub(super) fn no_name(error: PathError) -> Errno {
    match error {
        PathError::Name => Errno::EINVAL,
        PathError::TooLong => Errno::ENAMETOOLONG,
    }
}

impl Core {
    /// The node of a name.
    pub(super) fn lookup(&self, parent: u64, name: &Name) -> Result<u64> {
        for _ in 0..TRIES {
            match self.nodes().known(parent, name, self.ttl()) {
                Known::Node(id) => return Ok(id),
                Known::Nothing => return Err(Errno::ENOENT),
                Known::Ask => {}
            }
            self.settle_names()?;
            let (dir, changes, large) = {
                let mut nodes = self.nodes();
                let path = nodes.path(parent).ok_or(Errno::ESTALE)?;
                let dir = nodes.dir(parent).ok_or(Errno::ENOTDIR)?;
                (path, dir.changes, dir.large)
            };
            let wanted = Lookup { dir, name: Some(name.clone()), list: if large { 0 } else { SMALL } };
            let (found, packed) = self.link.call::<LookupCall, _>(wanted).map_err(|fail| fail.errno())?;
            let entries = if found.listed { Some(entries_of(&packed)?) } else { None };
            if self.learn(parent, name, changes, found.attr, entries, large) {
                return match self.nodes().dir(parent).and_then(|dir| dir.entries.get(name).copied()) {
                    Some(id) => Ok(id),
                    None => Err(Errno::ENOENT),
                };
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Takes in what the server said of a name, unless the directory was changed here meanwhile.
    fn learn(
        &self,
        parent: u64,
        name: &Name,
        changes: u64,
        attr: Option<Attr>,
        entries: Option<Vec<Entry>>,
        large: bool,
    ) -> bool {
        let mut nodes = self.nodes();
        let Some(dir) = nodes.dir(parent) else { return false };
        if dir.changes != changes {
            return false;
        }
        dir.large = large || entries.is_none();
        let updates = match (entries, attr) {
            (Some(entries), _) => nodes.list(parent, entries),
            (None, Some(attr)) => {
                let (id, known) = nodes.adopt(parent, name, attr);
                if known { vec![(id, attr)] } else { Vec::new() }
            }
            (None, None) => {
                if let Some(id) = nodes.unlink(parent, name) {
                    nodes.reap(id);
                }
                Vec::new()
            }
        };
        drop(nodes);
        for (id, attr) in updates {
            self.seen(id, attr);
        }
        true
    }

    /// The server said what a node is by now.
    pub(super) fn seen(&self, id: u64, attr: Attr) {
        let Some(file) = self.nodes().get(id).map(|node| node.file) else { return };
        let record = file.and_then(|file| self.cache.file(file));
        let old = record.as_ref().is_some_and(|record| record.is_newer_than(&attr));
        if let Some(node) = self.nodes().get_mut(id) {
            node.seen = Some(Instant::now());
            if !old {
                node.attr = attr;
            }
        }
        let (Some(file), Some(record)) = (file, record) else { return };
        if !old && !record.dirty && record.base != attr.version() {
            self.adopt_version(file, &attr);
            self.kernel_forgets(id);
        }
    }

    /// Asks for a node again if what is known of it is old.
    pub(super) fn revalidate(&self, id: u64) -> Result<()> {
        let ttl = self.ttl();
        if self.nodes().get(id).ok_or(Errno::ESTALE)?.is_fresh(ttl) {
            return Ok(());
        }
        self.settle_names()?;
        let Some(path) = self.nodes().path(id) else { return Ok(()) };
        let asked = self.link.call::<LookupCall, _>(Lookup { dir: path, name: None, list: 0 });
        let attr = match asked {
            Ok((found, _)) => found.attr,
            // What is known is better than nothing, for as long as nothing else can be had.
            Err(Fail::Gone) => return Ok(()),
            Err(fail) => return Err(fail.errno()),
        };
        let same = |attr: &Attr| self.nodes().get(id).is_some_and(|node| node.attr.ident == attr.ident);
        match attr.filter(same) {
            Some(attr) => {
                self.seen(id, attr);
                Ok(())
            }
            None => {
                // Another file has the name by now, or none: the directory has to be looked at again.
                let mut nodes = self.nodes();
                let parents: Vec<u64> = nodes
                    .get(id)
                    .into_iter()
                    .flat_map(|node| node.names.iter().map(|(parent, _)| *parent))
                    .collect();
                for parent in parents {
                    if let Some(dir) = nodes.dir(parent) {
                        dir.whole = None;
                    }
                }
                if let Some(node) = nodes.get_mut(id) {
                    node.seen = Instant::now().checked_sub(Duration::from_secs(1 << 30)).or(node.seen);
                }
                Err(Errno::ESTALE)
            }
        }
    }

    /// Has all names of a directory known.
    pub(super) fn whole(&self, id: u64) -> Result<()> {
        for _ in 0..TRIES {
            if self.nodes().is_whole(id, self.ttl()) {
                return Ok(());
            }
            self.settle_names()?;
            let (path, changes) = {
                let mut nodes = self.nodes();
                let path = nodes.path(id).ok_or(Errno::ESTALE)?;
                (path, nodes.dir(id).ok_or(Errno::ENOTDIR)?.changes)
            };
            let entries = match self.listing(&path) {
                Ok(entries) => entries,
                Err(fail) if fail.is(crate::proto::code::STALE) => continue,
                Err(fail) => return Err(fail.errno()),
            };
            let mut nodes = self.nodes();
            let dir = nodes.dir(id).ok_or(Errno::ENOTDIR)?;
            if dir.changes != changes {
                continue;
            }
            dir.large = entries.len() > SMALL as usize;
            let updates = nodes.list(id, entries);
            drop(nodes);
            for (id, attr) in updates {
                self.seen(id, attr);
            }
            return Ok(());
        }
        Err(Errno::EAGAIN)
    }

    /// All entries of a directory: the first part tells how many there are, the others come at once.
    fn listing(&self, dir: &RelPath) -> std::result::Result<Vec<Entry>, Fail> {
        let first = List { dir: dir.clone(), listing: 0, from: 0, count: PART };
        let (head, packed) = self.link.call::<ListCall, _>(first)?;
        let mut entries = unpack_entries(&packed).map_err(|_| Fail::Nonsense)?;
        let parts: Vec<List> = (head.next..head.total)
            .step_by(PART as usize)
            .map(|from| List { dir: dir.clone(), listing: head.listing, from, count: PART })
            .collect();
        let asked: Vec<_> = parts
            .into_iter()
            .map(|part| {
                let link = self.link.clone();
                self.link
                    .runtime()
                    .spawn(async move { link.ask::<ListCall, _>(part, Bytes::new(), None).await.0 })
            })
            .collect();
        for part in asked {
            let (_, packed) = self.link.runtime().block_on(part).map_err(|_| Fail::Nonsense)??;
            entries.extend(unpack_entries(&packed).map_err(|_| Fail::Nonsense)?);
        }
        Ok(entries)
    }

    /// Where a symlink points.
    pub(super) fn readlink(&self, id: u64) -> Result<Vec<u8>> {
        let path = {
            let nodes = self.nodes();
            if let Some(target) = nodes.get(id).and_then(|node| node.target.clone()) {
                return Ok(target);
            }
            nodes.path(id).ok_or(Errno::ESTALE)?
        };
        let (target, _) = self.link.call::<ReadlinkCall, _>(path).map_err(|fail| fail.errno())?;
        if let Some(node) = self.nodes().get_mut(id) {
            node.target = Some(target.clone());
        }
        Ok(target)
    }

    /// What the kernel is told of a node.
    pub(super) fn attributes(&self, id: u64) -> Result<Attributes> {
        let (attr, file, mtime) = {
            let nodes = self.nodes();
            let node = nodes.get(id).ok_or(Errno::ESTALE)?;
            (node.attr, node.file, node.mtime)
        };
        let kind = match attr.kind {
            Kind::File => FileKind::File,
            Kind::Dir => FileKind::Directory,
            Kind::Symlink => FileKind::Link,
            Kind::Fifo => FileKind::Pipe,
            Kind::Socket => FileKind::Socket,
            Kind::Device => FileKind::CharDevice,
        };
        let mut out = Attributes::new(id, kind, attr.mode);
        let (mut modified, mut size) = (attr.mtime, attr.size);
        if let Some(record) = file.and_then(|file| self.cache.file(file)).filter(|record| record.dirty) {
            size = record.size;
            modified = record.mtime.or(mtime).unwrap_or(modified);
        }
        out.size = size;
        out.stored = attr.blocks * 512;
        out.links = attr.links.max(1);
        (out.uid, out.gid) = self.owner_here(attr.uid, attr.gid);
        out.modified = system_time(modified);
        out.accessed = out.modified;
        out.changed = system_time(attr.ctime).max(out.modified);
        Ok(out)
    }

    /// The server's user is the owner of this session; who else there is there is nobody here.
    fn owner_here(&self, uid: u32, gid: u32) -> (u32, u32) {
        const NOBODY: u32 = 65534;
        let Some(owner) = self.options.owner else { return (uid, gid) };
        let uid = if uid == self.server_ids.0 { owner.0 } else { NOBODY };
        (uid, if gid == self.server_ids.1 { owner.1 } else { NOBODY })
    }

    /// The number there of a user or group here.
    pub(super) fn owner_there(
        &self,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<(Option<u32>, Option<u32>)> {
        let Some(owner) = self.options.owner else { return Ok((uid, gid)) };
        let same = |wanted: Option<u32>, own: u32| wanted.is_none_or(|wanted| wanted == own);
        if !same(uid, owner.0) || !same(gid, owner.1) {
            return Err(Errno::EPERM);
        }
        Ok((uid.map(|_| self.server_ids.0), gid.map(|_| self.server_ids.1)))
    }

    /// A new file, directory or symlink.
    pub(super) fn create(
        &self,
        parent: u64,
        name: &Name,
        kind: Kind,
        mode: u16,
        target: Option<Vec<u8>>,
    ) -> Result<u64> {
        let path = self.nodes().path_of(parent, name).map_err(no_name)?;
        let stamp = self.stamp();
        let op = match (kind, &target) {
            (Kind::Dir, _) => Op::Mkdir { path: path.clone(), mode },
            (Kind::Symlink, Some(target)) => Op::Symlink { path: path.clone(), target: target.clone() },
            (Kind::File, _) => Op::Create { path: path.clone(), mode, stamp },
            _ => return Err(Errno::EPERM),
        };
        if self.later(&path, &[parent])? {
            return self.create_later(parent, name, kind, mode, target, (path, op, stamp));
        }
        let Some(attr) = self.make(op)? else { return Err(Errno::EIO) };
        let mut nodes = self.nodes();
        let (id, _) = nodes.adopt(parent, name, attr);
        if let Some(dir) = nodes.dir(parent) {
            dir.changes += 1;
        }
        if let Some(node) = nodes.get_mut(id) {
            node.target = target;
            // A directory that was just made is known: it is empty.
            if let Some(dir) = &mut node.dir {
                dir.whole = Some(Instant::now());
            }
        }
        Ok(id)
    }

    fn create_later(
        &self,
        parent: u64,
        name: &Name,
        kind: Kind,
        mode: u16,
        target: Option<Vec<u8>>,
        (path, op, stamp): (RelPath, Op, Time),
    ) -> Result<u64> {
        let mut nodes = self.nodes();
        if nodes.dir(parent).ok_or(Errno::ENOTDIR)?.entries.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        let number = self.cache.add_op(op).map_err(errno_of)?;
        let (uid, gid) = self.server_ids;
        let size = target.as_ref().map_or(0, |target| target.len() as u64);
        let links = if kind == Kind::Dir { 2 } else { 1 };
        let attr = Attr {
            ident: Ident::default(),
            kind,
            mode,
            links,
            uid,
            gid,
            size,
            blocks: 0,
            mtime: stamp,
            ctime: stamp,
        };
        let id = nodes.make(parent, name, attr);
        let file = match kind {
            Kind::File => {
                let base = Version { size: 0, mtime: stamp, ctime: stamp };
                let record = FileRecord {
                    path,
                    ident: None,
                    made_by: Some(number),
                    base,
                    size: 0,
                    zero_from: 0,
                    mtime: None,
                    stamp: None,
                    dirty: false,
                    removed: false,
                };
                Some(self.cache.add_file(record).map_err(errno_of)?)
            }
            _ => None,
        };
        if let Some(dir) = nodes.dir(parent) {
            dir.changes += 1;
        }
        if let Some(node) = nodes.get_mut(id) {
            node.target = target;
            node.file = file;
            node.ops.push(number);
        }
        self.writeback.queue(number, id);
        Ok(id)
    }

    /// Whether a change of this name is to be made on the server later; then all of these directories are known whole.
    fn later(&self, path: &RelPath, dirs: &[u64]) -> Result<bool> {
        match self.policy_of(path) {
            Policy::None => Err(Errno::EROFS),
            Policy::Through => Ok(false),
            Policy::Back => {
                dirs.iter().try_for_each(|dir| self.whole(*dir))?;
                Ok(true)
            }
        }
    }

    pub(super) fn remove(&self, parent: u64, name: &Name, dir: bool) -> Result<()> {
        let id = self.lookup(parent, name)?;
        let path = self.nodes().path_of(parent, name).map_err(no_name)?;
        let kind = self.nodes().get(id).ok_or(Errno::ESTALE)?.attr.kind;
        match (dir, kind == Kind::Dir) {
            (true, false) => return Err(Errno::ENOTDIR),
            (false, true) => return Err(Errno::EISDIR),
            _ => {}
        }
        self.flush_before_unlink(id)?;
        let later = self.later(&path, &[parent])?;
        if later && dir {
            self.whole(id)?;
        }
        if !later {
            let op = self.removal(&path, id, dir);
            self.make(op)?;
            let mut nodes = self.nodes();
            return self.removed(&mut nodes, parent, name, id);
        }
        let mut nodes = self.nodes();
        if dir && nodes.dir(id).is_some_and(|dir| !dir.entries.is_empty()) {
            return Err(Errno::ENOTEMPTY);
        }
        let node = nodes.get_mut(id).ok_or(Errno::ESTALE)?;
        // What the server never heard of needs not be removed there.
        let own = std::mem::take(&mut node.ops);
        let unheard = !dir && node.local && node.names.len() == 1 && self.writeback.cancel(&own);
        let (ident, opens) = (node.attr.ident, node.opens);
        let known = (!node.local).then_some(ident);
        if unheard {
            for number in own {
                self.cache.op_done(number).map_err(errno_of)?;
            }
        } else {
            let op =
                if dir { Op::Rmdir { path } } else { Op::Unlink { path, ident: known, keep: opens > 0 } };
            let number = self.cache.add_op(op).map_err(errno_of)?;
            self.writeback.queue(number, id);
        }
        self.removed(&mut nodes, parent, name, id)
    }

    /// What is dirty of a file with other names goes to the server under the name it is known by.
    fn flush_before_unlink(&self, id: u64) -> Result<()> {
        let file =
            self.nodes().get(id).filter(|node| node.attr.links > 1 && !node.local).and_then(|node| node.file);
        match file {
            Some(file) if self.cache.file(file).is_some_and(|record| record.dirty) => self.flush_file(file),
            _ => Ok(()),
        }
    }

    fn removal(&self, path: &RelPath, id: u64, dir: bool) -> Op {
        if dir {
            return Op::Rmdir { path: path.clone() };
        }
        let nodes = self.nodes();
        let node = nodes.get(id);
        let ident = node.filter(|node| !node.local).map(|node| node.attr.ident);
        Op::Unlink { path: path.clone(), ident, keep: node.is_some_and(|node| node.opens > 0) }
    }

    /// A name is gone here. What is dirty of a file without a name is nobody's.
    fn removed(&self, nodes: &mut super::nodes::Nodes, parent: u64, name: &Name, id: u64) -> Result<()> {
        nodes.unlink(parent, name);
        if let Some(dir) = nodes.dir(parent) {
            dir.changes += 1;
        }
        self.nameless(nodes, id)
    }

    /// Lets go of a file that may have lost its last name.
    fn nameless(&self, nodes: &mut super::nodes::Nodes, id: u64) -> Result<()> {
        let Some(node) = nodes.get_mut(id) else { return Ok(()) };
        node.attr.links = node.attr.links.saturating_sub(1);
        let gone =
            node.names.is_empty() && (node.local || node.attr.links == 0 || node.attr.kind == Kind::Dir);
        if !gone {
            return Ok(());
        }
        let (file, opens) = (node.file, node.opens);
        if opens == 0 {
            node.file = None;
        }
        nodes.reap(id);
        match file {
            Some(file) if opens == 0 => self.cache.forget(file).map_err(errno_of),
            Some(file) => self.cache.update_file(file, |record| record.removed = true).map_err(errno_of),
            None => Ok(()),
        }
    }

    pub(super) fn rename(&self, from: (u64, &Name), to: (u64, &Name), no_replace: bool) -> Result<()> {
        let id = self.lookup(from.0, from.1)?;
        let paths = {
            let nodes = self.nodes();
            (nodes.path_of(from.0, from.1).map_err(no_name)?, nodes.path_of(to.0, to.1).map_err(no_name)?)
        };
        if self.policy_of(&paths.0) == Policy::None {
            return Err(Errno::EROFS);
        }
        if paths.1.is_within(&paths.0) && paths.0 != paths.1 {
            return Err(Errno::EINVAL);
        }
        let replaced = match self.lookup(to.0, to.1) {
            Ok(other) => Some(other),
            Err(Errno::ENOENT) => None,
            Err(errno) => return Err(errno),
        };
        if replaced == Some(id) {
            return Ok(());
        }
        let later = self.later(&paths.1, &[from.0, to.0])?;
        if later && let Some(other) = replaced.filter(|other| self.is_dir(*other)) {
            self.whole(other)?;
        }
        let op = Op::Rename { from: paths.0.clone(), path: paths.1.clone(), no_replace };
        if !later {
            self.make(op)?;
            let mut nodes = self.nodes();
            return self.renamed(&mut nodes, id, from, to, replaced, &paths);
        }
        let mut nodes = self.nodes();
        if let Some(other) = replaced {
            self.may_replace(&mut nodes, id, other, no_replace)?;
        }
        let number = self.cache.add_op(op).map_err(errno_of)?;
        if let Some(node) = nodes.get_mut(id) {
            node.ops.clear();
        }
        self.writeback.queue_rename(number, id);
        self.renamed(&mut nodes, id, from, to, replaced, &paths)
    }

    fn is_dir(&self, id: u64) -> bool {
        self.nodes().get(id).is_some_and(|node| node.attr.kind == Kind::Dir)
    }

    fn may_replace(
        &self,
        nodes: &mut super::nodes::Nodes,
        id: u64,
        other: u64,
        no_replace: bool,
    ) -> Result<()> {
        let dir =
            |nodes: &super::nodes::Nodes, id| nodes.get(id).is_some_and(|node| node.attr.kind == Kind::Dir);
        match (dir(nodes, id), dir(nodes, other)) {
            _ if no_replace => Err(Errno::EEXIST),
            (true, false) => Err(Errno::ENOTDIR),
            (false, true) => Err(Errno::EISDIR),
            (true, true) if nodes.dir(other).is_some_and(|dir| !dir.entries.is_empty()) => {
                Err(Errno::ENOTEMPTY)
            }
            _ => Ok(()),
        }
    }

    fn renamed(
        &self,
        nodes: &mut super::nodes::Nodes,
        id: u64,
        from: (u64, &Name),
        to: (u64, &Name),
        replaced: Option<u64>,
        paths: &(RelPath, RelPath),
    ) -> Result<()> {
        if replaced.is_some() {
            nodes.unlink(to.0, to.1);
        }
        nodes.unlink(from.0, from.1);
        nodes.link(to.0, to.1, id);
        for dir in [from.0, to.0] {
            if let Some(dir) = nodes.dir(dir) {
                dir.changes += 1;
            }
        }
        if let Some(other) = replaced {
            self.nameless(nodes, other)?;
        }
        let node = nodes.get(id);
        match node.and_then(|node| node.file) {
            Some(file) => {
                self.cache.update_file(file, |record| record.path = paths.1.clone()).map_err(errno_of)
            }
            None if node.is_some_and(|node| node.attr.kind == Kind::Dir) => self.moved_below(paths),
            None => Ok(()),
        }
    }

    /// Files in a directory that moved are elsewhere, too.
    fn moved_below(&self, paths: &(RelPath, RelPath)) -> Result<()> {
        for (file, record) in self.cache.files() {
            if let Some(path) = record.path.moved(&paths.0, &paths.1) {
                self.cache.update_file(file, |record| record.path = path).map_err(errno_of)?;
            }
        }
        Ok(())
    }

    pub(super) fn link(&self, id: u64, parent: u64, name: &Name) -> Result<()> {
        let (from, path) = {
            let nodes = self.nodes();
            (nodes.path(id).ok_or(Errno::ENOENT)?, nodes.path_of(parent, name).map_err(no_name)?)
        };
        let op = Op::Link { from, path: path.clone() };
        if self.later(&path, &[parent])? {
            let mut nodes = self.nodes();
            if nodes.dir(parent).ok_or(Errno::ENOTDIR)?.entries.contains_key(name) {
                return Err(Errno::EEXIST);
            }
            let number = self.cache.add_op(op).map_err(errno_of)?;
            self.writeback.queue(number, id);
            self.linked(&mut nodes, id, parent, name);
            return Ok(());
        }
        self.make(op)?;
        self.linked(&mut self.nodes(), id, parent, name);
        Ok(())
    }

    fn linked(&self, nodes: &mut super::nodes::Nodes, id: u64, parent: u64, name: &Name) {
        nodes.link(parent, name, id);
        if let Some(node) = nodes.get_mut(id) {
            node.attr.links += 1;
            // Its making cannot be taken back any more: another change builds on it.
            node.ops.clear();
        }
        if let Some(dir) = nodes.dir(parent) {
            dir.changes += 1;
        }
    }

    /// Mode, owner and times.
    pub(super) fn set_attr(
        &self,
        id: u64,
        mode: Option<u16>,
        owner: (Option<u32>, Option<u32>),
        mtime: Option<Time>,
    ) -> Result<()> {
        let path = self.nodes().path(id);
        let (uid, gid) = self.owner_there(owner.0, owner.1)?;
        let file = self.nodes().get(id).ok_or(Errno::ESTALE)?.file;
        let dirty = file.and_then(|file| self.cache.file(file)).is_some_and(|record| record.dirty);
        let mut mtime = mtime;
        if let (Some(time), Some(file), true) = (mtime, file, dirty) {
            // The write-back sets it, after the content.
            self.cache.update_file(file, |record| record.mtime = Some(time)).map_err(errno_of)?;
            mtime = None;
            if mode.is_none() && uid.is_none() && gid.is_none() {
                return Ok(());
            }
        }
        let Some(path) = path else { return Ok(()) };
        let op = Op::SetAttr { path: path.clone(), mode, uid, gid, mtime };
        let attr = match self.policy_of(&path) {
            Policy::None => return Err(Errno::EROFS),
            Policy::Through => self.make(op)?,
            Policy::Back => {
                let mut nodes = self.nodes();
                let number = self.cache.add_op(op).map_err(errno_of)?;
                if let Some(node) = nodes.get_mut(id) {
                    if node.local {
                        node.ops.push(number);
                    }
                    node.attr.mode = mode.unwrap_or(node.attr.mode);
                    node.attr.mtime = mtime.unwrap_or(node.attr.mtime);
                    node.attr.ctime = Time::now();
                }
                self.writeback.queue(number, id);
                None
            }
        };
        if let Some(attr) = attr {
            self.own_change(id, attr);
        }
        Ok(())
    }

    /// The server made a change of attributes of ours: the content is what it was.
    pub(super) fn own_change(&self, id: u64, attr: Attr) {
        let file = {
            let mut nodes = self.nodes();
            let Some(node) = nodes.get_mut(id).filter(|node| node.attr.ident == attr.ident) else { return };
            node.attr = attr;
            node.file
        };
        if let Some(file) = file {
            let updated = self.cache.update_file(file, |record| {
                if record.base.size == attr.size {
                    record.base = attr.version();
                }
            });
            if let Err(error) = updated {
                errno_of(error);
            }
        }
    }

    /// Forgets what is believed and clean.
    pub(super) fn invalidate(&self) -> Result<()> {
        self.flush_all(false)?;
        self.nodes().doubt();
        for (file, record) in self.cache.files() {
            if !record.dirty {
                self.cache.invalidate(file).map_err(errno_of)?;
            }
        }
        let ids = self.nodes().ids();
        for id in ids.into_iter().filter(|id| *id != ROOT) {
            let open = self.nodes().get(id).is_some_and(|node| node.file.is_some());
            if open {
                self.kernel_forgets(id);
            }
        }
        Ok(())
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
