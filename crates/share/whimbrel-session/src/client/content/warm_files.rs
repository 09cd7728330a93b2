//! Warming and pins: fetches a file, or all files below a directory, and has their content stay here.
//!
//! The names are walked twice: to add up the sizes, so that what does not fit is refused before anything is
//! fetched, and to fetch. Programs go first. What changes on the server meanwhile is left out and counted.
//!
//! Pins are stored in the cache's directory (`docs/formats/session-cache.md`).

use super::fetcher::FetchRequest;
use crate::cache::CacheDir;
use crate::client::{
    connection::server_connection::CallFailure,
    namespace::eviction::NamesGuard,
    session::{Core, Session},
};
use crate::proto::{Attr, Kind, PAGE, RelPath};
use serde::{Deserialize, Serialize};
use std::{collections::VecDeque, io, sync::Arc, thread, time::Duration};
use whimbrel_core::{ByteSize, lock};
use whimbrel_fuse::{Errno, Result};

const VERSION: u32 = 1;
/// Name of the file of pins in the directory of the cache.
const PINS: &str = "pins";
/// Most pinned paths of a session.
const MAX_PINS: usize = 4096;
/// Longest file of pins that is read.
const MAX_PINS_LEN: u64 = 32 << 20;
/// Bytes in transit.
const WINDOW: u64 = 8 << 20;
/// Most requests in transit; small files are one each.
const MAX_REQUESTS: usize = 256;
/// Bytes that are requested at once.
const REQUEST: u64 = 1 << 20;
/// Pause before a request while a program waits.
const PAUSE: Duration = Duration::from_millis(5);

/// How far the content of some files has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmProgress {
    /// Number of files.
    pub files: u64,
    /// Bytes of all of them.
    pub total: u64,
    /// Bytes that are here.
    pub here: u64,
}

/// Files cannot be warmed, pinned or unpinned.
#[derive(Debug, thiserror::Error)]
pub enum WarmError {
    /// The session stores nothing.
    #[error("this session has no cache")]
    NoCache,
    /// A call failed.
    #[error("cannot fetch {path}: {errno}")]
    Failed {
        /// Path that was asked for.
        path: RelPath,
        /// Error number for programs.
        errno: Errno,
    },
    /// The files are larger than the room for them.
    #[error("{} of the cache are needed, and {} may be used for this", ByteSize(*needed), ByteSize(*room))]
    TooLarge {
        /// Bytes of cache blocks that are needed.
        needed: u64,
        /// Bytes of cache blocks that may be used.
        room: u64,
    },
    /// There are too many pins.
    #[error("there are {MAX_PINS} pinned paths already")]
    TooMany,
    /// Nothing there is pinned.
    #[error("neither {path} nor anything below it is pinned by itself")]
    NotPinned {
        /// Path that was to be unpinned.
        path: RelPath,
    },
    /// Nobody waits for the files any more.
    #[error("it was cancelled")]
    Cancelled,
    /// The pins cannot be stored.
    #[error("cannot store the pins")]
    Store(#[source] io::Error),
}

#[derive(Serialize, Deserialize)]
struct StoredPins {
    version: u32,
    pins: Vec<RelPath>,
}

/// Receives progress; false cancels.
type Report<'a> = &'a mut dyn FnMut(WarmProgress) -> bool;

/// Requests in transit, with their bytes.
#[derive(Default)]
struct Transit {
    requests: VecDeque<(u64, Vec<Arc<FetchRequest>>)>,
    bytes: u64,
}

impl Transit {
    fn push(&mut self, bytes: u64, requests: Vec<Arc<FetchRequest>>) {
        self.bytes += bytes;
        self.requests.push_back((bytes, requests));
    }

    /// Waits until no more than this is in transit; returns the bytes that came.
    fn wait(&mut self, most: u64) -> std::result::Result<u64, Errno> {
        let mut came = 0;
        while self.bytes > most || self.requests.len() > MAX_REQUESTS {
            let Some((bytes, requests)) = self.requests.pop_front() else { break };
            self.bytes -= bytes;
            for request in requests {
                match request.wait() {
                    // What is not here in the end is counted then.
                    Ok(_) | Err(CallFailure::Outdated) => {}
                    Err(fail) => return Err(fail.errno()),
                }
            }
            came += bytes;
        }
        Ok(came)
    }
}

impl Session {
    /// Fetches a file, or all files below a directory, into the cache, and returns what is there then. If
    /// `report` returns false, it is cancelled.
    pub fn warm(
        &self,
        path: &RelPath,
        report: &mut dyn FnMut(WarmProgress) -> bool,
    ) -> std::result::Result<WarmProgress, WarmError> {
        self.core.warm(path, report)
    }

