//! Inodes: what is known of the server's files, and the changes made here. No I/O.
//!
//! An inode is found by its number, by its name in a directory, or by its identity on the server. A directory
//! that was listed completely also answers for absent names. Its counter `changes` goes up with every local
//! change, so that a reply to an earlier request is not mistaken for newer state.

use crate::{
    cache::FileId,
    client::leases::recall_log::RecallLog,
    proto::{Attr, Entry, Ident, Kind, Name, PathError, RelPath, Time},
};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, Instant},
};
use whimbrel_fuse::ROOT;

/// Most absent names of a directory that the kernel may cache; some programs try any number of names.
const MAX_ABSENT: usize = 1024;

#[derive(Debug, Default)]
pub(in crate::client) struct Dir {
    pub(in crate::client) entries: HashMap<Name, u64>,
    /// Time at which all names were seen, if they were.
    pub(in crate::client) listed_at: Option<Instant>,
    /// Whether there are too many names for one lookup to return.
    pub(in crate::client) large: bool,
    pub(in crate::client) changes: u64,
    /// Whether it was used since all names were last seen.
    pub(in crate::client) used: bool,
    /// Count of uses in the table at the last one of this directory.
    pub(super) last_use: u64,
    /// Names that the kernel caches as absent.
    absent: HashSet<Name>,
}

impl Dir {
    /// Whether its names were not listed, and are few enough for one lookup.
    pub(in crate::client) fn is_unknown(&self) -> bool {
        self.listed_at.is_none() && !self.large
    }

    /// Makes its names old. They stay known, and are used as long as the server has yet to make changes of
    /// them.
    fn outdate(&mut self) {
        self.listed_at = self.listed_at.map(|_| long_ago());
    }

    /// Records that the kernel created this name, and so knows it.
    pub(in crate::client) fn name_created(&mut self, name: &Name) {
        self.absent.remove(name);
    }
}

/// A file, directory or symlink.
#[derive(Debug)]
pub(in crate::client) struct Inode {
    pub(in crate::client) attr: Attr,
    /// Time of the last access, if it was set here.
    pub(in crate::client) atime: Option<Time>,
    /// Time at which the server reported the attributes; none if they were set here.
    pub(in crate::client) reported_at: Option<Instant>,
    /// Last moment at which attributes were changed here, or the server made such a change: what it was asked
    /// before may lack it.
    pub(in crate::client) changed_at: Option<Instant>,
    /// Time of a change of attributes or names here that the server has yet to report. That of `attr` is part
    /// of the version of the content.
    pub(in crate::client) ctime: Option<Time>,
    /// Parent directories and names; several for hard links, none once it is removed.
    pub(in crate::client) names: Vec<(u64, Name)>,
    /// Whether its lease was recalled, and it was not leased since.
    pub(in crate::client) recalled: bool,
    /// References that the kernel holds.
    pub(in crate::client) refs: u64,
    pub(in crate::client) opens: u32,
    pub(in crate::client) file: Option<FileId>,
    pub(in crate::client) local: bool,
    /// Pending changes that affect only this inode: they need not be made if it is removed.
    pub(in crate::client) ops: Vec<u64>,
    pub(in crate::client) target: Option<Vec<u8>>,
    /// In a place of its own, because most inodes are files.
    pub(in crate::client) dir: Option<Box<Dir>>,
    /// The last change of content made here.
    pub(in crate::client) mtime: Option<Time>,
    /// Whether writes of an open descriptor were put aside as a conflict, which its next close or sync must
    /// report.
    pub(in crate::client) conflicted: bool,
    /// Whether a lock of it was lost while it was open.
    pub(in crate::client) lock_lost: bool,
    /// Content epoch of what the kernel may have in its page cache.
    pub(in crate::client) epoch: Option<u64>,
}

