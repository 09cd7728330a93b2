//! Shared cache: a directory in which the users of this host share what they read from servers.
//!
//! Only its owner, root, can list it. Everybody can add files and open those whose names they know (mode
//! 1733). A name is 256 bits, known only to users whom the server let read that version of that file
//! ([`ShareKey`]). Each session therefore asks the server before it takes anything from here. Content is not
//! trusted: each page is checked in private memory by the digest that the server gave, so wrong bytes are
//! only fetched again. A user who may read a file could tell others its content anyway.
//!
//! Files get their names when they are complete, and are never written again. Old files must be removed by
//! other means (`docs/operations/sessions.md`).

use crate::client::session::Core;
use crate::{
    cache::FileId,
    proto::{Attr, PAGE, PIECE, PIECE_PAGES, ShareKey, Version, digest_of_page, is_in},
};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, fchmod, fstat, fstatvfs, linkat, openat, statat},
    io::Errno,
};
use std::{
    collections::HashMap,
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use whimbrel_core::Digest;

/// Smallest file that is shared: to ask for a key takes longer than to read a smaller one.
const MIN_FILE_SIZE: u64 = 1 << 20;
/// Number of files whose keys are remembered.
const MAX_KEYS: usize = 4096;
/// Fraction of the file system that is left free: one part of this number.
const FREE_FRACTION: u64 = 10;

/// Reasons why a directory cannot be the shared cache.
#[derive(Debug, thiserror::Error)]
pub(in crate::client) enum SharedCacheError {
    #[error("it cannot be opened")]
    Open { source: std::io::Error },
    #[error("it belongs to another user")]
    Owner,
    #[error("others can list it, or remove what is not theirs: its mode should be 1733")]
    Mode,
}

/// The directory of the shared cache, and the keys that servers gave.
pub(in crate::client) struct SharedCache {
    dir: OwnedFd,
    keys: Mutex<HashMap<FileId, (Version, Option<ShareKey>)>>,
    /// Set after a failed write: nothing more is added.
    closed: AtomicBool,
}

impl SharedCache {
    pub(in crate::client) fn open(dir: &Path) -> Result<Self, SharedCacheError> {
        let failed = |errno: Errno| SharedCacheError::Open { source: errno.into() };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(CWD, dir, flags, Mode::empty()).map_err(failed)?;
        let found = fstat(&dir).map_err(failed)?;
        // The owner can list the directory, and so knows all names.
        if found.st_uid != 0 && found.st_uid != rustix::process::geteuid().as_raw() {
            return Err(SharedCacheError::Owner);
        }
        let mode = Mode::from_raw_mode(found.st_mode);
        let listed = mode.intersects(Mode::RGRP | Mode::ROTH);
        if listed || mode.intersects(Mode::WGRP | Mode::WOTH) && !mode.contains(Mode::SVTX) {
            return Err(SharedCacheError::Mode);
        }
        Ok(Self { dir, keys: Mutex::default(), closed: AtomicBool::new(false) })
    }

    /// Records the key that a server gave for a file, or that it gives none.
    fn record(&self, file: FileId, version: Version, key: Option<ShareKey>) {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if keys.len() >= MAX_KEYS && !keys.contains_key(&file) {
            keys.clear();
        }
        keys.insert(file, (version, key));
    }

    fn key(&self, file: FileId, version: Version) -> Option<Option<ShareKey>> {
        let keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.get(&file).filter(|(of, _)| *of == version).map(|(_, key)| *key)
    }

    fn get(&self, name: &str, len: usize) -> Option<Vec<u8>> {
        // A pipe may have been put there.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.dir, name, flags, Mode::empty()).ok()?);
        let meta = file.metadata().ok().filter(|meta| meta.is_file() && meta.len() == len as u64)?;
        let mut content = vec![0; meta.len() as usize];
        file.read_exact_at(&mut content, 0).ok().map(|()| content)
    }

    fn put(&self, name: &str, content: &[u8]) -> Result<(), Errno> {
        if statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Ok(());
        }
        let room = fstatvfs(&self.dir)?;
        if room.f_bavail < room.f_blocks / FREE_FRACTION {
            return Err(Errno::NOSPC);
        }
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = openat(&self.dir, ".", flags, Mode::RUSR | Mode::WUSR)?;
        let file = File::from(file);
        file.write_all_at(content, 0)
            .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
        fchmod(&file, Mode::RUSR | Mode::RGRP | Mode::ROTH)?;
        let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
        match linkat(CWD, unnamed.as_str(), &self.dir, name, AtFlags::SYMLINK_FOLLOW) {
            // Another process was faster.
            Err(Errno::EXIST) => Ok(()),
            linked => linked,
        }
    }
}

/// Complete pieces of a range in a file of `size` bytes, as first page (counted from the start of the range)
/// and number of pages.
fn complete_pieces(offset: u64, len: usize, size: u64) -> impl Iterator<Item = (usize, usize)> {
    let end = offset + len as u64;
    let first = offset.div_ceil(PIECE) * PIECE;
    let last = if end >= size { end } else { end / PIECE * PIECE };
    (first..last.max(first)).step_by(PIECE as usize).map(move |start| {
        let bytes = PIECE.min(last - start) as usize;
        (((start - offset) / PAGE as u64) as usize, bytes.div_ceil(PAGE).min(PIECE_PAGES))
    })
}