    /// Has the content of a file, or of all files below a directory, stay in the cache once it is there, in
    /// later sessions on this cache as well.
    pub fn pin(&self, path: &RelPath) -> std::result::Result<(), WarmError> {
        self.core.pin(path)
    }

    /// Ends all pins at or below a path.
    pub fn unpin(&self, path: &RelPath) -> std::result::Result<(), WarmError> {
        self.core.unpin(path)
    }
}

fn failed(path: &RelPath) -> impl Fn(Errno) -> WarmError {
    move |errno| WarmError::Failed { path: path.clone(), errno }
}

impl Core {
    /// Fetches all content at or below a path that is not here, and returns what is here then.
    pub(in crate::client) fn warm(
        &self,
        path: &RelPath,
        report: Report<'_>,
    ) -> std::result::Result<WarmProgress, WarmError> {
        let (mut progress, needed) = self.sizes_at(path)?;
        let room = self.cache.stats().capacity;
        if needed > room {
            return Err(WarmError::TooLarge { needed, room });
        }
        let mut transit = Transit::default();
        let fetched = self.each_file(path, &mut |held, id, attr| {
            let file = self.file_of(id)?;
            progress.here += self.bytes_here(id, attr);
            let source = self.fetch_subject(id, file);
            drop(held);
            // A file that the server has yet to make is all here.
            let Some(source) = source else { return Ok(()) };
            let block = self.cache.block_size();
            let missing: Vec<u64> = (0..source.size.div_ceil(block))
                .filter(|number| !self.cache.has_block(file, *number, source.size))
                .collect();
            for blocks in missing.chunks((REQUEST / block).max(1) as usize) {
                if self.connection.has_waiters() {
                    thread::sleep(PAUSE);
                }
                transit.push(blocks.len() as u64 * block, self.fetch(&source, blocks, true));
                progress.here = progress.total.min(progress.here + transit.wait(WINDOW)?);
                if !report(progress) || self.writeback.is_stopped() {
                    return Err(Errno::EINTR);
                }
            }
            Ok(())
        });
        match fetched.and_then(|()| transit.wait(0)) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Err(WarmError::Cancelled),
            Err(errno) => return Err(failed(path)(errno)),
        }
        self.progress_at(path)
    }

    /// What of the files at or below a path is here.
    fn progress_at(&self, path: &RelPath) -> std::result::Result<WarmProgress, WarmError> {
        let mut now = WarmProgress::default();
        let looked = self.each_file(path, &mut |_, id, attr| {
            let here = self.bytes_here(id, attr);
            now = WarmProgress { files: now.files + 1, total: now.total + attr.size, here: now.here + here };
            Ok(())
        });
        looked.map(|()| now).map_err(failed(path))
    }

    /// Bytes of a file that are here.
    fn bytes_here(&self, id: u64, attr: Attr) -> u64 {
        let Ok(file) = self.file_of(id) else { return 0 };
        let missing = (0..attr.size.div_ceil(self.cache.block_size()))
            .filter_map(|block| self.cache.missing_pages(file, block, attr.size))
            .map(|pages| u64::from(pages.count_ones()) * PAGE as u64)
            .sum::<u64>();
        attr.size.saturating_sub(missing)
    }

    /// Number and bytes of the files at or below a path, and the bytes of cache blocks that they need.
    fn sizes_at(&self, path: &RelPath) -> std::result::Result<(WarmProgress, u64), WarmError> {
        if !self.options.has_cache() {
            return Err(WarmError::NoCache);
        }
        let (mut sizes, mut needed, block) = (WarmProgress::default(), 0, self.cache.block_size());
        let added = self.each_file(path, &mut |_, _, attr| {
            // Holes need no room.
            let stored = if attr.blocks == 0 { attr.size } else { attr.size.min(attr.blocks * 512) };
            sizes.files += 1;
            sizes.total += attr.size;
            needed += stored.div_ceil(block) * block;
            Ok(())
        });
        added.map(|()| (sizes, needed)).map_err(failed(path))
    }

