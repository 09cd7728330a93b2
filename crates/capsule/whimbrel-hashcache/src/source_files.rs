//! Source files: opened when one of their pages is needed, and cached open for the next.
//!
//! Nothing is mapped: a file that shrinks or changes gives a short read or other bytes, never a signal.
//! Memory files of machines are not cached, because an open descriptor would retain the memory of a machine
//! that has ended. A deleted image is closed at the next read of it; [`SourceFiles::close`] closes all.

use crate::format::SourceRecord;
use crate::location::SourceId;
use rustix::fs::OFlags;
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

/// Most files cached open.
const MAX_OPEN: usize = 64;

/// Format of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceKind {
    /// File or block device whose bytes are the content: a raw disk image, a saved memory image.
    Raw,
    /// A qcow2 image, of which the plain clusters are used.
    Qcow2,
    /// Memory of a running machine: it changes all the time, so other sources replace its entries.
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

/// Reasons why a read failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotRead {
    /// The file is gone or is another one: its entries are worthless.
    Gone,
    /// A later read may succeed.
    Unavailable,
}

#[derive(Debug)]
struct Opened {
    stamp: u64,
    file: File,
}

#[derive(Debug, Default)]
pub(crate) struct SourceFiles(Mutex<HashMap<SourceId, Arc<Opened>>>);

impl SourceFiles {
    fn lock(&self) -> MutexGuard<'_, HashMap<SourceId, Arc<Opened>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reads as many bytes as there are from `offset`; returns their number. `stamp` and `record` are those
    /// of the source now.
    pub(crate) fn read(
        &self,
        id: SourceId,
        stamp: u64,
        record: impl FnOnce() -> Option<SourceRecord>,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize, NotRead> {
        let opened = match self.cached(id, stamp) {
            Some(opened) => opened,
            None => self.open(id, stamp, &record().ok_or(NotRead::Gone)?)?,
        };
        fill(&opened.file, offset, buffer).map_err(|_| NotRead::Unavailable)
    }

    fn cached(&self, id: SourceId, stamp: u64) -> Option<Arc<Opened>> {
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
            // Permission denied is among them, which concerns this process rather than the file.
            _ => NotRead::Unavailable,
        })?;
        // Another machine soon reuses a descriptor number or a name in /dev/shm.
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

    pub(crate) fn forget(&self, id: SourceId) {
        self.lock().remove(&id);
    }

    pub(crate) fn close(&self) {
        self.lock().clear();
    }
}

/// Opens a regular file or block device for reading. Anything else is rejected as invalid input before it is
/// opened, since opening a pipe or a tape has side effects.
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

/// Device and inode; for a block device, its device number.
pub(crate) fn identity(meta: &Metadata) -> (u64, u64) {
    if meta.file_type().is_block_device() { (u64::MAX, meta.rdev()) } else { (meta.dev(), meta.ino()) }
}

/// Size of a file or block device in bytes.
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
