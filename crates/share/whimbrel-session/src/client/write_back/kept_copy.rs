//! Kept copies: local versions that were put aside as conflicts, with a map of what in them is whose.
//!
//! The copy is a file in `kept`, its map one of the same name in `conflicts`, both in the directory of the
//! cache. The map is written first, so a copy without one is older than maps or incomplete.

use crate::{
    cache::{CacheDir, CacheFile, fill},
    proto::RelPath,
};
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::{Path, PathBuf},
};

/// Directories of copies and of maps in that of the cache.
pub(super) const DIRS: [&str; 2] = ["kept", "conflicts"];
/// Bytes that are compared or copied at once.
const PIECE: u64 = 1 << 20;
/// Size of the units that a comparison reports.
const UNIT: u64 = 4096;
/// Longest map that is read.
const MAX_MAP: u64 = 64 << 20;
/// Names tried for a copy beside the server's version.
const MAX_NAMES: usize = 1000;

/// A local version that was put aside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptCopy {
    /// Name of the copy.
    #[serde(skip)]
    pub name: String,
    /// Path of the file in the session's directory.
    pub path: RelPath,
    /// Why it was put aside.
    pub why: String,
    /// When it was put aside, in seconds since 1970.
    pub at: i64,
    /// Size of the local version.
    pub size: u64,
    /// Bytes that were written here.
    pub ours: Vec<Range<u64>>,
    /// Bytes of the version that it was written over, as far as they were here.
    pub base: Vec<Range<u64>>,
    /// Bytes of that version that never were here: they are holes in the copy.
    pub absent: Vec<Range<u64>>,
}

/// Which version a conflict is resolved to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The local one, in place of the server's.
    Ours,
    /// The local one as far as it was written here, over the server's.
    OurWrites,
    /// The server's; the copy is removed.
    Theirs,
    /// The server's, and the local one beside it under another name.
    Both,
}

/// Reasons why a conflict cannot be resolved.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// A part of the local version was never on this host.
    #[error("{bytes} bytes of the local version never were on this host")]
    Incomplete {
        /// How many bytes are absent.
        bytes: u64,
    },
    /// A file cannot be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was to be done.
        action: &'static str,
        /// File that was read or written.
        path: PathBuf,
        /// Cause reported by the system.
        source: io::Error,
    },
}

fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> KeepError {
    let path = path.to_owned();
    move |source| KeepError::File { action, path: path.clone(), source }
}

/// Number of bytes in ranges.
pub fn total(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// What is in `0..end` and in none of the `taken` ranges, which are in order.
pub(super) fn rest(taken: &[Range<u64>], end: u64) -> Vec<Range<u64>> {
    let (mut rest, mut at) = (Vec::new(), 0);
    for range in taken {
        if range.start.min(end) > at {
            rest.push(at..range.start.min(end));
        }
        at = at.max(range.end);
    }
    if at < end {
        rest.push(at..end);
    }
    rest
}

/// Adds a range to others in order, and merges it with the last one if they touch.
pub(super) fn add(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// Name of a copy or of a map in the directory of the cache.
pub(super) fn name_in(dir: &str, name: &str) -> String {
    format!("{dir}/{name}")
}

/// The kept copies of a cache, the oldest first.
pub fn kept_copies(cache: &CacheDir) -> io::Result<Vec<KeptCopy>> {
    let found = match fs::read_dir(cache.path().join(DIRS[1])) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found?,
    };
    let mut copies = Vec::new();
    for entry in found {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // A map whose copy was not finished: the content is still in the cache.
        if !cache.path().join(name_in(DIRS[0], &name)).exists() {
            continue;
        }
        let map = match cache.load(&name_in(DIRS[1], &name), MAX_MAP) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => continue,
            map => map?,
        };
        let copy: KeptCopy = serde_json::from_slice(&map)?;
        copies.push(KeptCopy { name, ..copy });
    }
    copies.sort_by(|a, b| (a.at, &a.name).cmp(&(b.at, &b.name)));
    Ok(copies)
}

impl KeptCopy {
    /// The file with the local version, encrypted as the cache is.
    pub fn file(&self, cache: &CacheDir) -> PathBuf {
        cache.path().join(name_in(DIRS[0], &self.name))
    }

    fn open(&self, cache: &CacheDir) -> Result<CacheFile, KeepError> {
        let opened = cache.open_file(&name_in(DIRS[0], &self.name), OpenOptions::new().read(true));
        opened.map_err(failed("read", &self.file(cache)))
    }

