//! Changes of attributes: mode, owner and times, and what they say of the content.
//!
//! As in `name_changes.rs`, the server makes them first under write-through, and later under write-back.

use super::inodes::Inode;
use crate::client::{
    policy::Policy,
    session::{Core, errno_of},
};
use crate::proto::{Attr, AttrChange, Op, Time, Version};
use std::time::Instant;
use whimbrel_fuse::{Errno, Result};

impl Core {
    /// Changes mode, owner and times. User and group are numbers of this host.
    pub(in crate::client) fn set_attr(&self, id: u64, change: AttrChange) -> Result<()> {
        let AttrChange { mode, uid, gid, atime, mut mtime } = change;
        let path = self.inodes().path(id);
        let (uid, gid) = self.server_owner(uid, gid)?;
        let file = self.inodes().get(id).ok_or(Errno::ESTALE)?.file;
        let dirty = file.and_then(|file| self.cache.file(file)).is_some_and(|record| record.dirty);
        if let (Some(time), Some(file), true) = (mtime, file, dirty) {
            // The write-back sets the time, after the content.
            self.cache.update_file(file, |record| record.mtime = Some(time)).map_err(errno_of)?;
            mtime = None;
            if mode.is_none() && uid.is_none() && gid.is_none() && atime.is_none() {
                return Ok(());
            }
        }
        let set = AttrChange { mode, uid, gid, atime, mtime };
        let Some(path) = path else {
            // A removed file that is still open: nobody else sees its attributes.
            self.set_local(id, &set);
            return Ok(());
        };
        let mut known = self.inodes().get(id).and_then(|node| self.known(node));
        if let Some(known) = known.as_mut()
            && (mtime.is_none() || self.policy_of(&path) == Policy::Through)
        {
            // Only a new time that was queued hides that somebody else has written the file meanwhile.
            known.times.clear();
        }
        let op = match atime {
            None => Op::SetAttr { path: path.clone(), mode, uid, gid, mtime },
            Some(_) => Op::SetTimes { path: path.clone(), set, known: None },
        };
        let op = op.if_known(known);
        match self.policy_of(&path) {
            Policy::None => return Err(Errno::EROFS),
            Policy::Through => {
                let made = self.make_change_now(&op)?;
                made.attr
                    .into_iter()
                    .for_each(|attr| self.adopt_own_change(id, &op, attr, (made.before, made.asked)));
                if let (Some(_), Some(node)) = (atime, self.inodes().get_mut(id)) {
                    node.atime = atime;
                }
            }
            Policy::Back => {
                let mut nodes = self.inodes();
                let number = self.cache.add_op(op).map_err(errno_of)?;
                if let Some(node) = nodes.get_mut(id) {
                    // Can be cancelled only together with the creation.
                    if node.local && !node.ops.is_empty() {
                        node.ops.push(number);
                    }
                    set_in(node, &set);
                }
                self.writeback.queue(number, id, &[]);
                self.claim(&nodes, &[id]);
            }
        }
        Ok(())
    }

    fn set_local(&self, id: u64, set: &AttrChange) {
        if let Some(node) = self.inodes().get_mut(id) {
            set_in(node, set);
        }
    }

    /// Adopts attributes after a change by this client, which has left the content as it was. If somebody
    /// else wrote the file before, its content here keeps the old version: it is dropped, or found to be a
    /// conflict.
    pub(in crate::client) fn adopt_own_change(
        &self,
        id: u64,
        op: &Op,
        attr: Attr,
        (before, asked): (Option<Version>, Instant),
    ) {
        if self.inodes().get(id).is_some_and(|node| node.attr.ident == attr.ident) {
            self.adopt_own_version(id, op, &attr, before);
            self.store_attr(id, attr, asked);
        }
        self.attr_changed(id);
    }

    /// Records that an earlier answer of the server may lack a change of an inode.
    pub(super) fn attr_changed(&self, id: u64) {
        if let Some(node) = self.inodes().get_mut(id) {
            node.changed_at = Some(Instant::now());
        }
    }

    /// Adopts the version after a change by this client for the content here, if nobody else wrote it.
    pub(super) fn adopt_own_version(&self, id: u64, op: &Op, attr: &Attr, before: Option<Version>) {
        let Some(file) =
            self.inodes().get(id).filter(|node| node.attr.ident == attr.ident).and_then(|node| node.file)
        else {
            return;
        };
        let updated = self.cache.update_file(file, |record| {
            if is_content_of(record.base, op, attr, before) {
                record.base = attr.version();
            }
        });
        if let Err(error) = updated {
            errno_of(error);
        }
    }
}

/// Sets attributes of an inode here.
fn set_in(node: &mut Inode, set: &AttrChange) {
    node.attr.mode = set.mode.unwrap_or(node.attr.mode);
    node.attr.uid = set.uid.unwrap_or(node.attr.uid);
    node.attr.gid = set.gid.unwrap_or(node.attr.gid);
    node.attr.mtime = set.mtime.unwrap_or(node.attr.mtime);
    node.atime = set.atime.or(node.atime);
    node.ctime = Some(Time::now());
    node.changed_at = Some(Instant::now());
}

/// Whether a file with these attributes after our change `op` still has the content of the version `base`.
fn is_content_of(base: Version, op: &Op, attr: &Attr, before: Option<Version>) -> bool {
    let sets_time = op.attr_change().is_some_and(|set| set.mtime.is_some());
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
    use crate::proto::{Ident, Kind, RelPath};

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
