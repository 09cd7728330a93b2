//! The disk with the permanent state of a machine's TPM, which swtpm has as a file in the runtime directory.
//!
//! A boot writes the file from the disk before swtpm starts. From then on a thread writes the file to the
//! disk whenever swtpm has replaced it, a pause does so before the last pages are read, and the end of the
//! machine once more. So disks of capsules, clones, moves and epochs have what the guest was told is stored.
//! A machine that is loaded has its TPM in its device state; swtpm makes the file of that.
//!
//! The disk (docs/formats/tpm.md) has two records. The newer one counts, the older one is replaced, so that
//! a loss of power in the middle leaves the other. Integers are little endian, the digest is of all that
//! follows it:
//!
//! ```text
//! half   = magic[8] digest[32] number:u64 len:u64 state[len]      at 0 and at half of the disk
//! ```
//!
//! The file belongs to a process that may have been taken over, and the disk may come from another host: both
//! are bounded and checked.

use super::error::Cause;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fs::{
        Mode, OFlags,
        inotify::{self, CreateFlags, WatchFlags},
    },
};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
};
use whimbrel_block::{BlockError, Device};
use whimbrel_core::{ByteSize, Digest, PAGE_SIZE, lock};
use whimbrel_qemu::{MachineUser, TPM_STATE};

