//! Parts of an image in a folder or in an archive, by their names there.

use crate::ContainerError;
use rustix::fs::{Mode, OFlags};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

/// Most parts that an archive may have.
const PARTS_MAX: usize = 10_000;

/// A part: bytes of a file.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) file: File,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// Where the parts of an image are.
#[derive(Debug)]
pub(crate) enum Blobs {
    /// Files below a folder.
    Folder(PathBuf),
    /// Places in a tar archive.
    Archive { path: PathBuf, parts: BTreeMap<String, (u64, u64)> },
}

impl Blobs {
    /// The parts in a folder or in an archive.
    pub(crate) fn open(path: &Path) -> Result<Self, ContainerError> {
        let file = File::open(path).map_err(ContainerError::read(path))?;
        match file.metadata().map_err(ContainerError::read(path))?.is_dir() {
            true => Ok(Self::Folder(path.to_owned())),
            false => Ok(Self::Archive { path: path.to_owned(), parts: parts_of(path, file)? }),
        }
    }

    /// The part `name`; none if there is no such part.
    pub(crate) fn part(&self, name: &str) -> Result<Option<Part>, ContainerError> {
        let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
        if !name.split('/').all(is_plain) {
            return Err(ContainerError::invalid(format!("{name:?}"), "the name leads elsewhere"));
        }
        match self {
            Self::Folder(folder) => {
                let path = folder.join(name);
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
                let file = match rustix::fs::open(&path, flags, Mode::empty()) {
                    Ok(file) => File::from(file),
                    Err(rustix::io::Errno::NOENT) => return Ok(None),
                    Err(errno) => return Err(ContainerError::read(path)(errno.into())),
                };
                let about = file.metadata().map_err(ContainerError::read(&path))?;
                match about.is_file() {
                    true => Ok(Some(Part { file, offset: 0, length: about.len() })),
                    false => Err(ContainerError::invalid(name, "it is no file")),
                }
            }
            Self::Archive { path, parts } => {
                let Some((offset, length)) = parts.get(name).copied() else { return Ok(None) };
                let file = File::open(path).map_err(ContainerError::read(path))?;
                Ok(Some(Part { file, offset, length }))
            }
        }
    }

    /// Content of the part `name` of at most `max` bytes; none if there is no such part.
    pub(crate) fn content(&self, name: &str, max: u64) -> Result<Option<Vec<u8>>, ContainerError> {
        let Some(part) = self.part(name)? else { return Ok(None) };
        if part.length > max {
            return Err(ContainerError::invalid(name, format!("it is longer than {max} bytes")));
        }
        let (mut file, mut content) = (part.file, Vec::new());
        let read = file
            .seek(SeekFrom::Start(part.offset))
            .and_then(|_| file.take(part.length).read_to_end(&mut content));
        read.map_err(ContainerError::read(name))?;
        Ok(Some(content))
    }
}

/// Places of the files in a tar archive. Their contents are skipped. Names are those of its headers alone:
/// longer ones, which the archive's reader would hold in memory whatever their length, are of no part.
fn parts_of(path: &Path, file: File) -> Result<BTreeMap<String, (u64, u64)>, ContainerError> {
    let damaged = |error: io::Error| ContainerError::invalid(path.display().to_string(), error);
    let (mut archive, mut parts) = (tar::Archive::new(file), BTreeMap::new());
    for entry in archive.entries_with_seek().map_err(damaged)?.raw(true) {
        let entry = entry.map_err(damaged)?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).trim_start_matches("./").to_owned();
        parts.insert(name, (entry.raw_file_position(), entry.size()));
        if parts.len() > PARTS_MAX {
            return Err(ContainerError::TooMany { limit: PARTS_MAX });
        }
    }
    Ok(parts)
}
