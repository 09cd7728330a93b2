//! Crash disk: a disk in memory that loses power, fails or fills up at a chosen operation.
//!
//! After a power failure, every file has the synced bytes and a random part of the rest, some of it zeros;
//! every name changed since its directory was synced is in the old or the new state, independently. A killed
//! process leaves everything it did.

use rand::{Rng, SeedableRng, rngs::StdRng};
use rustix::io::Errno;
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, Weak},
};
use whimbrel_store::vfs::{Append, Lock, LockMode, LockWait, Mapping, ReadAt, Vfs};

type Names = BTreeMap<String, usize>;

#[derive(Default, Clone)]
struct File {
    bytes: Vec<u8>,
    synced: usize,
}

#[derive(Default)]
struct State {
    files: Vec<File>,
    names: Names,
    durable: Names,
    dirs: BTreeSet<String>,
    locks: BTreeMap<String, i32>,
    operations: u64,
    /// Power fails at this operation.
    off_at: u64,
    /// Only this operation fails, and with which error of the system.
    fail_at: (u64, i32),
    /// Reads that succeed before one fails; none if all do.
    reads_left: Option<u64>,
    /// Files and folders that are opened before some cannot be: those of the bits that are set, lowest first.
    opens_left: Option<(u64, u64)>,
    /// Most bytes of all files, each counted with [`NAME_BYTES`].
    capacity: Option<u64>,
    open_files: usize,
    mappings: Vec<Weak<Vec<u8>>>,
    /// Work to do before a file is next locked exclusively: a process that was stopped there.
    stall: Option<(String, Box<dyn FnOnce() + Send>)>,
}

/// Bytes on the disk that a file without content takes.
const NAME_BYTES: u64 = 128;

impl State {
    fn is_full(&self, more: u64) -> bool {
        let used = |file: &usize| self.files[*file].bytes.len() as u64 + NAME_BYTES;
        let used: u64 = self.names.values().map(used).sum();
        self.capacity.is_some_and(|capacity| used + more > capacity)
    }
}

/// Disk in memory; clones share it.
#[derive(Clone, Default)]
pub struct CrashDisk {
    state: Arc<(Mutex<State>, Condvar)>,
}

fn dir_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(dir, _)| dir)
}

