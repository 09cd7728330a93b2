//! Backups of the manager's metadata that a benefactor has for it, in `DATA/backups`.
//!
//! They arrive piece by piece over the connection to the manager. A backup gets its name once it is complete;
//! the benefactor does not look into it.

use crate::{
    backup::{self, BackupError, io_error},
    protocol::{BackupPiece, code},
};
use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};
use whimbrel_wire::Refusal;

/// The backups in the folder of a benefactor.
#[derive(Debug, Clone)]
pub(super) struct HeldBackups {
    data: PathBuf,
}

impl HeldBackups {
    pub(super) fn new(data: &Path) -> Self {
        Self { data: data.to_owned() }
    }

    pub(super) fn folder(&self) -> PathBuf {
        self.data.join(backup::FOLDER)
    }

    /// Stores a piece; `free` bytes may be used. With the last one, older backups of the pool are removed.
    pub(super) fn put(&self, header: BackupPiece, piece: &[u8], free: u64) -> Result<(), Refusal> {
        let BackupPiece { name, offset, length, keep } = header;
        let invalid = |text: &str| Refusal::new(code::INVALID, text.to_owned());
        let end = offset.checked_add(piece.len() as u64).filter(|end| *end <= length);
        let end = end.ok_or_else(|| invalid("the piece is behind the end"))?;
        if length - offset > free {
            let text = format!("a backup of {length} bytes does not fit");
            return Err(Refusal::new(code::FULL, text));
        }
        let folder = backup::create_folder(&self.data)?;
        let path = backup::unfinished(&folder, name);
        let at = append(&path, offset, piece).map_err(io_error("write", &path))?;
        if at != end {
            return Err(invalid("a piece is missing before this one"));
        }
        if end == length {
            backup::finish(&folder, name)?;
            backup::prune(&folder, name.pool, keep.into())?;
            remove_unfinished(&folder)?;
        }
        Ok(())
    }
}

/// Appends a piece if it is the next one, and returns the length of the file.
fn append(path: &Path, offset: u64, piece: &[u8]) -> io::Result<u64> {
    if offset == 0 {
        let mut file = File::create(path)?;
        file.write_all(piece)?;
        return Ok(piece.len() as u64);
    }
    let mut file = File::options().append(true).open(path)?;
    let length = file.metadata()?.len();
    if length != offset {
        return Ok(length);
    }
    file.write_all(piece)?;
    Ok(length + piece.len() as u64)
}

/// Removes backups that were interrupted.
fn remove_unfinished(folder: &Path) -> Result<(), BackupError> {
    let failed = || io_error("clean up", folder);
    for entry in std::fs::read_dir(folder).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(".part")) {
            std::fs::remove_file(entry.path()).map_err(failed())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::BackupName;

    #[test]
    fn a_backup_with_a_missing_piece_gets_no_name_and_the_newest_stay() {
        let dir = tempfile::tempdir().unwrap();
        let held = HeldBackups::new(dir.path());
        let name = |made| BackupName { pool: 7, made };
        let piece = |made, offset| BackupPiece { name: name(made), offset, length: 6, keep: 2 };
        let names = || backup::list(&held.folder()).unwrap().iter().map(|(n, _)| n.made).collect::<Vec<_>>();
        held.put(piece(1, 0), b"ab", 100).unwrap();
        assert!(held.put(piece(1, 4), b"ef", 100).is_err());
        assert!(held.put(piece(1, 2), b"cdefg", 100).is_err(), "longer than it says");
        assert_eq!(held.put(piece(2, 0), b"ab", 3).unwrap_err().code, code::FULL);
        assert!(names().is_empty());
        for made in 3..6 {
            for (offset, bytes) in [(0, b"abc"), (3, b"def")] {
                held.put(piece(made, offset), bytes, 100).unwrap();
            }
        }
        assert_eq!(names(), [4, 5]);
        assert_eq!(backup::read_piece(&held.folder(), name(5), 1).unwrap(), (6, b"bcdef".to_vec()));
        let left = std::fs::read_dir(held.folder()).unwrap().count();
        assert_eq!(left, 2, "nothing half is left");
    }
}