    /// Calls `found` for each file at or below a path. Those that are removed meanwhile are left out.
    fn each_file(
        &self,
        top: &RelPath,
        found: &mut dyn FnMut(NamesGuard<'_>, u64, Attr) -> Result<()>,
    ) -> Result<()> {
        let mut next = vec![top.clone()];
        while let Some(path) = next.pop() {
            let held = self.hold_names();
            let id = match self.resolve(&held, &path) {
                Err(Errno::ENOENT | Errno::ENOTDIR) if path != *top => continue,
                resolved => resolved?,
            };
            let attr = self.inodes().get(id).ok_or(Errno::ESTALE)?.attr;
            match attr.kind {
                Kind::File => found(held, id, attr)?,
                Kind::Dir => {
                    self.complete_directory(&held, id)?;
                    let nodes = self.inodes();
                    let dir = nodes.get(id).and_then(|node| node.dir.as_ref()).ok_or(Errno::ENOTDIR)?;
                    let is_wanted = |id: &u64| {
                        nodes.get(*id).is_some_and(|node| matches!(node.attr.kind, Kind::File | Kind::Dir))
                    };
                    let wanted = dir.entries.iter().filter(|(_, id)| is_wanted(id));
                    next.extend(wanted.filter_map(|(name, _)| path.join(name).ok()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Has the content at or below a path stay here once it has come.
    pub(in crate::client) fn pin(&self, path: &RelPath) -> std::result::Result<(), WarmError> {
        let _alone = lock(&self.pinning);
        let mut pins = self.cache.pins();
        pins.retain(|pin| !pin.is_within(path));
        if !pins.iter().any(|pin| path.is_within(pin)) {
            pins.push(path.clone());
        }
        let (_, here) = self.sizes_at(path)?;
        // One that is gone takes no room.
        let size = |pin: &RelPath| self.sizes_at(pin).map_or(0, |(_, needed)| needed);
        let needed = pins.iter().map(|pin| if pin == path { here } else { size(pin) }).sum();
        let room = self.cache.pinnable();
        match () {
            () if needed > room => Err(WarmError::TooLarge { needed, room }),
            () if pins.len() > MAX_PINS => Err(WarmError::TooMany),
            () => self.store_pins(pins),
        }
    }

    /// Lets the content at or below a path leave when the room is needed.
    pub(in crate::client) fn unpin(&self, path: &RelPath) -> std::result::Result<(), WarmError> {
        let _alone = lock(&self.pinning);
        let mut pins = self.cache.pins();
        let before = pins.len();
        pins.retain(|pin| !pin.is_within(path));
        if pins.len() == before {
            return Err(WarmError::NotPinned { path: path.clone() });
        }
        self.store_pins(pins)
    }

    fn store_pins(&self, pins: Vec<RelPath>) -> std::result::Result<(), WarmError> {
        let stored = postcard::to_allocvec(&StoredPins { version: VERSION, pins: pins.clone() });
        let bytes = stored.map_err(|error| WarmError::Store(io::Error::other(error)))?;
        self.cache_dir.replace(PINS, &bytes).map_err(WarmError::Store)?;
        self.cache.set_pins(pins);
        Ok(())
    }

    /// Sets the pins of earlier sessions.
    pub(in crate::client) fn restore_pins(&self) {
        if !self.options.has_cache() {
            return;
        }
        match load_pins(&self.cache_dir) {
            Ok(pins) => self.cache.set_pins(pins),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.event(format!("nothing is pinned, because the list cannot be read: {error}")),
        }
    }
}

fn load_pins(cache: &CacheDir) -> io::Result<Vec<RelPath>> {
    let bytes = cache.load(PINS, MAX_PINS_LEN)?;
    let stored: StoredPins = postcard::from_bytes(&bytes).map_err(io::Error::other)?;
    let known = stored.version == VERSION && stored.pins.len() <= MAX_PINS;
    known.then_some(stored.pins).ok_or_else(|| io::Error::other("it is of another version"))
}
