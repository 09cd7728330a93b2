//! Registration of source files: `add`, `register`, `note`, `forget`.
//!
//! A file has one record, found by its path, or by its inode if it was renamed. Adding it again scans it
//! again, unless it has not changed; its pages then get new locations instead of second entries. A record is
//! reused when its file was removed from the cache, or, if none is free, when its file does not exist any
//! more.

use crate::HashCache;
use crate::aligned_ranges::AlignedRanges;
use crate::error::{CacheError, Result, io_at};
use crate::format::SourceRecord;
use crate::location::{Location, SourceId};
use crate::qcow2::Map;
use crate::scan::{Added, Job, Progress, scan};
use crate::scan_ranges::{RawExtents, ScanRanges, Walk};
use crate::source_files::{self, SourceKind, identity, length, open_source};
use crate::source_records::SourceLock;
use std::fs::{File, Metadata};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use whimbrel_alignment::PageAlignment;
use whimbrel_core::Digest;

impl HashCache {
    /// Scans a file and inserts the locations of its pages. `cuts` is the alignment of the image in the file;
    /// without it pages begin at multiples of 4 KiB. The callback is called after every mebibyte, from
    /// several threads, and may cancel the scan.
    pub fn add(
        &self,
        path: &Path,
        kind: SourceKind,
        cuts: Option<&PageAlignment>,
        progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
    ) -> Result<Added> {
        let (file, path, mut record) = examine(path, kind)?;
        let grid = AlignedRanges::new(cuts);
        record.alignment_hash = grid.fingerprint();
        let changed = record.changed;
        let (walk, total) = walk(&file, &path, kind, record.size)?;
        let (source, known) = self.insert_record(&record)?;
        if known && kind != SourceKind::Memory {
            let (pages, nothing) = (self.sources().read(source).map_or(0, |record| record.pages), 0);
            let (zero, new, moved, evicted) = (nothing, nothing, nothing, nothing);
            return Ok(Added { source, scanned: false, pages, zero, new, moved, evicted });
        }
        let pieces = ScanRanges::new(walk, grid);
        let added = scan(self, Job { source, path: &path, file: &file, total, ranges: pieces, progress })?;
        // Only if the file was not removed meanwhile. Entries inserted since then are correct or are dropped
        // on use.
        let _lock = self.lock_sources()?;
        if self.sources().read(source).is_some_and(|now| now.path == record.path) {
            self.sources().write(source, &SourceRecord { changed, pages: added.pages, ..record })?;
        }
        Ok(added)
    }

    /// Registers a file without reading it, for a caller that has digests of its pages already and
    /// [records](Self::record_page) them.
    pub fn register(&self, path: &Path, kind: SourceKind) -> Result<SourceId> {
        let (_, _, record) = examine(path, kind)?;
        self.insert_record(&record).map(|(source, _)| source)
    }

    /// Inserts the location of the page of `digest`: a byte offset in a file, a multiple of 512. The content
    /// is not checked now.
    pub fn record_page(&self, digest: &Digest, location: Location) {
        self.insert(digest, location, |id| self.is_volatile(id));
    }

    /// Removes a file and every entry that points into it; returns the number of entries.
    pub fn remove(&self, path: &Path) -> Result<u64> {
        let path = io_at("name", path, std::path::absolute(path))?;
        let _thread = self.registration.lock().unwrap_or_else(|e| e.into_inner());
        let _process = SourceLock::take(self.file(), self.path())?;
        let found = self.sources().all().find(|(_, record)| record.path == path);
        let Some((source, _)) = found else { return Err(CacheError::Unknown { path }) };
        Ok(self.clear(source))
    }

    fn clear(&self, source: SourceId) -> u64 {
        self.sources().clear(source);
        self.files().forget(source);
        self.table().purge(source)
    }

    fn lock_sources(&self) -> Result<(SourceLock<'_>, std::sync::MutexGuard<'_, ()>)> {
        let thread = self.registration.lock().unwrap_or_else(|e| e.into_inner());
        Ok((SourceLock::take(self.file(), self.path())?, thread))
    }

