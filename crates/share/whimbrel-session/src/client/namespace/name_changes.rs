//! Changes of names and attributes: create, remove, rename, link and set attributes.
//!
//! Under write-through the server makes a change first, and it is applied here afterwards. Under write-back
//! it is applied here, with a record in the journal, and the server makes it later in the same order. The
//! complete directory must be known for that, so that what the server would refuse is refused at once. The
//! record is written before the inodes are unlocked: a thread that sees the change finds it in the queue.

use super::{
    directory_cache::errno_of_path_error,
    inodes::{Inode, InodeTable},
};
use crate::client::{
    policy::Policy,
    session::{Core, errno_of},
};
use crate::{
    cache::FileRecord,
    proto::{Attr, Ident, Kind, Known, Name, Op, RelPath, Time, Version},
};
use std::time::Instant;
use whimbrel_fuse::{Errno, Result};

impl Core {
    /// Creates a file, directory or symlink.
    pub(in crate::client) fn create(
        &self,
        parent: u64,
        name: &Name,
        kind: Kind,
        mode: u16,
        target: Option<Vec<u8>>,
    ) -> Result<u64> {
        let path = self.inodes().path_of(parent, name).map_err(errno_of_path_error)?;
        let stamp = self.stamp();
        let op = match (kind, &target) {
            (Kind::Dir, _) => Op::Mkdir { path: path.clone(), mode },
            (Kind::Symlink, Some(target)) => Op::Symlink { path: path.clone(), target: target.clone() },
            (Kind::File, _) => Op::Create { path: path.clone(), mode, stamp },
            _ => return Err(Errno::EPERM),
        };
        if self.is_deferred(&path, &[parent])? {
            return self.create_deferred(parent, name, kind, mode, target, (path, op, stamp));
        }
        let Some(attr) = self.make_change_now(&op)?.attr else { return Err(Errno::EIO) };
        let mut nodes = self.inodes();
        if let Some(dir) = nodes.dir(parent) {
            dir.changes += 1;
            dir.name_created(name);
        }
        let (id, _) = nodes.adopt(parent, name, attr);
        if let Some(node) = nodes.get_mut(id) {
            node.target = target;
            // The content of the new directory is known: it is empty.
            if let Some(dir) = &mut node.dir {
                dir.listed_at = Some(Instant::now());
            }
        }
        Ok(id)
    }

    fn create_deferred(
        &self,
        parent: u64,
        name: &Name,
        kind: Kind,
        mode: u16,
        target: Option<Vec<u8>>,
        (path, op, stamp): (RelPath, Op, Time),
    ) -> Result<u64> {
        let mut nodes = self.inodes();
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
        let id = nodes.add_local(parent, name, attr);
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
                    stamps: Vec::new(),
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
        self.writeback.queue(number, id, &[parent]);
        Ok(id)
    }

    /// Whether the server makes a change of this name later; if so, makes the names of these directories
    /// complete.
    fn is_deferred(&self, path: &RelPath, dirs: &[u64]) -> Result<bool> {
        match self.policy_of(path) {
            Policy::None => Err(Errno::EROFS),
            Policy::Through => Ok(false),
            Policy::Back => {
                dirs.iter().try_for_each(|dir| self.complete_directory(*dir))?;
                Ok(true)
            }
        }
    }

