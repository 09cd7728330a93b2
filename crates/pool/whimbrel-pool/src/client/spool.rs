//! Local files of the write modes, and closed files that are not in the pool yet.
//!
//! A local file has no name, so it vanishes with a process that dies. With complete local write, a closed
//! file gets a name in the spool folder, in one step and with everything that is needed to send it; the name
//! goes when the file is in the pool. What a process leaves behind is found by the next mount. A file is
//! locked while its process lives. See `docs/formats/pool.md`.

use super::{PoolError, Result};
use crate::protocol::{NewNode, NodeId};
use rustix::fs::{AtFlags, CWD, linkat};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    fs::{self, File},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const MAGIC: [u8; 4] = *b"WHCF";
/// Last bytes of a closed file: length of the description, magic, and checksum of the description.
const TAIL: u64 = 16;
/// Longest description of a file, in bytes.
const DESCRIPTION_MAX: u32 = 4096;
const SUFFIX: &str = ".closed";

/// Description of a closed file, behind its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClosedFile {
    /// Id of the pool that the file belongs to.
    pub(crate) pool: u64,
    /// The file to create if there is none.
    pub(crate) make: NewNode,
    /// The file, if it existed when it was opened.
    pub(crate) node: Option<NodeId>,
    /// Time of the content, in nanoseconds since 1970.
    pub(crate) modified: i64,
    /// Whether its chunks must be encrypted.
    pub(crate) encrypted: bool,
    /// Bytes of content.
    pub(crate) length: u64,
    /// xxh3 of the content.
    pub(crate) checksum: u64,
}

/// A local file to which a write mode appends.
pub(super) struct LocalFile {
    pub(super) file: File,
    pub(super) length: u64,
    checksum: Box<Xxh3>,
}

impl fmt::Debug for LocalFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalFile").field("length", &self.length).finish_non_exhaustive()
    }
}

/// A local file that is deleted when it is closed.
pub(super) fn unnamed(dir: &Path) -> Result<File> {
    tempfile::tempfile_in(dir).map_err(PoolError::local("create a local file"))
}

impl LocalFile {
    pub(super) fn create(dir: &Path) -> Result<Self> {
        Ok(Self { file: unnamed(dir)?, length: 0, checksum: Box::default() })
    }

    pub(super) fn append(&mut self, data: &[u8]) -> Result<()> {
        self.file.write_all_at(data, self.length).map_err(PoolError::local("write to the local file"))?;
        self.length += data.len() as u64;
        self.checksum.update(data);
        Ok(())
    }

    /// Gives the file a name in `dir`, with its description; `length` and `checksum` are set here.
    pub(super) fn give_name(&self, dir: &Path, description: ClosedFile) -> io::Result<LeftFile> {
        let description = ClosedFile { length: self.length, checksum: self.checksum.digest(), ..description };
        let file = self.file.try_clone()?;
        file.try_lock()?;
        let mut tail = postcard::to_stdvec(&description).map_err(io::Error::other)?;
        let (length, sum) = (tail.len() as u32, xxh3_64(&tail));
        tail.extend(length.to_le_bytes());
        tail.extend(MAGIC);
        tail.extend(sum.to_le_bytes());
        file.write_all_at(&tail, self.length)?;
        // No other file of this file system has the number.
        let path = dir.join(format!("whimbrel-{}{SUFFIX}", file.metadata()?.ino()));
        let open = format!("/proc/self/fd/{}", file.as_raw_fd());
        linkat(CWD, open, CWD, &path, AtFlags::SYMLINK_FOLLOW)?;
        Ok(LeftFile { file, path, description })
    }
}

/// A closed file in the spool folder, locked.
#[derive(Debug)]
pub(crate) struct LeftFile {
    file: File,
    pub(crate) path: PathBuf,
    pub(crate) description: ClosedFile,
}

