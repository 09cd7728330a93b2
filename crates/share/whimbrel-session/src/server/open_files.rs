//! Open files: reading content without holes, and writing only over content that the writer expects.
//!
//! Files stay open for a while, by identity, so a renamed or removed file remains accessible to its users. A
//! write checks the modification time first and sets it afterwards, under the lock of the file, so writers of
//! one server see each other.

use super::{
    exports::{ExportTree, attr_of},
    quota::{Quota, taken_by_write},
    refuse, stale, write_intent,
};
use crate::proto::{Attr, FileRef, Ident, MAX_HOLES, PAGE, Range, Time, Write, code, is_zero};
use rustix::{
    fs::{FallocateFlags, SeekFrom, Timespec, Timestamps, UTIME_OMIT, fallocate, ftruncate, futimens},
    io::Errno,
};
use std::{
    collections::HashMap,
    fs::File,
    ops,
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex, PoisonError, RwLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_core::lock;
use whimbrel_wire::Refusal;

/// Most bytes of one read or write; half of a wire frame.
pub(super) const MAX_RANGE: u32 = 4 << 20;
/// Most files that were removed and are still used by the client; beyond this the oldest is closed.
const MAX_REMOVED: usize = 1024;
/// Shortest hole that is reported.
const MIN_HOLE: u64 = 16 << 10;
/// Most holes that are examined in one file; the rest is read like data.
const MAX_HOLES_EXAMINED: usize = 1 << 16;
/// Attempts to read without a concurrent write, before older attributes are returned.
const TRIES: usize = 3;

pub(super) struct OpenFile {
    file: File,
    writable: bool,
    /// Held exclusively by a write and shared by reads: in the middle of a write the modification time is the
    /// system's.
    write_lock: Arc<RwLock<()>>,
    used: AtomicU64,
    /// Quota of the export.
    quota: Option<Arc<Quota>>,
}

/// The locks of all files that sessions of one server have open: a file has one lock, whoever opened it.
#[derive(Default)]
pub(super) struct WriteLocks {
    locks: Mutex<HashMap<Ident, Weak<RwLock<()>>>>,
}

impl WriteLocks {
    fn of(&self, ident: Ident) -> Arc<RwLock<()>> {
        let mut locks = lock(&self.locks);
        if locks.len() == locks.capacity() {
            locks.retain(|_, known| known.strong_count() > 0);
        }
        let known = locks.entry(ident).or_default();
        known.upgrade().unwrap_or_else(|| {
            let new = Arc::default();
            *known = Arc::downgrade(&new);
            new
        })
    }
}

pub(super) struct OpenFiles {
    most: usize,
    locks: Arc<WriteLocks>,
    clock: AtomicU64,
    open: Mutex<HashMap<Ident, Arc<OpenFile>>>,
    removed: Mutex<HashMap<Ident, Arc<OpenFile>>>,
}

impl OpenFiles {
    pub(super) fn new(most: usize, locks: Arc<WriteLocks>) -> Self {
        Self {
            most: most.max(1),
            locks,
            clock: AtomicU64::new(0),
            open: Mutex::default(),
            removed: Mutex::default(),
        }
    }

    /// The open file of this identity, opened now if necessary. To be written, it must still have its name,
    /// unless this session has removed it: what goes to a file that somebody has replaced is lost.
    pub(super) fn get(
        &self,
        tree: &ExportTree,
        wanted: &FileRef,
        write: bool,
    ) -> Result<Arc<OpenFile>, Refusal> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let removed = lock(&self.removed).get(&wanted.ident).cloned();
        let named = removed.is_none();
        let known = lock(&self.open).get(&wanted.ident).cloned().or(removed);
        if let Some(known) = known.filter(|known| known.writable || !write) {
            if write && named {
                tree.find(wanted)?;
            }
            known.used.store(now, Ordering::Relaxed);
            return Ok(known);
        }
        let file = tree.file(wanted, write)?;
        let mut open = lock(&self.open);
        // Another thread may have been faster.
        if let Some(known) = open.get(&wanted.ident).filter(|known| known.writable || !write) {
            return Ok(known.clone());
        }
        let order = self.locks.of(wanted.ident);
        let (used, quota) = (AtomicU64::new(now), tree.quota.clone());
        let opened = Arc::new(OpenFile { file, writable: write, write_lock: order, used, quota });
        open.insert(wanted.ident, opened.clone());
        if open.len() > self.most {
            let oldest = open.iter().min_by_key(|(_, file)| file.used.load(Ordering::Relaxed));
            if let Some(oldest) = oldest.map(|(ident, _)| *ident) {
                open.remove(&oldest);
            }
        }
        Ok(opened)
    }

    /// Retains a file that is about to lose its name, so that this session can still read it.
    pub(super) fn retain_removed(&self, tree: &ExportTree, wanted: &FileRef) -> Result<(), Refusal> {
        let file = self.get(tree, wanted, false)?;
        let mut removed = lock(&self.removed);
        if removed.len() >= MAX_REMOVED {
            let oldest = removed.iter().min_by_key(|(_, file)| file.used.load(Ordering::Relaxed));
            if let Some(oldest) = oldest.map(|(ident, _)| *ident) {
                removed.remove(&oldest);
            }
        }
        removed.insert(wanted.ident, file);
        Ok(())
    }

    /// The lock that every session holds while it writes this file.
    pub(super) fn write_lock(&self, ident: Ident) -> Arc<RwLock<()>> {
        self.locks.of(ident)
    }

    /// Closes a file after a sync: a descriptor for writing would prevent others from executing the file.
    pub(super) fn release(&self, ident: &Ident) {
        lock(&self.open).remove(ident);
    }
}

