//! Page reader: takes the location from the table, reads the bytes from the file and checks the digest.
//!
//! Files that share a page mostly share the following pages too. So the second hit in sequence reads a window
//! of 64 KiB, which serves later requests without a system call. A request that the table does not know is
//! also compared once with the page after the last hit, because its entry may have been evicted while its
//! neighbours stayed.
//!
//! Invariant: a page is returned only after the digest of that very copy was checked.

use crate::HashCache;
use crate::location::Location;
use crate::source_files::NotRead;
use crate::stats::Counter;
use crate::table::Inserted;
use whimbrel_core::{Digest, PAGE_SIZE};

/// Bytes of the first half of a digest.
const HALF: usize = 16;
const WINDOW: usize = 64 << 10;
/// Windows of a stream: enough for a few alternating sequences.
const WINDOWS: usize = 4;

/// Page to look for. The table has only the first half of digests.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PageQuery {
    Digest(Digest),
    /// Page whose digest begins with the first half of this one; the second half is ignored.
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

/// Bytes of a source that were read a moment ago.
#[derive(Debug)]
struct Window {
    at: Location,
    bytes: Vec<u8>,
}

impl Window {
    /// Page at `location`, if all of it is inside.
    fn page(&self, location: Location) -> Option<&[u8]> {
        let from = location.offset.checked_sub(self.at.offset)?;
        let from = usize::try_from(from).ok().filter(|_| location.source == self.at.source)?;
        self.bytes.get(from..from.checked_add(PAGE_SIZE)?)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    windows: Vec<Window>,
    next_window: usize,
    last: Option<Location>,
    /// The last request was a hit, so the page after it is worth a comparison.
    guess: bool,
}

enum Fetched {
    Right,
    Wrong,
    Unavailable,
}

impl Stream {
    /// Finds the requested page; `page` has undefined content if it returns false.
    pub(crate) fn get(&mut self, cache: &HashCache, sought: &PageQuery, page: &mut [u8; PAGE_SIZE]) -> bool {
        let table = cache.table();
        let (counters, sources) = (cache.counters(), cache.sources());
        let key = table.key(sought.digest());
        for seen in table.all(&key) {
            let location = seen.location.location();
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
        let found = std::mem::take(&mut self.guess) && self.match_next_page(cache, sought, page);
        counters.add(if found { Counter::Hits } else { Counter::Misses }, 1);
        found
    }

    /// Whether the page after the last hit is the requested one; only if it is in a window.
    fn match_next_page(&mut self, cache: &HashCache, sought: &PageQuery, page: &mut [u8; PAGE_SIZE]) -> bool {
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
            // The window may be older than the file, so read the file.
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

    /// Whether `location` is shortly after the last hit.
    fn is_sequential(&self, location: Location) -> bool {
        self.last.is_some_and(|last| {
            let ahead = location.offset.wrapping_sub(last.offset);
            last.source == location.source && (1..=WINDOW as u64).contains(&ahead)
        })
    }

    /// Replaces the oldest window by the bytes at `at`; returns the length of its first page.
    fn read_window(
        &mut self,
        cache: &HashCache,
        at: Location,
        page: &mut [u8; PAGE_SIZE],
    ) -> Result<usize, NotRead> {
        if self.windows.len() < WINDOWS {
            self.windows.push(Window { at, bytes: Vec::with_capacity(WINDOW) });
            self.next_window = self.windows.len() - 1;
        } else {
            self.next_window = (self.next_window + 1) % WINDOWS;
        }
        let window = &mut self.windows[self.next_window];
        window.at = at;
        window.bytes.resize(WINDOW, 0);
        let read = cache.read(at, &mut window.bytes);
        window.bytes.truncate(*read.as_ref().unwrap_or(&0));
        let first = window.bytes.len().min(PAGE_SIZE);
        page[..first].copy_from_slice(&window.bytes[..first]);
        read.map(|_| first)
    }
}

/// Stream of requests with its own read-ahead, for one thread that gets many pages.
#[derive(Debug)]
pub struct Reader<'a> {
    cache: &'a HashCache,
    stream: Stream,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(cache: &'a HashCache) -> Self {
        Self { cache, stream: Stream::default() }
    }

    /// Reads a page as [`HashCache::get`] does.
    pub fn get(&mut self, digest: &Digest, page: &mut [u8; PAGE_SIZE]) -> bool {
        self.stream.get(self.cache, &PageQuery::Digest(*digest), page)
    }
}

impl HashCache {
    /// Inserts a location, and counts an eviction.
    pub(crate) fn insert(
        &self,
        digest: &Digest,
        location: Location,
        volatile: impl Fn(crate::SourceId) -> bool,
    ) -> Inserted {
        let table = self.table();
        let Some(place) = crate::location::PackedLocation::new(location) else { return Inserted::Known };
        let done = table.insert(&table.key(digest), place, volatile, || self.random_number());
        if done == Inserted::Evicted {
            self.counters().add(Counter::Evictions, 1);
        }
        done
    }
}
