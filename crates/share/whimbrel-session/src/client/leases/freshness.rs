//! Freshness: for how long what is known here may be used without a question, here and by the kernel.

use super::lease_state::Reliance;
use crate::client::session::Core;
use std::{
    sync::PoisonError,
    time::{Duration, Instant},
};

/// Longest time for which the kernel may cache names and attributes, so that changed settings take effect
/// soon.
const MAX_KERNEL_TTL: Duration = Duration::from_secs(60);
/// How long leased names and attributes are fresh; shorter than the age of recalled ones.
const LEASED: Duration = Duration::from_secs(365 * 24 * 3600);

impl Core {
    /// How long the server's answers are cached. Without a limit while the server cannot be reached.
    pub(in crate::client) fn ttl(&self) -> Duration {
        if !self.connection.is_up() {
            return Duration::MAX;
        }
        let aged = self.settings.read().unwrap_or_else(PoisonError::into_inner).ttl();
        match self.reliance() {
            Reliance::Until(_) if !aged.is_zero() => LEASED,
            Reliance::Nothing => Duration::ZERO,
            _ => aged,
        }
    }

    /// How long the kernel may cache what is known of an inode.
    pub(in crate::client) fn kernel_ttl(&self, id: u64) -> Duration {
        if self.inodes().get(id).is_some_and(|node| node.recalled) {
            return Duration::ZERO;
        }
        let aged = self.settings.read().unwrap_or_else(PoisonError::into_inner).ttl();
        let leased = match self.reliance() {
            Reliance::Until(until) if !aged.is_zero() => until.saturating_duration_since(Instant::now()),
            Reliance::Nothing if self.connection.is_up() => Duration::ZERO,
            _ => aged,
        };
        leased.min(MAX_KERNEL_TTL)
    }

    /// How long answers about an inode and the names in it are cached. Without a limit while the server has
    /// yet to make a change there, because its answers would be older than the state here.
    pub(in crate::client) fn ttl_of(&self, id: u64) -> Duration {
        if self.is_affected(id) { Duration::MAX } else { self.ttl() }
    }

    /// Whether the server has yet to make a change of an inode, of the names in it, or of its path.
    pub(in crate::client) fn is_affected(&self, id: u64) -> bool {
        if self.writeback.queued() == 0 {
            return false;
        }
        let nodes = self.inodes();
        self.writeback.affects(id, &nodes.above(id))
    }
}
