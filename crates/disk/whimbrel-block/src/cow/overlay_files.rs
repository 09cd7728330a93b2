//! Files of an overlay: creation, opening and removal.
//!
//! ```text
//! DIR/data         the allocated pages, at their own offsets; sparse
//! DIR/owned        the durable bitmap; an overlay exists when this file has its name
//! LIVE/ID.owned    the live bitmap, on a file system in memory
//! ```
//!
//! Both bitmaps are written under a temporary name, synced and renamed, so a file with a final name is
//! complete. The live one counts only under the boot id it was created with: unsynced data is still in the
//! page cache then.
//!
//! Another process may go on with the open files. The lock is one of the open data file, so it goes along.

use super::format::{BitmapKind, HEADER_SIZE, Header, HeaderError};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::Digest;

/// Time to wait for the lock of an overlay. A process that another thread is starting holds every descriptor
/// of ours, and so each lock, until it executes its program.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// Directories of an overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayDir {
    /// Directory of this overlay, on a disk. Created if it does not exist.
    pub dir: PathBuf,
    /// Directory for live bitmaps, on a file system in memory that only the daemon writes (below `/run`).
    /// Created if it does not exist; overlays share it.
    pub live_dir: PathBuf,
}

/// Key from which those of the overlays of a host are derived.
#[derive(Clone, Copy)]
pub struct OverlayKey(pub [u8; 32]);

impl std::fmt::Debug for OverlayKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OverlayKey")
    }
}

impl OverlayKey {
    /// Keys of the overlay with this id: no two overlays have the same.
    fn of(&self, id: &[u8; 16]) -> [u8; 64] {
        let mut keys = [0; 64];
        let mut hash = blake3::Hasher::new_derive_key("whimbrel overlay 2026-11-25 sectors");
        hash.update(&self.0).update(id).finalize_xof().fill(&mut keys);
        keys
    }
}

/// What the header has of the keys, to tell others from them.
fn key_check(keys: &[u8; 64]) -> [u8; 16] {
    let check = blake3::derive_key("whimbrel overlay 2026-11-25 key check", keys);
    std::array::from_fn(|i| check[i])
}

/// Reasons why an overlay could not be created or opened.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    /// The operating system returned an error.
    #[error("cannot {action} {path}")]
    Io {
        /// Verb of the operation: `open`, `create`, …
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The directory has an overlay already.
    #[error("{dir} already has an overlay")]
    Exists {
        /// Directory of the overlay.
        dir: PathBuf,
    },
    /// The overlay is open in this or another process.
    #[error("the overlay in {dir} is in use")]
    InUse {
        /// Directory of the overlay.
        dir: PathBuf,
    },
    /// The header of a bitmap is invalid.
    #[error("the bitmap {path} is invalid")]
    Header {
        /// Path of the file.
        path: PathBuf,
        /// Defect of the header.
        source: HeaderError,
    },
    /// The overlay was created over another base; the combination would be garbage.
    #[error("the overlay in {dir} belongs to another base or size")]
    OtherBase {
        /// Directory of the overlay.
        dir: PathBuf,
    },
    /// The overlay is encrypted, and the caller gave no key.
    #[error("the overlay in {dir} is encrypted, and there is no key")]
    KeyNeeded {
        /// Directory of the overlay.
        dir: PathBuf,
    },
    /// The overlay is encrypted with another key.
    #[error("the overlay in {dir} is encrypted with another key")]
    WrongKey {
        /// Directory of the overlay.
        dir: PathBuf,
    },
    /// The data file has lost its end.
    #[error("{} has {found} bytes instead of {size}", path.display())]
    Length {
        /// Path of the data file.
        path: PathBuf,
        /// Bytes that the file has.
        found: u64,
        /// Bytes of the disk.
        size: u64,
    },
    /// The base ends inside a page.
    #[error("the base has {size} bytes, which are not complete pages")]
    BaseSize {
        /// Bytes of the base.
        size: u64,
    },
}

impl OverlayError {
    /// The file or directory that the error is about; none for a base.
    pub fn path(&self) -> &Path {
        match self {
            Self::Io { path, .. } | Self::Header { path, .. } | Self::Length { path, .. } => path,
            Self::Exists { dir }
            | Self::InUse { dir }
            | Self::OtherBase { dir }
            | Self::KeyNeeded { dir }
            | Self::WrongKey { dir } => dir,
            Self::BaseSize { .. } => Path::new(""),
        }
    }
}

/// Open files of an overlay, which are locked as long as one process has the data file open.
#[derive(Debug)]
pub struct OverlayFiles {
    /// File of the allocated pages.
    pub data: File,
    /// File of the durable bitmap.
    pub durable: File,
    /// File of the live bitmap.
    pub live: File,
}