    pub(in crate::client) fn remove(&self, parent: u64, name: &Name, dir: bool) -> Result<()> {
        let id = self.lookup(parent, name)?;
        let path = self.inodes().path_of(parent, name).map_err(errno_of_path_error)?;
        let kind = self.inodes().get(id).ok_or(Errno::ESTALE)?.attr.kind;
        match (dir, kind == Kind::Dir) {
            (true, false) => return Err(Errno::ENOTDIR),
            (false, true) => return Err(Errno::EISDIR),
            _ => {}
        }
        self.flush_before_unlink(id)?;
        let later = self.is_deferred(&path, &[parent])?;
        if later && dir {
            self.complete_directory(id)?;
        }
        if !later {
            let op = self.removal(&path, id, dir);
            self.make_change_now(&op)?;
            let mut nodes = self.inodes();
            self.use_other_name(&nodes, id, (parent, name))?;
            return self.removed(&mut nodes, parent, name, id);
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
        }
        self.removed(&mut nodes, parent, name, id)
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
    fn known(&self, node: &Inode) -> Option<Known> {
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
    fn removed(&self, nodes: &mut InodeTable, parent: u64, name: &Name, id: u64) -> Result<()> {
        nodes.unlink(parent, name);
        if let Some(dir) = nodes.dir(parent) {
            dir.changes += 1;
        }
        self.drop_if_nameless(nodes, id)
    }

    /// Drops a file that may have lost its last name.
    fn drop_if_nameless(&self, nodes: &mut InodeTable, id: u64) -> Result<()> {
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
        let id = self.lookup(from.0, from.1)?;
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
        let replaced = match self.lookup(to.0, to.1) {
            Ok(other) => Some(other),
            Err(Errno::ENOENT) => None,
            Err(errno) => return Err(errno),
        };
        if replaced == Some(id) {
            return Ok(());
        }
        let later = self.is_deferred(&paths.1, &[from.0, to.0])?;
        if later && let Some(other) = replaced.filter(|other| self.is_dir(*other)) {
            self.complete_directory(other)?;
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
            self.renamed(&mut nodes, id, from, to, replaced, &paths)?;
            drop(nodes);
            // The inode change time is the result of this change.
            made.attr.into_iter().for_each(|attr| self.adopt_own_change(id, &op, attr, made.before));
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
        self.renamed(&mut nodes, id, from, to, replaced, &paths)
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
            self.drop_if_nameless(nodes, other)?;
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
        if self.is_deferred(&path, &[parent])? {
            let mut nodes = self.inodes();
            if nodes.dir(parent).ok_or(Errno::ENOTDIR)?.entries.contains_key(name) {
                return Err(Errno::EEXIST);
            }
            let number = self.cache.add_op(op).map_err(errno_of)?;
            self.writeback.queue(number, id, &[parent]);
            self.linked(&mut nodes, id, parent, name);
            return Ok(());
        }
        let made = self.make_change_now(&op)?;
        self.linked(&mut self.inodes(), id, parent, name);
        made.attr.into_iter().for_each(|attr| self.adopt_own_change(id, &op, attr, made.before));
        Ok(())
    }

    fn linked(&self, nodes: &mut InodeTable, id: u64, parent: u64, name: &Name) {
        nodes.link(parent, name, id);
        if let Some(node) = nodes.get_mut(id) {
            node.attr.links += 1;
            // The creation cannot be cancelled any more: another change builds on it.
            node.ops.clear();
        }
        if let Some(dir) = nodes.dir(parent) {
            dir.changes += 1;
        }
    }

    /// Changes mode, owner and times.
    pub(in crate::client) fn set_attr(
        &self,
        id: u64,
        mode: Option<u16>,
        owner: (Option<u32>, Option<u32>),
        mtime: Option<Time>,
    ) -> Result<()> {
        let path = self.inodes().path(id);
        let (uid, gid) = self.server_owner(owner.0, owner.1)?;
        let file = self.inodes().get(id).ok_or(Errno::ESTALE)?.file;
        let dirty = file.and_then(|file| self.cache.file(file)).is_some_and(|record| record.dirty);
        let mut mtime = mtime;
        if let (Some(time), Some(file), true) = (mtime, file, dirty) {
            // The write-back sets the time, after the content.
            self.cache.update_file(file, |record| record.mtime = Some(time)).map_err(errno_of)?;
            mtime = None;
            if mode.is_none() && uid.is_none() && gid.is_none() {
                return Ok(());
            }
        }
        let Some(path) = path else { return Ok(()) };
        let mut known = self.inodes().get(id).and_then(|node| self.known(node));
        if let Some(known) = known.as_mut()
            && (mtime.is_none() || self.policy_of(&path) == Policy::Through)
        {
            // Only a new time that was queued hides that somebody else has written the file meanwhile.
            known.times.clear();
        }
        let op = Op::SetAttr { path: path.clone(), mode, uid, gid, mtime }.if_known(known);
        match self.policy_of(&path) {
            Policy::None => return Err(Errno::EROFS),
            Policy::Through => {
                let made = self.make_change_now(&op)?;
                made.attr.into_iter().for_each(|attr| self.adopt_own_change(id, &op, attr, made.before));
            }
            Policy::Back => {
                let mut nodes = self.inodes();
                let number = self.cache.add_op(op).map_err(errno_of)?;
                if let Some(node) = nodes.get_mut(id) {
                    // Can be cancelled only together with the creation.
                    if node.local && !node.ops.is_empty() {
                        node.ops.push(number);
                    }
                    node.attr.mode = mode.unwrap_or(node.attr.mode);
                    node.attr.uid = uid.unwrap_or(node.attr.uid);
                    node.attr.gid = gid.unwrap_or(node.attr.gid);
                    node.attr.mtime = mtime.unwrap_or(node.attr.mtime);
                    node.attr.ctime = Time::now();
                }
                self.writeback.queue(number, id, &[]);
            }
        }
        Ok(())
    }

    /// Adopts attributes after a change by this client, which has left the content as it was. If somebody
    /// else wrote the file before, its content here keeps the old version: it is dropped, or found to be a
    /// conflict.
    pub(in crate::client) fn adopt_own_change(&self, id: u64, op: &Op, attr: Attr, before: Option<Version>) {
        let Some(file) =
            self.inodes().get(id).filter(|node| node.attr.ident == attr.ident).map(|node| node.file)
        else {
            return;
        };
        let updated = file.map_or(Ok(()), |file| {
            self.cache.update_file(file, |record| {
                if is_content_of(record.base, op, &attr, before) {
                    record.base = attr.version();
                }
            })
        });
        if let Err(error) = updated {
            errno_of(error);
        }
        self.store_attr(id, attr);
    }
}

/// Whether a file with these attributes after our change `op` still has the content of the version `base`.
fn is_content_of(base: Version, op: &Op, attr: &Attr, before: Option<Version>) -> bool {
    let sets_time = matches!(op.plain(), Op::SetAttr { mtime: Some(_), .. });
    let same_time = attr.mtime == base.mtime;
    let unwritten = match before {
        Some(before) => before == base && (same_time || sets_time),
        // An older server, or a lost answer; a time that we set hides that of another writer.
        None => same_time && !sets_time,
    };
    unwritten && attr.size == base.size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_ours_only_if_nobody_wrote_it_between_what_we_know_and_our_change() {
        let time = |seconds| Time { seconds, nanos: 0 };
        let version = |mtime, ctime| Version { size: 8, mtime: time(mtime), ctime: time(ctime) };
        let path = RelPath::root();
        let (mode, uid, gid) = (Some(0o600), None, None);
        let chmod = Op::SetAttr { path: path.clone(), mode, uid, gid, mtime: None };
        let touch = Op::SetAttr { path, mode: None, uid, gid, mtime: Some(time(50)) };
        let after = |mtime, size| Attr {
            ident: Ident::default(),
            kind: Kind::File,
            mode: 0,
            links: 1,
            uid: 0,
            gid: 0,
            size,
            blocks: 0,
            mtime: time(mtime),
            ctime: time(99),
        };
        let base = version(1, 2);
        let same = |op, attr, before| is_content_of(base, op, &attr, before);
        assert!(same(&chmod, after(1, 8), Some(base)) && same(&chmod, after(1, 8), None));
        assert!(same(&touch, after(50, 8), Some(base)));
        assert!(!same(&touch, after(50, 8), None), "an older server does not tell");
        assert!(!same(&chmod, after(3, 8), Some(version(3, 3))), "written by somebody else");
        assert!(!same(&chmod, after(3, 8), None));
        assert!(!same(&touch, after(50, 8), Some(version(3, 3))));
        assert!(!same(&chmod, after(1, 8), Some(version(1, 7))), "written, and the time set back");
        assert!(!same(&chmod, after(3, 8), Some(base)), "written after the server looked");
        assert!(!same(&chmod, after(1, 9), Some(base)));
    }
}
