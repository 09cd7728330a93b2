//! Hash cache: creates, opens and queries the table file.
//!
//! The file is created without a name, with all of its blocks allocated, and linked to its name when it is
//! complete. So there is a complete table or none, and a crash leaves nothing behind. An unusable table is an
//! error, or is replaced if the caller asks for that. A file that never was a table is not replaced.

use crate::SourceKind;
use crate::error::{CacheError, Result, io_at};
use crate::format::{Geometry, HEADER_SIZE, Header, HeaderError};
use crate::location::{Location, SourceId};
use crate::mapped_table::Mapped;
use crate::page_reader::{PageQuery, Reader, Stream};
use crate::prng::Random;
use crate::source_files::{NotRead, SourceFiles};
use crate::source_records::SourceRecords;
use crate::stats::Counters;
use crate::table::Table;
use rustix::fs::{AtFlags, CWD, FallocateFlags, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use whimbrel_core::{Digest, PAGE_SIZE};

/// Keys whose memory is prefetched while an earlier one is looked up.
const PREFETCH_DISTANCE: usize = 32;

/// Most streams that are retained for the next request; each has read ahead up to 256 KiB.
const STREAMS_MAX: usize = 8;

/// Reaction to a missing or unusable table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMissing {
    /// Return an error.
    Fail,
    /// Create a table if there is no file; a damaged or foreign file is an error.
    Create(Geometry),
    /// Create a table if there is no file, or if the file is damaged, truncated or of another version.
    Recreate(Geometry),
}

/// Open hash cache; many threads may use it at once.
#[derive(Debug)]
pub struct HashCache {
    path: PathBuf,
    file: File,
    map: Mapped,
    geometry: Geometry,
    files: SourceFiles,
    random: Random,
    /// Streams that no thread uses now, the last one used at the end. A thread takes one, so that nobody waits
    /// while another reads a file.
    streams: Mutex<Vec<Stream>>,
    /// Held with the file lock while the list of sources changes.
    pub(crate) registration: Mutex<()>,
}

impl HashCache {
    /// Opens the table at `path`.
    pub fn open(path: &Path, missing: OnMissing) -> Result<Self> {
        Self::open_seeded(path, missing, rand::random())
    }

    /// Opens the table with a seed for evictions, for tests that must be repeatable.
    pub fn open_seeded(path: &Path, missing: OnMissing, seed: u64) -> Result<Self> {
        let (file, header) = match (open_table(path), missing) {
            (
                Err(CacheError::Io { source, .. }),
                OnMissing::Create(geometry) | OnMissing::Recreate(geometry),
            ) if source.kind() == io::ErrorKind::NotFound => create(path, geometry)?,
            (Err(CacheError::Unusable { source, .. }), OnMissing::Recreate(geometry)) => {
                tracing::warn!(path = %path.display(), reason = %source, "recreating the hash cache");
                io_at("remove", path, std::fs::remove_file(path))?;
                create(path, geometry)?
            }
            (opened, _) => opened?,
        };
        let geometry = header.geometry;
        let map = io_at("map", path, Mapped::new(&file, geometry.file_size() as usize))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            map,
            geometry,
            files: SourceFiles::default(),
            random: Random::new(seed),
            streams: Mutex::default(),
            registration: Mutex::default(),
        })
    }

    /// Size of the table.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Path of the table file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Probable location of a page. Nothing is read or checked: this tells whether [`get`](Self::get) is
    /// worth a try.
    pub fn lookup(&self, digest: &Digest) -> Option<Location> {
        let table = self.table();
        table.first(&table.key(digest))
    }

    /// [`lookup`](Self::lookup) for many digests, with a result for each; prefetches the table's memory.
    pub fn lookup_many(&self, digests: &[Digest]) -> Vec<Option<Location>> {
        let table = self.table();
        let mut keys = [table.key(&Digest([0; 32])); PREFETCH_DISTANCE];
        let mut found = Vec::with_capacity(digests.len());
        for i in 0..digests.len() + PREFETCH_DISTANCE {
            if i >= PREFETCH_DISTANCE {
                found.push(table.first(&keys[i % PREFETCH_DISTANCE]));
            }
            if let Some(digest) = digests.get(i) {
                keys[i % PREFETCH_DISTANCE] = table.key(digest);
                table.prefetch(&keys[i % PREFETCH_DISTANCE]);
            }
            table.prefetch_rest(&keys[(i + PREFETCH_DISTANCE / 2) % PREFETCH_DISTANCE]);
        }
        found
    }

    /// Reads the page of `digest` from any location and checks it. Wrong entries are dropped. If it returns
    /// false, `page` has undefined content.
    pub fn get(&self, digest: &Digest, page: &mut [u8; PAGE_SIZE]) -> bool {
        self.get_from_stream(&PageQuery::Digest(*digest), page)
    }

    /// [`get`](Self::get) by the first half of a digest: reads the first page found whose digest begins with
    /// `half`.
    pub fn get_by_half(&self, half: &[u8; 16], page: &mut [u8; PAGE_SIZE]) -> bool {
        let mut digest = Digest([0; 32]);
        digest.0[..half.len()].copy_from_slice(half);
        self.get_from_stream(&PageQuery::Half(digest), page)
    }

    fn get_from_stream(&self, sought: &PageQuery, page: &mut [u8; PAGE_SIZE]) -> bool {
        let mut stream = self.streams().pop().unwrap_or_default();
        let found = stream.get(self, sought, page);
        let mut streams = self.streams();
        if streams.len() < STREAMS_MAX {
            streams.push(stream);
        }
        found
    }

    fn streams(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.streams.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reader for one thread that gets many pages, with a read-ahead of its own.
    pub fn reader(&self) -> Reader<'_> {
        Reader::new(self)
    }

    /// Closes the source files that are open, so that deleted ones free their space. They are opened again
    /// when needed.
    pub fn close_files(&self) {
        self.files.close();
        self.streams().clear();
    }

    /// Writes the table to the disk now. Otherwise the kernel writes it later, even if the process has died.
    pub fn flush(&self) -> Result<()> {
        io_at("write", &self.path, self.map.flush())
    }

    pub(crate) fn table(&self) -> Table<'_> {
        Table::new(&self.map, &self.geometry)
    }

    pub(crate) fn sources(&self) -> SourceRecords<'_> {
        SourceRecords::new(&self.map, self.geometry)
    }

    pub(crate) fn counters(&self) -> Counters<'_> {
        Counters(&self.map.words()[self.geometry.counters_word()..][..PAGE_SIZE / 8])
    }

    pub(crate) fn files(&self) -> &SourceFiles {
        &self.files
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn random_number(&self) -> u64 {
        self.random.next()
    }

    /// Whether the content of a source changes all the time.
    pub(crate) fn is_volatile(&self, id: SourceId) -> bool {
        self.sources().read(id).is_none_or(|record| record.kind == SourceKind::Memory)
    }

    pub(crate) fn read(&self, location: Location, buffer: &mut [u8]) -> Result<usize, NotRead> {
        let (sources, id) = (self.sources(), location.source);
        self.files.read(id, sources.stamp(id), || sources.read(id), location.offset, buffer)
    }
}