impl OverlayFiles {
    /// Checks that both bitmaps are those of one overlay over this base, of this boot, and that it is
    /// locked by the data file. Returns the keys of its data, if it is encrypted.
    pub(super) fn check(
        &self,
        size: u64,
        base: Digest,
        key: Option<&OverlayKey>,
    ) -> Result<Option<[u8; 64]>, OverlayError> {
        let passed = |kind: &str| PathBuf::from(format!("the passed {kind} bitmap"));
        let read = |file: &File, path: PathBuf| {
            let mut bytes = [0; HEADER_SIZE];
            io_at("read", &path, file.read_exact_at(&mut bytes, 0))?;
            let header = Header::decode(&bytes);
            header.map_err(|source| OverlayError::Header { path, source })
        };
        let durable = read(&self.durable, passed("durable"))?;
        let live = read(&self.live, passed("live"))?;
        let boot = io_at("read the boot id for", &passed("live"), boot_id())?;
        let wanted = Header { kind: BitmapKind::Live { boot }, ..durable.clone() };
        let expected = (BitmapKind::Durable, size, base);
        if (durable.kind, durable.size, durable.base) != expected || live != wanted {
            return Err(OverlayError::OtherBase { dir: passed("durable") });
        }
        // Has no effect on a file that holds the lock.
        match flock(&self.data, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => keys_of(&durable, key, &passed("durable")),
            Err(_) => Err(OverlayError::InUse { dir: passed("durable") }),
        }
    }
}

/// Files of an overlay that was created or opened here, and the keys of its data, if it is encrypted.
pub(super) struct OpenedOverlay {
    pub(super) files: OverlayFiles,
    pub(super) keys: Option<[u8; 64]>,
}

impl OverlayDir {
    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn durable(&self) -> PathBuf {
        self.dir.join("owned")
    }

    fn live(&self, id: &[u8; 16]) -> PathBuf {
        let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        self.live_dir.join(hex + ".owned")
    }

    pub(super) fn create(
        &self,
        size: u64,
        base: Digest,
        key: Option<&OverlayKey>,
    ) -> Result<OpenedOverlay, OverlayError> {
        io_at("create", &self.dir, fs::create_dir_all(&self.dir))?;
        let data = self.open_data(OpenOptions::new().create(true).truncate(false))?;
        if self.durable().exists() {
            return Err(OverlayError::Exists { dir: self.dir.clone() });
        }
        // Removes data of an interrupted creation, whose pages would become visible later.
        io_at("size", &self.data(), data.set_len(0).and_then(|()| data.set_len(size)))?;
        io_at("sync", &self.data(), data.sync_all())?;
        let id = io_at("make an id for", &self.dir, random_id())?;
        let keys = key.map(|key| key.of(&id));
        let key_check = keys.as_ref().map(key_check);
        let header = Header { kind: BitmapKind::Durable, id, size, base, key_check };
        let durable = write_new(&self.durable(), &header, None)?;
        io_at("sync", &self.dir, sync_dir(&self.dir))?;
        self.finish(data, durable, header, keys)
    }

    /// Opens an overlay that was created over `base`. One that is not encrypted needs no key.
    pub(super) fn open(
        &self,
        size: u64,
        base: Digest,
        key: Option<&OverlayKey>,
    ) -> Result<OpenedOverlay, OverlayError> {
        let data = self.open_data(&mut OpenOptions::new())?;
        let (durable, header) = open_bitmap(&self.durable(), OpenOptions::new().read(true).write(true))?;
        if (header.kind, header.size, header.base) != (BitmapKind::Durable, size, base) {
            return Err(OverlayError::OtherBase { dir: self.dir.clone() });
        }
        check_length(&data, &self.data(), size)?;
        let keys = keys_of(&header, key, &self.dir)?;
        self.finish(data, durable, header, keys)
    }

    /// Size of the disk, as the overlay was created or grew last.
    pub(super) fn size(&self) -> Result<u64, OverlayError> {
        Ok(open_bitmap(&self.durable(), OpenOptions::new().read(true))?.1.size)
    }

    /// Makes the overlay as large as its disk has become, durably. Every write that was acknowledged must be
    /// durable: the live bitmap is made anew from the durable one.
    pub(super) fn enlarge(&self, size: u64) -> Result<(), OverlayError> {
        let data = self.open_data(&mut OpenOptions::new())?;
        let (durable, header) = open_bitmap(&self.durable(), OpenOptions::new().read(true))?;
        // Data beyond the size that the header says is what an interrupted growth left: nothing.
        io_at("size", &self.data(), data.set_len(size))?;
        io_at("sync", &self.data(), data.sync_all())?;
        write_new(&self.durable(), &Header { size, ..header }, Some(&durable))?;
        io_at("sync", &self.dir, sync_dir(&self.dir))
    }

    /// Checks what can be known of the overlay without opening it, and changes nothing: the header of its
    /// bitmap and the sizes of its files.
    ///
    /// # Errors
    /// Those of opening it, but for its base, its key and its use.
    pub fn check(&self) -> Result<(), OverlayError> {
        let (_, header) = open_bitmap(&self.durable(), OpenOptions::new().read(true))?;
        let path = self.data();
        let data = io_at("open", &path, File::open(&path))?;
        check_length(&data, &path, header.size)
    }

