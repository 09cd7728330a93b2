//! Quotas: how much space the files of an export may take, as `du` counts it.
//!
//! The server adds what its clients' changes take and free. Programs of the server's own host, and files
//! with several names, are seen when the whole export is counted: at the start, now and then, and when a
//! change was refused. A change is refused before it begins; those of several files at once may exceed a
//! quota by one request each.

use super::{refuse, sessions::ServedSession};
use crate::proto::{Attr, FilesystemSpace, Kind, Op};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, StatxFlags, openat, statx},
    io::Errno,
};
use std::{
    collections::HashSet,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_wire::Refusal;

/// Unit of [`Attr::blocks`] (stat(2)).
const UNIT: u64 = 512;
/// Space that a new name is taken to need: a block of most file systems.
const NAME: u64 = 4096;
/// Longest and shortest time between two counts.
const AGE_MAX: Duration = Duration::from_secs(600);
const AGE_MIN: Duration = Duration::from_secs(1);
/// Pause after a count in its own durations: a large export that is full is not counted all the time.
const PAUSE: u32 = 9;
/// Deepest directory that is counted; `PATH_MAX` allows no deeper one.
const DEPTH_MAX: usize = 2048;

/// The quota of an export.
#[derive(Debug)]
pub(super) struct Quota {
    limit: u64,
    used: AtomicI64,
    /// Whether the whole export was counted.
    is_counted: AtomicBool,
    /// Whether it is to be counted now.
    asked: Mutex<bool>,
    ask: Condvar,
}

impl Quota {
    /// A quota of `limit` bytes for the files below `dir`, which a thread counts.
    pub(super) fn new(dir: OwnedFd, limit: u64) -> std::io::Result<Arc<Self>> {
        let quota = Arc::new(Self {
            limit,
            used: AtomicI64::new(0),
            is_counted: AtomicBool::new(false),
            asked: Mutex::default(),
            ask: Condvar::new(),
        });
        let counted = Arc::downgrade(&quota);
        std::thread::Builder::new().name("quota".into()).spawn(move || keep_counted(&dir, &counted))?;
        Ok(quota)
    }

    /// Adds what a change of a file took or freed.
    pub(super) fn charge(&self, before: &Attr, after: &Attr) {
        self.used.fetch_add(taken(after) - taken(before), Ordering::Relaxed);
    }

    /// Refuses a change that takes up to `more` bytes if there is no room for them.
    pub(super) fn admit(&self, more: u64) -> Result<(), Refusal> {
        let used = u64::try_from(self.used.load(Ordering::Relaxed)).unwrap_or(0);
        if more == 0 || used.saturating_add(more) <= self.limit || !self.is_counted.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Somebody else may have removed files.
        *lock(&self.asked) = true;
        self.ask.notify_one();
        Err(refuse("take more space than the quota of this directory")(Errno::DQUOT))
    }

    /// The space of a file system, as far as the quota leaves it.
    pub(super) fn limit_space(&self, space: FilesystemSpace) -> FilesystemSpace {
        let unit = space.unit.max(1);
        let used = u64::try_from(self.used.load(Ordering::Relaxed)).unwrap_or(0);
        let left = self.limit.saturating_sub(used) / unit;
        FilesystemSpace {
            total: space.total.min(self.limit / unit),
            free: space.free.min(left),
            available: space.available.min(left),
            ..space
        }
    }

    fn count(&self, dir: &OwnedFd) {
        let before = self.used.load(Ordering::Relaxed);
        let Ok(total) = Count::of(dir) else { return };
        // Changes meanwhile are in the count or not; they stay added, until the next one.
        self.used.fetch_add(total as i64 - before, Ordering::Relaxed);
        self.is_counted.store(true, Ordering::Relaxed);
    }

    /// Waits until a count is due.
    fn wait(&self) {
        let asked = lock(&self.asked);
        let waited = self.ask.wait_timeout_while(asked, AGE_MAX, |asked| !*asked);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

/// Counts until the quota is gone.
fn keep_counted(dir: &OwnedFd, quota: &Weak<Quota>) {
    while let Some(quota) = quota.upgrade() {
        let begun = Instant::now();
        quota.count(dir);
        let pause = AGE_MIN.max(begun.elapsed() * PAUSE);
        // Held while it waits: an export lives as long as its server.
        quota.wait();
        drop(quota);
        std::thread::sleep(pause);
    }
}

/// Adds up the space of a tree.
#[derive(Default)]
struct Count {
    total: u64,
    /// Files with several names that were counted.
    linked: HashSet<u64>,
}

impl Count {
    fn of(dir: &OwnedFd) -> Result<u64, Errno> {
        let mut count = Self::default();
        let about = statx(dir, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
        count.total = about.stx_blocks * UNIT;
        count.below(dir, (about.stx_dev_major, about.stx_dev_minor), 0)?;
        Ok(count.total)
    }

    /// Adds what is below a directory; other file systems that are mounted there are left out. What goes away
    /// meanwhile is no error.
    fn below(&mut self, dir: &OwnedFd, device: (u32, u32), depth: usize) -> Result<(), Errno> {
        if depth > DEPTH_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        for entry in Dir::read_from(dir)?.flatten() {
            let name = entry.file_name();
            if [b".".as_slice(), b".."].contains(&name.to_bytes()) {
                continue;
            }
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            let Ok(about) = statx(dir, name, flags, StatxFlags::BASIC_STATS) else { continue };
            if (about.stx_dev_major, about.stx_dev_minor) != device {
                continue;
            }
            let is_folder = FileType::from_raw_mode(u32::from(about.stx_mode)) == FileType::Directory;
            if is_folder || about.stx_nlink < 2 || self.linked.insert(about.stx_ino) {
                self.total += about.stx_blocks * UNIT;
            }
            let open = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            if is_folder && let Ok(below) = openat(dir, name, open, Mode::empty()) {
                self.below(&below, device, depth + 1)?;
            }
        }
        Ok(())
    }
}

/// Most bytes that a write of `bytes` at `offset` takes of a file: none over blocks that it has.
pub(super) fn taken_by_write(there: &Attr, offset: u64, bytes: u64) -> u64 {
    let is_over = offset.saturating_add(bytes) <= there.size && there.blocks * UNIT >= there.size;
    if is_over { 0 } else { bytes }
}

/// Carries out a change of names under the quota of its export.
pub(super) fn op_within<T>(
    session: &ServedSession,
    op: &Op,
    change: impl FnOnce() -> Result<T, Refusal>,
) -> Result<T, Refusal> {
    let Some(quota) = &session.tree.quota else { return change() };
    let (files, more) = match op.plain() {
        Op::Create { path, .. } | Op::Mkdir { path, .. } | Op::Symlink { path, .. } => (vec![path], NAME),
        Op::Make { path, .. } | Op::Replace { path, .. } => (vec![path], NAME),
        // The blocks of a file count once, whatever its names.
        Op::Link { .. } | Op::SetAttr { .. } | Op::SetTimes { .. } | Op::If { .. } => (Vec::new(), 0),
        Op::Rename { from, path, .. } => (vec![from, path], 0),
        Op::Unlink { path, .. } | Op::Rmdir { path } => (vec![path], 0),
    };
    quota.admit(more)?;
    let now = || {
        let attrs = files.iter().filter_map(|path| session.tree.attr(path).ok().flatten());
        attrs.map(|attr| taken(&attr)).sum::<i64>()
    };
    let before = now();
    let done = change();
    quota.used.fetch_add(now() - before, Ordering::Relaxed);
    done
}

/// Bytes that a file takes. One with several names keeps them when it loses one.
fn taken(attr: &Attr) -> i64 {
    let counts = attr.kind == Kind::Dir || (attr.kind != Kind::Device && attr.links < 2);
    if counts { (attr.blocks * UNIT) as i64 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn opened(path: &std::path::Path) -> OwnedFd {
        fs::File::open(path).unwrap().into()
    }

    #[test]
    fn a_tree_is_counted_as_du_does() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("a/b/file"), vec![7; 300_000]).unwrap();
        fs::hard_link(dir.path().join("a/b/file"), dir.path().join("a/again")).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("a/out")).unwrap();
        fs::File::create(dir.path().join("sparse")).unwrap().set_len(1 << 30).unwrap();
        let du = std::process::Command::new("du").args(["-s", "-B1"]).arg(dir.path()).output().unwrap();
        let du = String::from_utf8(du.stdout).unwrap();
        let counted = Count::of(&opened(dir.path())).unwrap();
        assert_eq!(Some(counted.to_string().as_str()), du.split_whitespace().next());
    }

    #[test]
    fn the_space_of_a_file_system_ends_where_the_quota_does() {
        let quota = Quota {
            limit: 1 << 20,
            used: AtomicI64::new(3 << 18),
            is_counted: AtomicBool::new(true),
            asked: Mutex::default(),
            ask: Condvar::new(),
        };
        let space = FilesystemSpace {
            unit: 4096,
            total: 1 << 30,
            free: 1 << 20,
            available: 8,
            files: 9,
            files_free: 5,
        };
        let limited = quota.limit_space(space);
        assert_eq!((limited.total, limited.free, limited.available, limited.files), (256, 64, 8, 9));
        quota.admit(1 << 18).unwrap();
        quota.admit((1 << 18) + 1).unwrap_err();
        assert!(*lock(&quota.asked), "it is counted again");
        quota.used.store(-5, Ordering::Relaxed);
        quota.admit(1 << 20).unwrap();
    }
}
