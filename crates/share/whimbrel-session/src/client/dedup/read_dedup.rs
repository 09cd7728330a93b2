//! Dedup of reads: pages that this host already has are not fetched over a slow link.
//!
//! A hash cache ([`HashCache`]) in the cache's directory maps digests to places in the cache's frames and in
//! reference files of this host, such as disk images. If enough hits in a range are likely, the client asks
//! the server for digests (`DIGEST`), looks them up here and in what other users of this host have read
//! (`shared_cache`), and requests only the other pages (`PAGES`). The digest of the copy in hand is checked
//! before use, so a changed file can cost time but never give wrong data. The likelihood of hits is estimated
//! for each file.

use super::hit_estimate::{DigestQuery, HitEstimate, HitEstimates};
use crate::client::{
    connection::server_connection::CallFailure,
    content::fetcher::{FetchSubject, FetchedContent},
    session::Core,
};
use crate::{
    cache::FileId,
    proto::{
        Attr, DigestCall, Digests, DigestsDone, PAGE, PagesCall, Range, Read, ReadPages, digest_of_page,
        is_in, is_zero, unpack_digests, unpack_pages,
    },
};
use bytes::Bytes;
use std::{
    ops::ControlFlow,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};
use whimbrel_core::Digest;
use whimbrel_hashcache::{Geometry, HashCache, Location, OnMissing, SourceId, SourceKind};
use whimbrel_wire::Code;

/// Rate assumed for a link without measurements, in bytes per second: 100 Mbit/s.
pub(in crate::client) const DEFAULT_RATE: f64 = 12.5e6;

struct Table {
    pages: HashCache,
    frames: SourceId,
}

#[derive(Default)]
pub(in crate::client) struct DedupTable {
    table: OnceLock<Option<Table>>,
    pub(in crate::client) table_pages: AtomicU64,
    /// Whether the server does not support digests.
    pub(in crate::client) unsupported: AtomicBool,
    estimates: HitEstimates,
    /// Pages that were found here and not sent.
    pub(in crate::client) found_pages: AtomicU64,
}

/// Result of the lookups for one range.
struct Found {
    content: Vec<u8>,
    /// Pages still to be requested, one bit each.
    missing_map: Vec<u8>,
    pages: u32,
    missing: u32,
}

fn open(dir: &Path, pages: u64) -> Option<Table> {
    let geometry = Geometry::for_pages(pages.max(1024)).with_sources(64);
    let opened = HashCache::open(&dir.join("pages"), OnMissing::Recreate(geometry)).and_then(|pages| {
        let frames = pages.register(&dir.join("frames"), SourceKind::Raw)?;
        Ok(Table { pages, frames })
    });
    opened
        .inspect_err(|error| {
            let error = error as &dyn std::error::Error;
            tracing::warn!(error, "cannot open the table of pages on this host, so they may be sent again");
        })
        .ok()
}

impl Core {
    fn with_estimate<T>(&self, file: FileId, with: impl FnOnce(&mut HitEstimate) -> T) -> T {
        let named = !self.options.references.is_empty() || self.shared.is_some();
        self.dedup.estimates.with(file, HitEstimate::new(named), with)
    }

    fn dedup_table(&self) -> Option<&Table> {
        let pages = self.cache.stats().capacity / PAGE as u64;
        self.dedup.table.get_or_init(|| open(&self.options.cache, pages)).as_ref()
    }

    /// Opens the table of an earlier session and indexes the reference files, in a thread of its own.
    pub(in crate::client) fn index_references(self: &Arc<Self>) {
        let known = self.options.references.clone();
        if known.is_empty() && !self.options.cache.join("pages").exists() {
            return;
        }
        let weak = Arc::downgrade(self);
        thread::spawn(move || {
            for path in std::iter::once(None).chain(known.iter().map(Some)) {
                let Some(core) = weak.upgrade() else { return };
                let Some(table) = core.dedup_table() else { return };
                if let Some(path) = path {
                    core.index_file(table, path);
                }
                core.dedup.table_pages.fetch_max(table.pages.stats().used, Ordering::Release);
            }
        });
    }

    fn index_file(&self, table: &Table, path: &Path) {
        let going = |_| match self.writeback.is_stopped() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let added = SourceKind::guess(path).and_then(|kind| table.pages.add(path, kind, None, &going));
        if let Err(error) = added {
            self.event(format!("{}: cannot index the reference file: {error}", path.display()));
        }
    }

    /// Records where content from the server is stored here: it may be requested again under another name, or
    /// by another user.
    pub(in crate::client) fn record_content(&self, file: FileId, attr: &Attr, offset: u64, content: &[u8]) {
        if self.connection.compression_level().is_none() {
            return;
        }
        let digest = |page| (!is_zero(page)).then(|| digest_of_page(page));
        let digests: Vec<_> = content.chunks(PAGE).map(digest).collect();
        self.record_places(file, offset, &digests);
        self.publish_shared(file, attr, offset, content, &digests);
    }

    fn record_places(&self, file: FileId, offset: u64, digests: &[Option<Digest>]) {
        // Without a cache on disk, frames are in memory and cannot be found again. Of one that is encrypted,
        // the table would tell what content it has.
        if !self.options.has_cache() || self.cache_dir.is_encrypted() {
            return;
        }
        let Some(table) = self.dedup_table() else { return };
        let mut noted = 0;
        for (at, place) in self.cache.page_places(file, offset, (digests.len() * PAGE) as u64) {
            if let Some(Some(digest)) = digests.get((at - offset) as usize / PAGE) {
                table.pages.record_page(digest, Location { source: table.frames, offset: place });
                noted += 1;
            }
        }
        // In this order, so that a file's own pages never count as those of another.
        self.with_estimate(file, |odds| odds.own_pages += noted);
        self.dedup.table_pages.fetch_add(noted, Ordering::Release);
    }

