//! Locks of files, as fcntl(2) and flock(2) ask for them.

use crate::{Errno, Result};

/// What a lock of a range is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Others may have shared locks, too.
    Shared,
    /// Nobody else may have a lock.
    Exclusive,
    /// There is none any more.
    Unlock,
}

/// A lock of a range of bytes. flock(2) locks all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLock {
    /// Offset of the first byte.
    pub start: u64,
    /// Offset of the last byte; `i64::MAX` stands for the end of the file, wherever it is.
    pub end: u64,
    /// What the lock is to be, or is.
    pub kind: LockKind,
    /// Process that has it.
    pub pid: u32,
}

impl LockKind {
    /// The kind of an `l_type` of fcntl(2).
    pub(crate) fn of(number: i32) -> Result<Self> {
        match number as libc::c_short as libc::c_int {
            libc::F_RDLCK => Ok(Self::Shared),
            libc::F_WRLCK => Ok(Self::Exclusive),
            libc::F_UNLCK => Ok(Self::Unlock),
            _ => Err(Errno::EINVAL),
        }
    }

    /// The number for `l_type` of fcntl(2).
    pub fn number(self) -> i32 {
        match self {
            Self::Shared => libc::F_RDLCK,
            Self::Exclusive => libc::F_WRLCK,
            Self::Unlock => libc::F_UNLCK,
        }
    }
}
