//! Hash cache of this host: finds pages in local files so that transfers can skip them.
//!
//! The user adds files; memory files and disk images of machines are added automatically. The cache is
//! optional: if its table is damaged or cannot be opened, transfers send all pages.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    transfer::image_alignment::alignment_of_file,
};
use std::{
    ops::ControlFlow,
    path::Path,
    sync::{Arc, OnceLock},
};
use whimbrel_api::{
    CacheAddRequest, CacheInfo, CacheSource, Operation, OperationKind, OperationResult, Unit,
};
use whimbrel_core::{ByteSize, Digest, PAGE_SIZE};
use whimbrel_hashcache::{CacheError, Geometry, HashCache, OnMissing, SourceKind};
use whimbrel_image::ShortDigest;

/// Bytes of the table: the pages of 14 GiB. The file is sparse until it is filled.
const TABLE: u64 = 64 << 20;

/// The cache, opened when it is first needed.
#[derive(Default)]
pub(crate) struct HashCacheService {
    cache: OnceLock<Option<Arc<HashCache>>>,
}

impl Daemon {
    /// The cache, unless it cannot be opened.
    pub(crate) fn hash_cache(&self) -> Option<Arc<HashCache>> {
        let open = || {
            let path = self.directories.hash_cache();
            let cache = HashCache::open(&path, OnMissing::Recreate(Geometry::for_file_size(TABLE)));
            cache.map(Arc::new).inspect_err(|error| {
                let error = error as &dyn std::error::Error;
                tracing::warn!(error, "cannot open the hash cache: transfers send all pages");
            })
        };
        self.hash_cache.cache.get_or_init(|| open().ok()).clone()
    }

    fn hash_cache_or_error(&self) -> Result<Arc<HashCache>, DaemonError> {
        self.hash_cache()
            .ok_or_else(|| DaemonError::HashCache { source: "its table cannot be opened".into() })
    }

    pub(crate) fn cache_info(&self) -> Result<CacheInfo, DaemonError> {
        let stats = self.hash_cache_or_error()?.stats();
        let source = |source: whimbrel_hashcache::SourceStats| CacheSource {
            path: source.path,
            kind: kind_name(source.kind).to_owned(),
            pages: source.pages,
            hits: source.hits,
            dropped: source.dropped,
        };
        Ok(CacheInfo {
            table: ByteSize(stats.bytes),
            slots: stats.slots,
            used: stats.used,
            evictions: stats.evictions,
            sources: stats.sources.into_iter().map(source).collect(),
        })
    }

    /// Starts to add a file to the cache, or to remove it.
    pub(crate) fn cache_add(self: &Arc<Self>, request: CacheAddRequest) -> Result<Operation, DaemonError> {
        let cache = self.hash_cache_or_error()?;
        let path = match (request.path, &request.machine) {
            (Some(path), None) if path.is_absolute() => path,
            (None, Some(name)) => self.machines.get(name)?.try_lock("cache", None)?.running()?.ram_path(),
            _ => return Err(DaemonError::invalid("name a file by its absolute path, or a machine")),
        };
        let memory = request.machine.is_some();
        if !request.forget {
            std::fs::metadata(&path).map_err(|source| DaemonError::io("open", &path, source))?;
        }
        let subject = path.display().to_string();
        Ok(self.operations().start(OperationKind::Cache, subject, move |reporter| {
            let pages = match request.forget {
                true => cache.remove(&path).map_err(cache_error)?,
                false => add(&cache, &path, memory, reporter)?,
            };
            Ok(OperationResult::Cache { pages })
        }))
    }
}

fn add(
    cache: &HashCache,
    path: &Path,
    memory: bool,
    reporter: &ProgressReporter,
) -> Result<u64, DaemonError> {
    let kind = match memory {
        true => SourceKind::Memory,
        false => SourceKind::guess(path).map_err(cache_error)?,
    };
    let cuts = alignment_of_file(path, kind);
    let added = cache.add(path, kind, cuts.as_ref(), &|progress| {
        reporter.progress("reading", Unit::Bytes, progress.done, Some(progress.total));
        match reporter.is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    if reporter.is_cancelled() {
        return Err(DaemonError::Cancelled { left: "the pages read so far are in the cache".into() });
    }
    added.map(|added| added.pages).map_err(cache_error)
}

/// The cache for transfers; both sides check the digest.
pub(crate) struct HashCachePages(pub(crate) Arc<HashCache>);

impl whimbrel_transfer::PageLookup for HashCachePages {
    fn page(&self, digest: &Digest, out: &mut [u8]) -> bool {
        match <&mut [u8; PAGE_SIZE]>::try_from(out) {
            Ok(out) => self.0.get(digest, out),
            Err(_) => false,
        }
    }

    fn page_by_short_digest(&self, key: &ShortDigest, out: &mut [u8]) -> bool {
        <&mut [u8; PAGE_SIZE]>::try_from(out).is_ok_and(|out| self.0.get_by_half(&key.0, out))
    }
}

fn kind_name(kind: SourceKind) -> &'static str {
    match kind {
        SourceKind::Raw => "raw",
        SourceKind::Qcow2 => "qcow2",
        SourceKind::Memory => "memory",
    }
}

fn cache_error(source: CacheError) -> DaemonError {
    DaemonError::HashCache { source: source.into() }
}
