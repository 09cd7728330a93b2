//! Election of the manager that does the chores: the one that holds a lock in the database.
//!
//! Only a manager that benefactors are connected to takes part, because orders to copy go over these
//! connections. All managers serve.

use super::{ManagerService, placement};
use crate::meta::{LeaderLock, MetaError};
use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

/// Time for which a manager without benefactors leaves the lock to others.
const PAUSE: Duration = Duration::from_secs(3);

/// The part of a manager in the election.
#[derive(Debug)]
pub(super) struct Leadership {
    lock: LeaderLock,
    paused: Option<Instant>,
}

impl Leadership {
    pub(super) fn new(service: &ManagerService) -> Self {
        Self { lock: service.shared.meta.leader_lock(), paused: None }
    }

    /// Whether this manager is to do the chores now.
    pub(super) async fn leads(&mut self, service: &ManagerService) -> bool {
        let able = service.reaches_benefactors().await.unwrap_or(false);
        if !able {
            self.lock.release();
            self.paused = Some(Instant::now());
        }
        let paused = self.paused.is_some_and(|at| at.elapsed() < PAUSE);
        let leads = !paused && self.lock.hold().await;
        if service.shared.leads.swap(leads, Ordering::Relaxed) != leads {
            tracing::info!(leads, "whether this manager does the chores has changed");
        }
        leads
    }
}

impl ManagerService {
    /// Whether this manager does the chores: repair, balance, policies.
    pub fn leads(&self) -> bool {
        self.shared.leads.load(Ordering::Relaxed)
    }

    /// Whether a benefactor that is online has a connection here, or none is online: orders to copy go over
    /// these connections.
    async fn reaches_benefactors(&self) -> Result<bool, MetaError> {
        let (members, now) = (self.shared.meta.members().await?, self.now());
        let online = placement::BenefactorState::Online;
        let mut online =
            members.iter().filter(|member| placement::BenefactorState::of(member, now) == online).peekable();
        let connections = self.shared.connections();
        let open = |key| connections.get(key).is_some_and(|connection| connection.close_reason().is_none());
        Ok(online.peek().is_none() || online.any(|member| open(&member.key)))
    }
}