    fn is_worth_digests(&self, source: &FetchSubject, range: Range, waited: bool) -> bool {
        let (twins, file) = (&self.dedup, source.file);
        let known = twins.table_pages.load(Ordering::Acquire);
        let known = self.shared.is_some() || known > self.with_estimate(file, |odds| odds.own_pages);
        if twins.unsupported.load(Ordering::Relaxed) || !known {
            return false;
        }
        let Some(round_trip) =
            self.connection.round_trip().filter(|_| self.connection.compression_level().is_some())
        else {
            return false;
        };
        if self.lacks_key(file, source.size) {
            return true;
        }
        let (rate, round_trip) = match self.options.slow_round_trip.is_zero() {
            true => (DEFAULT_RATE, 0.0),
            false => (self.connection.rate().unwrap_or(DEFAULT_RATE), round_trip.as_secs_f64()),
        };
        let asked = DigestQuery { bytes: range.len.into(), waited, rate, round_trip };
        self.with_estimate(file, |odds| odds.is_worthwhile(asked))
    }

    /// The content of a range by its digests; none if a plain read is better.
    pub(in crate::client) async fn fetch_by_digest(
        self: &Arc<Self>,
        source: &FetchSubject,
        range: Range,
        waited: bool,
    ) -> Option<Result<FetchedContent, CallFailure>> {
        if !self.is_worth_digests(source, range, waited) {
            return None;
        }
        let body = Digests { file: source.file_ref.clone(), range };
        let (said, digests) = match self.connection.send::<DigestCall, _>(body, Bytes::new(), None).await.0 {
            // An older server lacks `DIGEST`.
            Err(fail) if fail.is(Code::UNKNOWN_KIND) => {
                self.dedup.unsupported.store(true, Ordering::Relaxed);
                return None;
            }
            Err(fail) => return Some(Err(fail)),
            Ok(answer) => answer,
        };
        let attr = said.attr;
        let (core, file) = (self.clone(), source.file);
        let found =
            tokio::task::spawn_blocking(move || core.look_up_digests(file, range, &said, &digests)).await;
        match found {
            Ok(Some(found)) if found.missing == 0 => Some(Ok((attr, found.content))),
            Ok(Some(found)) => match self.fetch_missing_pages(source, range, found).await {
                Ok((now, content)) if now.version() == attr.version() => Some(Ok((attr, content))),
                // The file changed between the two replies: the pages found belong to another version.
                Ok(_) => None,
                Err(fail) => Some(Err(fail)),
            },
            Ok(None) | Err(_) => Some(Err(CallFailure::InvalidReply)),
        }
    }

    fn look_up_digests(
        &self,
        file: FileId,
        range: Range,
        said: &DigestsDone,
        digests: &[u8],
    ) -> Option<Found> {
        let digests = unpack_digests(&said.pages, digests, range.len as usize).ok()?;
        self.record_key(file, &said.attr, said.share);
        let mut content = vec![0; said.pages.len as usize];
        let mut lacking = vec![0; digests.len().div_ceil(8)];
        let mut reader = self.dedup_table().map(|table| table.pages.reader());
        let (mut pages, mut missing) = (0, 0);
        let mut page = [0; PAGE];
        for (number, place) in content.chunks_mut(PAGE).enumerate() {
            let Some(digest) = digests[number] else { continue };
            pages += 1;
            if reader.as_mut().is_some_and(|reader| reader.get(&digest, &mut page)) {
                place.copy_from_slice(&page[..place.len()]);
            } else {
                lacking[number / 8] |= 1 << (number % 8);
                missing += 1;
            }
        }
        if missing > 0 {
            let place = (&digests[..], &mut lacking[..]);
            missing -= self.take_shared(file, &said.attr, range.offset, &mut content, place);
        }
        self.with_estimate(file, |odds| odds.record(pages, pages - missing));
        self.dedup.found_pages.fetch_add(u64::from(pages - missing), Ordering::Relaxed);
        Some(Found { content, missing_map: lacking, pages, missing })
    }

    /// Requests the pages that were not found.
    async fn fetch_missing_pages(
        self: &Arc<Self>,
        source: &FetchSubject,
        range: Range,
        found: Found,
    ) -> Result<FetchedContent, CallFailure> {
        let Found { mut content, missing_map: lacking, pages, missing } = found;
        tracing::trace!(offset = range.offset, pages, missing, "found here by digest");
        let read = Read { file: source.file_ref.clone(), range, level: self.connection.compression_level() };
        let body = ReadPages { read, wanted: lacking.clone() };
        let (done, packed) = self.connection.send_for_content::<PagesCall, _>(body).await?;
        let merged = tokio::task::spawn_blocking(move || {
            let rest =
                unpack_pages(&done.pages, &packed, content.len()).map_err(|_| CallFailure::InvalidReply)?;
            if rest.len() != content.len() {
                return Err(CallFailure::Outdated);
            }
            for (number, place) in content.chunks_mut(PAGE).enumerate() {
                if is_in(&lacking, number) {
                    place.copy_from_slice(&rest[number * PAGE..][..place.len()]);
                }
            }
            Ok((done.attr, content))
        });
        merged.await.unwrap_or(Err(CallFailure::Unreachable))
    }
}
