//! Tree prefetch: requests names and attributes of many directories before programs ask for them.
//!
//! When a session begins, the tree is walked level by level, with several large requests at once, up to a
//! limit: a program that walks it would otherwise wait a round trip for each directory. When cached names
//! grow old while in use, all directories in use are requested again together, so that only the first program
//! waits.
//!
//! A reply counts from the moment of its request, and not at all for a directory that was changed or listed
//! here meanwhile. Nobody waits for a walk, and what it does not bring is requested as usual.

use crate::client::{
    connection::server_connection::CallFailure,
    namespace::{directory_cache::MAX_LOOKUP_NAMES, inodes::Dir},
    session::Core,
};
use crate::proto::{Kind, ListTree, RelPath, WalkCall, Walked, WalkedDir, unpack_dirs};
use bytes::Bytes;
use std::{
    collections::{HashMap, HashSet},
    sync::{Weak, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_fuse::ROOT;

/// Most names in one walk: about 30 MB here, and a second of a server's time.
const MAX_NAMES: usize = 100_000;
/// Requests in progress at once.
const MAX_REQUESTS: usize = 8;
/// Directories of one request, and names after which its reply ends.
const PART: (usize, u32) = (256, 8192);
/// Cache times below this are not worth a walk.
const MIN_TTL: Duration = Duration::from_secs(1);

/// State of a directory at the request: local changes, and when it was last listed completely.
type DirState = (u64, Option<Instant>);

/// Requests sent at once, and the state at that moment.
struct Wave {
    below: bool,
    begun: Instant,
    /// Number of local changes so far.
    changes: u64,
    /// Number of evictions so far.
    evictions: u64,
    before: HashMap<u64, DirState>,
    parts: Vec<Vec<(u64, RelPath)>>,
}

type Answer = Result<(Walked, Bytes), CallFailure>;

fn dir_state(dir: &Dir) -> DirState {
    (dir.changes, dir.listed_at)
}

impl Core {
    pub(in crate::client) fn walk_tree(&self) {
        self.walk(vec![ROOT], true);
    }

    /// Requests all directories again that are in use and grow old.
    pub(in crate::client) fn walk_again(&self) {
        let ttl = self.ttl();
        if ttl < MIN_TTL || self.walking.load(Ordering::Acquire) {
            return;
        }
        let old = self.inodes().used_dirs(ttl / 2);
        // A single directory is requested by the caller.
        if old.len() > 1 {
            self.walk(old, false);
        }
    }

    /// Requests directories again whose names are not leased any more.
    pub(in crate::client) fn walk_listed(&self, dirs: Vec<u64>) {
        // A single directory is requested by who needs it.
        if dirs.len() > 1 {
            self.walk(dirs, false);
        }
    }

    fn walk(&self, dirs: Vec<u64>, below: bool) {
        if self.walking.swap(true, Ordering::AcqRel) {
            return;
        }
        let me = self.me.clone();
        self.connection.runtime().spawn(async move {
            walk_waves(&me, dirs, below).await;
            if let Some(core) = me.upgrade() {
                core.walking.store(false, Ordering::Release);
            }
        });
    }

    /// The next requests for these directories; the rest stays in `dirs`. None while the server has yet to
    /// make changes of this client, because its replies would be older than the state here.
    fn wave(&self, dirs: &mut Vec<u64>, below: bool) -> Option<Wave> {
        let mut nodes = self.inodes();
        if self.writeback.queued() > 0 {
            return None;
        }
        let now: Vec<u64> = dirs.drain(..dirs.len().min(PART.0 * MAX_REQUESTS)).collect();
        let known: Vec<(u64, RelPath)> = now.iter().filter_map(|id| Some((*id, nodes.path(*id)?))).collect();
        let before = now.iter().filter_map(|id| Some((*id, dir_state(nodes.dir(*id)?)))).collect();
        // Even a few directories are spread over requests, because those below come with them.
        let size = known.len().div_ceil(MAX_REQUESTS).clamp(1, PART.0);
        let parts: Vec<_> = known.chunks(size).map(<[_]>::to_vec).collect();
        let changes = self.writeback.changes();
        let evictions = nodes.evictions;
        (!parts.is_empty()).then_some(Wave {
            below,
            begun: Instant::now(),
            changes,
            evictions,
            before,
            parts,
        })
    }

    /// Stores a reply; returns the directories below that it did not bring.
    fn store_dirs(&self, wave: &Wave, dirs: Vec<WalkedDir>) -> Vec<u64> {
        let (mut updates, mut below) = (Vec::new(), Vec::new());
        let mut nodes = self.inodes();
        if nodes.evictions != wave.evictions && self.writeback.changes() != wave.changes {
            // What was changed here meanwhile may have left, so that nothing tells that the reply lacks it.
            return Vec::new();
        }
        for WalkedDir { ident, entries } in dirs {
            let Some(id) = nodes.by_ident(&ident) else { continue };
            let Some(dir) = nodes.dir(id) else { continue };
            if dir_state(dir) != wave.before.get(&id).copied().unwrap_or_default() {
                continue;
            }
            dir.large = entries.is_none();
            let Some(entries) = entries else { continue };
            let dirs = entries.iter().filter(|entry| {
                wave.below && entry.attr.kind == Kind::Dir && entry.attr.ident.dev == ident.dev
            });
            below.extend(dirs.map(|entry| entry.attr.ident));
            updates.extend(nodes.store_listing(id, entries, wave.begun));
            if let Some(dir) = nodes.dir(id) {
                dir.used = false;
            }
        }
        let unknown =
            |id: &u64| nodes.get(*id).and_then(|node| node.dir.as_deref()).is_some_and(Dir::is_unknown);
        let below: Vec<u64> =
            below.iter().filter_map(|ident| nodes.by_ident(ident)).filter(unknown).collect();
        // Attributes that were changed here meanwhile are newer than the reply.
        let changed = self.writeback.changes() != wave.changes;
        drop(nodes);
        self.invalidate_kernel_names();
        if !changed {
            updates.into_iter().for_each(|(id, attr)| self.store_attr(id, attr, wave.begun));
        }
        below
    }

    /// Stores all replies of a wave; returns the directories to request next, and the number of names
    /// received.
    fn store_wave(&self, wave: &Wave, answers: Vec<Answer>) -> Result<(Vec<u64>, usize), CallFailure> {
        let (mut next, mut names) = (Vec::new(), 0);
        for (part, answer) in wave.parts.iter().zip(answers) {
            let (walked, packed) = answer?;
            let dirs = unpack_dirs(&packed).map_err(|_| CallFailure::InvalidReply)?;
            let reached = walked.reached as usize;
            if reached == 0 || reached > part.len() {
                return Err(CallFailure::InvalidReply);
            }
            names += dirs.iter().filter_map(|dir| dir.entries.as_ref()).map(Vec::len).sum::<usize>();
            next.extend(part[reached..].iter().map(|(id, _)| *id));
            next.extend(self.store_dirs(wave, dirs));
        }
        self.evict_names();
        Ok((next, names))
    }
}

/// Requests and stores, wave after wave. Holds the session only while it does so, since the session may end
/// at any time.
async fn walk_waves(me: &Weak<Core>, mut dirs: Vec<u64>, below: bool) {
    let (mut names, mut asked) = (0, HashSet::new());
    while names < MAX_NAMES && !dirs.is_empty() {
        let Some(core) = me.upgrade() else { return };
        let Some(wave) = core.wave(&mut dirs, below) else { return };
        let tasks: Vec<_> = wave.parts.iter().map(|part| core.ask_for(part, below)).collect();
        drop(core);
        let mut answers = Vec::new();
        for task in tasks {
            answers.push(task.await.unwrap_or(Err(CallFailure::InvalidReply)));
        }
        let Some(core) = me.upgrade() else { return };
        let learnt = tokio::task::spawn_blocking(move || core.store_wave(&wave, answers)).await;
        let Ok(Ok((next, came))) = learnt else { return };
        names += came;
        // A directory that cannot be read is requested once more by itself, and then no more.
        dirs.extend(next.into_iter().filter(|id| asked.insert(*id)));
    }
}

impl Core {
    fn ask_for(&self, part: &[(u64, RelPath)], below: bool) -> tokio::task::JoinHandle<Answer> {
        let dirs = part.iter().map(|(_, path)| path.clone()).collect();
        let wanted = ListTree { dirs, below, names: PART.1, most: MAX_LOOKUP_NAMES };
        let link = self.connection.clone();
        self.connection
            .runtime()
            .spawn(async move { link.send::<WalkCall, _>(wanted, Bytes::new(), None).await.0 })
    }
}