    /// Source of a file. Its record is written as not scanned; if the file is known and unchanged, the record
    /// stays and the result is true.
    fn insert_record(&self, record: &SourceRecord) -> Result<(SourceId, bool)> {
        let _lock = self.lock_sources()?;
        let sources = self.sources();
        if let Some((source, old)) = sources.all().find(|(_, old)| is_same_file(old, record)) {
            let unchanged = (old.kind, old.identity, old.size, old.changed, old.alignment_hash)
                == (record.kind, record.identity, record.size, record.changed, record.alignment_hash);
            let (changed, pages) = (if unchanged { old.changed } else { (0, 0) }, old.pages);
            if !unchanged || old.path != record.path {
                sources.write(source, &SourceRecord { changed, pages, ..record.clone() })?;
            }
            return Ok((source, unchanged));
        }
        let source = match sources.ids().find(|id| sources.read(*id).is_none()) {
            Some(free) => free,
            None => {
                let gone = |(id, old): (SourceId, SourceRecord)| is_gone(&old).then_some(id);
                let limit = self.geometry().sources();
                sources.all().find_map(gone).ok_or(CacheError::SourcesFull { limit })?
            }
        };
        // Entries of the record's previous file must not be taken for entries of this file.
        self.clear(source);
        sources.write(source, &SourceRecord { changed: (0, 0), ..record.clone() })?;
        Ok((source, false))
    }
}

/// Whether both records have one path, or one inode while the old path does not lead to another file.
fn is_same_file(old: &SourceRecord, new: &SourceRecord) -> bool {
    let leads_elsewhere = || std::fs::metadata(&old.path).is_ok_and(|meta| identity(&meta) != new.identity);
    old.path == new.path || (old.identity == new.identity && old.kind == new.kind && !leads_elsewhere())
}

fn is_gone(record: &SourceRecord) -> bool {
    match std::fs::metadata(&record.path) {
        Ok(meta) => record.kind == SourceKind::Memory && identity(&meta) != record.identity,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Opens a file and makes a record of its present state.
fn examine(path: &Path, kind: SourceKind) -> Result<(File, PathBuf, SourceRecord)> {
    let path = io_at("name", path, std::path::absolute(path))?;
    let (file, meta) = match open_source(&path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(CacheError::NotAFile { path });
        }
        opened => io_at("open", &path, opened)?,
    };
    let size = io_at("measure", &path, length(&file))?;
    let record = SourceRecord {
        kind,
        identity: identity(&meta),
        size,
        changed: changed(&meta),
        pages: 0,
        alignment_hash: 0,
        path: path.clone(),
    };
    Ok((file, path, record))
}

/// Seconds and nanoseconds of the last change; never zeros, which mean that the file was not scanned.
fn changed(meta: &Metadata) -> (i64, u64) {
    match (meta.mtime(), meta.mtime_nsec()) {
        (0, 0) => (0, 1),
        (seconds, nanoseconds) => (seconds, nanoseconds as u64),
    }
}

/// Walk over a file, and the bytes of the image in it.
fn walk(file: &File, path: &Path, kind: SourceKind, size: u64) -> Result<(Walk, u64)> {
    let file = io_at("open", path, file.try_clone())?;
    match kind {
        SourceKind::Raw | SourceKind::Memory => Ok((Walk::Raw(RawExtents::new(file, size)), size)),
        SourceKind::Qcow2 => {
            let map =
                Map::open(file).map_err(|source| CacheError::Qcow2 { path: path.to_owned(), source })?;
            let total = map.size();
            Ok((Walk::Qcow2(map.extents()), total))
        }
    }
}

impl source_files::SourceKind {
    /// Kind of a file: a qcow2 image by its first bytes, otherwise raw. For paths that users name.
    pub fn guess(path: &Path) -> Result<Self> {
        let (file, _, _) = examine(path, Self::Raw)?;
        let mut magic = [0; 4];
        let read = io_at("read", path, source_files::fill(&file, 0, &mut magic))?;
        Ok(if read == 4 && magic == *b"QFI\xfb" { Self::Qcow2 } else { Self::Raw })
    }
}