/// Size of the disk. A state of swtpm 0.7 has 1 KB, and 200 KB if the guest fills the TPM.
pub const TPM_DISK: ByteSize = ByteSize(1 << 20);
const HALF: u64 = TPM_DISK.0 / 2;
const MAGIC: [u8; 8] = *b"WhimTPM1";
const DIGEST: usize = MAGIC.len();
const NUMBER: usize = DIGEST + 32;
const LEN: usize = NUMBER + 8;
const STATE: usize = LEN + 8;
/// Longest state that fits into one half.
const STATE_MAX: usize = HALF as usize - STATE;
/// Interval at which the file is looked at if the kernel has no more watches to give.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Why a state cannot be read or saved.
#[derive(Debug, thiserror::Error)]
pub(super) enum TpmStateError {
    #[error("the state of the TPM is damaged: resume or rewind to a capsule that has a good one")]
    Damaged,
    #[error("the disk of the TPM has another size")]
    Size,
    #[error("the file of the TPM is no file, or too long")]
    File,
    #[error("cannot access the disk of the TPM")]
    Disk(#[from] BlockError),
    #[error("cannot access the file of the TPM")]
    Io(#[from] io::Error),
}

/// Disk of a TPM, and the file that it keeps.
pub(super) struct TpmDisk {
    saver: Arc<Saver>,
    watcher: Mutex<Option<Watcher>>,
}

struct Saver {
    device: Arc<dyn Device>,
    dir: PathBuf,
    saved: Mutex<Saved>,
}

/// What is on the disk already.
#[derive(Default)]
struct Saved {
    /// The file that was looked at last: inode, time of change, length.
    seen: Option<(u64, i64, i64, u64)>,
    /// Number of the newest record and digest of its state, once the disk was read.
    newest: Option<(u64, Digest)>,
}

struct Watcher {
    thread: JoinHandle<()>,
    stop: OwnedFd,
}

impl TpmDisk {
    /// The disk `device` for the state of the TPM that works in `dir`.
    pub(super) fn new(device: Arc<dyn Device>, dir: PathBuf) -> Self {
        let saver = Arc::new(Saver { device, dir, saved: Mutex::default() });
        Self { saver, watcher: Mutex::default() }
    }

    /// Writes the file for a TPM that is about to start, unless it is to be a new one.
    pub(super) fn write_file(&self, user: Option<MachineUser>) -> Result<(), TpmStateError> {
        let mut saved = lock(&self.saver.saved);
        let (number, state) = newest(&*self.saver.device)?.unwrap_or_default();
        saved.newest = Some((number, Digest::of(&state)));
        if number == 0 {
            return Ok(());
        }
        let path = self.saver.dir.join(TPM_STATE);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(&state)?;
        Ok(user.map_or(Ok(()), |user| user.give(&path))?)
    }

    /// Keeps what the TPM has written by now. It does not wait for other hosts.
    pub(super) fn save_now(&self) {
        report(self.saver.save(false));
    }

    /// Keeps what the TPM writes from now on, in the background, and what it has written before.
    pub(super) fn watch(&self) {
        let mut watcher = lock(&self.watcher);
        if watcher.is_none() {
            *watcher = Watcher::start(self.saver.clone())
                .inspect_err(|error| tracing::error!(%error, "cannot watch the state of a TPM"))
                .ok();
        }
    }

    /// Ends that, after all was saved.
    pub(super) fn end_watch(&self) {
        if let Some(watcher) = lock(&self.watcher).take() {
            watcher.end();
        }
    }
}

impl Drop for TpmDisk {
    fn drop(&mut self) {
        self.end_watch();
    }
}

/// Keeps the state that a TPM in `dir` left, whose machine has ended while nobody watched it.
pub(super) fn save_left(device: Arc<dyn Device>, dir: &Path) -> Result<(), Cause> {
    Ok(TpmDisk::new(device, dir.to_owned()).saver.save(true)?)
}

fn report(done: Result<(), TpmStateError>) {
    if let Err(error) = done {
        let error = &error as &dyn std::error::Error;
        tracing::error!(error, "could not keep the state of a TPM");
    }
}

impl Saver {
    /// Writes the file to the disk if it has changed. If what is on the disk is not known, that is read
    /// first, or left to the next call.
    fn save(&self, may_read: bool) -> Result<(), TpmStateError> {
        let mut saved = lock(&self.saved);
        let Some(file) = open(&self.dir.join(TPM_STATE))? else { return Ok(()) };
        let meta = file.metadata()?;
        let seen = (meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len());
        if saved.seen == Some(seen) {
            return Ok(());
        }
        if !meta.is_file() || meta.len() > STATE_MAX as u64 {
            return Err(TpmStateError::File);
        }
        let (number, before) = match saved.newest {
            Some(newest) => newest,
            None if !may_read => return Ok(()),
            // What is damaged is replaced.
            None => newest(&*self.device)
                .or_else(|error| if matches!(error, TpmStateError::Damaged) { Ok(None) } else { Err(error) })?
                .map_or((0, Digest::of(b"")), |(number, state)| (number, Digest::of(&state))),
        };
        let mut state = Vec::new();
        file.take(STATE_MAX as u64).read_to_end(&mut state)?;
        let digest = Digest::of(&state);
        if digest != before {
            let (offset, record) = record(number + 1, &state);
            self.device.write_at(offset, &record)?;
            self.device.flush()?;
        }
        let number = if digest == before { number } else { number + 1 };
        *saved = Saved { seen: Some(seen), newest: Some((number, digest)) };
        Ok(())
    }

    fn watch(&self, changes: Option<&OwnedFd>, stop: &OwnedFd) {
        let timeout = changes.is_none().then_some(LOOK);
        loop {
            let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
            fds.extend(changes.map(|changes| PollFd::new(changes, PollFlags::IN)));
            report(self.save(true));
            // A signal makes it look once more.
            let _ = poll(&mut fds, timeout.as_ref());
            if !fds[0].revents().is_empty() {
                return report(self.save(true));
            }
            // What changed does not matter.
            let _ = changes.map(|changes| rustix::io::read(changes, &mut [0; 4096]));
        }
    }
}

impl Watcher {
    fn start(saver: Arc<Saver>) -> io::Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let wakes = stop.try_clone()?;
        let changes = changes_in(&saver.dir)
            .inspect_err(|error| tracing::debug!(%error, "no watch for the state of a TPM"))
            .ok();
        let watch = move || saver.watch(changes.as_ref(), &wakes);
        Ok(Self { thread: thread::Builder::new().name("tpm-disk".into()).spawn(watch)?, stop })
    }

    fn end(self) {
        // Fails only if the count is full, and then the thread has been told.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let _ = self.thread.join();
    }
}

fn changes_in(dir: &Path) -> io::Result<OwnedFd> {
    let changes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    inotify::add_watch(&changes, dir, WatchFlags::MOVED_TO | WatchFlags::CLOSE_WRITE)?;
    Ok(changes)
}

fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => Ok(Some(fd.into())),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A record and its place. The number decides the half, so that the record before it stays.
fn record(number: u64, state: &[u8]) -> (u64, Vec<u8>) {
    let mut record = vec![0; (STATE + state.len()).next_multiple_of(PAGE_SIZE)];
    record[..DIGEST].copy_from_slice(&MAGIC);
    record[NUMBER..LEN].copy_from_slice(&number.to_le_bytes());
    record[LEN..STATE].copy_from_slice(&(state.len() as u64).to_le_bytes());
    record[STATE..STATE + state.len()].copy_from_slice(state);
    let digest = Digest::of(&record[NUMBER..STATE + state.len()]);
    record[DIGEST..NUMBER].copy_from_slice(&digest.0);
    (number % 2 * HALF, record)
}

/// Number and state of the newest record; none if the disk is empty.
fn newest(device: &dyn Device) -> Result<Option<(u64, Vec<u8>)>, TpmStateError> {
    if device.size() != TPM_DISK.0 {
        return Err(TpmStateError::Size);
    }
    let halves = [read_half(device, 0)?, read_half(device, HALF)?];
    let is_empty = halves.iter().all(|half| matches!(half, Half::Empty));
    let found = halves.into_iter().filter_map(|half| match half {
        Half::Whole(number, state) => Some((number, state)),
        Half::Empty | Half::Damaged => None,
    });
    match found.max_by_key(|(number, _)| *number) {
        None if !is_empty => Err(TpmStateError::Damaged),
        newest => Ok(newest),
    }
}

enum Half {
    Empty,
    Damaged,
    Whole(u64, Vec<u8>),
}

fn read_half(device: &dyn Device, offset: u64) -> Result<Half, BlockError> {
    let mut first = vec![0; PAGE_SIZE];
    device.read_at(offset, &mut first)?;
    if whimbrel_core::is_zero(&first) {
        return Ok(Half::Empty);
    }
    let number_at = |at: usize| u64::from_le_bytes(first[at..at + 8].try_into().unwrap_or_default());
    let (number, len) = (number_at(NUMBER), number_at(LEN));
    if first[..DIGEST] != MAGIC || len > STATE_MAX as u64 || number == 0 {
        return Ok(Half::Damaged);
    }
    let mut record = vec![0; STATE + len as usize];
    device.read_at(offset, &mut record)?;
    let is_whole = Digest::of(&record[NUMBER..]).0 == first[DIGEST..NUMBER];
    Ok(if is_whole { Half::Whole(number, record.split_off(STATE)) } else { Half::Damaged })
}

#[cfg(test)]
#[path = "tpm_disk_tests.rs"]
mod tests;
