//! Changes of names: create, remove, rename and link. Those of attributes are in `attribute_changes.rs`.
//!
//! Under write-through the server makes a change first, and it is applied here afterwards. Under write-back
//! it is applied here, with a record in the journal, and the server makes it later in the same order. The
//! complete directory must be known for that, so that what the server would refuse is refused at once. The
//! record is written before the inodes are unlocked: a thread that sees the change finds it in the queue.

use super::{
    directory_cache::errno_of_path_error,
    eviction::NamesGuard,
    inodes::{Inode, InodeTable, long_ago},
};
use crate::client::{
    policy::Policy,
    session::{Core, errno_of},
};
use crate::{
    cache::FileRecord,
    proto::{Attr, EntryKind, Ident, Kind, Known, Name, Op, Owner, RelPath, Time, Version},
};
use whimbrel_fuse::{Errno, Result};

/// The set-group-id bit: new files in a directory with it belong to its group.
const SET_GROUP: u16 = 0o2000;

/// A file that is created here.
struct NewFile {
    node: EntryKind,
    mode: u16,
    /// Owner on the server, if it is not the usual one.
    owner: Option<Owner>,
    stamp: Time,
}

impl NewFile {
    fn target(&self) -> Option<Vec<u8>> {
        if let EntryKind::Symlink(target) = &self.node { Some(target.clone()) } else { None }
    }

    /// Links that the directory above gets by it.
    fn links_of_parent(&self) -> i32 {
        i32::from(self.node == EntryKind::Dir)
    }

    /// Attributes until the server reports them.
    fn attr(&self, Owner { uid, gid }: Owner) -> Attr {
        let (size, blocks) = match &self.node {
            EntryKind::Symlink(target) => (target.len() as u64, 0),
            EntryKind::Char(number) => (u64::from(number.0), 0),
            EntryKind::Block(number) => (u64::from(number.0), 1),
            _ => (0, 0),
        };
        Attr {
            ident: Ident::default(),
            kind: self.node.kind(),
            mode: self.mode,
            links: if self.node == EntryKind::Dir { 2 } else { 1 },
            uid,
            gid,
            size,
            blocks,
            mtime: self.stamp,
            ctime: self.stamp,
        }
    }
}

impl Core {
    /// Creates a file of any type for a user and group of this host.
    pub(in crate::client) fn create(
        &self,
        held: &NamesGuard<'_>,
        (parent, name): (u64, &Name),
        node: EntryKind,
        mode: u16,
        caller: (u32, u32),
    ) -> Result<u64> {
        let path = {
            let mut nodes = self.inodes();
            nodes.dir_used(parent);
            nodes.path_of(parent, name).map_err(errno_of_path_error)?
        };
        let stamp = self.stamp();
        let (owner, mode) = self.owner_of_new(parent, &node, mode, caller);
        let op = match &node {
            _ if owner.is_some() => Op::Make { path: path.clone(), node: node.clone(), mode, owner, stamp },
            EntryKind::Dir => Op::Mkdir { path: path.clone(), mode },
            EntryKind::Symlink(target) => Op::Symlink { path: path.clone(), target: target.clone() },
            EntryKind::File => Op::Create { path: path.clone(), mode, stamp },
            EntryKind::Char(_) | EntryKind::Block(_) if !self.connection.sets_owners() => {
                return Err(Errno::EPERM);
            }
            _ if !self.connection.knows_nodes() => return Err(Errno::EPERM),
            _ => Op::Make { path: path.clone(), node: node.clone(), mode, owner, stamp },
        };
        let new = NewFile { node, mode, owner, stamp };
        if self.is_deferred(held, &path, &[parent])? {
            return self.create_deferred(parent, name, new, (path, op));
        }
        let made = self.make_change_now(&op)?;
        let Some(attr) = made.attr else { return Err(Errno::EIO) };
        let mut nodes = self.inodes();
        nodes.dir_changed(parent, new.links_of_parent(), true);
        if let Some(dir) = nodes.dir(parent) {
            dir.name_created(name);
        }
        let (id, _) = nodes.adopt(parent, name, attr, made.asked);
        let trusted = nodes.trusted(&attr.ident, made.asked);
        if let Some(node) = nodes.get_mut(id) {
            node.target = new.target();
            // The content of the new directory is known: it is empty.
            if let Some(dir) = &mut node.dir {
                dir.listed_at = Some(trusted.unwrap_or_else(long_ago));
            }
        }
        Ok(id)
    }

