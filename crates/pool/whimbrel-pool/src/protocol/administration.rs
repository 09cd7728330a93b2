//! Headers and answers of the calls of admins: labels and removal of members, backups.

use super::BenefactorId;
use crate::backup::BackupName;
use serde::{Deserialize, Serialize};

/// What an admin says of a benefactor.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemberLabels {
    /// Name of its site; empty if unknown.
    pub site: String,
    /// Name of its rack in the site.
    pub rack: String,
    /// Name of its host in the rack.
    pub host: String,
    /// Seconds for which it may be silent before it is lost, such as every night; 0 if it is always there.
    pub away: u64,
}

/// A benefactor with its labels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberDetails {
    /// Number of the benefactor.
    pub id: BenefactorId,
    /// Name for people.
    pub name: String,
    /// Whether its copies count: it is neither lost nor leaving.
    pub counts: bool,
    /// Where it is, and how long it may be away.
    pub labels: MemberLabels,
}

/// What is known of all benefactors beside their status.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemberReport {
    /// All benefactors of the pool.
    pub members: Vec<MemberDetails>,
    /// Chunks whose copies are nearer to each other than they could be, as the last look found it.
    pub crowded: u64,
    /// Seconds until unknown chunks may be deleted after a restore; none without a quarantine.
    pub quarantine: Option<u64>,
    /// Age of the last backup in seconds; none before the first.
    pub backup_age: Option<u64>,
}

/// Result of the removal of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RemovedMember {
    /// Chunks of which it had a copy that is made again.
    pub copies: u64,
    /// Chunks in use of which it had the last copy.
    pub lost: u64,
}

/// Where a backup is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupReport {
    /// Name of the backup.
    pub name: BackupName,
    /// Length in bytes.
    pub bytes: u64,
    /// Names of the benefactors that have it.
    pub benefactors: Vec<String>,
    /// Object store that has it.
    pub store: Option<String>,
    /// Places that failed, with the reasons.
    pub failed: Vec<(String, String)>,
}

/// Header of a piece of a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupPiece {
    /// Name of the backup.
    pub name: BackupName,
    /// Offset of the piece; pieces come in order, and the first one starts anew.
    pub offset: u64,
    /// Length of the backup.
    pub length: u64,
    /// Number of backups of this pool to retain.
    pub keep: u16,
}
