//! Index set: all index files of a store; look-ups, refresh, log-structured merging.
//!
//! Merging bounds the number of files that a look-up visits: an index is merged with the newer ones as soon
//! as these together are a third of its size, so sizes grow geometrically. A merged file is published before
//! those it replaces are removed; a crash in between leaves duplicates with the same answers. Processes that
//! find a file missing list the directory again.

use crate::{
    error::{Result, StoreError},
    file_names::{INDEX, PACKS, PackId, publish, set_aside},
    index::{self, Entry, Index, MAX_FRAMES, MAX_PACKS, ObjectLocation, PackLocation},
    index_cipher::IndexCipher,
    vfs::{LockMode, LockWait, Vfs},
};
use rustix::io::Errno;
use std::{
    collections::{BTreeMap, HashSet},
    io,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};
use whimbrel_core::lock;
use whimbrel_image::ShortDigest;

const INDEX_LOCK: &str = "index.lock";

pub(crate) struct IndexSet {
    files: Arc<dyn Vfs>,
    /// Cipher of new index files, if the store is encrypted.
    cipher: Option<Arc<IndexCipher>>,
    open: RwLock<Arc<Vec<Arc<Index>>>>,
    refreshing: Mutex<()>,
    /// Whether an index file could not be read since the store was opened.
    ignored: AtomicBool,
    /// Index file that the last refresh could not read, and why. What it names is not missing.
    unread: Mutex<Option<UnreadIndex>>,
}

/// An index file that the system does not let us read.
#[derive(Clone)]
struct UnreadIndex {
    path: String,
    errno: i32,
}

impl IndexSet {
    pub(crate) fn open(files: Arc<dyn Vfs>, cipher: Option<Arc<IndexCipher>>) -> Result<Self> {
        let catalog = Self {
            files,
            cipher,
            open: RwLock::default(),
            refreshing: Mutex::new(()),
            ignored: AtomicBool::new(false),
            unread: Mutex::default(),
        };
        catalog.refresh()?;
        Ok(catalog)
    }

    /// Whether an index file could not be read.
    pub(crate) fn has_ignored(&self) -> bool {
        self.ignored.load(Ordering::Relaxed)
    }