    /// Removes the overlay, if it exists and is not in use.
    ///
    /// # Errors
    /// Those of opening it, or if a file cannot be removed.
    pub fn remove(&self) -> Result<(), OverlayError> {
        if !self.dir.exists() {
            return Ok(());
        }
        let _data = self.open_data(OpenOptions::new().create(true).truncate(false))?;
        if self.durable().exists() {
            let (_, header) = open_bitmap(&self.durable(), OpenOptions::new().read(true))?;
            let live = self.live(&header.id);
            if live.exists() {
                io_at("remove", &live, fs::remove_file(&live))?;
            }
        }
        io_at("remove", &self.dir, fs::remove_dir_all(&self.dir))
    }

    /// Opens the data file and locks it, which locks the overlay.
    fn open_data(&self, options: &mut OpenOptions) -> Result<File, OverlayError> {
        let path = self.data();
        let data = io_at("open", &path, options.read(true).write(true).open(&path))?;
        let deadline = Instant::now() + LOCK_PATIENCE;
        loop {
            match flock(&data, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(data),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => sleep(LOCK_PAUSE),
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(OverlayError::InUse { dir: self.dir.clone() });
                }
                Err(errno) => return io_at("lock", &path, Err(errno.into())),
            }
        }
    }

    /// Opens the live bitmap of this boot, or creates one from the durable bitmap.
    fn finish(
        &self,
        data: File,
        durable: File,
        header: Header,
        keys: Option<[u8; 64]>,
    ) -> Result<OpenedOverlay, OverlayError> {
        io_at("create", &self.live_dir, fs::create_dir_all(&self.live_dir))?;
        let path = self.live(&header.id);
        let boot = io_at("read the boot id for", &path, boot_id())?;
        let wanted = Header { kind: BitmapKind::Live { boot }, ..header };
        if path.exists() {
            let (live, found) = open_bitmap(&path, OpenOptions::new().read(true).write(true))?;
            if found == wanted {
                return Ok(OpenedOverlay { files: OverlayFiles { data, durable, live }, keys });
            }
        }
        let live = write_new(&path, &wanted, Some(&durable))?;
        Ok(OpenedOverlay { files: OverlayFiles { data, durable, live }, keys })
    }
}

/// Keys of the data under this header, none if it is not encrypted.
fn keys_of(header: &Header, key: Option<&OverlayKey>, dir: &Path) -> Result<Option<[u8; 64]>, OverlayError> {
    let Some(check) = header.key_check else { return Ok(None) };
    let key = key.ok_or_else(|| OverlayError::KeyNeeded { dir: dir.to_owned() })?;
    let keys = key.of(&header.id);
    if key_check(&keys) != check {
        return Err(OverlayError::WrongKey { dir: dir.to_owned() });
    }
    Ok(Some(keys))
}

/// Creates a bitmap file with this header and the bits of `bits`, or none.
fn write_new(path: &Path, header: &Header, bits: Option<&File>) -> Result<File, OverlayError> {
    let draft = path.with_extension("draft");
    let write = || {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&draft)?;
        file.write_all(&header.encode())?;
        if let Some(mut bits) = bits {
            bits.seek(SeekFrom::Start(HEADER_SIZE as u64))?;
            io::copy(&mut bits.take(header.file_len() - HEADER_SIZE as u64), &mut file)?;
        }
        file.set_len(header.file_len())?;
        file.sync_all()?;
        fs::rename(&draft, path)?;
        Ok(file)
    };
    io_at("write", path, write())
}

/// Opens a bitmap file and decodes its header; checks its length.
fn open_bitmap(path: &Path, options: &OpenOptions) -> Result<(File, Header), OverlayError> {
    let mut file = io_at("open", path, options.open(path))?;
    let mut bytes = [0; HEADER_SIZE];
    io_at("read", path, file.read_exact(&mut bytes))?;
    let header =
        Header::decode(&bytes).map_err(|source| OverlayError::Header { path: path.to_owned(), source })?;
    if io_at("measure", path, file.metadata())?.len() != header.file_len() {
        let source = HeaderError::Field { field: "size" };
        return Err(OverlayError::Header { path: path.to_owned(), source });
    }
    Ok((file, header))
}

/// Refuses a data file that lost its end: what the guest wrote there would read as an error of the disk.
fn check_length(data: &File, path: &Path, size: u64) -> Result<(), OverlayError> {
    let found = io_at("measure", path, data.metadata())?.len();
    if found >= size {
        return Ok(());
    }
    Err(OverlayError::Length { path: path.to_owned(), found, size })
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()?;
    dir.parent().map_or(Ok(()), |parent| File::open(parent)?.sync_all())
}

fn random_id() -> io::Result<[u8; 16]> {
    let mut id = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut id)?;
    Ok(id)
}

/// Boot id of the running kernel, from `random(4)`.
fn boot_id() -> io::Result<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    let id = u128::from_str_radix(&digits, 16).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    Ok(id.to_be_bytes())
}

fn io_at<T>(action: &'static str, path: &Path, outcome: io::Result<T>) -> Result<T, OverlayError> {
    outcome.map_err(|source| OverlayError::Io { action, path: path.to_owned(), source })
}
