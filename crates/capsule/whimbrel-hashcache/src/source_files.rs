//! Source files: opened when a page of them is wanted, kept open for the next.
//!
//! Nothing is mapped: a file that shrinks or changes under us gives a short read or other bytes, never a
//! signal. Memory of machines is not kept open, because an open descriptor would keep the memory of a machine
//! that is gone; a deleted image is let go at the next read of it, and all of them by [`SourceFiles::close`].

use crate::format::SourceRecord;
use crate::location::SourceId;
use rustix::fs::OFlags;
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

/// Files kept open.
const MAX_OPEN: usize = 64;

/// What a source is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceKind {
    /// Any file or block device whose bytes are the content: a raw disk image, a saved memory image.
    Raw,
    /// A qcow2 image; its plain clusters are used.
    Qcow2,
    /// The memory of a running machine: changes all the time, gives way to places that do not.
    Memory,
}

impl SourceKind {
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Raw => 1,
            Self::Qcow2 => 2,
            Self::Memory => 3,
        }
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        [Self::Raw, Self::Qcow2, Self::Memory].into_iter().find(|kind| kind.code() == code)
    }
}

/// Why nothing was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotRead {
    /// The file is not there any more, or is another: entries of it are worth nothing.
    Gone,
    /// It may be read another time.
    Unavailable,
}

#[derive(Debug)]
struct Opened {
    stamp: u64,
    file: File,
}

/// The open files of a cache.
#[derive(Debug, Default)]
pub(crate) struct SourceFiles(Mutex<HashMap<SourceId, Arc<Opened>>>);

impl SourceFiles {
    fn lock(&self) -> MutexGuard<'_, HashMap<SourceId, Arc<Opened>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reads what there is from `offset`; the number of bytes. `stamp` and `record` are those of the source
    /// now.
    pub(crate) fn read(
        &self,
        id: SourceId,
        stamp: u64,
        record: impl FnOnce() -> Option<SourceRecord>,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, NotRead> {
        let opened = match self.known(id, stamp) {
            Some(opened) => opened,
            None => self.open(id, stamp, &record().ok_or(NotRead::Gone)?)?,
        };
        fill(&opened.file, offset, buffer).map_err(|_| NotRead::Unavailable)
    }

    fn known(&self, id: SourceId, stamp: u64) -> Option<Arc<Opened>> {
        let opened = self.lock().get(&id).filter(|opened| opened.stamp == stamp)?.clone();
        let lives = opened.file.metadata().is_ok_and(|meta| meta.nlink() > 0);
        if !lives {
            self.forget(id);
        }
        lives.then_some(opened)
    }

    fn open(&self, id: SourceId, stamp: u64, record: &SourceRecord) -> Result<Arc<Opened>, NotRead> {
        let (file, meta) = open_source(&record.path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidInput => {
                NotRead::Gone
            }
            // Among them: permission denied, which says more of this process than of the file.
            _ => NotRead::Unavailable,
        })?;
        // A descriptor number or a name in /dev/shm is soon another machine's.
        if record.kind == SourceKind::Memory && identity(&meta) != record.identity {
            return Err(NotRead::Gone);
        }
        let opened = Arc::new(Opened { stamp, file });
        if record.kind != SourceKind::Memory {
            let mut files = self.lock();
            if files.len() >= MAX_OPEN {
                files.clear();
            }
            files.insert(id, opened.clone());
        }
        Ok(opened)
    }

    /// Closes one.
    pub(crate) fn forget(&self, id: SourceId) {
        self.lock().remove(&id);
    }

    /// Closes all.
    pub(crate) fn close(&self) {
        self.lock().clear();
    }
}

/// Opens a regular file or block device for reading. Anything else is refused as invalid input before it is
/// opened, since opening a pipe or a tape does things.
pub(crate) fn open_source(path: &Path) -> io::Result<(File, Metadata)> {
    let usable = |meta: &Metadata| meta.is_file() || meta.file_type().is_block_device();
    let refused = || io::Error::from(io::ErrorKind::InvalidInput);
    if !usable(&std::fs::metadata(path)?) {
        return Err(refused());
    }
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    if usable(&meta) { Ok((file, meta)) } else { Err(refused()) }
}

/// Device and inode; for a block device its own number.
pub(crate) fn identity(meta: &Metadata) -> (u64, u64) {
    if meta.file_type().is_block_device() { (u64::MAX, meta.rdev()) } else { (meta.dev(), meta.ino()) }
}

/// Bytes of a file or block device.
pub(crate) fn length(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// Reads until the buffer is full or the file ends.
pub(crate) fn fill(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
