//! Unsynced data under write-through: the server has it, and may lose it until a sync, which must notice that
//! the server has restarted in between. Pure.
//!
//! The server's memory holds such data until somebody syncs it. Each entry has the number of restarts known
//! before the first of it was sent: if there are more after the sync, some of it may be lost, and the program
//! must be told.

use crate::{cache::FileId, proto::RelPath};
use std::collections::HashMap;

#[derive(Debug, Default)]
pub(in crate::client) struct Unsynced {
    files: HashMap<FileId, u64>,
    dirs: HashMap<RelPath, u64>,
}

impl Unsynced {
    /// Content of a file is about to be sent.
    pub(in crate::client) fn file_sent(&mut self, file: FileId, restarts: u64) {
        note(self.files.entry(file).or_insert(restarts), restarts);
    }

    /// A change of names in this directory is about to be sent.
    pub(in crate::client) fn dir_sent(&mut self, dir: RelPath, restarts: u64) {
        note(self.dirs.entry(dir).or_insert(restarts), restarts);
    }

    /// Restarts before the first unsynced content of a file was sent, if there is any; a sync follows.
    pub(in crate::client) fn take_file(&mut self, file: FileId) -> Option<u64> {
        self.files.remove(&file)
    }

    /// As [`Unsynced::take_file`], for the names in a directory.
    pub(in crate::client) fn take_dir(&mut self, dir: &RelPath) -> Option<u64> {
        self.dirs.remove(dir)
    }
}

/// The first count is the one that matters.
fn note(known: &mut u64, restarts: u64) {
    *known = restarts.min(*known);
}
