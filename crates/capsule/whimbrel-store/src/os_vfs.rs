//! [`Vfs`] of the operating system: files below a directory. The one module of this crate with `unsafe`: it
//! maps index files.

use crate::vfs::{Append, Lock, LockMode, LockWait, Mapping, ReadAt, Vfs};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::Arc,
};

/// Files below a directory.
#[derive(Debug)]
pub struct OsVfs {
    root: PathBuf,
}

impl OsVfs {
    /// Creates a file system rooted at `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }
}

struct Appender(File);

impl Append for Appender {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }
}

struct Reader(File);

impl ReadAt for Reader {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.0.metadata().map(|meta| meta.len())
    }
}

impl Vfs for OsVfs {
    fn create(&self, path: &str) -> io::Result<Box<dyn Append>> {
        let file = OpenOptions::new().append(true).create_new(true).open(self.root.join(path))?;
        Ok(Box::new(Appender(file)))
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn ReadAt>> {
        Ok(Arc::new(Reader(File::open(self.root.join(path))?)))
    }

    fn map(&self, path: &str) -> io::Result<Mapping> {
        let file = File::open(self.root.join(path))?;
        if file.metadata()?.len() == 0 {
            return Ok(Arc::new(Vec::new()));
        }
        // SAFETY: the mapped bytes must not change while they are borrowed. Mapped files (index files) are
        // written under a temporary name, synced, renamed and from then on only ever removed, which leaves a
        // mapping intact. Truncating one from outside violates this, as deleting the store does.
        let map = unsafe { memmap2::Mmap::map(&file) }?;
        Ok(Arc::new(map))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.root.join(from), self.root.join(to))
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        fs::remove_file(self.root.join(path))
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let names = fs::read_dir(self.root.join(dir))?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(Result::transpose).collect()
    }

    fn sync(&self, path: &str) -> io::Result<()> {
        File::open(self.root.join(path))?.sync_data()
    }

    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        File::open(self.root.join(dir))?.sync_all()
    }

    fn make_dir(&self, dir: &str) -> io::Result<()> {
        fs::create_dir_all(self.root.join(dir))
    }

    fn lock(&self, path: &str, mode: LockMode, patience: LockWait) -> io::Result<Option<Lock>> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(self.root.join(path))?;
        loop {
            // Calls of the standard library go by way of the C library, where the simulation stands in.
            let locked = match (mode, patience) {
                (LockMode::Shared, LockWait::Wait) => file.lock_shared().map_err(TryLockError::Error),
                (LockMode::Exclusive, LockWait::Wait) => file.lock().map_err(TryLockError::Error),
                (LockMode::Shared, LockWait::Try) => file.try_lock_shared(),
                (LockMode::Exclusive, LockWait::Try) => file.try_lock(),
            };
            match locked {
                Ok(()) => return Ok(Some(Box::new(file))),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }
}