#[derive(Debug)]
pub(in crate::client) struct InodeTable {
    /// Each in a place of its own: a table that grows has its content twice for a moment, and room for as
    /// much again afterwards.
    pub(super) nodes: HashMap<u64, Box<Inode>>,
    by_ident: HashMap<Ident, u64>,
    next: u64,
    /// Names of which the kernel knows what is not so any more.
    pub(super) appeared: Vec<(u64, Name)>,
    recalls: RecallLog,
    /// Number of uses of directories so far.
    pub(super) uses: u64,
    /// Number of inodes, or of uses, beyond which the next eviction is due.
    pub(super) next_eviction: (usize, u64),
    /// Number of evictions so far.
    pub(in crate::client) evictions: u64,
    /// Operations in progress that hold names, by the number of uses when each began.
    pub(super) held: BTreeMap<u64, usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::client) enum NameLookup {
    /// The name leads to this inode.
    Node(u64),
    /// The name does not exist.
    Nothing,
    Ask,
}

impl Inode {
    fn new(attr: Attr, reported_at: Option<Instant>) -> Self {
        let dir = (attr.kind == Kind::Dir).then(Box::default);
        Self {
            attr,
            atime: None,
            reported_at,
            changed_at: None,
            ctime: None,
            names: Vec::new(),
            recalled: false,
            refs: 0,
            opens: 0,
            file: None,
            local: false,
            ops: Vec::new(),
            target: None,
            dir,
            mtime: None,
            conflicted: false,
            lock_lost: false,
            epoch: None,
        }
    }

    /// Makes the attributes stale, so that the server is asked again.
    pub(in crate::client) fn expire(&mut self) {
        self.reported_at = Some(long_ago());
    }

    pub(in crate::client) fn is_fresh(&self, ttl: Duration) -> bool {
        self.local || self.reported_at.is_none_or(|seen| seen.elapsed() < ttl)
    }
}

/// A moment before which nothing is fresh.
pub(super) fn long_ago() -> Instant {
    let long = Duration::from_secs(3600 * 24 * 400);
    Instant::now().checked_sub(long).unwrap_or_else(Instant::now)
}

impl InodeTable {
    pub(in crate::client) fn new(root: Attr) -> Self {
        let by_ident = HashMap::from([(root.ident, ROOT)]);
        Self {
            nodes: HashMap::from([(ROOT, Box::new(Inode::new(root, Some(Instant::now()))))]),
            by_ident,
            next: ROOT + 1,
            appeared: Vec::new(),
            recalls: RecallLog::default(),
            uses: 0,
            next_eviction: (0, 0),
            evictions: 0,
            held: BTreeMap::new(),
        }
    }

    /// A lease was recalled, or has been given back: what is known of the file must be asked for again.
    /// Returns its inode if the kernel may know it.
    pub(in crate::client) fn recalled(&mut self, ident: &Ident, now: Instant) -> Option<u64> {
        self.recalls.recalled(*ident, now);
        let id = self.by_ident(ident)?;
        let known: Vec<Name> = self.kernel_names(id).collect();
        self.appeared.extend(known.into_iter().map(|name| (id, name)));
        let node = self.nodes.get_mut(&id)?;
        node.expire();
        node.recalled = true;
        if let Some(dir) = &mut node.dir {
            dir.outdate();
            self.appeared.extend(std::mem::take(&mut dir.absent).into_iter().map(|name| (id, name)));
        }
        (node.refs > 0).then_some(id)
    }

    /// Names in a directory that the kernel may know. Those of directories stay known: a process may be in
    /// one, and would lose its way. That they are old is found when they are used.
    fn kernel_names(&self, dir: u64) -> impl Iterator<Item = Name> {
        let entries = self.nodes.get(&dir).and_then(|node| node.dir.as_ref()).map(|dir| &dir.entries);
        let known = |id: &u64| self.nodes.get(id).is_some_and(|node| node.refs > 0 && node.dir.is_none());
        entries.into_iter().flatten().filter(move |(_, id)| known(id)).map(|(name, _)| name.clone())
    }

    /// There are no leases of what was asked for before this moment. Returns the directories in use whose
    /// names were known.
    pub(in crate::client) fn all_recalled(&mut self, moment: Instant) -> Vec<u64> {
        self.recalls.all_recalled(moment);
        let mut listed = Vec::new();
        for (id, node) in self.nodes.iter_mut().filter(|(_, node)| !node.local) {
            node.expire();
            let Some(dir) = &mut node.dir else { continue };
            self.appeared.extend(std::mem::take(&mut dir.absent).into_iter().map(|name| (*id, name)));
            dir.outdate();
            listed.extend(Some(*id).filter(|_| dir.used && dir.listed_at.is_some()));
        }
        listed
    }