impl OpenFile {
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn attr(&self) -> Result<Attr, Refusal> {
        attr_of(&self.file)
    }

    /// Attributes; after a partial write, the modification time is the writer's stamp.
    pub(super) fn stamped_attr(&self) -> Result<Attr, Refusal> {
        let attr = self.attr()?;
        Ok(Attr { mtime: write_intent::stamp_of(&self.file, attr.mtime).unwrap_or(attr.mtime), ..attr })
    }

    /// Content of a range, and attributes that are no newer than it.
    pub(super) fn read(&self, range: Range) -> Result<(Attr, Vec<u8>), Refusal> {
        self.read_consistent(|size| self.content(range, size))
    }

    /// Holes of the file in order, up to the limit of one reply, and attributes that are no newer than they
    /// are.
    pub(super) fn holes(&self) -> Result<(Attr, Vec<ops::Range<u64>>), Refusal> {
        self.read_consistent(|size| Ok(self.find_holes(size)))
    }

    /// Repeats `look` until no write interferes, up to a limit; the attributes are no newer than its result.
    fn read_consistent<T>(&self, look: impl Fn(u64) -> Result<T, Refusal>) -> Result<(Attr, T), Refusal> {
        let _order = self.write_lock.read().unwrap_or_else(PoisonError::into_inner);
        let mut before = self.stamped_attr()?;
        for last in (0..TRIES).rev() {
            let seen = look(before.size)?;
            let after = self.stamped_attr()?;
            if last == 0 || after.version() == before.version() {
                return Ok((before, seen));
            }
            before = after;
        }
        Err(stale())
    }