impl Core {
    /// Whether the server has yet to be asked for the key of a file that may be shared.
    pub(in crate::client) fn lacks_key(&self, file: FileId, size: u64) -> bool {
        let record = self.cache.file(file).filter(|_| size >= MIN_FILE_SIZE);
        let shared = self.shared.as_ref().zip(record);
        shared.is_some_and(|(shared, record)| shared.key(file, record.base).is_none())
    }

    /// Records the key of a file that the server let this session read.
    pub(in crate::client) fn record_key(&self, file: FileId, attr: &Attr, key: Option<ShareKey>) {
        if let Some(shared) = &self.shared {
            shared.record(file, attr.version(), key);
        }
    }

    fn key_of(&self, file: FileId, attr: &Attr) -> Option<(&SharedCache, ShareKey)> {
        let shared = self.shared.as_ref().filter(|_| attr.size >= MIN_FILE_SIZE)?;
        Some((shared, shared.key(file, attr.version())??))
    }

    /// Takes missing pages from those that others have read, and returns their number.
    pub(in crate::client) fn take_shared(
        &self,
        file: FileId,
        attr: &Attr,
        offset: u64,
        content: &mut [u8],
        (digests, lacking): (&[Option<Digest>], &mut [u8]),
    ) -> u32 {
        let Some((shared, key)) = self.key_of(file, attr) else { return 0 };
        let mut taken = 0;
        for (first, pages) in complete_pieces(offset, content.len(), attr.size) {
            let wanted = || first..first + pages;
            let Some(of) = digests.get(wanted()).filter(|_| wanted().any(|page| is_in(lacking, page))) else {
                continue;
            };
            let start = first * PAGE;
            let place = start..content.len().min(start + pages * PAGE);
            let Some(piece) = shared.get(&key.name(of), place.len()) else { continue };
            for number in wanted().filter(|page| digests[*page].is_some()) {
                let at = (number - first) * PAGE;
                let page = &piece[at..piece.len().min(at + PAGE)];
                if is_in(lacking, number) && Some(digest_of_page(page)) == digests[number] {
                    content[start + at..][..page.len()].copy_from_slice(page);
                    lacking[number / 8] &= !(1 << (number % 8));
                    taken += 1;
                }
            }
        }
        taken
    }

    /// Shares content with others who may read it.
    pub(in crate::client) fn publish_shared(
        &self,
        file: FileId,
        attr: &Attr,
        offset: u64,
        content: &[u8],
        digests: &[Option<Digest>],
    ) {
        let Some((shared, key)) = self.key_of(file, attr) else { return };
        for (first, pages) in complete_pieces(offset, content.len(), attr.size) {
            let Some(of) = digests.get(first..first + pages) else { continue };
            if of.iter().all(Option::is_none) || shared.closed.load(Ordering::Relaxed) {
                continue;
            }
            let start = first * PAGE;
            let piece = &content[start..content.len().min(start + pages * PAGE)];
            if let Err(errno) = shared.put(&key.name(of), piece)
                && !shared.closed.swap(true, Ordering::Relaxed)
            {
                self.event(format!("the shared cache gets no more data from this session: {errno}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[test]
    fn only_whole_pieces_are_shared_and_the_last_may_be_short() {
        let all = |offset, len, size| complete_pieces(offset, len, size).collect::<Vec<_>>();
        let (page, piece) = (PAGE as u64, PIECE as usize);
        assert_eq!(all(0, 2 * piece, 1 << 30), [(0, 16), (16, 16)]);
        assert_eq!(all(page, 2 * piece, 1 << 30), [(15, 16)]);
        assert_eq!(all(PIECE, piece + 5000, PIECE * 2 + 5000), [(0, 16), (16, 2)]);
        assert_eq!(all(page, 100, 1 << 30), []);
        assert_eq!(all(page, PAGE, 2 * page), []);
        assert_eq!(all(0, 0, 0), []);
    }

    #[test]
    fn a_directory_that_others_can_list_or_take_from_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let with = |mode| {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            SharedCache::open(dir.path())
        };
        for good in [0o1733, 0o1730, 0o700] {
            assert!(with(good).is_ok(), "{good:o}");
        }
        for bad in [0o1777, 0o733, 0o1737, 0o1773, 0o755, 0o720] {
            assert!(matches!(with(bad), Err(SharedCacheError::Mode)), "{bad:o}");
        }
        assert!(matches!(SharedCache::open(&dir.path().join("none")), Err(SharedCacheError::Open { .. })));
    }

    #[test]
    fn what_is_no_whole_file_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1733)).unwrap();
        let shared = SharedCache::open(dir.path()).unwrap();
        shared.put("piece", b"content").unwrap();
        shared.put("piece", b"other").unwrap();
        assert_eq!(shared.get("piece", 7).as_deref(), Some(&b"content"[..]));
        assert_eq!(shared.get("piece", 5), None, "the first stays, and is as long as it is");
        let mode = fs::metadata(dir.path().join("piece")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o444);
        std::os::unix::fs::symlink("piece", dir.path().join("link")).unwrap();
        rustix::fs::mkfifoat(CWD, dir.path().join("pipe"), Mode::RUSR | Mode::WUSR).unwrap();
        assert_eq!((shared.get("link", 7), shared.get("pipe", 0), shared.get("none", 7)), (None, None, None));
    }
}
