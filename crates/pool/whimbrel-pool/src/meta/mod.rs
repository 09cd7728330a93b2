//! Metadata of the manager in a transactional database, SQLite or PostgreSQL, with the same statements.
//!
//! All durable state is here, so a manager can be killed at any instant, and several can use one PostgreSQL.
//! Both have the same statements and differ in column types (`schema`) and in the driver (`driver`).
//!
//! Times are milliseconds since 1970 by the manager's clock; only differences between them are used.

mod backup;
mod chunks;
mod codings;
mod commit_queue;
mod commits;
mod database;
mod driver;
mod files;
mod garbage;
mod group_commit;
#[cfg(test)]
mod group_tests;
mod groups;
mod leader_lock;
mod member_changes;
mod members;
mod pins;
mod quarantine;
mod quotas;
mod reference_counts;
mod retention;
mod schema;
#[cfg(test)]
mod shard_tests;
mod shards;
mod surplus;
#[cfg(test)]
mod tests;
mod versions;

use crate::protocol::{BenefactorId, ChunkId, MemberLabels, NodeId, VersionInfo};
pub(crate) use backup::{RowLoader, SnapshotPart};
pub(crate) use codings::ChunkToCode;
pub(crate) use commits::PendingCommit;
pub(crate) use database::Meta;
pub(crate) use driver::Value;
pub(crate) use garbage::{ChunkStatus, GcDecision, Quarantine, decide};
pub(crate) use groups::GroupRow;
pub(crate) use leader_lock::LeaderLock;
pub(crate) use member_changes::SharedNumber;
pub(crate) use quotas::QuotaKey;
pub(crate) use shards::{LostPiece, NewPiece};
use whimbrel_core::Digest;
use whimbrel_wire::PublicKey;

/// Failure to read or change the metadata.
#[derive(Debug, thiserror::Error)]
pub enum MetaError {
    /// The database failed or refused a statement.
    #[error("the database failed")]
    Storage {
        /// Cause reported by the database driver.
        #[from]
        source: sqlx::Error,
    },
    /// A commit could not be made durable.
    #[error("the database cannot be synced")]
    Sync {
        /// Cause reported by the kernel.
        #[from]
        source: std::io::Error,
    },
    /// The file, folder or version does not exist.
    #[error("no such file or folder")]
    NotFound,
    /// The name is in use.
    #[error("the name is taken")]
    Exists,
    /// The node is a file where a folder is required.
    #[error("not a folder")]
    NotAFolder,
    /// The node is a folder where a file is required.
    #[error("is a folder")]
    IsAFolder,
    /// The folder is not empty.
    #[error("the folder is not empty")]
    NotEmpty,
    /// The session's lease has expired.
    #[error("the write session has ended")]
    SessionOver,
    /// The version on which a new one is based was removed, or a chunk of it has no copy left.
    #[error("a chunk that the file shares with an older version does not exist any more")]
    Gone,
    /// A version that would be removed is pinned.
    #[error("version {number} is pinned by {by}; `whimbrel pool pins` lists pins and how to remove one")]
    Pinned {
        /// Number of the version in the file.
        number: u32,
        /// Holders of its pins.
        by: String,
    },
    /// A group lacks files of its ranks.
    #[error("the group has {found} of {expected} files; commit it when all ranks have closed theirs")]
    Incomplete {
        /// Files that it has.
        found: u64,
        /// Files that it must have.
        expected: u64,
    },
    /// A benefactor that would be removed has the last copies of chunks in use.
    #[error("it has the only copy of {chunks} chunks in use; wait for repair, or lose them with `--force`")]
    LastCopies {
        /// Number of these chunks.
        chunks: u64,
    },
    /// The request is invalid.
    #[error("{0}")]
    Invalid(&'static str),
    /// The data belongs to another pool.
    #[error("the data belongs to pool {found:016x}, this is {expected:016x}")]
    OtherPool {
        /// Pool that the data belongs to.
        found: u64,
        /// Pool of this database.
        expected: u64,
    },
    /// Stored metadata cannot be read.
    #[error("the stored {what} is damaged")]
    Damaged {
        /// Name of the damaged part.
        what: &'static str,
    },
}

pub(crate) type Result<T> = std::result::Result<T, MetaError>;

/// A benefactor in the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BenefactorRow {
    pub(crate) id: BenefactorId,
    pub(crate) key: PublicKey,
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) capacity: u64,
    pub(crate) used: u64,
    pub(crate) free: u64,
    pub(crate) chunks: u64,
    pub(crate) draining: bool,
    /// Bytes that it should free because the owner of its disk needs them.
    pub(crate) bytes_to_free: u64,
    pub(crate) lost: bool,
    pub(crate) faults: u64,
    /// Time of the last heartbeat.
    pub(crate) seen: i64,
    /// Bytes reserved by write sessions.
    pub(crate) reserved: u64,
    pub(crate) labels: MemberLabels,
}

/// A chunk that may lack copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnderReplicated {
    pub(crate) chunk: ChunkId,
    pub(crate) digest: Digest,
    pub(crate) length: u64,
    pub(crate) want: u8,
    pub(crate) used: bool,
    pub(crate) places: Vec<BenefactorId>,
    /// Places of the other pieces, if it is a piece of a chunk.
    pub(crate) apart_from: Vec<BenefactorId>,
    /// Time at which it was queued or tried; it changes if the chunk is queued again.
    pub(crate) since: i64,
}

/// A version as input of the policies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RetainedVersion {
    pub(crate) folder: NodeId,
    pub(crate) node: NodeId,
    pub(crate) name: String,
    pub(crate) current: bool,
    pub(crate) info: VersionInfo,
    /// Whether the file has its own policy.
    pub(crate) has_own_policy: bool,
}

/// A pin of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PinRow {
    pub(crate) node: NodeId,
    pub(crate) number: u32,
    /// Number of the version in the pool.
    pub(crate) version: u64,
    pub(crate) size: u64,
    /// Holder, start and end of the pin; none if a user set it.
    pub(crate) held: Option<(String, i64, i64)>,
}

/// Totals of the whole pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PoolTotals {
    pub(crate) files: u64,
    pub(crate) versions: u64,
    pub(crate) logical: u64,
    pub(crate) unique: u64,
    pub(crate) chunks: u64,
    pub(crate) repair: u64,
    pub(crate) sessions: u64,
    /// Number of pinned versions.
    pub(crate) pinned: u64,
}