    pub(crate) fn snapshot(&self) -> Arc<Vec<Arc<Index>>> {
        self.open.read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Loads index files that other processes published, and drops removed ones. Those that cannot be read
    /// are left out, so that what the others name can be.
    pub(crate) fn refresh(&self) -> Result<()> {
        self.reload().map(drop)
    }

    /// Like [`Self::refresh`], for whoever removes what no index names, or makes indexes forget it.
    ///
    /// # Errors
    /// If an index file cannot be read now. One whose content is damaged is none to wait for.
    pub(crate) fn refresh_whole(&self) -> Result<()> {
        self.reload()?.map_or(Ok(()), Err)
    }

    /// Why an object that no index names may be in the store all the same: an index cannot be read now.
    pub(crate) fn unread(&self) -> Option<StoreError> {
        let UnreadIndex { path, errno } = lock(&self.unread).clone()?;
        Some(StoreError::io("map", &path)(io::Error::from_raw_os_error(errno)))
    }

    /// Loads the index files. Returns why one of them could not be read.
    fn reload(&self) -> Result<Option<StoreError>> {
        let _one = self.refreshing.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            let known: BTreeMap<String, Arc<Index>> =
                self.snapshot().iter().map(|i| (i.name.clone(), i.clone())).collect();
            match self.load(&known) {
                Ok((indexes, unread)) => {
                    *self.open.write().unwrap_or_else(|e| e.into_inner()) = Arc::new(indexes);
                    *lock(&self.unread) = unread;
                    return Ok(self.unread());
                }
                // Merged away between listing and opening: the file that replaces it exists by now.
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The index files, and one that cannot be read.
    fn load(&self, known: &BTreeMap<String, Arc<Index>>) -> Result<(Vec<Arc<Index>>, Option<UnreadIndex>)> {
        let mut unread = None;
        let names = self.files.list(INDEX).map_err(StoreError::io("list", INDEX))?;
        let mut indexes = Vec::with_capacity(names.len());
        for name in names.into_iter().filter(|name| name.ends_with(".idx")) {
            if let Some(index) = known.get(&name) {
                indexes.push(index.clone());
                continue;
            }
            let path = format!("{INDEX}/{name}");
            let opened = match self.files.map(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(StoreError::io("map", &path)(error));
                }
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                    unread = Some(UnreadIndex { path: path.clone(), errno });
                    Err(error.to_string())
                }
                Ok(map) => Index::open(&name, map, self.cipher.as_ref()).map_err(str::to_owned),
            };
            match opened {
                Ok(index) => indexes.push(Arc::new(index)),
                // Packs of a damaged index count as not indexed, and the next repair rebuilds their index.
                Err(reason) => {
                    tracing::warn!(path, reason, "ignoring a damaged index file");
                    self.ignored.store(true, Ordering::Relaxed);
                }
            }
        }
        indexes.sort_by_key(|index| std::cmp::Reverse(index.frame_count()));
        Ok((indexes, unread))
    }

    pub(crate) fn find(&self, key: ShortDigest) -> Vec<ObjectLocation> {
        self.snapshot().iter().flat_map(|index| index.find(key)).collect()
    }

    pub(crate) fn packs(&self) -> BTreeMap<PackId, u32> {
        self.snapshot().iter().flat_map(|index| index.packs().iter().copied()).collect()
    }

    /// Bytes of the largest index.
    pub(crate) fn largest(&self) -> u64 {
        self.snapshot().iter().map(|index| index.size()).max().unwrap_or(0)
    }

    /// Publishes an index of `entries` in `packs`, durably. The packs must be durable already.
    pub(crate) fn publish(&self, packs: &[(PackId, u32)], entries: &[Entry]) -> Result<()> {
        let mut start = 0;
        for packs in packs.chunks(MAX_PACKS / 2) {
            let covered: HashSet<PackId> = packs.iter().map(|(id, _)| *id).collect();
            let end = start + entries[start..].partition_point(|entry| covered.contains(&entry.frame.pack));
            for entries in entries[start..end].chunks(MAX_FRAMES - 1) {
                let name = format!("{:016x}.idx", rand::random::<u64>());
                publish(&*self.files, INDEX, &name, &index::encode(packs, entries, self.cipher.as_deref()))?;
            }
            start = end;
        }
        self.refresh()
    }

    /// Merges small index files. Does nothing if another process is merging.
    pub(crate) fn merge(&self) -> Result<()> {
        let lock = self.files.lock(INDEX_LOCK, LockMode::Exclusive, LockWait::Try);
        let Some(_lock) = lock.map_err(StoreError::io("lock", INDEX_LOCK))? else { return Ok(()) };
        self.refresh()?;
        let indexes = self.snapshot();
        let sizes: Vec<usize> = indexes.iter().map(|index| index.frame_count()).collect();
        let Some(first) = merge_from(&sizes) else { return Ok(()) };
        self.replace(&indexes[first..], &HashSet::new(), &HashSet::new())
    }

    /// Whether the body of one of the smallest index files is damaged, which have this size together.
    pub(crate) fn is_damaged_within(&self, bytes: u64) -> bool {
        let mut left = bytes;
        let indexes = self.snapshot();
        let mut small = indexes.iter().rev().take_while(|index| {
            left = left.saturating_sub(index.size());
            left > 0
        });
        small.any(|index| !index.body_is_intact())
    }

    /// Names of the index files whose bodies are damaged. Reads all of them.
    pub(crate) fn damaged(&self) -> HashSet<String> {
        let indexes = self.snapshot();
        indexes.iter().filter(|index| !index.body_is_intact()).map(|index| index.name.clone()).collect()
    }

    /// Packs of all index files but those called `damaged`.
    pub(crate) fn packs_without(&self, damaged: &HashSet<String>) -> HashSet<PackId> {
        let indexes = self.snapshot();
        let intact = indexes.iter().filter(|index| !damaged.contains(&index.name));
        intact.flat_map(|index| index.packs().iter().map(|(id, _)| *id)).collect()
    }

    /// Removes those `damaged` index files whose packs others cover, or are gone.
    pub(crate) fn remove_damaged(&self, damaged: &HashSet<String>) -> Result<()> {
        let lock = self.files.lock(INDEX_LOCK, LockMode::Exclusive, LockWait::Wait);
        let _lock = lock.map_err(StoreError::io("lock", INDEX_LOCK))?;
        self.refresh()?;
        let present = self.files.list(PACKS).map_err(StoreError::io("list", PACKS))?;
        let present: HashSet<PackId> = present.iter().filter_map(|name| PackId::parse(name)).collect();
        let covered = self.packs_without(damaged);
        let is_needless = |id: &PackId| covered.contains(id) || !present.contains(id);
        for index in self.snapshot().iter().filter(|index| damaged.contains(&index.name)) {
            if index.packs().iter().all(|(id, _)| is_needless(id)) {
                let path = format!("{INDEX}/{}", index.name);
                self.files.remove(&path).map_err(StoreError::io("remove", &path))?;
            }
        }
        self.files.sync_dir(INDEX).map_err(StoreError::io("sync", INDEX))?;
        self.refresh()
    }

    /// Renames index files that cannot be read, if others cover every pack: nothing is known by them alone.
    pub(crate) fn set_unread_aside(&self) -> Result<()> {
        let lock = self.files.lock(INDEX_LOCK, LockMode::Exclusive, LockWait::Wait);
        let _lock = lock.map_err(StoreError::io("lock", INDEX_LOCK))?;
        // Listed before the refresh, and the packs after it: what appears meanwhile counts as readable, and
        // the packs of an index are there before it.
        let mut unread = self.files.list(INDEX).map_err(StoreError::io("list", INDEX))?;
        self.refresh()?;
        let present = self.files.list(PACKS).map_err(StoreError::io("list", PACKS))?;
        let covered = self.packs();
        unread.retain(|name| name.ends_with(".idx") && self.snapshot().iter().all(|it| it.name != *name));
        if unread.is_empty()
            || !present.iter().filter_map(|it| PackId::parse(it)).all(|it| covered.contains_key(&it))
        {
            return Ok(());
        }
        for name in &unread {
            tracing::error!(
                name,
                "an index file that cannot be read is set aside; others have what it named"
            );
            set_aside(&*self.files, &format!("{INDEX}/{name}"))?;
        }
        self.files.sync_dir(INDEX).map_err(StoreError::io("sync", INDEX))?;
        self.ignored.store(false, Ordering::Relaxed);
        self.refresh()
    }

    /// Rewrites every index file that has one of the packs `gone` or one of the frames `dead`, without them.
    pub(crate) fn remove(&self, gone: &HashSet<PackId>, dead: &HashSet<PackLocation>) -> Result<()> {
        let lock = self.files.lock(INDEX_LOCK, LockMode::Exclusive, LockWait::Wait);
        let _lock = lock.map_err(StoreError::io("lock", INDEX_LOCK))?;
        self.refresh_whole()?;
        for index in self.snapshot().iter() {
            let covers = index.packs().iter().any(|(id, _)| gone.contains(id));
            if covers || (!dead.is_empty() && index.places().any(|place| dead.contains(&place))) {
                self.replace(std::slice::from_ref(index), gone, dead)?;
            }
        }
        Ok(())
    }

    /// Rewrites index files from before the store was encrypted, whose keys everybody can read.
    pub(crate) fn hide_rest(&self) -> Result<()> {
        let lock = self.files.lock(INDEX_LOCK, LockMode::Exclusive, LockWait::Wait);
        let _lock = lock.map_err(StoreError::io("lock", INDEX_LOCK))?;
        self.refresh()?;
        for index in self.snapshot().iter().filter(|index| !index.is_hidden()) {
            self.replace(std::slice::from_ref(index), &HashSet::new(), &HashSet::new())?;
        }
        Ok(())
    }

    /// Publishes one file that replaces `old`, without the packs `gone` and the frames `dead`.
    fn replace(
        &self,
        old: &[Arc<Index>],
        gone: &HashSet<PackId>,
        dead: &HashSet<PackLocation>,
    ) -> Result<()> {
        let (mut packs, mut entries) = (BTreeMap::new(), Vec::new());
        for index in old {
            let new: HashSet<PackId> = index
                .packs()
                .iter()
                .map(|(id, _)| *id)
                .filter(|id| !gone.contains(id) && !packs.contains_key(id))
                .collect();
            let Some(contents) = index.contents() else {
                let path = format!("{INDEX}/{}", index.name);
                return Err(StoreError::Index { path, reason: "body checksum" });
            };
            let stays = |entry: &Entry| new.contains(&entry.frame.pack) && !dead.contains(&entry.frame);
            entries.extend(contents.into_iter().filter(stays));
            packs.extend(index.packs().iter().filter(|(id, _)| new.contains(id)).copied());
        }
        if !packs.is_empty() {
            let packs: Vec<_> = packs.into_iter().collect();
            let name = format!("{:016x}.idx", rand::random::<u64>());
            publish(&*self.files, INDEX, &name, &index::encode(&packs, &entries, self.cipher.as_deref()))?;
        }
        for index in old {
            let path = format!("{INDEX}/{}", index.name);
            self.files.remove(&path).map_err(StoreError::io("remove", &path))?;
        }
        self.files.sync_dir(INDEX).map_err(StoreError::io("sync", INDEX))?;
        self.refresh()
    }
}

/// First file (sizes descending) from which on the files should be merged; none if no merge is due.
fn merge_from(sizes: &[usize]) -> Option<usize> {
    (0..sizes.len().saturating_sub(1)).find(|first| {
        let rest: usize = sizes[first + 1..].iter().sum();
        let total = rest + sizes[*first];
        // Up to three tiny files cost less than rewriting them at every commit.
        rest * 3 >= sizes[*first] && total < MAX_FRAMES && sizes.len() - first > 3
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_commits_leave_a_dozen_files() {
        let (mut sizes, mut rewritten) = (Vec::new(), 0);
        for commit in 0..1000 {
            sizes.push(10 + commit % 7);
            sizes.sort_by_key(|size| std::cmp::Reverse(*size));
            if let Some(first) = merge_from(&sizes) {
                let merged = sizes.drain(first..).sum::<usize>();
                rewritten += merged;
                sizes.push(merged);
                sizes.sort_by_key(|size| std::cmp::Reverse(*size));
            }
            assert!(sizes.len() <= 12, "{sizes:?}");
        }
        assert!(rewritten < 13_000 * 10, "{rewritten}");
    }
}
