//! The table file: made, opened, looked into.
//!
//! It is made as a file without a name, with all of its blocks allocated, and linked to its name when it is
//! whole; so there is a whole table or none, and nothing is left behind. A table that cannot be used is an
//! error that says so, or is replaced if the caller wishes. A file that never was a table is not replaced.

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

/// Keys on their way from memory while one is looked at.
const AHEAD: usize = 32;

/// What to do when there is no usable table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMissing {
    /// Say so.
    Fail,
    /// Make one if there is no file; a damaged or foreign file is an error.
    Create(Geometry),
    /// Make one if there is no file, or one that is damaged, of another version, or cut short.
    Recreate(Geometry),
}

/// An open hash cache. All of it may be used from many threads at once.
#[derive(Debug)]
pub struct HashCache {
    path: PathBuf,
    file: File,
    map: Mapped,
    geometry: Geometry,
    files: SourceFiles,
    random: Random,
    shared: Mutex<Stream>,
    /// Held with the file lock while the list of sources changes.
    pub(crate) registration: Mutex<()>,
}

impl HashCache {
    /// Opens the table at `path`.
    pub fn open(path: &Path, missing: OnMissing) -> Result<Self> {
        Self::open_seeded(path, missing, rand::random())
    }

    /// The same with chosen randomness of evictions, for tests that must repeat.
    pub fn open_seeded(path: &Path, missing: OnMissing, seed: u64) -> Result<Self> {
        let (file, header) = match (open_table(path), missing) {
            (
                Err(CacheError::Io { source, .. }),
                OnMissing::Create(geometry) | OnMissing::Recreate(geometry),
            ) if source.kind() == io::ErrorKind::NotFound => create(path, geometry)?,
            (Err(CacheError::Unusable { source, .. }), OnMissing::Recreate(geometry)) => {
                tracing::warn!(path = %path.display(), reason = %source, "making the hash cache anew");
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
            shared: Mutex::default(),
            registration: Mutex::default(),
        })
    }

    /// How large the table is.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Where the table is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where a page may lie. Nothing is read or checked: this asks whether [`get`](Self::get) is worth a try.
    pub fn lookup(&self, digest: &Digest) -> Option<Location> {
        let table = self.table();
        table.first(&table.key(digest))
    }

    /// [`lookup`](Self::lookup) for many digests, an answer for each; the table's memory is fetched ahead.
    pub fn lookup_many(&self, digests: &[Digest]) -> Vec<Option<Location>> {
        let table = self.table();
        let mut keys = [table.key(&Digest([0; 32])); AHEAD];
        let mut found = Vec::with_capacity(digests.len());
        for i in 0..digests.len() + AHEAD {
            if i >= AHEAD {
                found.push(table.first(&keys[i % AHEAD]));
            }
            if let Some(digest) = digests.get(i) {
                keys[i % AHEAD] = table.key(digest);
                table.prefetch(&keys[i % AHEAD]);
            }
            table.prefetch_rest(&keys[(i + AHEAD / 2) % AHEAD]);
        }
        found
    }

    /// Reads the page of `digest` from wherever it lies and checks it. Entries that turn out wrong are
    /// dropped. If it returns false, `page` holds anything.
    pub fn get(&self, digest: &Digest, page: &mut [u8; PAGE_SIZE]) -> bool {
        self.stream().get(self, &PageQuery::Digest(*digest), page)
    }

    /// The same for a page of which only the first half of the digest is known: reads the first page found
    /// whose digest begins so.
    pub fn get_by_half(&self, half: &[u8; 16], page: &mut [u8; PAGE_SIZE]) -> bool {
        let mut digest = Digest([0; 32]);
        digest.0[..half.len()].copy_from_slice(half);
        self.stream().get(self, &PageQuery::Half(digest), page)
    }

    fn stream(&self) -> MutexGuard<'_, Stream> {
        self.shared.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// For one thread that gets many pages: read-ahead that others do not disturb.
    pub fn reader(&self) -> Reader<'_> {
        Reader::new(self)
    }

    /// Closes the source files that are kept open, so that deleted ones free their space. They are opened
    /// again when needed.
    pub fn close_files(&self) {
        self.files.close();
        *self.shared.lock().unwrap_or_else(|e| e.into_inner()) = Stream::default();
    }

    /// Writes the table to the disk now. Without it the kernel does so in its own time, also after the
    /// process died.
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

    pub(crate) fn draw(&self) -> u64 {
        self.random.next()
    }

    /// Whether a source changes all the time.
    pub(crate) fn is_volatile(&self, id: SourceId) -> bool {
        self.sources().read(id).is_none_or(|record| record.kind == SourceKind::Memory)
    }

    /// Reads from a source what there is.
    pub(crate) fn read(&self, location: Location, buffer: &mut [u8]) -> Result<usize, NotRead> {
        let (sources, id) = (self.sources(), location.source);
        self.files.read(id, sources.stamp(id), || sources.read(id), location.offset, buffer)
    }
}

/// Opens a table file and checks its header and length.
fn open_table(path: &Path) -> Result<(File, Header)> {
    let unusable = |source| CacheError::Unusable { path: path.to_owned(), source };
    let file = io_at("open", path, File::options().read(true).write(true).open(path))?;
    let found = io_at("measure", path, file.metadata())?.len();
    if found < HEADER_SIZE as u64 {
        // Nothing of the size of a page can tell what it was; an empty file is what is left of a table or of
        // nothing.
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

/// Makes a table, or opens the one that another process made at the same moment.
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

/// Gives a file its blocks, so that a write to the mapping never needs one from a full disk.
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