impl CrashDisk {
    pub fn new() -> Self {
        let disk = Self::default();
        disk.lock_state().off_at = u64::MAX;
        disk
    }

    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap()
    }

    pub fn operations(&self) -> u64 {
        self.lock_state().operations
    }

    pub fn power_off_at(&self, operation: u64) {
        self.lock_state().off_at = operation;
    }

    /// Makes one operation fail with an error of the system.
    pub fn fail_at(&self, operation: u64, error: Errno) {
        self.lock_state().fail_at = (operation, error.raw_os_error());
    }

    /// After `left` files or folders are opened, lets some not be for want of a descriptor: those for which a
    /// bit of `refused` is set, beginning with the lowest.
    pub fn refuse_descriptors(&self, left: u64, refused: u64) {
        self.lock_state().opens_left = Some((left, refused));
    }

    /// Whether so many files were opened that some were refused. None is from here on.
    pub fn has_refused(&self) -> bool {
        self.lock_state().opens_left.take().is_some_and(|(left, _)| left == 0)
    }

    fn take_descriptor(&self) -> io::Result<()> {
        let mut state = self.lock_state();
        match &mut state.opens_left {
            None => Ok(()),
            Some((0, refused)) => {
                let is_refused = *refused & 1 == 1;
                *refused >>= 1;
                let error = || io::Error::from_raw_os_error(Errno::MFILE.raw_os_error());
                if is_refused { Err(error()) } else { Ok(()) }
            }
            Some((left, _)) => {
                *left -= 1;
                Ok(())
            }
        }
    }

    /// Makes one read fail, after so many that do not.
    pub fn fail_read_after(&self, reads: u64) {
        self.lock_state().reads_left = Some(reads);
    }

    /// Whether the read that is to fail has not come yet.
    pub fn reads_are_to_fail(&self) -> bool {
        self.lock_state().reads_left.is_some()
    }

    /// Limits the disk to the bytes it has now and `more`; none removes the limit.
    pub fn limit(&self, more: Option<u64>) {
        let mut state = self.lock_state();
        state.capacity = None;
        let used: u64 =
            state.names.values().map(|file| state.files[*file].bytes.len() as u64 + NAME_BYTES).sum();
        state.capacity = more.map(|more| used + more);
    }

    /// Does `work` while the next process that wants `path` exclusively is stopped.
    pub fn stall_before_lock(&self, path: &str, work: impl FnOnce() + Send + 'static) {
        self.lock_state().stall = Some((path.to_owned(), Box::new(work)));
    }

    /// Bytes of the files that are mapped.
    pub fn mapped_bytes(&self) -> usize {
        self.lock_state().mappings.iter().filter_map(Weak::upgrade).map(|mapping| mapping.len()).sum()
    }

    /// Number of files that are open.
    pub fn open_files(&self) -> usize {
        self.lock_state().open_files
    }

    /// Changes one byte of a file.
    pub fn flip(&self, path: &str, at: usize, bit: u8) {
        let mut state = self.lock_state();
        let file = state.names[path];
        state.files[file].bytes[at] ^= 1 << bit;
    }

    /// Every file with its bytes.
    pub fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let state = self.lock_state();
        state.names.iter().map(|(path, file)| (path.clone(), state.files[*file].bytes.clone())).collect()
    }

    /// Puts a file there, or other bytes into it, from outside.
    pub fn put(&self, path: &str, bytes: &[u8]) {
        let mut state = self.lock_state();
        let file = state.files.len();
        state.files.push(File { bytes: bytes.to_vec(), synced: bytes.len() });
        state.names.insert(path.to_owned(), file);
        state.durable.insert(path.to_owned(), file);
    }

    /// Takes a file away from outside.
    pub fn delete(&self, path: &str) {
        let mut state = self.lock_state();
        state.names.remove(path);
        state.durable.remove(path);
    }

    pub fn paths(&self, dir: &str) -> Vec<(String, usize)> {
        let state = self.lock_state();
        let inside = state.names.iter().filter(|(path, _)| dir_of(path) == dir);
        inside.map(|(path, file)| (path.clone(), state.files[*file].bytes.len())).collect()
    }

    /// The disk as the next process finds it after a power failure.
    pub fn after_power_failure(&self, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let state = self.lock_state();
        let mut names = state.durable.clone();
        let changed: BTreeSet<&String> = state.names.keys().chain(state.durable.keys()).collect();
        for path in changed {
            match state.names.get(path) {
                _ if random.random() => {}
                Some(file) => drop(names.insert(path.clone(), *file)),
                None => drop(names.remove(path)),
            }
        }
        let files = state.files.iter().map(|file| torn(file, &mut random)).collect();
        Self::booted(files, names, state.dirs.clone())
    }

    /// The disk as the next process finds it after the last one was killed.
    pub fn after_kill(&self) -> Self {
        let state = self.lock_state();
        Self::booted(state.files.clone(), state.names.clone(), state.dirs.clone())
    }

    fn booted(files: Vec<File>, names: Names, dirs: BTreeSet<String>) -> Self {
        let disk = Self::new();
        let mut state = disk.lock_state();
        state.files = files;
        state.durable = names.clone();
        state.names = names;
        state.dirs = dirs;
        drop(state);
        disk
    }

    /// Counts an operation that changes the disk.
    fn step(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock_state();
        state.operations += 1;
        match state.operations {
            now if now >= state.off_at => Err(io::Error::other("power failure")),
            now if now == state.fail_at.0 => Err(io::Error::from_raw_os_error(state.fail_at.1)),
            _ => Ok(state),
        }
    }

    fn find(&self, path: &str) -> io::Result<usize> {
        let state = self.lock_state();
        if state.operations >= state.off_at {
            return Err(io::Error::other("power failure"));
        }
        state.names.get(path).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn torn(file: &File, random: &mut StdRng) -> File {
    let kept = random.random_range(file.synced..=file.bytes.len());
    let mut bytes = file.bytes[..kept].to_vec();
    if kept > file.synced && random.random() {
        let from = random.random_range(file.synced..kept);
        let to = random.random_range(from..kept);
        bytes[from..to].fill(0);
    }
    File { synced: bytes.len(), bytes }
}

struct Handle {
    disk: CrashDisk,
    file: usize,
}

impl Handle {
    fn new(disk: &CrashDisk, file: usize) -> Self {
        disk.lock_state().open_files += 1;
        Self { disk: disk.clone(), file }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.disk.lock_state().open_files -= 1;
    }
}

impl Append for Handle {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut state = match self.disk.step() {
            Ok(state) => state,
            Err(error) => {
                // Half of it was written.
                self.disk.lock_state().files[self.file].bytes.extend(&bytes[..bytes.len() / 2]);
                return Err(error);
            }
        };
        if state.is_full(bytes.len() as u64) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.files[self.file].bytes.extend(bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.disk.step()?;
        let file = &mut state.files[self.file];
        file.synced = file.bytes.len();
        Ok(())
    }
}

impl ReadAt for Handle {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut state = self.disk.lock_state();
        match state.reads_left {
            Some(0) => {
                state.reads_left = None;
                return Err(io::Error::from_raw_os_error(Errno::IO.raw_os_error()));
            }
            left => state.reads_left = left.map(|left| left - 1),
        }
        let bytes =
            state.files[self.file].bytes.get(offset as usize..).and_then(|bytes| bytes.get(..out.len()));
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.lock_state().files[self.file].bytes.len() as u64)
    }
}