impl LeftFile {
    /// Calls `each` with the content, block by block. Fails if it is not what was written.
    pub(crate) fn read(&self, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let failed = || PoolError::local("read a closed file");
        let (mut at, mut sum) = (0, Xxh3::new());
        let mut block = vec![0; 1 << 20];
        while at < self.description.length {
            let length = (self.description.length - at).min(block.len() as u64) as usize;
            self.file.read_exact_at(&mut block[..length], at).map_err(failed())?;
            sum.update(&block[..length]);
            each(&block[..length])?;
            at += length as u64;
        }
        match sum.digest() == self.description.checksum {
            true => Ok(()),
            false => Err(failed()(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Removes the file, which is in the pool or is not wanted.
    pub(crate) fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "a local file could not be removed");
        }
    }
}

/// The closed files in `dir` that ended processes have left, oldest first.
pub(crate) fn left(dir: &Path) -> io::Result<Vec<LeftFile>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let named = path.file_name().and_then(|name| name.to_str());
        if !named.is_some_and(|name| name.starts_with("whimbrel-") && name.ends_with(SUFFIX)) {
            continue;
        }
        match open(&path) {
            Ok(file) => found.extend(file),
            Err(error) => tracing::warn!(%error, path = %path.display(), "a closed file cannot be used"),
        }
    }
    found.sort_by_key(|file| file.description.modified);
    Ok(found)
}

/// Opens a closed file; none if a living process has it. The folder may be writable for everybody, so a file
/// of another user, who could have written anything, is refused.
fn open(path: &Path) -> io::Result<Option<LeftFile>> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    if file.try_lock().is_err() {
        return Ok(None);
    }
    let end = meta.len().checked_sub(TAIL).ok_or_else(invalid)?;
    let mut tail = [0; TAIL as usize];
    file.read_exact_at(&mut tail, end)?;
    let [a, b, c, d, magic @ .., _, _, _, _, _, _, _, _] = tail;
    let length = u32::from_le_bytes([a, b, c, d]);
    if magic != MAGIC || length > DESCRIPTION_MAX {
        return Err(invalid());
    }
    let start = end.checked_sub(length.into()).ok_or_else(invalid)?;
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, start)?;
    let description: ClosedFile = postcard::from_bytes(&bytes).map_err(io::Error::other)?;
    let right = tail.ends_with(&xxh3_64(&bytes).to_le_bytes()) && description.length == start;
    match right {
        true => Ok(Some(LeftFile { file, path: path.to_owned(), description })),
        false => Err(invalid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed() -> ClosedFile {
        let make = NewNode { parent: 1, name: "state".into(), folder: false, mode: 0o640, uid: 1, gid: 2 };
        ClosedFile { pool: 7, make, node: None, modified: 5, encrypted: true, length: 0, checksum: 0 }
    }

    fn content(file: &LeftFile) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        file.read(|block| {
            all.extend_from_slice(block);
            Ok(())
        })?;
        Ok(all)
    }

    #[test]
    fn a_closed_file_is_found_when_its_process_has_ended_and_an_open_one_never() {
        let dir = tempfile::tempdir().unwrap();
        let mut local = LocalFile::create(dir.path()).unwrap();
        local.append(b"one ").unwrap();
        local.append(b"two").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "no name before the close");
        let named = local.give_name(dir.path(), closed()).unwrap();
        drop(local);
        assert!(left(dir.path()).unwrap().is_empty(), "its process lives");
        let path = named.path.clone();
        drop(named);
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        assert!(left(dir.path()).unwrap().is_empty(), "another user may have made it");
        let me = rustix::process::geteuid().as_raw();
        std::os::unix::fs::chown(&path, Some(me), None).unwrap();
        let mut found = left(dir.path()).unwrap();
        assert_eq!(content(&found[0]).unwrap(), b"one two");
        let description = &found[0].description;
        assert_eq!((description.length, &description.make.name[..]), (7, "state"));
        found.remove(0).remove();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_closed_file_that_a_power_failure_damaged_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let mut local = LocalFile::create(dir.path()).unwrap();
        local.append(&[3; 5000]).unwrap();
        let path = local.give_name(dir.path(), closed()).unwrap().path;
        drop(local);
        let whole = fs::read(&path).unwrap();
        for at in 5000..whole.len() {
            let mut bent = whole.clone();
            bent[at] ^= 0x20;
            fs::write(&path, bent).unwrap();
            assert!(left(dir.path()).unwrap().is_empty(), "{at}");
        }
        let mut hole = whole.clone();
        hole[..4096].fill(0);
        fs::write(&path, hole).unwrap();
        assert!(content(&left(dir.path()).unwrap()[0]).is_err());
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(left(dir.path()).unwrap().is_empty());
    }
}