    /// Finds holes; a file system without holes reports that everything is data.
    fn find_holes(&self, size: u64) -> Vec<ops::Range<u64>> {
        let (mut holes, mut at) = (Vec::new(), 0);
        for _ in 0..MAX_HOLES_EXAMINED {
            let Ok(hole) = rustix::fs::seek(&self.file, SeekFrom::Hole(at)) else { break };
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(hole)) {
                Ok(data) => data.min(size),
                Err(Errno::NXIO) => size,
                Err(_) => break,
            };
            if data.saturating_sub(hole) >= MIN_HOLE {
                holes.push(hole..data);
            }
            if data >= size || holes.len() >= MAX_HOLES {
                break;
            }
            at = data;
        }
        holes
    }

    fn content(&self, range: Range, size: u64) -> Result<Vec<u8>, Refusal> {
        let len = u64::from(range.len.min(MAX_RANGE)).min(size.saturating_sub(range.offset));
        let mut content = vec![0; len as usize];
        let end = range.offset + len;
        let mut at = range.offset;
        while at < end {
            // Holes are not read. A file system without holes reports that everything is data.
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data.min(end),
                Err(Errno::NXIO) => end,
                Err(_) => at,
            };
            let hole = match rustix::fs::seek(&self.file, SeekFrom::Hole(data)) {
                Ok(hole) if hole > data => hole.min(end),
                _ => end,
            };
            let (from, to) = ((data - range.offset) as usize, (hole - range.offset) as usize);
            self.fill(&mut content[from..to], data)?;
            at = hole;
        }
        Ok(content)
    }

    /// Reads until full or the end of the file; beyond the end of a truncated file there are zeros.
    fn fill(&self, mut out: &mut [u8], mut at: u64) -> Result<(), Refusal> {
        while !out.is_empty() {
            match self.file.read_at(out, at) {
                Ok(0) => return Ok(()),
                Ok(read) => {
                    out = &mut out[read..];
                    at += read as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(refuse("read the file")(errno_of(&error))),
            }
        }
        Ok(())
    }

    pub(super) fn write(&self, wanted: &Write, content: &[u8]) -> Result<Attr, Refusal> {
        let more = |now: &Attr| taken_by_write(now, wanted.offset, content.len() as u64);
        let write = |now: &Attr| self.change(wanted, content, now);
        self.write_stamped((&wanted.expect, wanted.stamp), more, write).map(|done| done.0)
    }

    /// Runs `change`, which gets the current attributes and takes up to `more` bytes, if the modification
    /// time is one of those expected and there is room for it, and sets the stamp.
    pub(super) fn write_stamped<T>(
        &self,
        (expect, stamp): (&[Time], Time),
        more: impl FnOnce(&Attr) -> u64,
        change: impl FnOnce(&Attr) -> Result<T, Refusal>,
    ) -> Result<(Attr, T), Refusal> {
        let _order = self.write_lock.write().unwrap_or_else(PoisonError::into_inner);
        let now = self.attr()?;
        let ours = |time: Time| expect.iter().any(|known| known.is_stored_as(time));
        if !ours(now.mtime) && !write_intent::stamp_of(&self.file, now.mtime).is_some_and(ours) {
            return Err(Refusal::new(code::CONFLICT, "the file was changed by somebody else"));
        }
        if let Some(quota) = &self.quota {
            quota.admit(more(&now))?;
        }
        write_intent::record(&self.file, stamp);
        let changed = change(&now);
        if let (Some(quota), Ok(after)) = (&self.quota, self.attr()) {
            quota.charge(&now, &after);
        }
        // After a failure as well: the part that was written is the writer's, too.
        match set_mtime(&self.file, stamp) {
            Ok(()) => write_intent::end(&self.file),
            // A file of another user: the remaining mark still attributes the modification time to this
            // writer.
            Err(Errno::PERM) => {}
            Err(errno) => return Err(refuse("set the time of the last change")(errno)),
        }
        let done = changed?;
        Ok((self.attr()?, done))
    }

    /// Truncates, extends and fills the file, which has the attributes `now`.
    fn change(&self, wanted: &Write, content: &[u8], now: &Attr) -> Result<(), Refusal> {
        let mut size = now.size;
        let end = wanted.offset.checked_add(content.len() as u64);
        let end = end.ok_or_else(|| refuse("write beyond the largest file size")(Errno::FBIG))?;
        if let Some(cut) = wanted.cut.filter(|cut| *cut < size) {
            ftruncate(&self.file, cut).map_err(refuse("truncate the file"))?;
            size = cut;
        }
        let grown = if content.is_empty() { size } else { size.max(end) };
        let wanted_size = wanted.size.unwrap_or(grown);
        if wanted_size.max(grown) != size {
            ftruncate(&self.file, wanted_size.max(grown)).map_err(refuse("change the size"))?;
        }
        let reserved = reserved_end(now).min(size);
        for (number, page) in content.chunks(PAGE).enumerate() {
            self.write_page(wanted.offset + (number * PAGE) as u64, page, reserved)?;
        }
        if wanted_size < grown {
            ftruncate(&self.file, wanted_size).map_err(refuse("truncate the file"))?;
        }
        Ok(())
    }

    /// Writes a page. Zeros become a hole, but before the byte `reserved` they keep their space.
    fn write_page(&self, at: u64, page: &[u8], reserved: u64) -> Result<(), Refusal> {
        if is_zero(page) {
            let zero = if at < reserved { FallocateFlags::ZERO_RANGE } else { FallocateFlags::PUNCH_HOLE };
            if fallocate(&self.file, zero | FallocateFlags::KEEP_SIZE, at, page.len() as u64).is_ok() {
                return Ok(());
            }
        }
        self.file.write_all_at(page, at).map_err(|error| refuse("write the file")(errno_of(&error)))
    }

    /// Makes the content durable.
    pub(super) fn sync(&self) -> Result<(), Refusal> {
        self.file.sync_all().map_err(|error| refuse("sync the file")(errno_of(&error)))
    }
}

/// End of the bytes that keep their space when they become zeros. A file without holes may be one whose space
/// somebody has reserved; in a sparse one zeros are holes.
pub(super) fn reserved_end(now: &Attr) -> u64 {
    if now.blocks.saturating_mul(512) >= now.size { now.size } else { 0 }
}

pub(super) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

pub(super) fn timespec(time: Time) -> Timespec {
    Timespec { tv_sec: time.seconds, tv_nsec: i64::from(time.nanos.min(999_999_999)) }
}

