//! Store handle: opening, and the state that handles share.

use crate::{
    complete_capsules::CompleteCapsules,
    error::{Result, StoreError},
    fetched_objects::FetchedObjects,
    file_names::{INDEX, MARKER, PACKS, PARTIAL, REFS, publish},
    gc_lease::{Condemned, GcLease, Pinned, Purpose, gate},
    keys::{DataKey, MasterKey},
    layout::{self, Layout},
    object_reader::Objects,
    os_vfs::OsVfs,
    remote_objects::{LocalNodes, RemoteSource},
    reserve,
    vfs::{LockMode, Vfs},
};
use std::{
    fs::File,
    io,
    path::Path,
    sync::{Arc, Mutex, Weak},
};
use whimbrel_core::{
    CapsuleId, Digest, lock,
    loss::{Loss, is_back},
};
use whimbrel_image::{Manifest, ShortDigest, delta};

/// Options of a store handle. The stored bytes depend on none of them but the key.
#[derive(Debug, Clone)]
pub struct Options {
    /// Create the store if there is none.
    pub create: bool,
    /// zstd level of new content.
    pub level: i32,
    /// zstd level of deltas; they are few, so it may be higher.
    pub delta_level: i32,
    /// Pages of one image with a base that are tried as deltas; more are stored plain, at full speed. Those
    /// tried are held in memory with their older versions for a while, a few thousand at a time.
    pub delta_pages: u64,
    /// Threads of one writer that hash and compress.
    pub workers: usize,
    /// Bytes of decoded frames in the cache.
    pub cache: usize,
    /// Bytes of packs from before the store was encrypted that one garbage collection seals. It needs that
    /// much room.
    pub seal_bytes: u64,
    /// Master key of an encrypted store. A store that is not encrypted becomes so.
    pub key: Option<MasterKey>,
    /// Data key of an encrypted store, from a process that has opened it. The master key is not needed then.
    pub data_key: Option<DataKey>,
}

impl Default for Options {
    fn default() -> Self {
        let workers = std::thread::available_parallelism().map_or(2, |n| n.get().min(8));
        Self {
            create: false,
            level: 1,
            delta_level: delta::LEVEL,
            delta_pages: 16_384,
            workers,
            cache: 64 << 20,
            seal_bytes: 1 << 30,
            key: None,
            data_key: None,
        }
    }
}

impl Options {
    /// Default options, but creating the store if there is none.
    pub fn create() -> Self {
        Self { create: true, ..Self::default() }
    }
}

pub(crate) struct Inner {
    pub(crate) files: Arc<dyn Vfs>,
    pub(crate) objects: Objects,
    pub(crate) options: Options,
    pub(crate) layout: Layout,
    data_key: Option<DataKey>,
    pub(crate) remote: RemoteSource,
    pub(crate) fetched: FetchedObjects,
    pub(crate) complete: CompleteCapsules,
    /// Reference for the thread that writes fetched objects.
    pub(crate) weak_self: Weak<Inner>,
    latch: Mutex<Latch>,
}

/// Refusal of writes after the disk failed.
#[derive(Default)]
struct Latch {
    failed: Option<&'static str>,
    /// Number of failures so far: what was begun before one is void, also after the store was reopened.
    failures: u64,
}

impl Inner {
    /// Key of the content, if the store is encrypted.
    pub(crate) fn data_key(&self) -> Option<&DataKey> {
        self.data_key.as_ref()
    }

    /// Fails after a failed sync. Returns the number of failures so far.
    pub(crate) fn check_latch(&self) -> Result<u64> {
        let latch = lock(&self.latch);
        latch.failed.map_or(Ok(latch.failures), |action| Err(StoreError::Latched { action }))
    }

    /// Passes on the result of a write; latches the store if it is not known what is on the disk.
    pub(crate) fn latching<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error @ StoreError::Io { action, .. }) = &result
            && (error.is_uncertain() || is_back(Loss::FullDiskLatches))
        {
            let mut latch = lock(&self.latch);
            latch.failed.get_or_insert(action);
            latch.failures += 1;
        }
        result
    }
}

/// Handle of a store; clones share one cache and one latch.
#[derive(Clone)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

whimbrel_core::opaque_debug!(Store, Pin);

impl Store {
    /// Opens the store in `dir`.
    pub fn open(dir: &Path, options: Options) -> Result<Self> {
        if options.create {
            let path = dir.display().to_string();
            make_root(dir, &|dir| File::open(dir)?.sync_all()).map_err(StoreError::io("create", &path))?;
        } else if !dir.join(MARKER).exists() {
            return Err(StoreError::NoStore { path: dir.display().to_string() });
        }
        Self::open_on(Arc::new(OsVfs::new(dir)), options)
    }