    /// Owner and mode of a new file. In a directory with the set-group-id bit it gets that group, and a
    /// directory that bit. The owner is left to the server if it cannot set another, if the user has no
    /// number there, or if it is what the server sets anyway.
    fn owner_of_new(
        &self,
        parent: u64,
        node: &EntryKind,
        mode: u16,
        (uid, gid): (u32, u32),
    ) -> (Option<Owner>, u16) {
        let above = self.inodes().get(parent).map(|node| node.attr);
        let group = above.filter(|attr| attr.mode & SET_GROUP != 0).map(|attr| attr.gid);
        let mode = if group.is_some() && *node == EntryKind::Dir { mode | SET_GROUP } else { mode };
        if !self.connection.sets_owners() {
            return (None, mode);
        }
        let Ok((Some(uid), Some(gid))) = self.server_owner(Some(uid), Some(gid)) else { return (None, mode) };
        let owner = Owner { uid, gid: group.unwrap_or(gid) };
        let usual = Owner { uid: self.server_ids.0, gid: group.unwrap_or(self.server_ids.1) };
        ((owner != usual).then_some(owner), mode)
    }

    fn create_deferred(
        &self,
        parent: u64,
        name: &Name,
        new: NewFile,
        (path, op): (RelPath, Op),
    ) -> Result<u64> {
        let mut nodes = self.inodes();
        if nodes.dir(parent).ok_or(Errno::ENOTDIR)?.entries.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        let number = self.cache.add_op(op).map_err(errno_of)?;
        let above = nodes.get(parent).map(|node| node.attr).filter(|attr| attr.mode & SET_GROUP != 0);
        let usual = Owner { uid: self.server_ids.0, gid: above.map_or(self.server_ids.1, |attr| attr.gid) };
        let id = nodes.add_local(parent, name, new.attr(new.owner.unwrap_or(usual)));
        let file = match new.node {
            EntryKind::File => {
                let base = Version { size: 0, mtime: new.stamp, ctime: new.stamp };
                let record = FileRecord {
                    path,
                    ident: None,
                    made_by: Some(number),
                    base,
                    size: 0,
                    zero_from: 0,
                    mtime: None,
                    stamps: Vec::new(),
                    dirty: false,
                    removed: false,
                };
                Some(self.cache.add_file(record).map_err(errno_of)?)
            }
            _ => None,
        };
        nodes.dir_changed(parent, new.links_of_parent(), false);
        if let Some(node) = nodes.get_mut(id) {
            node.target = new.target();
            node.file = file;
            node.ops.push(number);
        }
        self.writeback.queue(number, id, &[parent]);
        self.claim(&nodes, &[parent]);
        Ok(id)
    }

    /// Whether the server makes a change of this name later; if so, makes the names of these directories
    /// complete.
    fn is_deferred(&self, held: &NamesGuard<'_>, path: &RelPath, dirs: &[u64]) -> Result<bool> {
        match self.policy_of(path) {
            Policy::None => Err(Errno::EROFS),
            Policy::Through => Ok(false),
            Policy::Back => {
                dirs.iter().try_for_each(|dir| self.complete_directory(held, *dir))?;
                Ok(true)
            }
        }
    }

