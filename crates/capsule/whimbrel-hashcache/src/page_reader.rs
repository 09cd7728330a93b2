//! Getting a page: the place from the table, the bytes from the file, the proof from the digest.
//!
//! Two files that share a page mostly share the next ones too, so a second hit behind the first reads a
//! window of 64 KiB, which serves the following requests without a system call. A request that the table does
//! not know is also compared with the page behind the last hit, once: its entry may have been evicted while
//! its neighbours stayed.
//!
//! Invariant: bytes are handed out only after the digest of the very copy that is handed out was found right.

use crate::HashCache;
use crate::location::Location;
use crate::source_files::NotRead;
use crate::stats::Counter;
use crate::table::Inserted;
use whimbrel_core::{Digest, PAGE_SIZE};

/// Bytes of the first half of a digest.
const HALF: usize = 16;
const WINDOW: usize = 64 << 10;
/// Windows kept: a few streams that alternate.
const WINDOWS: usize = 4;

/// What page is looked for. The table knows no more of a digest than its first half.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PageQuery {
    /// The one of this digest.
    Digest(Digest),
    /// One whose digest begins like this one; the rest of it counts for nothing.
    Half(Digest),
}

impl PageQuery {
    fn digest(&self) -> &Digest {
        let (Self::Digest(digest) | Self::Half(digest)) = self;
        digest
    }

    fn is(&self, found: &Digest) -> bool {
        match self {
            Self::Digest(digest) => digest == found,
            Self::Half(digest) => digest.0[..HALF] == found.0[..HALF],
        }
    }
}

/// Bytes of a source as they were a moment ago.
#[derive(Debug)]
struct Window {
    at: Location,
    bytes: Vec<u8>,
}

impl Window {
    /// The page at `location`, if it lies inside whole.
    fn page(&self, location: Location) -> Option<&[u8]> {
        let from = location.offset.checked_sub(self.at.offset)?;
        let from = usize::try_from(from).ok().filter(|_| location.source == self.at.source)?;
        self.bytes.get(from..from.checked_add(PAGE_SIZE)?)
    }
}

/// What one stream of requests remembers.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    windows: Vec<Window>,
    turn: usize,
    last: Option<Location>,
    /// The last request was a hit, so the page behind it is worth a look.
    guess: bool,
}

enum Fetched {
    Right,
    Wrong,
    Unavailable,
}

impl Stream {
    /// Finds the page that is sought; `page` means nothing if it returns false.
    pub(crate) fn get(&mut self, cache: &HashCache, sought: &PageQuery, page: &mut [u8; PAGE_SIZE]) -> bool {
        let table = cache.table();
        let (counters, sources) = (cache.counters(), cache.sources());
        let key = table.key(sought.digest());
        for seen in table.all(&key) {
            let location = seen.place.location();
            match self.fetch(cache, location, sought, page) {
                Fetched::Right => {
                    table.used(seen);
                    sources.hit(location.source);
                    counters.add(Counter::Hits, 1);
                    (self.last, self.guess) = (Some(location), true);
                    return true;
                }
                Fetched::Wrong => {
                    table.drop(seen);
                    sources.dropped(location.source);
                    counters.add(Counter::Dropped, 1);
                }
                Fetched::Unavailable => {}
            }
        }
        let found = std::mem::take(&mut self.guess) && self.read_at_location(cache, sought, page);
        counters.add(if found { Counter::Hits } else { Counter::Misses }, 1);
        found
    }

    /// Whether the page behind the last hit is the one; only if it was read already.
    fn read_at_location(
        &mut self,
        cache: &HashCache,
        sought: &PageQuery,
        page: &mut [u8; PAGE_SIZE],
    ) -> bool {
        let Some(last) = self.last else { return false };
        let next = Location { offset: last.offset + PAGE_SIZE as u64, ..last };
        let Some(bytes) = self.windows.iter().find_map(|window| window.page(next)) else { return false };
        page.copy_from_slice(bytes);
        let digest = Digest::of(page);
        if !sought.is(&digest) {
            return false;
        }
        cache.insert(&digest, next, |id| cache.is_volatile(id));
        cache.sources().hit(next.source);
        cache.counters().add(Counter::ReadAhead, 1);
        (self.last, self.guess) = (Some(next), true);
        true
    }

    fn fetch(
        &mut self,
        cache: &HashCache,
        location: Location,
        sought: &PageQuery,
        page: &mut [u8; PAGE_SIZE],
    ) -> Fetched {
        if let Some(bytes) = self.windows.iter().find_map(|window| window.page(location)) {
            page.copy_from_slice(bytes);
            if sought.is(&Digest::of(page)) {
                return Fetched::Right;
            }
            // The window may be older than the file.
        }
        let read = if self.is_sequential(location) {
            self.read_window(cache, location, page)
        } else {
            cache.read(location, page)
        };
        match read {
            Ok(PAGE_SIZE) if sought.is(&Digest::of(page)) => Fetched::Right,
            Ok(_) | Err(NotRead::Gone) => Fetched::Wrong,
            Err(NotRead::Unavailable) => Fetched::Unavailable,
        }
    }

    /// Whether `location` comes shortly behind the last hit.
    fn is_sequential(&self, location: Location) -> bool {
        self.last.is_some_and(|last| {
            let ahead = location.offset.wrapping_sub(last.offset);
            last.source == location.source && (1..=WINDOW as u64).contains(&ahead)
        })
    }

    /// Reads a window in place of the oldest; bytes of its first page.
    fn read_window(
        &mut self,
        cache: &HashCache,
        at: Location,
        page: &mut [u8; PAGE_SIZE],
    ) -> Result<usize, NotRead> {
        if self.windows.len() < WINDOWS {
            self.windows.push(Window { at, bytes: Vec::with_capacity(WINDOW) });
            self.turn = self.windows.len() - 1;
        } else {
            self.turn = (self.turn + 1) % WINDOWS;
        }
        let window = &mut self.windows[self.turn];
        window.at = at;
        window.bytes.resize(WINDOW, 0);
        let read = cache.read(at, &mut window.bytes);
        window.bytes.truncate(*read.as_ref().unwrap_or(&0));
        let first = window.bytes.len().min(PAGE_SIZE);
        page[..first].copy_from_slice(&window.bytes[..first]);
        read.map(|_| first)
    }
}

/// A stream of requests with read-ahead of its own: one for each thread that gets many pages.
#[derive(Debug)]
pub struct Reader<'a> {
    cache: &'a HashCache,
    stream: Stream,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(cache: &'a HashCache) -> Self {
        Self { cache, stream: Stream::default() }
    }

    /// Like [`HashCache::get`].
    pub fn get(&mut self, digest: &Digest, page: &mut [u8; PAGE_SIZE]) -> bool {
        self.stream.get(self.cache, &PageQuery::Digest(*digest), page)
    }
}

impl HashCache {
    /// Notes a place, and counts what had to go for it.
    pub(crate) fn insert(
        &self,
        digest: &Digest,
        location: Location,
        volatile: impl Fn(crate::SourceId) -> bool,
    ) -> Inserted {
        let table = self.table();
        let Some(place) = crate::location::PackedLocation::new(location) else { return Inserted::Known };
        let done = table.insert(&table.key(digest), place, volatile, || self.draw());
        if done == Inserted::Evicted {
            self.counters().add(Counter::Evictions, 1);
        }
        done
    }
}
