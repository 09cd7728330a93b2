//! Directory listings, complete or in parts.
//!
//! A listing has the names of a directory at one moment; its parts may be requested in any order and
//! concurrently. A name that was removed before its part is requested is left out.

use super::{exports::attr_in, leased_answers::Granting, refuse};
use crate::proto::{Entry, List, Listed, Name, RelPath, code, pack_entries};
use rustix::{fs::Dir, io::Errno};
use std::{
    collections::VecDeque,
    ops::Range,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_core::lock;
use whimbrel_wire::Refusal;

/// Most listings remembered for a session: parts are requested soon after each other.
const MAX_LISTINGS: usize = 16;
/// Most names remembered, besides those of the latest listing: some hundred megabytes.
const MAX_NAMES: usize = 4 << 20;
const PART: u32 = 8192;

pub(super) struct Listing {
    dir: OwnedFd,
    names: Vec<Name>,
}

#[derive(Default)]
pub(super) struct Listings {
    next: AtomicU64,
    latest: Mutex<VecDeque<(u64, Arc<Listing>)>>,
}

impl Listing {
    /// Reads a directory; `None` if it has more than `most` names.
    pub(super) fn read(dir: OwnedFd, most: usize) -> Result<Option<Self>, Refusal> {
        let mut names = Vec::new();
        let reader = Dir::read_from(&dir).map_err(refuse("read the directory"))?;
        for entry in reader {
            let entry = entry.map_err(refuse("read the directory"))?;
            // Skip `.`, `..` and names that the wire cannot carry.
            let Ok(name) = Name::new(entry.file_name().to_bytes()) else { continue };
            if names.len() == most {
                return Ok(None);
            }
            names.push(name);
        }
        Ok(Some(Self { dir, names }))
    }

    /// Encodes the entries `from..from + count` for the wire.
    pub(super) fn part(
        &self,
        from: u64,
        count: u32,
        granting: &mut Granting,
    ) -> Result<(Vec<u8>, u64), Refusal> {
        let from = usize::try_from(from).unwrap_or(usize::MAX).min(self.names.len());
        let to = self.names.len().min(from + count.min(PART) as usize);
        let packed = pack_entries(&self.entries(from..to, granting)?);
        let packed = packed.ok_or_else(|| refuse("pack a listing")(Errno::OVERFLOW))?;
        Ok((packed, to as u64))
    }

    pub(super) fn all(&self, granting: &mut Granting) -> Result<Vec<Entry>, Refusal> {
        self.entries(0..self.names.len(), granting)
    }

    fn entries(&self, range: Range<usize>, granting: &mut Granting) -> Result<Vec<Entry>, Refusal> {
        let entry = |name: &Name| match attr_in(&self.dir, name) {
            Ok(attr) => Some(Ok(Entry { name: name.clone(), attr })),
            Err(Errno::NOENT) => None,
            Err(errno) => Some(Err(refuse("examine a file")(errno))),
        };
        let mut entries: Vec<Entry> = self.names[range].iter().filter_map(entry).collect::<Result<_, _>>()?;
        granting.entries(&self.dir, &mut entries);
        Ok(entries)
    }
}

impl Listings {
    /// A part of a listing; a request without a listing creates one.
    pub(super) fn part(
        &self,
        wanted: &List,
        granting: &mut Granting,
        open: impl FnOnce(&RelPath) -> Result<OwnedFd, Refusal>,
    ) -> Result<(Listed, Vec<u8>), Refusal> {
        let (number, listing) = match wanted.listing {
            0 => {
                let dir = open(&wanted.dir)?;
                granting.dir(&dir)?;
                let listing = Listing::read(dir, usize::MAX)?;
                let listing = listing.ok_or_else(|| refuse("read the directory")(Errno::OVERFLOW))?;
                self.insert(Arc::new(listing))
            }
            number => (number, self.find(number)?),
        };
        let (packed, next) = listing.part(wanted.from, wanted.count, granting)?;
        Ok((Listed { listing: number, total: listing.names.len() as u64, next }, packed))
    }

    fn insert(&self, listing: Arc<Listing>) -> (u64, Arc<Listing>) {
        let number = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let mut kept = lock(&self.latest);
        kept.push_back((number, listing.clone()));
        let names = |kept: &VecDeque<(u64, Arc<Listing>)>| -> usize {
            kept.iter().map(|(_, listing)| listing.names.len()).sum()
        };
        while kept.len() > MAX_LISTINGS || (kept.len() > 1 && names(&kept) > MAX_NAMES) {
            kept.pop_front();
        }
        (number, listing)
    }

    fn find(&self, number: u64) -> Result<Arc<Listing>, Refusal> {
        let kept = lock(&self.latest);
        let found = kept.iter().find(|(known, _)| *known == number).map(|(_, listing)| listing.clone());
        found.ok_or_else(|| Refusal::new(code::STALE, "the listing has expired, start another"))
    }
}
