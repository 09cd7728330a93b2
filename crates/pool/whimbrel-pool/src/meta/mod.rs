//! Metadata of the manager in a transactional database, SQLite or PostgreSQL, with the same statements.
//!
//! All durable state is here, so a manager can be killed at any instant, and several can use one PostgreSQL.
//! The modules in `sql` are compiled once for each driver; only column types differ, see `schema`.
//!
//! Times are milliseconds since 1970 by the manager's clock; only differences between them are used.

mod garbage;
mod group_commit;
mod reference_counts;
mod schema;

#[allow(clippy::duplicate_mod, reason = "the same statements, compiled for the other driver")]
mod postgres;
mod sqlite;
#[cfg(test)]
mod tests;

use crate::{
    chunk_map::ChunkRef,
    policy::Policy,
    protocol::{
        BenefactorId, BenefactorStatus, ChunkId, Commit, Fault, Inventory, Located, NewNode, Node,
        NodeChange, NodeId, VersionInfo, Written,
    },
};
pub(crate) use garbage::{ChunkStatus, GcDecision, judge};
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
    pub(crate) owed: u64,
    pub(crate) lost: bool,
    pub(crate) faults: u64,
    /// Time of the last heartbeat.
    pub(crate) seen: i64,
    /// Bytes reserved by write sessions.
    pub(crate) reserved: u64,
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
    pub(crate) own: bool,
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

/// The database of a manager, with either driver.
#[derive(Debug, Clone)]
pub(crate) enum Meta {
    Sqlite(sqlite::statements::Database),
    Postgres(postgres::statements::Database),
}

macro_rules! on_either {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        impl Meta {
            $(
                pub(crate) async fn $name(&self, $($arg: $type),*) -> Result<$out> {
                    match self {
                        Self::Sqlite(database) => database.$name($($arg),*).await,
                        Self::Postgres(database) => database.$name($($arg),*).await,
                    }
                }
            )*
        }
    };
}

on_either! {
    fn pool_id() -> u64;
    fn register(key: &PublicKey, status: &BenefactorStatus, now: i64) -> BenefactorId;
    fn members() -> Vec<BenefactorRow>;
    fn mark_lost(benefactor: BenefactorId, now: i64) -> ();
    fn start_drain(benefactor: BenefactorId, now: i64) -> ();
    fn stop_drain(benefactor: BenefactorId) -> ();
    fn holdings() -> Vec<(BenefactorId, u64)>;
    fn movable(from: BenefactorId, to: BenefactorId, most: u32) -> Vec<(ChunkId, Digest)>;
    fn moved(chunks: &[ChunkId], from: BenefactorId, to: BenefactorId, now: i64) -> ();
    fn undrained(benefactor: BenefactorId, counted: &[BenefactorId]) -> u64;
    fn dismiss(benefactor: BenefactorId) -> ();
    fn start_session(shares: &[(BenefactorId, u64)], now: i64) -> u64;
    fn renew_session(session: u64, now: i64) -> ();
    fn end_session(session: u64) -> ();
    fn expire_sessions(before: i64) -> u64;
    fn reserve(session: u64, shares: &[(BenefactorId, u64)]) -> ();
    fn known(digests: &[Digest], copies: u8, alive_since: i64, now: i64) -> Vec<ChunkId>;
    fn standing(version: u64, copies: u8, alive_since: i64) -> Vec<bool>;
    fn enroll(session: u64, written: &[Written], now: i64) -> Vec<ChunkId>;
    fn commit(commit: &Commit, pieces: &[ChunkRef], now: i64) -> Node;
    fn lookup(parent: NodeId, name: &str) -> Node;
    fn node(id: NodeId) -> Node;
    fn list(parent: NodeId, after: &str, most: u32) -> Vec<Node>;
    fn make(make: &NewNode, now: i64) -> Node;
    fn remove(parent: NodeId, name: &str, folder: bool, now: i64) -> ();
    fn rename(from: (NodeId, &str), to: (NodeId, &str), replace: bool, now: i64) -> ();
    fn change(id: NodeId, change: &NodeChange, now: i64) -> Node;
    fn versions(node: NodeId) -> Vec<VersionInfo>;
    fn map(version: u64) -> Vec<u8>;
    fn locate(chunks: &[ChunkId]) -> Vec<Located>;
    fn fault(fault: &Fault, now: i64) -> ();
    fn collect(benefactor: BenefactorId, inventory: &Inventory, listed: &[(Digest, u32)], now: i64) -> Vec<bool>;
    fn needy(most: u32) -> Vec<UnderReplicated>;
    fn copied(chunks: &[ChunkId], benefactor: BenefactorId, now: i64) -> ();
    fn healed(chunks: &[(ChunkId, i64)]) -> ();
    fn postpone(chunks: &[ChunkId], now: i64) -> ();
    fn policy(folder: NodeId) -> (Option<Policy>, Policy);
    fn set_policy(node: NodeId, policy: Option<&Policy>, now: i64) -> ();
    fn retained() -> Vec<RetainedVersion>;
    fn drop_version(node: NodeId, number: u32, even_current: bool, now: i64) -> ();
    fn pin(node: NodeId, number: u32, pinned: bool) -> ();
    fn hold(version: u64, owner: &[u8], holder: &str, now: i64, ends: i64) -> ();
    fn release(version: u64, owner: Option<&[u8]>, holder: &str) -> ();
    fn held(owner: Option<&[u8]>) -> Vec<PinRow>;
    fn pinned() -> Vec<PinRow>;
    fn expire_held(now: i64) -> u64;
    fn prolong_held(ends: i64) -> ();
    fn path(node: NodeId) -> String;
    fn sums() -> PoolTotals;
    fn sessions() -> u64;
}

impl Meta {
    /// Opens `location`, a `postgres://` URL or the path of a SQLite file, and creates the file if missing.
    pub(crate) async fn open(location: &str) -> Result<Self> {
        if location.starts_with("postgres://") || location.starts_with("postgresql://") {
            Ok(Self::Postgres(postgres::statements::Database::open(location).await?))
        } else {
            Ok(Self::Sqlite(sqlite::statements::Database::open(location).await?))
        }
    }
}
