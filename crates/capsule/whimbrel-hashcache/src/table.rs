//! Hash table: buckets that map digests to locations. Lock-free; an entry may be wrong, so users of a
//! location check the content.
//!
//! A bucket is one page, chosen by the first bits of the digest. It has 32 groups of eight entries; a group
//! is a cache line of eight tags and a cache line of their eight locations. The tag, bytes 8 to 16 of the
//! digest, also chooses the group where a search begins. The search goes on through at most [`WINDOW`] groups
//! of the bucket, wrapping round. It ends early at an entry that was never used, because insertion takes the
//! first free entry in the same order.
//!
//! Any number of threads and processes load and store tags and locations with relaxed order and never
//! together. Two writers can lose an entry or combine the tag of one with the location of another; both are
//! found when the location is used.
//!
//! Entries go from virgin (both words zero) to used to dropped (location zero, tag kept) and never back to
//! virgin, so that the early end stays correct.

use crate::format::{BUCKET_ENTRIES, Geometry};
use crate::location::{Location, PackedLocation, SourceId};
use crate::mapped_table::{Mapped, prefetch};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use whimbrel_core::Digest;

const GROUP: usize = 8;
const GROUP_WORDS: usize = 2 * GROUP;
const GROUPS: usize = BUCKET_ENTRIES as usize / GROUP;
/// Groups that may have a digest.
const WINDOW: usize = 4;
/// Entries drawn at random for an eviction.
const SAMPLE: usize = 8;
/// Locations stored for one digest.
const COPIES: usize = 2;

#[derive(Debug, Clone, Copy)]
pub(crate) struct TableKey {
    first: usize,
    home: usize,
    tag: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct EntrySnapshot {
    slot: usize,
    pub(crate) location: PackedLocation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// The table had this location, or enough others, for the digest.
    Known,
    /// The digest's entry points to another location now.
    Moved,
    Added,
    /// The least used entry of a sample was replaced.
    Evicted,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Table<'a> {
    words: &'a [AtomicU64],
    buckets: u64,
}

impl<'a> Table<'a> {
    pub(crate) fn new(map: &'a Mapped, geometry: &Geometry) -> Self {
        Self { words: &map.words()[geometry.buckets_word()..], buckets: geometry.buckets() }
    }

    pub(crate) fn key(&self, digest: &Digest) -> TableKey {
        let bucket = (u128::from(digest.prefix()) * u128::from(self.buckets)) >> 64;
        let [_, _, _, _, _, _, _, _, a, b, c, d, e, f, g, h, ..] = digest.0;
        let tag = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let home = (tag >> 59) as usize % GROUPS;
        // A tag of zero would look like an entry that was never used.
        TableKey { first: bucket as usize * GROUPS * GROUP_WORDS, home, tag: tag.max(1) }
    }

    /// Prefetches the lines where a search most likely ends.
    #[inline(always)]
    pub(crate) fn prefetch(&self, key: &TableKey) {
        let group = key.first + key.home * GROUP_WORDS;
        prefetch(&self.words[group]);
        prefetch(&self.words[group + GROUP]);
    }

    /// Prefetches the tags of the other groups if the search will not end in the first, which should have
    /// arrived by now.
    #[inline(always)]
    pub(crate) fn prefetch_rest(&self, key: &TableKey) {
        let mut groups = self.window(key);
        if let Some((tags, ..)) = groups.next()
            && compare(tags, key.tag) == (0, false)
        {
            groups.for_each(|(tags, ..)| prefetch(&tags[0]));
        }
    }

    /// Groups of a key's window: the tags, the locations, and the index of the first location word.
    #[inline(always)]
    fn window(&self, key: &TableKey) -> impl Iterator<Item = (&'a [AtomicU64], &'a [AtomicU64], usize)> {
        let words = self.words;
        let (first, home) = (key.first, key.home);
        (0..WINDOW).map(move |step| {
            let at = first + (home + step) % GROUPS * GROUP_WORDS;
            let (tags, places) = words[at..at + GROUP_WORDS].split_at(GROUP);
            (tags, places, at + GROUP)
        })
    }

    /// First location of a digest; the content is not checked.
    #[inline]
    pub(crate) fn first(&self, key: &TableKey) -> Option<Location> {
        for (tags, places, _) in self.window(key) {
            let (mut equal, virgin) = compare(tags, key.tag);
            while equal != 0 {
                let place = PackedLocation(places[equal.trailing_zeros() as usize].load(Relaxed));
                if !place.is_none() {
                    return Some(place.location());
                }
                equal &= equal - 1;
            }
            if virgin {
                return None;
            }
        }
        None
    }

    /// All locations of a digest, at most [`COPIES`] and one more after damage.
    pub(crate) fn all(&self, key: &TableKey) -> impl Iterator<Item = EntrySnapshot> + use<> {
        let mut found = [None; COPIES + 1];
        let mut count = 0;
        for (tags, places, at) in self.window(key) {
            let (mut equal, virgin) = compare(tags, key.tag);
            while equal != 0 && count < found.len() {
                let i = equal.trailing_zeros() as usize;
                let place = PackedLocation(places[i].load(Relaxed));
                if !place.is_none() {
                    found[count] = Some(EntrySnapshot { slot: at + i, location: place });
                    count += 1;
                }
                equal &= equal - 1;
            }
            if virgin {
                break;
            }
        }
        found.into_iter().flatten()
    }