    /// Time at which the server reported something about a file, if that may be relied on.
    pub(in crate::client) fn trusted(&self, ident: &Ident, asked: Instant) -> Option<Instant> {
        self.recalls.trusts(ident, asked).then_some(asked)
    }

    /// Records when the server reported the attributes of an inode.
    pub(in crate::client) fn reported(&mut self, id: u64, asked: Instant) {
        let Some(ident) = self.nodes.get(&id).map(|node| node.attr.ident) else { return };
        let trusted = self.trusted(&ident, asked);
        if let Some(node) = self.nodes.get_mut(&id) {
            node.recalled = trusted.is_none();
            node.reported_at = Some(trusted.unwrap_or_else(long_ago));
        }
    }

    pub(in crate::client) fn get(&self, id: u64) -> Option<&Inode> {
        self.nodes.get(&id).map(Box::as_ref)
    }

    pub(in crate::client) fn get_mut(&mut self, id: u64) -> Option<&mut Inode> {
        self.nodes.get_mut(&id).map(Box::as_mut)
    }

    pub(in crate::client) fn dir(&mut self, id: u64) -> Option<&mut Dir> {
        self.nodes.get_mut(&id)?.dir.as_deref_mut()
    }

    pub(in crate::client) fn by_ident(&self, ident: &Ident) -> Option<u64> {
        self.by_ident.get(ident).copied()
    }

    pub(in crate::client) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(in crate::client) fn ids(&self) -> Vec<u64> {
        self.nodes.keys().copied().collect()
    }

    /// Path of an inode; none if it is removed.
    pub(in crate::client) fn path(&self, id: u64) -> Option<RelPath> {
        let mut names = Vec::new();
        let mut at = id;
        while at != ROOT {
            let (parent, name) = self.nodes.get(&at)?.names.first()?;
            names.push(name);
            at = *parent;
            // Longer than any path: a loop, which cannot occur, would end here.
            if names.len() > 2048 {
                return None;
            }
        }
        let mut path = RelPath::root();
        for name in names.into_iter().rev() {
            path = path.join(name).ok()?;
        }
        Some(path)
    }

    pub(in crate::client) fn path_of(&self, parent: u64, name: &Name) -> Result<RelPath, PathError> {
        self.path(parent).ok_or(PathError::Name)?.join(name)
    }

    /// Directories that were listed completely longer than `age` ago and used since.
    pub(in crate::client) fn used_dirs(&self, age: Duration) -> Vec<u64> {
        let old = |node: &Inode| {
            let dir = node.dir.as_ref().filter(|dir| dir.used && !node.local);
            dir.and_then(|dir| dir.listed_at).is_some_and(|seen| seen.elapsed() >= age)
        };
        self.nodes.iter().filter(|(_, node)| old(node)).map(|(id, _)| *id).collect()
    }

    pub(super) fn dir_used(&mut self, id: u64) {
        self.uses += 1;
        let uses = self.uses;
        if let Some(dir) = self.dir(id) {
            (dir.used, dir.last_use) = (true, uses);
        }
    }

    pub(in crate::client) fn look_up(&mut self, parent: u64, name: &Name, ttl: Duration) -> NameLookup {
        self.dir_used(parent);
        let Some(node) = self.nodes.get(&parent) else { return NameLookup::Ask };
        let Some(dir) = &node.dir else { return NameLookup::Ask };
        let whole = node.local || dir.listed_at.is_some_and(|seen| seen.elapsed() < ttl);
        match dir.entries.get(name) {
            Some(id)
                if self.nodes.get(id).is_some_and(|node| node.is_fresh(ttl) || (whole && !node.recalled)) =>
            {
                NameLookup::Node(*id)
            }
            None if whole => NameLookup::Nothing,
            _ => NameLookup::Ask,
        }
    }

