//! Commit mark: the commit point of a handover as one small write. It is a file beside the machine's record,
//! prepared earlier, into which the id of the handover is written and synced while the machine is paused.
//!
//! A record with `leaving` and a mark with the same handover together mean `HandedOver`. The mark is in one
//! sector of a file that has its full size already, so it needs one write of data and no change of a
//! directory, and is atomic. Ids are never used twice, so an old mark names no handover.
//!
//! After a failed write or sync nobody knows what a later daemon will find. The caller then writes a record
//! without `leaving` before the machine runs again.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::Path,
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

    /// The handover that the mark in the folder of a machine names, if there is one.
    pub(crate) fn read(dir: &Path) -> io::Result<Option<HandoverId>> {
        let mut id = [0; 16];
        match File::open(dir.join(FILE)).and_then(|mut file| file.read_exact(&mut id)) {
            Ok(()) => Ok(Some(HandoverId(id)).filter(|_| id != [0; 16])),
            // A shorter file was never prepared.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_names_a_handover_only_once_it_was_made() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        assert_eq!(CommitMark::read(dir.path()).unwrap(), None);
        let mark = CommitMark::prepare(dir.path()).unwrap();
        assert_eq!(CommitMark::read(dir.path()).unwrap(), None);
        mark.make(HandoverId([7; 16])).unwrap();
        assert_eq!(CommitMark::read(dir.path()).unwrap(), Some(HandoverId([7; 16])));
        CommitMark::prepare(dir.path()).unwrap();
        assert_eq!(CommitMark::read(dir.path()).unwrap(), None, "the next one begins without");
        std::fs::write(dir.path().join(FILE), [7; 15]).unwrap();
        assert_eq!(CommitMark::read(dir.path()).unwrap(), None);
    }
}
