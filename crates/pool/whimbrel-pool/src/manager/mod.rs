//! The manager of a pool: all metadata and the decisions based on it. File data does not pass through it.
//!
//! All durable state is in the database (`meta`); memory holds only connections and counters. The manager can
//! be killed and restarted at any instant without losing anything that was committed.

mod admission;
mod backups;
mod balance;
mod clock;
mod confirmation;
mod copy_orders;
mod erasure;
mod groups;
mod leadership;
mod locations;
mod maintenance;
mod membership;
mod pins;
mod placement;
mod policies;
mod process;
mod quotas;
mod restore;
mod roles;
mod scrubs;
mod service;
mod spread;

pub use backups::BackupOptions;
pub(crate) use backups::answer_about_backups;
pub use maintenance::MaintenanceReport;
pub use process::{Manager, ManagerError, ManagerOptions};
pub(crate) use restore::read_backup;
pub use restore::{BackupSource, RestoreOptions, RestoreReport, restore};
pub use roles::{PoolRole, PoolRoleError, PoolRoles};
pub use service::ManagerService;

use crate::{meta::MetaError, protocol::code};
use whimbrel_wire::{Code, Refusal};

impl From<MetaError> for Refusal {
    fn from(error: MetaError) -> Self {
        let code = match &error {
            MetaError::NotFound => code::NOT_FOUND,
            MetaError::Exists => code::EXISTS,
            MetaError::NotAFolder => code::NOT_A_FOLDER,
            MetaError::IsAFolder => code::IS_A_FOLDER,
            MetaError::NotEmpty => code::NOT_EMPTY,
            MetaError::SessionOver => code::SESSION_OVER,
            MetaError::Gone => code::GONE,
            MetaError::Pinned { .. } => code::PINNED,
            MetaError::LastCopies { .. } => code::LAST_COPY,
            MetaError::Incomplete { .. } => code::INCOMPLETE,
            MetaError::Invalid(_) => code::INVALID,
            MetaError::OtherPool { .. } => code::OTHER_POOL,
            MetaError::Damaged { .. } => code::DAMAGED,
            MetaError::Sync { source } => {
                tracing::error!(error = %source, "the database cannot be synced");
                code::STORAGE
            }
            MetaError::Storage { source } => {
                tracing::error!(error = %source, "the database failed");
                code::STORAGE
            }
        };
        let refusal = Refusal::new(code, error.to_string());
        // Another writer was faster, or the disk may recover, so a retry may succeed.
        if code == code::STORAGE { refusal.retryable() } else { refusal }
    }
}

fn invalid(text: &str) -> Refusal {
    Refusal::new(code::INVALID, text)
}

fn internal(text: &str) -> Refusal {
    Refusal::new(Code::INTERNAL, text)
}