struct Held {
    disk: CrashDisk,
    path: String,
    count: i32,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(count) = self.disk.lock_state().locks.get_mut(&self.path) {
            *count -= self.count;
        }
        self.disk.state.1.notify_all();
    }
}

const EXCLUSIVE: i32 = 1 << 20;

impl Vfs for CrashDisk {
    fn create(&self, path: &str) -> io::Result<Box<dyn Append>> {
        let mut state = self.step()?;
        if state.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if state.is_full(NAME_BYTES) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let file = state.files.len();
        state.files.push(File::default());
        state.names.insert(path.to_owned(), file);
        drop(state);
        Ok(Box::new(Handle::new(self, file)))
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn ReadAt>> {
        self.take_descriptor()?;
        Ok(Arc::new(Handle::new(self, self.find(path)?)))
    }

    fn map(&self, path: &str) -> io::Result<Mapping> {
        self.take_descriptor()?;
        let file = self.find(path)?;
        let mut state = self.lock_state();
        let mapping = Arc::new(state.files[file].bytes.clone());
        state.mappings.retain(|mapping| mapping.strong_count() > 0);
        state.mappings.push(Arc::downgrade(&mapping));
        Ok(mapping)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.step()?;
        let file = state.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        state.names.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let removed = self.step()?.names.remove(path);
        removed.map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        self.take_descriptor()?;
        let state = self.lock_state();
        let inside = state.names.keys().filter(|path| dir_of(path) == dir);
        Ok(inside.map(|path| path.rsplit('/').next().unwrap_or(path).to_owned()).collect())
    }

    fn sync(&self, path: &str) -> io::Result<()> {
        let file = self.find(path)?;
        let mut state = self.step()?;
        state.files[file].synced = state.files[file].bytes.len();
        Ok(())
    }

    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        let mut state = self.step()?;
        let state = &mut *state;
        state.durable.retain(|path, _| dir_of(path) != dir);
        let now = state.names.iter().filter(|(path, _)| dir_of(path) == dir);
        state.durable.extend(now.map(|(path, file)| (path.clone(), *file)));
        Ok(())
    }

    fn make_dir(&self, dir: &str) -> io::Result<()> {
        self.step()?.dirs.insert(dir.to_owned());
        Ok(())
    }

    fn lock(&self, path: &str, mode: LockMode, patience: LockWait) -> io::Result<Option<Lock>> {
        let (limit, count) = if mode == LockMode::Exclusive { (0, EXCLUSIVE) } else { (EXCLUSIVE - 1, 1) };
        let stalls = |(stalled, _): &mut (String, _)| stalled == path && mode == LockMode::Exclusive;
        let stall = self.lock_state().stall.take_if(stalls);
        stall.into_iter().for_each(|(_, work)| work());
        let mut state = self.lock_state();
        loop {
            let held = state.locks.entry(path.to_owned()).or_default();
            if *held <= limit {
                *held += count;
                drop(state);
                return Ok(Some(Box::new(Held { disk: self.clone(), path: path.to_owned(), count })));
            }
            if patience == LockWait::Try {
                return Ok(None);
            }
            state = self.state.1.wait(state).unwrap();
        }
    }
}
