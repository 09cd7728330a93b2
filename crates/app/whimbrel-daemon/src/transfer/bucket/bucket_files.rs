//! Files of a store that lies in a bucket: packs, indexes, refs, keys and the state of garbage collection are
//! objects, each written once or replaced as a whole.
//!
//! Locks, GC leases, temporary files and the reserve belong to this process: whoever changes the store has
//! [`BucketLock`], so nobody else does, and a reader of another host has a holder.

use super::bucket_lock::BucketLock;
use bytes::Bytes;
use std::{
    collections::{BTreeMap, HashMap},
    io,
    ops::Bound,
    sync::{
        Arc, Condvar, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_core::lock;
use whimbrel_pool::benefactor::{Bucket, TierError};
use whimbrel_store::vfs::{Append, Lock, LockMode, LockWait, Mapping, ReadAt, Vfs};

/// Longest object that is stored by one request.
const LONG: usize = 16 << 20;
/// Folders that only this process uses.
const LOCAL: [&str; 3] = ["tmp/", "leases/", "reserve/"];

/// Files of one store. Without a lock of the bucket they can be read only.
pub(super) struct BucketFiles {
    me: Weak<Self>,
    bucket: Arc<Bucket>,
    right: Option<BucketLock>,
    local: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    locks: Arc<Locks>,
    moved: Arc<AtomicU64>,
}

impl BucketFiles {
    /// The files of a bucket, which can be changed with `right`.
    pub(super) fn new(bucket: Arc<Bucket>, right: Option<BucketLock>) -> Arc<Self> {
        let (local, locks, moved) = Default::default();
        Arc::new_cyclic(|me| Self { me: me.clone(), bucket, right, local, locks, moved })
    }

    /// Bytes of objects that were sent and received.
    pub(super) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    fn check_right(&self) -> io::Result<()> {
        match &self.right {
            Some(right) => right.check(),
            None => Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the bucket is only read")),
        }
    }

    fn put(&self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.check_right()?;
        self.moved.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let stored = match bytes.len() > LONG {
            true => self.bucket.put_parts(path, bytes, || self.check_right().is_ok()),
            false => self.bucket.put(path, Bytes::copy_from_slice(bytes)),
        };
        stored.map_err(failed)
    }

    fn whole(&self, path: &str) -> io::Result<Bytes> {
        let bytes = self.bucket.get(path, None).map_err(failed)?.ok_or_else(absent)?;
        self.moved.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

fn is_local(path: &str) -> bool {
    let is_lock = path.ends_with(".lock") && !path.contains('/');
    is_lock || LOCAL.iter().any(|folder| path.starts_with(folder))
}

fn failed(error: TierError) -> io::Error {
    io::Error::other(error)
}

fn absent() -> io::Error {
    io::ErrorKind::NotFound.into()
}

/// A file in memory.
struct Content(Bytes);

impl ReadAt for Content {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let begin = usize::try_from(offset).map_err(|_| short())?;
        let end = begin.checked_add(out.len()).ok_or_else(short)?;
        out.copy_from_slice(self.0.get(begin..end).ok_or_else(short)?);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }
}

/// A pack, of which each frame is one request.
struct Pack {
    bucket: Arc<Bucket>,
    path: String,
    size: u64,
    moved: Arc<AtomicU64>,
}

impl ReadAt for Pack {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        if out.is_empty() {
            return Ok(());
        }
        let bytes = self.bucket.get(&self.path, Some(offset..end)).map_err(failed)?.ok_or_else(absent)?;
        if bytes.len() != out.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.copy_from_slice(&bytes);
        self.moved.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.size)
    }
}

/// An object that is being written: it is there, as long as it is so far, after each sync.
struct ObjectAppender {
    files: Weak<BucketFiles>,
    path: String,
    bytes: Vec<u8>,
    synced: Option<usize>,
}

impl Append for ObjectAppender {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.synced == Some(self.bytes.len()) {
            return Ok(());
        }
        let files = self.files.upgrade().ok_or_else(|| io::Error::other("the store is closed"))?;
        files.put(&self.path, &self.bytes)?;
        self.synced = Some(self.bytes.len());
        Ok(())
    }
}

/// A file of this process, visible at once.
struct LocalAppender {
    files: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    path: String,
}