fn open_table(path: &Path) -> Result<(File, Header)> {
    let unusable = |source| CacheError::Unusable { path: path.to_owned(), source };
    let file = io_at("open", path, File::options().read(true).write(true).open(path))?;
    let found = io_at("measure", path, file.metadata())?.len();
    if found < HEADER_SIZE as u64 {
        // A file shorter than a page does not tell its origin. An empty file counts as a truncated table.
        let foreign = found > 0 && !begins_like_a_table(&file);
        let short = HeaderError::Length { found, wanted: HEADER_SIZE as u64 };
        return Err(if foreign { CacheError::Foreign { path: path.to_owned() } } else { unusable(short) });
    }
    let mut bytes = [0; HEADER_SIZE];
    io_at("read", path, file.read_exact_at(&mut bytes, 0))?;
    let header = Header::decode(&bytes).map_err(|source| match source {
        HeaderError::Magic => CacheError::Foreign { path: path.to_owned() },
        source => unusable(source),
    })?;
    let wanted = header.geometry.file_size();
    if found != wanted {
        return Err(unusable(HeaderError::Length { found, wanted }));
    }
    Ok((file, header))
}

fn begins_like_a_table(file: &File) -> bool {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, 0).is_ok() && bytes == crate::format::MAGIC
}

/// Creates a table, or opens the one that another process created at the same moment.
fn create(path: &Path, geometry: Geometry) -> Result<(File, Header)> {
    let header = Header { id: rand::random(), geometry };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::TMPFILE.bits() as i32;
    let unnamed = File::options().read(true).write(true).mode(0o600).custom_flags(flags).open(folder);
    let file = io_at("create", path, unnamed)?;
    io_at("allocate", path, allocate(&file, geometry.file_size()))?;
    io_at("write", path, file.write_all_at(&header.encode(), 0))?;
    io_at("sync", path, file.sync_all())?;
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::linkat(CWD, unnamed.as_str(), CWD, path, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => {
            io_at("sync", folder, File::open(folder).and_then(|folder| folder.sync_all()))?;
            Ok((file, header))
        }
        Err(Errno::EXIST) => open_table(path),
        Err(error) => io_at("create", path, Err(error.into())),
    }
}

/// Allocates all blocks of a file, so that a write to the mapping never needs one from a full disk.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP) => {
            let zeros = vec![0; 1 << 20];
            let mut at = 0;
            while at < bytes {
                let part = (bytes - at).min(zeros.len() as u64);
                file.write_all_at(&zeros[..part as usize], at)?;
                at += part;
            }
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}
