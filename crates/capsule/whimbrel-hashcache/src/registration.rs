//! Files that come and go: `add`, `register`, `note`, `forget`.
//!
//! A file has one record, found by its path, or by its inode when it got another name. Adding it again scans
//! it again, unless nothing about it changed; its pages then get new places instead of second entries. A
//! record is reused when its file was forgotten, or, when there is no free one, when its file does not exist
//! any more.

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
    /// Reads a file and notes where its pages lie. `cuts` says where pages begin in the image that the
    /// file holds; without it, at every 4 KiB. The callback
    /// is called after every mebibyte, from several threads, and may end the scan.
    pub fn add(
        &self,
        path: &Path,
        kind: SourceKind,
        cuts: Option<&PageAlignment>,
        progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
    ) -> Result<Added> {
        let (file, path, mut record) = examine(path, kind)?;
        let grid = AlignedRanges::new(cuts);
        record.cuts = grid.mark();
        let changed = record.changed;
        let (walk, total) = walk(&file, &path, kind, record.size)?;
        let (source, known) = self.insert_record(&record)?;
        if known && kind != SourceKind::Memory {
            let (pages, nothing) = (self.sources().read(source).map_or(0, |record| record.pages), 0);
            let (zero, new, moved, evicted) = (nothing, nothing, nothing, nothing);
            return Ok(Added { source, scanned: false, pages, zero, new, moved, evicted });
        }
        let pieces = ScanRanges::new(walk, grid);
        let added = scan(self, Job { source, path: &path, file: &file, total, pieces, progress })?;
        // Only if nobody forgot it meanwhile; what was noted then is found wrong on use or right.
        let _lock = self.lock_sources()?;
        if self.sources().read(source).is_some_and(|now| now.path == record.path) {
            self.sources().write(source, &SourceRecord { changed, pages: added.pages, ..record })?;
        }
        Ok(added)
    }

    /// Makes a file known without reading it, for a caller that has digests of its pages already and
    /// [notes](Self::note) them.
    pub fn register(&self, path: &Path, kind: SourceKind) -> Result<SourceId> {
        let (_, _, record) = examine(path, kind)?;
        self.insert_record(&record).map(|(source, _)| source)
    }

    /// Notes that the page of `digest` lies at a byte offset of a file, a multiple of 512. Nothing is checked
    /// now.
    pub fn note(&self, digest: &Digest, location: Location) {
        self.insert(digest, location, |id| self.is_volatile(id));
    }

    /// Forgets a file and every entry that points into it; how many there were.
    pub fn forget(&self, path: &Path) -> Result<u64> {
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

    /// The slot of a file, its record written as not scanned; or as it is, and true, if the file is known and
    /// unchanged.
    fn insert_record(&self, record: &SourceRecord) -> Result<(SourceId, bool)> {
        let _lock = self.lock_sources()?;
        let sources = self.sources();
        if let Some((source, old)) = sources.all().find(|(_, old)| is_same_file(old, record)) {
            let unchanged = (old.kind, old.identity, old.size, old.changed, old.cuts)
                == (record.kind, record.identity, record.size, record.changed, record.cuts);
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
        // What a former owner of the number left must not be taken for this file's.
        self.clear(source);
        sources.write(source, &SourceRecord { changed: (0, 0), ..record.clone() })?;
        Ok((source, false))
    }
}

/// The same path, or the same inode under another name while the old name does not lead elsewhere.
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

/// Opens a file and says what it is now.
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
        cuts: 0,
        path: path.clone(),
    };
    Ok((file, path, record))
}

/// Seconds and nanoseconds of the last change; never the mark of a file that was not scanned.
fn changed(meta: &Metadata) -> (i64, u64) {
    match (meta.mtime(), meta.mtime_nsec()) {
        (0, 0) => (0, 1),
        (seconds, nanoseconds) => (seconds, nanoseconds as u64),
    }
}

/// The walk over a file, and the bytes of the image it holds.
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
    /// What a file looks like: a qcow2 image by its first bytes, anything else is raw. For paths that people
    /// name.
    pub fn guess(path: &Path) -> Result<Self> {
        let (file, _, _) = examine(path, Self::Raw)?;
        let mut magic = [0; 4];
        let read = io_at("read", path, source_files::fill(&file, 0, &mut magic))?;
        Ok(if read == 4 && magic == *b"QFI\xfb" { Self::Qcow2 } else { Self::Raw })
    }
}