impl Append for LocalAppender {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut files = lock(&self.files);
        files.get_mut(&self.path).ok_or_else(absent)?.extend_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Vfs for BucketFiles {
    fn create(&self, path: &str) -> io::Result<Box<dyn Append>> {
        if is_local(path) {
            let mut local = lock(&self.local);
            if local.contains_key(path) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            local.insert(path.to_owned(), Vec::new());
            return Ok(Box::new(LocalAppender { files: self.local.clone(), path: path.to_owned() }));
        }
        self.check_right()?;
        if self.bucket.size(path).map_err(failed)?.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let (bytes, synced) = (Vec::new(), None);
        Ok(Box::new(ObjectAppender { files: self.me.clone(), path: path.to_owned(), bytes, synced }))
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn ReadAt>> {
        if is_local(path) {
            let content = lock(&self.local).get(path).map(|bytes| Bytes::copy_from_slice(bytes));
            return Ok(Arc::new(Content(content.ok_or_else(absent)?)));
        }
        if !path.starts_with("packs/") {
            return Ok(Arc::new(Content(self.whole(path)?)));
        }
        let size = self.bucket.size(path).map_err(failed)?.ok_or_else(absent)?;
        Ok(Arc::new(Pack {
            bucket: self.bucket.clone(),
            path: path.to_owned(),
            size,
            moved: self.moved.clone(),
        }))
    }

    fn map(&self, path: &str) -> io::Result<Mapping> {
        Ok(Arc::new(self.whole(path)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        if is_local(from) {
            let bytes = lock(&self.local).remove(from).ok_or_else(absent)?;
            if is_local(to) {
                lock(&self.local).insert(to.to_owned(), bytes);
                return Ok(());
            }
            return self.put(to, &bytes);
        }
        self.put(to, &self.whole(from)?)?;
        self.remove(from)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        if is_local(path) {
            return lock(&self.local).remove(path).map(drop).ok_or_else(absent);
        }
        self.check_right()?;
        self.bucket.delete(path).map_err(failed)
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let folder = if dir.is_empty() { String::new() } else { format!("{dir}/") };
        if is_local(&folder) {
            let local = lock(&self.local);
            let from = (Bound::Included(folder.clone()), Bound::Unbounded);
            let inside = local.range(from).map_while(|(path, _)| path.strip_prefix(&folder));
            return Ok(inside.map(str::to_owned).collect());
        }
        let entries = self.bucket.list_dir(dir).map_err(failed)?;
        Ok(entries.into_iter().map(|entry| entry.name).collect())
    }

    /// What is stored is durable.
    fn sync(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn sync_dir(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    /// A bucket has no folders.
    fn make_dir(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self, path: &str, mode: LockMode, patience: LockWait) -> io::Result<Option<Lock>> {
        Ok(self.locks.take(path, mode, patience).map(|held| Box::new(held) as Lock))
    }
}

/// Locks between threads of this process: by path, the number of holders who share one, or -1 for one alone.
#[derive(Default)]
struct Locks {
    held: Mutex<HashMap<String, i64>>,
    released: Condvar,
}

struct HeldLock {
    locks: Arc<Locks>,
    path: String,
    mode: LockMode,
}

impl Locks {
    fn take(self: &Arc<Self>, path: &str, mode: LockMode, patience: LockWait) -> Option<HeldLock> {
        let mut held = lock(&self.held);
        loop {
            let holders = held.entry(path.to_owned()).or_default();
            match mode {
                LockMode::Shared if *holders >= 0 => *holders += 1,
                LockMode::Exclusive if *holders == 0 => *holders = -1,
                _ if patience == LockWait::Try => return None,
                _ => {
                    held = self.released.wait(held).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
            }
            return Some(HeldLock { locks: self.clone(), path: path.to_owned(), mode });
        }
    }
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        let mut held = lock(&self.locks.held);
        if let Some(holders) = held.get_mut(&self.path) {
            *holders = if self.mode == LockMode::Shared { *holders - 1 } else { 0 };
            if *holders == 0 {
                held.remove(&self.path);
            }
        }
        self.locks.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_shared_or_has_one_holder() {
        let locks = Arc::new(Locks::default());
        let try_take = |mode| locks.take("gate.lock", mode, LockWait::Try);
        let (one, other) = (try_take(LockMode::Shared).unwrap(), try_take(LockMode::Shared).unwrap());
        assert!(try_take(LockMode::Exclusive).is_none());
        drop((one, other));
        let alone = try_take(LockMode::Exclusive).unwrap();
        assert!(try_take(LockMode::Shared).is_none() && try_take(LockMode::Exclusive).is_none());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| locks.take("gate.lock", LockMode::Shared, LockWait::Wait).is_some());
            drop(alone);
            assert!(waits.join().unwrap());
        });
        assert!(lock(&locks.held).is_empty());
    }
}