    /// Inserts the location of a digest. Entries of sources that are `volatile` are replaced by others.
    pub(crate) fn insert(
        &self,
        key: &TableKey,
        place: PackedLocation,
        volatile: impl Fn(SourceId) -> bool,
        random: impl FnMut() -> u64,
    ) -> Inserted {
        let mut free = None;
        let mut copies = 0;
        let mut yielding = None;
        for (tags, places, at) in self.window(key) {
            let mut virgin = false;
            for i in 0..GROUP {
                let tag = tags[i].load(Relaxed);
                let old = PackedLocation(places[i].load(Relaxed));
                // Searches end at a tag of zero, so the entry is free even if damage left a location.
                if old.is_none() || tag == 0 {
                    free.get_or_insert(at + i);
                    virgin |= tag == 0;
                } else if tag == key.tag {
                    if old.source() == place.source() {
                        return self.refresh(EntrySnapshot { slot: at + i, location: old }, place);
                    }
                    copies += 1;
                    if volatile(old.source()) {
                        yielding = Some(EntrySnapshot { slot: at + i, location: old });
                    }
                }
            }
            if virgin {
                break;
            }
        }
        if copies >= COPIES {
            return match yielding {
                Some(old) if !volatile(place.source()) => self.refresh(old, place),
                _ => Inserted::Known,
            };
        }
        let (slot, outcome) = match free {
            Some(slot) => (slot, Inserted::Added),
            None => (self.victim(key, random), Inserted::Evicted),
        };
        self.words[slot].store(0, Relaxed);
        self.words[slot - GROUP].store(key.tag, Relaxed);
        self.words[slot].store(place.0, Relaxed);
        outcome
    }

    /// Points an entry to a newer location of the same content and retains its count.
    fn refresh(&self, old: EntrySnapshot, place: PackedLocation) -> Inserted {
        if old.location.location() == place.location() {
            return Inserted::Known;
        }
        let new = place.with_uses(old.location.uses());
        let _ = self.words[old.slot].compare_exchange(old.location.0, new.0, Relaxed, Relaxed);
        Inserted::Moved
    }

    /// Chooses the entry to evict: the least used of a random sample. Each of the others loses one use with a
    /// chance of 1 in 8, so a use lasts for about one turnover of the window.
    fn victim(&self, key: &TableKey, mut random: impl FnMut() -> u64) -> usize {
        let (mut draw, mut age) = (random(), random());
        let mut slots = [0; SAMPLE];
        let mut victim = (usize::MAX, u8::MAX);
        let uses = |slot: usize| PackedLocation(self.words[slot].load(Relaxed)).uses();
        for (i, slot) in slots.iter_mut().enumerate() {
            let entry = draw as usize % (WINDOW * GROUP);
            draw >>= 6;
            let group = (key.home + entry / GROUP) % GROUPS;
            *slot = key.first + group * GROUP_WORDS + GROUP + entry % GROUP;
            // The first of equals, so that the random draw decides between them.
            if i == 0 || uses(*slot) < victim.1 {
                victim = (*slot, uses(*slot));
            }
        }
        let victim = victim.0;
        for slot in slots.into_iter().filter(|slot| *slot != victim) {
            if age & 7 == 0 {
                let old = PackedLocation(self.words[slot].load(Relaxed));
                let new = old.with_uses(old.uses().saturating_sub(1));
                let _ = self.words[slot].compare_exchange(old.0, new.0, Relaxed, Relaxed);
            }
            age >>= 3;
        }
        victim
    }

    pub(crate) fn used(&self, seen: EntrySnapshot) {
        let new = seen.location.with_uses(seen.location.uses().saturating_add(1));
        let _ = self.words[seen.slot].compare_exchange(seen.location.0, new.0, Relaxed, Relaxed);
    }

    /// Drops a wrong entry, unless another thread changed it meanwhile.
    pub(crate) fn drop(&self, seen: EntrySnapshot) {
        // The count may have changed since; retry as long as the location is the same.
        let mut now = seen.location;
        while now.location() == seen.location.location() && !now.is_none() {
            match self.words[seen.slot].compare_exchange(now.0, 0, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(other) => now = PackedLocation(other),
            }
        }
    }

    /// Drops every entry of a source; returns their number.
    pub(crate) fn purge(&self, source: SourceId) -> u64 {
        let mut dropped = 0;
        for slot in self.place_words() {
            let place = PackedLocation(slot.load(Relaxed));
            if place.source() == source && slot.compare_exchange(place.0, 0, Relaxed, Relaxed).is_ok() {
                dropped += 1;
            }
        }
        dropped
    }

    /// Counts the entries of each source, by number; entries with a number past `sources`, which are damage,
    /// count under 0. Walks over the table.
    pub(crate) fn count_by_source(&self, sources: u32) -> Vec<u64> {
        let mut counts = vec![0; sources as usize + 1];
        for slot in self.place_words() {
            let place = PackedLocation(slot.load(Relaxed));
            if !place.is_none() {
                let number = u32::from(place.source().0);
                counts[if number <= sources { number as usize } else { 0 }] += 1;
            }
        }
        counts
    }

    fn place_words(&self) -> impl Iterator<Item = &'a AtomicU64> {
        self.words.chunks_exact(GROUP_WORDS).flat_map(|group| &group[GROUP..])
    }
}

/// Compares tags: returns the equal ones as bits, and whether an entry was never used.
#[inline(always)]
fn compare(tags: &[AtomicU64], tag: u64) -> (u32, bool) {
    let mut equal = 0;
    let mut virgin = false;
    for (i, other) in tags.iter().enumerate() {
        let other = other.load(Relaxed);
        equal |= u32::from(other == tag) << i;
        virgin |= other == 0;
    }
    (equal, virgin)
}
