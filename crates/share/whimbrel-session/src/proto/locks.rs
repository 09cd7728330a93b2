//! Locks of ranges of files, held at the server for a client.

use super::FileRef;
use serde::{Deserialize, Serialize};

/// What a lock is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockAction {
    /// Looks for a lock in the way of a shared one.
    TestShared,
    /// Looks for a lock in the way of an exclusive one.
    TestExclusive,
    /// Sets a shared lock, in place of what this owner has there.
    Shared,
    /// Sets an exclusive lock, in place of what this owner has there.
    Exclusive,
    /// Removes what this owner has there.
    Unlock,
}

/// Requests a lock. If one is in the way, it fails with `EAGAIN`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// The regular file to lock.
    pub file: FileRef,
    /// Owner of the lock, among those of this client.
    pub owner: u64,
    /// Offset of the first byte.
    pub start: u64,
    /// Offset of the last byte; `i64::MAX` stands for the end of the file, wherever it is.
    pub end: u64,
    /// What to do.
    pub action: LockAction,
}

/// Result of a request for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locked {
    /// For a test, the first lock in the way: first and last byte, and whether it is exclusive.
    pub in_the_way: Option<(u64, u64, bool)>,
}
