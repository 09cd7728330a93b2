//! Commit mark: the commit point of a handover as one small write. It is a file beside the machine's record,
//! prepared earlier, into which the id of the handover is written and synced while the machine is paused.
//!
//! A record with `leaving` and a mark with the same handover together mean `HandedOver`. The mark is in one
//! sector of a file that has its full size already, so it needs one write of data and no change of a
//! directory, and is atomic. It is prepared before the record names the handover, and ids are never used
//! twice: a record with `leaving` whose mark is missing, short or of another handover has been damaged, and
//! tells nobody who has the machine.
//!
//! After a failed write or sync nobody knows what a later daemon will find. The caller then writes a record
//! without `leaving` before the machine runs again.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_wire::atomic_file;

const FILE: &str = "handed-over";
/// More than any file system's smallest unit of writing.
const FILE_SIZE: usize = 4096;

/// A prepared mark that is not written yet.
pub(crate) struct CommitMark {
    file: File,
}

impl CommitMark {
    /// Prepares the mark in the folder of a machine; durable when this returns.
    pub(crate) fn prepare(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        atomic_file::replace(&path, &[0; FILE_SIZE])?;
        Ok(Self { file: File::options().write(true).open(&path)? })
    }

    /// Writes the mark: when this returns, the machine is handed over.
    pub(crate) fn make(&self, handover: HandoverId) -> io::Result<()> {
        self.file.write_all_at(&handover.0, 0)?;
        self.file.sync_data()
    }
}

/// Makes a mark durable that an earlier daemon made: it may have been killed before its sync. The mark is
/// written once more, since a sync that failed leaves it in the cache of the kernel as if it were on the
/// disk.
pub(crate) fn make_durable(dir: &Path) -> io::Result<()> {
    let path = path(dir);
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let mut mark = Vec::new();
    file.take(FILE_SIZE as u64).read_to_end(&mut mark)?;
    if mark.iter().any(|byte| *byte != 0) {
        let file = File::options().write(true).open(&path)?;
        file.write_all_at(&mark, 0)?;
        file.sync_data()?;
    }
    Ok(())
}

/// The mark's file in the folder of a machine.
pub(crate) fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// Whether a mark was made for the handover that is pending.
///
/// # Errors
/// If the mark is none of a pending handover: then nobody knows whether it was made.
pub(crate) fn is_made(path: &Path, pending: HandoverId) -> io::Result<bool> {
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let mut file = File::open(path)?;
    let mut id = [0; 16];
    // A mark has its full size before the machine's record names the handover.
    if file.metadata()?.len() != FILE_SIZE as u64 {
        return Err(invalid("it does not have its full size"));
    }
    file.read_exact(&mut id)?;
    match id {
        id if id == [0; 16] => Ok(false),
        id if id == pending.0 => Ok(true),
        _ => Err(invalid("it names another handover than the record")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_says_that_a_handover_was_committed_or_that_it_cannot_be_known() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (path, pending) = (path(dir.path()), HandoverId([7; 16]));
        is_made(&path, pending).unwrap_err();
        let mark = CommitMark::prepare(dir.path()).unwrap();
        assert!(!is_made(&path, pending).unwrap());
        mark.make(pending).unwrap();
        make_durable(dir.path()).unwrap();
        assert!(is_made(&path, pending).unwrap());
        is_made(&path, HandoverId([8; 16])).unwrap_err();
        CommitMark::prepare(dir.path()).unwrap();
        assert!(!is_made(&path, pending).unwrap(), "the next one begins without");
        for short in [0, 15, FILE_SIZE - 1] {
            std::fs::write(&path, vec![7; short]).unwrap();
            make_durable(dir.path()).unwrap();
            is_made(&path, pending).unwrap_err();
        }
    }
}