    /// Opens the store on `files`: another kind of disk, or one that fails on purpose.
    pub fn open_on(files: Arc<dyn Vfs>, options: Options) -> Result<Self> {
        let (layout, data_key) = match &options.data_key {
            Some(data) => layout::open_with(&*files, data)?,
            None => layout::open(&*files, options.create, options.key.as_ref())?,
        };
        sync_names(&*files)?;
        if let Err(error) = Condemned::mend(&*files) {
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "the state of garbage collection cannot be read: nothing is written");
        }
        let objects = Objects::new(files.clone(), options.cache, data_key.as_ref())?;
        let inner = Arc::new_cyclic(|me| Inner {
            files,
            objects,
            options,
            layout,
            data_key,
            remote: RemoteSource::default(),
            fetched: FetchedObjects::default(),
            complete: CompleteCapsules::default(),
            weak_self: me.clone(),
            latch: Mutex::default(),
        });
        Ok(Self { inner })
    }

    /// Whether there is a store in `dir` that is not encrypted.
    pub fn is_plain(dir: &Path) -> bool {
        matches!(Layout::read(&OsVfs::new(dir)), Ok(Some(Layout::Plain)))
    }

    /// Key of the content, if the store is encrypted.
    pub fn data_key(&self) -> Option<&DataKey> {
        self.inner.data_key()
    }

    /// Whether writes are refused since one failed.
    pub fn is_latched(&self) -> bool {
        self.inner.check_latch().is_err()
    }

    /// Accepts writes again after a failed sync, if the disk works: does what opening the store does. Writers
    /// that were open when it failed stay failed.
    pub fn reopen(&self) -> Result<()> {
        let inner = &self.inner;
        if inner.check_latch().is_ok() {
            return Ok(());
        }
        inner.layout.check(&*inner.files)?;
        sync_names(&*inner.files)?;
        publish(&*inner.files, "", MARKER, inner.layout.marker().as_bytes())?;
        inner.objects.indexes.refresh()?;
        self.undo_half_collection()?;
        lock(&inner.latch).failed = None;
        Ok(())
    }

    /// Bytes that are set aside for garbage collection on a full disk.
    pub fn reserved_bytes(&self) -> Result<u64> {
        reserve::size(&*self.inner.files)
    }

    /// Sets bytes aside for garbage collection. Without them it may fail on a full disk, and nothing else.
    pub(crate) fn refill_reserve(&self) {
        let inner = &self.inner;
        if let Err(error) = reserve::refill(&*inner.files, inner.objects.indexes.largest()) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot set bytes aside for garbage collection"
            );
        }
    }

    /// Decodes the manifest of a capsule.
    pub fn manifest(&self, id: &CapsuleId) -> Result<Manifest> {
        Ok(Manifest::decode(&self.blob(&id.0)?)?)
    }

    /// Reads a blob, or any other object, by its digest; a fetched object may be in memory.
    pub fn blob(&self, digest: &Digest) -> Result<Vec<u8>> {
        // In this order: an object that is no longer in memory is in a pack by then.
        match self.inner.fetched.get(digest) {
            Some(bytes) => Ok(bytes.to_vec()),
            None => Ok(self.inner.objects.get(digest)?.bytes().to_vec()),
        }
    }

    /// Whether the store has each object, by its index; fetched objects in memory count.
    pub fn has(&self, digests: &[Digest]) -> Vec<bool> {
        digests.iter().map(|digest| LocalNodes(&self.inner).has(digest)).collect()
    }

    /// Digest of an object with this short digest, if a pack here has an undamaged one; reads the object.
    pub fn digest_of(&self, key: &ShortDigest) -> Option<Digest> {
        self.inner.objects.digest_of(*key)
    }

    /// Retains a capsule while the pin exists, even without refs: for a machine that reads its pages lazily.
    pub fn pin(&self, id: &CapsuleId) -> Result<Pin> {
        let inner = &self.inner;
        let _gate = gate(&*inner.files, LockMode::Shared)?;
        let manifest = self.manifest(id)?;
        if !self.is_partial(id)? {
            self.require_complete(id)?;
        }
        let lease =
            GcLease::new(inner.files.clone(), Purpose::Pin, Condemned::read(&*inner.files)?.generation)?;
        lease.pin(Pinned::Object(id.0))?;
        manifest.blobs().try_for_each(|blob| lease.pin(Pinned::Object(blob)))?;
        for image in &manifest.images {
            image.root.map_or(Ok(()), |root| lease.pin(Pinned::Image { root, pages: image.pages }))?;
        }
        Ok(Pin { capsule: *id, _lease: lease })
    }
}

/// Retains a capsule; see [`Store::pin`].
pub struct Pin {
    capsule: CapsuleId,
    _lease: GcLease,
}

impl Pin {
    /// Capsule that is retained.
    pub fn capsule(&self) -> CapsuleId {
        self.capsule
    }
}

/// Creates the directory of a store with those above it, and makes their names durable.
fn make_root(dir: &Path, sync: &dyn Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    let dir = std::path::absolute(dir)?;
    if dir.join(MARKER).exists() {
        return Ok(());
    }
    let missing = dir.ancestors().take_while(|dir| !dir.exists()).count();
    std::fs::create_dir_all(&dir)?;
    if is_back(Loss::ParentNotSynced) {
        return Ok(());
    }
    // One more than was missing: a killed process may have made the last without a sync.
    dir.ancestors().skip(1).take(missing.max(1)).try_for_each(sync)
}

/// Makes names durable that a killed process left: what is built on them must not outlive them.
fn sync_names(files: &dyn Vfs) -> Result<()> {
    for dir in [PACKS, INDEX, REFS, PARTIAL, ""] {
        if is_back(Loss::NamesNotSynced) {
            continue;
        }
        match files.sync_dir(dir) {
            // Stores of earlier versions may lack the directory of partial capsules.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.map_err(StoreError::io("sync", dir))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn the_names_of_a_new_store_s_directories_are_made_durable() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        let synced = RefCell::new(Vec::new());
        let sync = |dir: &Path| {
            synced.borrow_mut().push(dir.to_owned());
            Ok(())
        };
        make_root(&top.join("data/store"), &sync).unwrap();
        assert_eq!(synced.take(), [top.join("data"), top.to_owned()]);
        // A process may have made it and been killed before the sync.
        make_root(&top.join("data/store"), &sync).unwrap();
        assert_eq!(synced.take(), [top.join("data")]);
        std::fs::write(top.join("data/store").join(MARKER), Layout::Plain.marker()).unwrap();
        make_root(&top.join("data/store"), &sync).unwrap();
        assert_eq!(synced.take(), [] as [std::path::PathBuf; 0]);
    }
}