    /// How long the kernel may cache that a directory lacks this name.
    pub(in crate::client) fn cache_absent(&mut self, parent: u64, name: &Name, ttl: Duration) -> Duration {
        let Some(node) = self.nodes.get_mut(&parent) else { return Duration::ZERO };
        let Some(dir) = &mut node.dir else { return Duration::ZERO };
        let left = match dir.listed_at {
            _ if node.local => ttl,
            Some(seen) => ttl.saturating_sub(seen.elapsed()),
            None => Duration::ZERO,
        };
        if left.is_zero() || dir.entries.contains_key(name) || dir.absent.len() >= MAX_ABSENT {
            return Duration::ZERO;
        }
        dir.absent.insert(name.clone());
        left
    }

    /// The directories above an inode, the nearest first.
    pub(in crate::client) fn above(&self, id: u64) -> Vec<u64> {
        let parent = |id: &u64| Some(self.nodes.get(id)?.names.first()?.0);
        std::iter::successors(parent(&id), parent).collect()
    }

    /// What this name leads to is not what the kernel knows.
    pub(in crate::client) fn name_changed(&mut self, path: &RelPath) {
        let Some((dir, name)) = path.split() else { return };
        let names = dir.as_bytes().split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        let parent = names
            .map(Name::new)
            .try_fold(ROOT, |at, name| self.nodes.get(&at)?.dir.as_ref()?.entries.get(&name.ok()?).copied());
        self.appeared.extend(parent.map(|parent| (parent, name)));
    }

    /// Takes the names that the kernel must look up again.
    pub(in crate::client) fn take_appeared(&mut self) -> Vec<(u64, Name)> {
        std::mem::take(&mut self.appeared)
    }

    /// Whether all names of a directory are known and fresh.
    pub(in crate::client) fn is_complete(&mut self, id: u64, ttl: Duration) -> bool {
        self.dir_used(id);
        let Some(node) = self.nodes.get(&id) else { return false };
        let Some(dir) = &node.dir else { return false };
        node.local || dir.listed_at.is_some_and(|seen| seen.elapsed() < ttl)
    }

    /// The inode of a file that the server reported when it was asked at this moment, and whether it was
    /// known before.
    pub(in crate::client) fn adopt(
        &mut self,
        parent: u64,
        name: &Name,
        attr: Attr,
        asked: Instant,
    ) -> (u64, bool) {
        let (id, known) = match self.by_ident.get(&attr.ident) {
            // A directory has one name only; a file may have several.
            Some(id) if self.nodes.get(id).is_some_and(|node| node.attr.kind == attr.kind) => (*id, true),
            _ => {
                let id = self.insert(Inode::new(attr, None));
                self.reported(id, asked);
                (id, false)
            }
        };
        if attr.kind == Kind::Dir
            && let Some(node) = self.nodes.get_mut(&id)
        {
            let old = std::mem::take(&mut node.names);
            for (parent, name) in old {
                if let Some(dir) = self.dir(parent) {
                    dir.entries.remove(&name);
                }
            }
        }
        let another = |dir: &mut Dir| dir.entries.get(name).is_some_and(|known| *known != id);
        if self.dir(parent).is_some_and(|dir| dir.absent.remove(name) || another(dir)) {
            self.appeared.push((parent, name.clone()));
        }
        self.link(parent, name, id);
        (id, known)
    }

    fn insert(&mut self, node: Inode) -> u64 {
        let id = self.next;
        self.next += 1;
        if !node.local {
            self.by_ident.insert(node.attr.ident, id);
        }
        self.nodes.insert(id, Box::new(node));
        id
    }

    pub(in crate::client) fn add_local(&mut self, parent: u64, name: &Name, attr: Attr) -> u64 {
        let mut node = Inode::new(attr, None);
        node.local = true;
        let id = self.insert(node);
        self.link(parent, name, id);
        id
    }

    /// Records that the server created an inode.
    pub(in crate::client) fn set_created(&mut self, id: u64, attr: Attr, asked: Instant) {
        let trusted = self.trusted(&attr.ident, asked);
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.local = false;
        node.attr.ident = attr.ident;
        // The content of this directory is known: it was created here, empty.
        if let Some(dir) = &mut node.dir {
            dir.listed_at = Some(trusted.unwrap_or_else(long_ago));
        }
        self.by_ident.insert(attr.ident, id);
        self.reported(id, asked);
    }

