//! Pools that a host knows: those that it uses, and those that `whimbrel host --pool` names.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Pool, as one of its managers sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolInfo {
    /// Managers, as `whimbrel pool manager` prints them, with commas between them.
    pub managers: String,
    /// Why no manager says more, if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// State of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<PoolState>,
}

/// State of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct PoolState {
    /// Number of files.
    pub files: u64,
    /// Number of their versions.
    pub versions: u64,
    /// Bytes of all versions.
    pub logical: u64,
    /// Bytes of their distinct chunks.
    pub unique: u64,
    /// Chunks with fewer copies than required.
    pub short_of_copies: u64,
    /// Seconds until all chunks have their copies, at the present rate; none if there is no progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repaired_in_s: Option<u64>,
    /// Chunks without a reachable copy.
    pub lost: u64,
    /// Files that are being written.
    pub writing: u64,
    /// Versions that users or holders have pinned.
    pub pinned: u64,
    /// Age of the newest backup of the metadata; none without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_age_s: Option<u64>,
    /// Members that lend disks.
    pub benefactors: Vec<PoolBenefactor>,
}

/// Member of a pool that lends a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolBenefactor {
    /// Name of the benefactor.
    pub name: String,
    /// Address for clients.
    pub address: String,
    /// State: `online`, `offline`, `lost` or `draining`.
    pub state: String,
    /// Bytes that it offers.
    pub capacity: u64,
    /// Bytes of its chunks.
    pub used: u64,
    /// Bytes that it can still store.
    pub free: u64,
    /// Chunks that were found damaged or missing there.
    pub faults: u64,
    /// Seconds since it was heard last.
    pub silent_s: u64,
    /// Reading and checking of what it has; none if it says nothing about that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<PoolScrub>,
}

/// Round in which a benefactor reads and checks all that it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolScrub {
    /// Bytes checked in this round.
    pub checked: u64,
    /// Bytes that the benefactor has.
    pub of: u64,
    /// Seconds since the last complete round; none before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_s: Option<u64>,
    /// Damaged copies found in this round or the last.
    pub damaged: u64,
    /// Whether a round at the set rate takes longer than the set time.
    pub late: bool,
}