    pub(in crate::client) fn remove(&self, parent: u64, name: &Name, dir: bool) -> Result<()> {
        let held = self.hold_names();
        let id = self.lookup(&held, parent, name)?;
        let path = self.inodes().path_of(parent, name).map_err(errno_of_path_error)?;
        let kind = self.inodes().get(id).ok_or(Errno::ESTALE)?.attr.kind;
        match (dir, kind == Kind::Dir) {
            (true, false) => return Err(Errno::ENOTDIR),
            (false, true) => return Err(Errno::EISDIR),
            _ => {}
        }
        self.flush_before_unlink(id)?;
        let later = self.is_deferred(&held, &path, &[parent])?;
        if later && dir {
            self.complete_directory(&held, id)?;
        }
        if !later {
            let op = self.removal(&path, id, dir);
            self.make_change_now(&op)?;
            let mut nodes = self.inodes();
            self.use_other_name(&nodes, id, (parent, name))?;
            return self.removed(&mut nodes, (parent, name), id, true);
        }
        let mut nodes = self.inodes();
        if dir && nodes.dir(id).is_some_and(|dir| !dir.entries.is_empty()) {
            return Err(Errno::ENOTEMPTY);
        }
        self.use_other_name(&nodes, id, (parent, name))?;
        let condition = nodes.get(id).and_then(|node| self.known(node));
        let node = nodes.get_mut(id).ok_or(Errno::ESTALE)?;
        // A file that the server has not been told of need not be removed there.
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
            let number = self.cache.add_op(op.if_known(condition)).map_err(errno_of)?;
            self.writeback.queue(number, id, &[parent]);
            self.claim(&nodes, &[id, parent]);
        }
        self.removed(&mut nodes, (parent, name), id, false)
    }

    /// Writes back a file with other names under the name that the server knows.
    fn flush_before_unlink(&self, id: u64) -> Result<()> {
        let file = self
            .inodes()
            .get(id)
            .filter(|node| node.attr.links > 1 && !node.local)
            .and_then(|node| node.file);
        match file {
            Some(file) if self.cache.file(file).is_some_and(|record| record.dirty) => {
                self.flush_file(file, false)
            }
            _ => Ok(()),
        }
    }

    /// A name is about to lead elsewhere: a file with another name is recorded under that one. This precedes
    /// the change in the journal, so that after a crash the file recorded under the old name is the one that
    /// goes with it.
    fn use_other_name(&self, nodes: &InodeTable, id: u64, (parent, name): (u64, &Name)) -> Result<()> {
        let Some(node) = nodes.get(id) else { return Ok(()) };
        let other = node.names.iter().find(|(dir, known)| *dir != parent || known != name);
        let path = other.and_then(|(dir, name)| nodes.path_of(*dir, name).ok());
        match (node.file, path) {
            (Some(file), Some(path)) => {
                self.cache.update_file(file, |record| record.path = path).map_err(errno_of)
            }
            _ => Ok(()),
        }
    }

    fn removal(&self, path: &RelPath, id: u64, dir: bool) -> Op {
        if dir {
            return Op::Rmdir { path: path.clone() };
        }
        let nodes = self.inodes();
        let node = nodes.get(id);
        let ident = node.filter(|node| !node.local).map(|node| node.attr.ident);
        let keep = node.is_some_and(|node| node.opens > 0);
        Op::Unlink { path: path.clone(), ident, keep }.if_known(node.and_then(|node| self.known(node)))
    }

    /// What is known of a file that a change may replace or remove: another client's newer content must not
    /// be lost by it.
    pub(super) fn known(&self, node: &Inode) -> Option<Known> {
        if node.attr.kind != Kind::File {
            return None;
        }
        let record = node.file.and_then(|file| self.cache.file(file));
        let mut times = vec![node.attr.mtime];
        times.extend(
            record.iter().flat_map(|record| {
                record.stamps.iter().copied().chain([record.base.mtime]).chain(record.mtime)
            }),
        );
        times.sort_unstable();
        times.dedup();
        Some(Known { ident: (!node.local).then_some(node.attr.ident), times })
    }

    /// Removes a name here. Dirty content of a file without a name is dropped.
    fn removed(
        &self,
        nodes: &mut InodeTable,
        (parent, name): (u64, &Name),
        id: u64,
        made: bool,
    ) -> Result<()> {
        nodes.unlink(parent, name);
        let dir = nodes.get(id).is_some_and(|node| node.attr.kind == Kind::Dir);
        nodes.dir_changed(parent, if dir { -1 } else { 0 }, made);
        self.drop_if_nameless(nodes, id, made)
    }

    /// Drops a file that may have lost its last name.
    fn drop_if_nameless(&self, nodes: &mut InodeTable, id: u64, made: bool) -> Result<()> {
        let Some(node) = nodes.get_mut(id) else { return Ok(()) };
        let lost = if node.attr.kind == Kind::Dir { 2 } else { 1 };
        node.attr.links = node.attr.links.saturating_sub(lost);
        node.ctime = Some(Time::now());
        if made && !node.names.is_empty() {
            node.expire();
        }
        let gone =
            node.names.is_empty() && (node.local || node.attr.links == 0 || node.attr.kind == Kind::Dir);
        if !gone {
            return Ok(());
        }
        let (file, opens) = (node.file, node.opens);
        if opens == 0 {
            node.file = None;
        }
        nodes.remove_unused(id);
        match file {
            Some(file) if opens == 0 => self.cache.remove_file(file).map_err(errno_of),
            Some(file) => self.cache.update_file(file, |record| record.removed = true).map_err(errno_of),
            None => Ok(()),
        }
    }

    pub(in crate::client) fn rename(
        &self,
        from: (u64, &Name),
        to: (u64, &Name),
        no_replace: bool,
    ) -> Result<()> {
        let held = self.hold_names();
        let id = self.lookup(&held, from.0, from.1)?;
        let paths = {
            let nodes = self.inodes();
            (
                nodes.path_of(from.0, from.1).map_err(errno_of_path_error)?,
                nodes.path_of(to.0, to.1).map_err(errno_of_path_error)?,
            )
        };
        if self.policy_of(&paths.0) == Policy::None {
            return Err(Errno::EROFS);
        }
        if paths.1.is_within(&paths.0) && paths.0 != paths.1 {
            return Err(Errno::EINVAL);
        }
        let replaced = match self.lookup(&held, to.0, to.1) {
            Ok(other) => Some(other),
            Err(Errno::ENOENT) => None,
            Err(errno) => return Err(errno),
        };
        if replaced == Some(id) {
            return Ok(());
        }
        let later = self.is_deferred(&held, &paths.1, &[from.0, to.0])?;
        if later && let Some(other) = replaced.filter(|other| self.is_dir(*other)) {
            self.complete_directory(&held, other)?;
        }
        // A file of which nothing is known here must not be replaced either.
        let keep = no_replace || replaced.is_none();
        let op = Op::Rename { from: paths.0.clone(), path: paths.1.clone(), no_replace: keep };
        let condition = |nodes: &InodeTable| self.known(nodes.get(replaced?)?);
        if !later {
            let op = op.if_known(condition(&self.inodes()));
            let made = self.make_change_now(&op).map_err(|errno| match errno {
                Errno::EEXIST if !no_replace => self.newer_file(&paths.1),
                errno => errno,
            })?;
            let mut nodes = self.inodes();
            replaced.map_or(Ok(()), |other| self.use_other_name(&nodes, other, to))?;
            self.renamed(&mut nodes, id, (from, to), replaced, &paths, true)?;
            drop(nodes);
            // The inode change time is the result of this change.
            made.attr
                .into_iter()
                .for_each(|attr| self.adopt_own_change(id, &op, attr, (made.before, made.asked)));
            return Ok(());
        }
        let mut nodes = self.inodes();
        if let Some(other) = replaced {
            self.may_replace(&mut nodes, id, other, no_replace)?;
            self.use_other_name(&nodes, other, to)?;
        }
        let number = self.cache.add_op(op.if_known(condition(&nodes))).map_err(errno_of)?;
        if let Some(node) = nodes.get_mut(id) {
            node.ops.clear();
        }
        self.writeback.queue_rename(number, id, &[from.0, to.0]);
        self.claim(&nodes, &[id, from.0, to.0]);
        self.renamed(&mut nodes, id, (from, to), replaced, &paths, false)
    }

    fn is_dir(&self, id: u64) -> bool {
        self.inodes().get(id).is_some_and(|node| node.attr.kind == Kind::Dir)
    }

    fn may_replace(&self, nodes: &mut InodeTable, id: u64, other: u64, no_replace: bool) -> Result<()> {
        let dir = |nodes: &InodeTable, id| nodes.get(id).is_some_and(|node| node.attr.kind == Kind::Dir);
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
        nodes: &mut InodeTable,
        id: u64,
        (from, to): ((u64, &Name), (u64, &Name)),
        replaced: Option<u64>,
        paths: &(RelPath, RelPath),
        made: bool,
    ) -> Result<()> {
        if replaced.is_some() {
            nodes.unlink(to.0, to.1);
        }
        nodes.unlink(from.0, from.1);
        nodes.link(to.0, to.1, id);
        let is_dir = |id| nodes.get(id).is_some_and(|node| node.attr.kind == Kind::Dir);
        let (moves, ends) = (is_dir(id), replaced.is_some_and(is_dir));
        nodes.dir_changed(from.0, -i32::from(moves), made);
        nodes.dir_changed(to.0, i32::from(moves) - i32::from(ends), made);
        if let Some(node) = nodes.get_mut(id) {
            node.ctime = Some(Time::now());
        }
        if let Some(other) = replaced {
            self.drop_if_nameless(nodes, other, made)?;
        }
        let node = nodes.get(id);
        match node.and_then(|node| node.file) {
            Some(file) => {
                self.cache.update_file(file, |record| record.path = paths.1.clone()).map_err(errno_of)
            }
            None if node.is_some_and(|node| node.attr.kind == Kind::Dir) => self.move_files_below(paths),
            None => Ok(()),
        }
    }

    fn move_files_below(&self, paths: &(RelPath, RelPath)) -> Result<()> {
        for (file, record) in self.cache.files() {
            if let Some(path) = record.path.moved(&paths.0, &paths.1) {
                self.cache.update_file(file, |record| record.path = path).map_err(errno_of)?;
            }
        }
        Ok(())
    }

    pub(in crate::client) fn link(&self, id: u64, parent: u64, name: &Name) -> Result<()> {
        let (from, path) = {
            let nodes = self.inodes();
            (nodes.path(id).ok_or(Errno::ENOENT)?, nodes.path_of(parent, name).map_err(errno_of_path_error)?)
        };
        let op = Op::Link { from, path: path.clone() };
        let held = self.hold_names();
        if self.is_deferred(&held, &path, &[parent])? {
            let mut nodes = self.inodes();
            if nodes.dir(parent).ok_or(Errno::ENOTDIR)?.entries.contains_key(name) {
                return Err(Errno::EEXIST);
            }
            let number = self.cache.add_op(op).map_err(errno_of)?;
            self.writeback.queue(number, id, &[parent]);
            self.claim(&nodes, &[id, parent]);
            self.linked(&mut nodes, id, (parent, name), false);
            return Ok(());
        }
        let made = self.make_change_now(&op)?;
        self.linked(&mut self.inodes(), id, (parent, name), true);
        made.attr
            .into_iter()
            .for_each(|attr| self.adopt_own_change(id, &op, attr, (made.before, made.asked)));
        Ok(())
    }

    fn linked(&self, nodes: &mut InodeTable, id: u64, (parent, name): (u64, &Name), made: bool) {
        nodes.link(parent, name, id);
        if let Some(node) = nodes.get_mut(id) {
            node.attr.links += 1;
            node.ctime = Some(Time::now());
            // The creation cannot be cancelled any more: another change builds on it.
            node.ops.clear();
        }
        nodes.dir_changed(parent, 0, made);
    }
}
