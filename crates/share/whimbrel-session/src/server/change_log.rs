//! Log of the latest changes of files, so that an answer that was read before one of them is not trusted.
//! Pure.

use super::lease_table::HolderId;
use crate::proto::Ident;
use std::collections::{HashSet, VecDeque};

/// Most changes that are remembered. An answer that took longer than these counts as outdated.
const MAX_CHANGES: usize = 4096;

/// The latest changes, numbered.
#[derive(Debug, Default)]
pub(super) struct ChangeLog {
    changes: VecDeque<(Ident, Option<HolderId>)>,
    /// Number of the change before the first one remembered.
    before: u64,
}

/// Files that were changed after some moment.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChangedFiles {
    These(HashSet<Ident>),
    /// Any file may have been changed.
    Any,
}

impl ChangeLog {
    /// Number of the latest change.
    pub(super) fn latest(&self) -> u64 {
        self.before + self.changes.len() as u64
    }

    pub(super) fn add(&mut self, file: Ident, by: Option<HolderId>) {
        self.changes.push_back((file, by));
        if self.changes.len() > MAX_CHANGES {
            self.changes.pop_front();
            self.before += 1;
        }
    }

    /// Files that others than `reader` have changed since the change of this number.
    pub(super) fn since(&self, moment: u64, reader: HolderId) -> ChangedFiles {
        if moment < self.before {
            return ChangedFiles::Any;
        }
        let later = self.changes.iter().skip((moment - self.before) as usize);
        let others = later.filter(|(_, by)| *by != Some(reader));
        ChangedFiles::These(others.map(|(file, _)| *file).collect())
    }

    /// Any file may have been changed by now.
    pub(super) fn forget(&mut self) {
        self.before += self.changes.len() as u64 + 1;
        self.changes.clear();
    }
}

impl ChangedFiles {
    pub(super) fn contains(&self, file: &Ident) -> bool {
        match self {
            Self::These(files) => files.contains(file),
            Self::Any => true,
        }
    }
}