    /// The server's version on the mount.
    pub fn theirs(&self, mount: &Path) -> PathBuf {
        mount.join(OsStr::from_bytes(self.path.as_bytes()))
    }

    /// Stores the map, durably.
    pub(super) fn store(&self, cache: &CacheDir) -> io::Result<()> {
        fs::create_dir_all(cache.path().join(DIRS[1]))?;
        cache.replace(&name_in(DIRS[1], &self.name), &serde_json::to_vec(self)?)
    }

    /// Bytes written here that are not the same in the server's version, in units of 4 KiB.
    pub fn compare(&self, cache: &CacheDir, mount: &Path) -> Result<Vec<Range<u64>>, KeepError> {
        let (ours, theirs) = (self.file(cache), self.theirs(mount));
        let local = self.open(cache)?;
        let remote = File::open(&theirs).map_err(failed("read", &theirs))?;
        let mut differs = Vec::new();
        let (mut one, mut other) = (vec![0; UNIT as usize], vec![0; UNIT as usize]);
        for range in &self.ours {
            let mut at = range.start;
            while at < range.end {
                let len = (UNIT - at % UNIT).min(range.end - at) as usize;
                let read = local.read(at, &mut one[..len]).map_err(failed("read", &ours))?;
                let there = fill(&remote, &mut other[..len], at).map_err(failed("read", &theirs))?;
                if (&one[..read], read) != (&other[..there], there) {
                    add(&mut differs, at..at + len as u64);
                }
                at += len as u64;
            }
        }
        Ok(differs)
    }

    /// Resolves the conflict. The copy is removed only when the chosen version is durable.
    pub fn resolve(&self, cache: &CacheDir, mount: &Path, keep: Keep) -> Result<(), KeepError> {
        let absent = total(&self.absent);
        if absent > 0 && matches!(keep, Keep::Ours | Keep::Both) {
            return Err(KeepError::Incomplete { bytes: absent });
        }
        let theirs = self.theirs(mount);
        let open = |path: &Path, options: &mut OpenOptions| {
            options.write(true).open(path).map_err(failed("write", path))
        };
        match keep {
            Keep::Theirs => {}
            Keep::Ours => {
                let to = open(&theirs, OpenOptions::new().create(true).truncate(true))?;
                self.write_to(cache, (&to, &theirs), true)?;
            }
            Keep::OurWrites => {
                self.write_to(cache, (&open(&theirs, &mut OpenOptions::new())?, &theirs), false)?
            }
            Keep::Both => {
                let beside = self.free_name(&theirs);
                let to = open(&beside, OpenOptions::new().create_new(true))?;
                self.write_to(cache, (&to, &beside), true)?;
            }
        }
        // The map last: a map without a copy is not listed.
        for path in [self.file(cache), cache.path().join(name_in(DIRS[1], &self.name))] {
            fs::remove_file(&path).map_err(failed("remove", &path))?;
        }
        Ok(())
    }

    /// A name beside the server's version that is not used.
    fn free_name(&self, theirs: &Path) -> PathBuf {
        let name = |number: usize| {
            let mut name = theirs.as_os_str().to_owned();
            name.push(if number == 0 { ".ours".to_owned() } else { format!(".ours-{number}") });
            PathBuf::from(name)
        };
        (0..MAX_NAMES).map(name).find(|path| !path.exists()).unwrap_or_else(|| name(MAX_NAMES))
    }

    /// Writes the local version to a file, durably: all of it, or only what was written here.
    fn write_to(&self, cache: &CacheDir, (to, path): (&File, &Path), whole: bool) -> Result<(), KeepError> {
        let (from, copy) = (self.file(cache), self.open(cache)?);
        let base = self.base.iter().filter(|_| whole);
        if whole {
            to.set_len(self.size).map_err(failed("write", path))?;
        }
        let mut buffer = vec![0; PIECE as usize];
        for range in self.ours.iter().chain(base) {
            let mut at = range.start;
            while at < range.end {
                let len = PIECE.min(range.end - at) as usize;
                let read = copy.read(at, &mut buffer[..len]).map_err(failed("read", &from))?;
                to.write_all_at(&buffer[..read], at).map_err(failed("write", path))?;
                at += len as u64;
            }
        }
        to.sync_all().map_err(failed("sync", path))
    }
}