fn set_mtime(file: &File, time: Time) -> Result<(), Errno> {
    let unread = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT as _ };
    futimens(file, &Timestamps { last_access: unread, last_modification: timespec(time) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{proto::RelPath, server::Export};
    use std::fs;

    #[test]
    fn the_writes_of_two_sessions_to_one_file_exclude_each_other() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "before").unwrap();
        let tree = Export::new(dir.path()).unwrap().tree(&RelPath::root(), false).unwrap();
        let path = RelPath::new(b"file").unwrap();
        let found = tree.attr(&path).unwrap().unwrap();
        let wanted = FileRef { path, ident: found.ident };
        let locks = Arc::<WriteLocks>::default();
        let sessions = [(); 2].map(|()| OpenFiles::new(1, locks.clone()));
        let [first, second] = sessions.map(|files| files.get(&tree, &wanted, true).unwrap());
        let stamp = |seconds| Time { seconds, nanos: 0 };
        let write = |_: &Attr| {
            assert!(second.write_lock.try_write().is_err(), "the other session may check and write now");
            Ok(())
        };
        first.write_stamped((&[found.mtime], stamp(1)), |_| 0, write).unwrap();
        let late = second.write_stamped((&[found.mtime], stamp(2)), |_| 0, |_| Ok(()));
        assert_eq!(late.map(|_| ()).unwrap_err().code, code::CONFLICT);
    }

    #[test]
    fn zeros_are_holes_in_a_sparse_file_and_space_in_an_allocated_one() {
        const SIZE: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let tree = Export::new(dir.path()).unwrap().tree(&RelPath::root(), false).unwrap();
        let files = OpenFiles::new(8, Arc::default());
        let blocks_after = |name: &str, hole: bool| {
            let made = fs::File::create(dir.path().join(name)).unwrap();
            made.write_all_at(&[1; SIZE as usize], 0).unwrap();
            if hole {
                made.set_len(2 * SIZE).unwrap();
            }
            made.sync_all().unwrap();
            let path = RelPath::new(name.as_bytes()).unwrap();
            let before = tree.attr(&path).unwrap().unwrap();
            let file = FileRef { path, ident: before.ident };
            let content = vec![0; SIZE as usize];
            let (pages, _) = crate::proto::pack_pages(&content, None);
            let (expect, stamp) = (vec![before.mtime], Time { seconds: 1, nanos: 0 });
            let write = Write { file: file.clone(), offset: 0, expect, stamp, cut: None, size: None, pages };
            let after = files.get(&tree, &file, true).unwrap().write(&write, &content).unwrap();
            assert_eq!(fs::read(dir.path().join(name)).unwrap()[..SIZE as usize], content);
            (before.blocks, after.blocks)
        };
        let (before, after) = blocks_after("sparse", true);
        assert!(after < before / 2, "{after} of {before} blocks");
        let (before, after) = blocks_after("allocated", false);
        assert!(after >= SIZE / 512, "{after} of {before} blocks");
    }

    #[test]
    fn a_writer_whose_stamp_was_stored_in_whole_seconds_writes_on_and_no_other_does() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "before").unwrap();
        let tree = Export::new(dir.path()).unwrap().tree(&RelPath::root(), false).unwrap();
        let path = RelPath::new(b"file").unwrap();
        let wanted = FileRef { ident: tree.attr(&path).unwrap().unwrap().ident, path };
        let files = OpenFiles::new(8, Arc::default());
        let file = files.get(&tree, &wanted, true).unwrap();
        let stamp = Time { seconds: 1_000_001, nanos: 987_654_321 };
        let write = |found: Time| {
            set_mtime(file.file(), found).unwrap();
            file.write_stamped((&[stamp], stamp), |_: &Attr| 0, |_: &Attr| Ok(())).map(|_| ())
        };
        for (seconds, nanos) in
            [(1_000_001, 987_654_300), (1_000_001, 980_000_000), (1_000_001, 0), (1_000_000, 0)]
        {
            write(Time { seconds, nanos }).unwrap();
        }
        for (seconds, nanos) in
            [(1_000_001, 987_654_322), (1_000_001, 500_000_000), (999_999, 0), (1_000_002, 0)]
        {
            assert_eq!(write(Time { seconds, nanos }).unwrap_err().code, code::CONFLICT);
        }
    }

    #[test]
    fn a_file_that_was_replaced_is_not_written_any_more_and_can_still_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join("file");
        fs::write(&name, "before").unwrap();
        let tree = Export::new(dir.path()).unwrap().tree(&RelPath::root(), false).unwrap();
        let path = RelPath::new(b"file").unwrap();
        let wanted = FileRef { ident: tree.attr(&path).unwrap().unwrap().ident, path };
        let files = OpenFiles::new(8, Arc::default());
        files.get(&tree, &wanted, true).unwrap();
        assert!(files.get(&tree, &wanted, true).is_ok(), "it has its name");

        fs::write(dir.path().join("new"), "after").unwrap();
        fs::rename(dir.path().join("new"), &name).unwrap();
        let refused = files.get(&tree, &wanted, true).map(|_| ()).unwrap_err();
        assert_eq!(refused.code, stale().code);
        fs::remove_file(&name).unwrap();
        assert!(files.get(&tree, &wanted, true).is_err(), "it has no name");
        assert!(files.get(&tree, &wanted, false).is_ok(), "its users read on");
    }
}