    /// Makes a name lead to an inode; the inode that it led to before loses the name.
    pub(in crate::client) fn link(&mut self, parent: u64, name: &Name, id: u64) {
        let Some(dir) = self.dir(parent) else { return };
        // If it was created here, the kernel knows the name.
        dir.absent.remove(name);
        let before = dir.entries.insert(name.clone(), id);
        let place = (parent, name.clone());
        if let Some(before) = before.filter(|before| *before != id)
            && let Some(node) = self.nodes.get_mut(&before)
        {
            node.names.retain(|known| *known != place);
            self.remove_unused(before);
        }
        if let Some(node) = self.nodes.get_mut(&id)
            && !node.names.contains(&place)
        {
            // Most files have one name, for which a vector would make room for four.
            node.names.reserve_exact(1);
            node.names.push(place);
        }
    }

    /// Removes a name and returns the inode that it led to.
    pub(in crate::client) fn unlink(&mut self, parent: u64, name: &Name) -> Option<u64> {
        let id = self.dir(parent)?.entries.remove(name)?;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.names.retain(|(known, other)| *known != parent || other != name);
        }
        Some(id)
    }

    /// Stores the complete list of a directory's names. Returns the inodes that were known, with their
    /// attributes.
    pub(in crate::client) fn store_listing(
        &mut self,
        id: u64,
        entries: Vec<Entry>,
        asked: Instant,
    ) -> Vec<(u64, Attr)> {
        let mut found = Vec::with_capacity(entries.len());
        let mut names: HashMap<Name, ()> = HashMap::with_capacity(entries.len());
        for Entry { name, attr } in entries {
            let (child, known) = self.adopt(id, &name, attr, asked);
            if known {
                found.push((child, attr));
            }
            names.insert(name, ());
        }
        let trusted = self.nodes.get(&id).and_then(|node| self.trusted(&node.attr.ident, asked));
        let uses = self.uses;
        let Some(dir) = self.dir(id) else { return found };
        dir.last_use = uses;
        dir.listed_at = Some(trusted.unwrap_or_else(long_ago));
        let gone: Vec<Name> = dir.entries.keys().filter(|name| !names.contains_key(*name)).cloned().collect();
        for name in gone {
            if let Some(child) = self.unlink(id, &name) {
                if self.nodes.get(&child).is_some_and(|node| node.refs > 0) {
                    self.appeared.push((id, name));
                }
                self.remove_unused(child);
            }
        }
        found
    }

    /// Removes an inode that has no name, no reference and no open descriptor.
    pub(in crate::client) fn remove_unused(&mut self, id: u64) -> Option<FileId> {
        let node = self.nodes.get(&id)?;
        if id == ROOT || !node.names.is_empty() || node.refs > 0 || node.opens > 0 {
            return None;
        }
        let node = self.nodes.remove(&id)?;
        if self.by_ident.get(&node.attr.ident) == Some(&id) {
            self.by_ident.remove(&node.attr.ident);
        }
        node.file
    }

    /// Records that a name of this directory was changed here, and `links` directories came or went. If the
    /// server has made the change, its attributes are requested when they are needed again.
    pub(in crate::client) fn dir_changed(&mut self, id: u64, links: i32, made: bool) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some(dir) = &mut node.dir else { return };
        dir.changes += 1;
        let now = Time::now();
        (node.attr.mtime, node.attr.ctime) = (now, now);
        node.attr.links = node.attr.links.saturating_add_signed(links);
        if made {
            node.expire();
        }
    }

    /// Makes everything stale except what was changed here.
    pub(in crate::client) fn expire_all(&mut self) {
        for (id, node) in &mut self.nodes {
            let absent = node.dir.as_mut().map(|dir| std::mem::take(&mut dir.absent));
            self.appeared.extend(absent.into_iter().flatten().map(|name| (*id, name)));
            if node.local {
                continue;
            }
            node.expire();
            if let Some(dir) = &mut node.dir {
                dir.listed_at = None;
            }
        }
    }
}
