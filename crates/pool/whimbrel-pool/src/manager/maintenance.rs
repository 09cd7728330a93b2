//! Background maintenance of the pool: repair, expired leases and lost benefactors.
//!
//! New writes have priority: while write sessions are open, a round of repair copies few chunks.

use super::{ManagerService, placement};
use crate::{
    meta::{BenefactorRow, MetaError, Quarantine, UnderReplicated},
    protocol::{BenefactorAddress, BenefactorId, put_digests},
};
use std::{
    sync::{PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_wire::CallError;

/// Chunks in one round of repair, without and with open write sessions.
const ROUND: u32 = 512;
const ROUND_DURING_WRITES: u32 = 64;
/// Time for which a benefactor that refused a copy gets no other.
const REFUSAL_TIME: Duration = Duration::from_secs(10);

/// Result of a round of maintenance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MaintenanceReport {
    /// Number of copies made.
    pub copied: u64,
    /// Chunks without a reachable copy.
    pub lost: u64,
    /// Chunks that wait, because no benefactor can take them or a copy failed.
    pub waiting: u64,
}

impl ManagerService {
    /// Runs a round of everything except policies.
    pub async fn run_maintenance(&self, lost_after: Duration) -> Result<MaintenanceReport, MetaError> {
        let (meta, now) = (&self.shared.meta, self.now());
        meta.expire_sessions(now - i64::from(self.shared.lease) * 1000).await?;
        meta.expire_pins(now).await?;
        let lost_after = i64::try_from(lost_after.as_millis()).unwrap_or(i64::MAX);
        let members = meta.members().await?;
        for member in &members {
            // Nobody could report before the manager started.
            let seen = member.seen.max(self.shared.clock.start());
            let away = i64::try_from(member.labels.away.saturating_mul(1000)).unwrap_or(i64::MAX);
            if !member.lost && now.saturating_sub(seen) > lost_after.max(away) {
                tracing::warn!(benefactor = %member.name, "a benefactor is lost; its chunks are re-replicated");
                meta.mark_lost(member.id, now).await?;
            }
        }
        self.scan_spread(&members).await?;
        let report = self.repair().await?;
        self.code_old().await?;
        Ok(report)
    }

    /// Has copies made of the chunks that wait longest.
    async fn repair(&self) -> Result<MaintenanceReport, MetaError> {
        let (meta, began) = (&self.shared.meta, Instant::now());
        if self.quarantine() == Quarantine::On && !self.may_repair_restored().await? {
            return Ok(MaintenanceReport::default());
        }
        let writing = meta.sessions().await? > 0;
        let needy = meta.under_replicated(if writing { ROUND_DURING_WRITES } else { ROUND }).await?;
        if needy.is_empty() {
            self.shared.lost.store(0, Ordering::Relaxed);
            return Ok(MaintenanceReport::default());
        }
        let members = self.members().await?;
        let plan = placement::repair(&needy, &members, &self.domains(&members), self.now());
        meta.remove_from_repair(&plan.healed).await?;
        let waiting: Vec<_> = plan.lost.iter().chain(&plan.stuck).copied().collect();
        meta.postpone(&waiting, self.now()).await?;
        let (lost, rebuilt) = self.rebuild_pieces(&plan.lost, &members).await?;
        self.shared.lost.store(lost.len() as u64, Ordering::Relaxed);
        let mut orders = tokio::task::JoinSet::new();
        for ((from, to), chunks) in plan.copies {
            let place = members.iter().find(|m| m.id == to).map(|m| BenefactorAddress {
                id: to,
                address: m.address.clone(),
                key: m.key,
            });
            let source = members.iter().find(|m| m.id == from).map(|m| m.key);
            let (Some(place), Some(source)) = (place, source) else { continue };
            let chunks: Vec<UnderReplicated> = chunks.into_iter().map(|at| needy[at].clone()).collect();
            let service = self.clone();
            orders.spawn(async move { service.send_copy_order(source, place, chunks).await });
        }
        let mut report =
            MaintenanceReport { lost: lost.len() as u64, waiting: plan.stuck.len() as u64, copied: rebuilt };
        while let Some(done) = orders.join_next().await {
            let (copied, failed) = done.unwrap_or(Ok((0, 0)))?;
            report.copied += copied;
            report.waiting += failed;
        }
        self.shared.repaired.fetch_add(report.copied, Ordering::Relaxed);
        let rate = report.copied as f64 * 1000.0 / began.elapsed().as_secs_f64().max(0.001);
        self.shared.repair_rate.store(rate as u64, Ordering::Relaxed);
        Ok(report)
    }

    /// Whether repair may begin after a restore: everybody had time to tell what they have, and no chunk
    /// with enough copies is in the queue any more.
    async fn may_repair_restored(&self) -> Result<bool, MetaError> {
        let lost_after = i64::try_from(self.shared.lost_after.as_millis()).unwrap_or(i64::MAX);
        let members = self.shared.meta.members().await?;
        let counts = |member: &&BenefactorRow| {
            placement::BenefactorState::of(member, self.now()) == placement::BenefactorState::Online
        };
        let counted: Vec<BenefactorId> = members.iter().filter(counts).map(|member| member.id).collect();
        let more = self.shared.meta.remove_healed(&counted).await?;
        Ok(!more && self.now() >= self.shared.clock.start().saturating_add(lost_after))
    }

    /// All benefactors, for copies: one that refused a copy lately counts as full.
    pub(super) async fn members(&self) -> Result<Vec<BenefactorRow>, MetaError> {
        let mut members = self.shared.meta.members().await?;
        let mut refusals = self.shared.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.retain(|_, at| at.elapsed() < REFUSAL_TIME);
        let refusing = members.iter_mut().filter(|member| refusals.contains_key(&member.id));
        refusing.for_each(|member| member.free = 0);
        Ok(members)
    }

    /// Records that a copy order failed because the target did not take the chunks.
    pub(super) fn record_refusal(&self, to: BenefactorId, error: &CallError) {
        // A source answers with a refusal if the target cannot be reached or does not take the chunks.
        if matches!(error, CallError::Refused { .. }) {
            let mut refusals = self.shared.refusals.lock().unwrap_or_else(PoisonError::into_inner);
            refusals.insert(to, Instant::now());
        }
    }

    /// Sends a shadow map to a source and commits its copies; returns how many were made and how many failed.
    async fn send_copy_order(
        &self,
        source: whimbrel_wire::PublicKey,
        to: BenefactorAddress,
        chunks: Vec<UnderReplicated>,
    ) -> Result<(u64, u64), MetaError> {
        let meta = &self.shared.meta;
        let digests = put_digests(chunks.iter().map(|chunk| &chunk.digest));
        let copied = self.copy_chunks(&source, &to, digests, chunks.len()).await;
        let failed = copied.unwrap_or_else(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, to = %to.address, "repair could not copy chunks");
            vec![true; chunks.len()]
        });
        let with = |wanted: bool| {
            let chosen = chunks.iter().zip(&failed).filter(move |(_, failed)| **failed == wanted);
            chosen.map(|(chunk, _)| chunk.chunk).collect::<Vec<_>>()
        };
        let (copied, waiting) = (with(false), with(true));
        meta.insert_copies(&copied, to.id, self.now()).await?;
        meta.postpone(&waiting, self.now()).await?;
        Ok((copied.len() as u64, waiting.len() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{manager::ManagerOptions, meta::Meta, protocol::BenefactorStatus};
    use whimbrel_wire::{PublicKey, Trust};

    #[tokio::test]
    async fn a_manager_that_was_away_or_whose_clock_stepped_gives_everybody_time_to_report() {
        let dir = tempfile::tempdir().unwrap();
        let meta = Meta::open(&dir.path().join("pool.db").display().to_string()).await.unwrap();
        let options = ManagerOptions::new(dir.path().to_owned(), "127.0.0.1:0".parse().unwrap());
        let start = async || {
            let trust = std::sync::Arc::new(Trust::load(dir.path()).unwrap());
            ManagerService::start(meta.clone(), trust, &options).await.unwrap()
        };
        let (name, address) = (String::from("b1"), String::from("h:1"));
        let status = BenefactorStatus {
            name,
            address,
            pool: 0,
            capacity: 1,
            used: 0,
            free: 1,
            chunks: 0,
            draining: false,
            owed: 0,
        };
        let hour = 3_600_000;
        // The last report was an hour ago, and then an hour ahead of the wall clock.
        for ahead in [-hour, hour] {
            let then = start().await.now() + ahead;
            meta.register(&PublicKey([1; 32]), &status, then).await.unwrap();
            meta.start_session(&[(1, 1)], then).await.unwrap();
            let service = start().await;
            assert!(service.now() >= then);
            service.run_maintenance(options.lost_after).await.unwrap();
            assert!(!meta.members().await.unwrap()[0].lost, "{ahead}");
        }
        assert_eq!(meta.sessions().await.unwrap(), 2);
        let service = start().await;
        service.run_maintenance(Duration::ZERO).await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        service.run_maintenance(Duration::ZERO).await.unwrap();
        assert!(meta.members().await.unwrap()[0].lost, "silent since the start for longer than allowed");
    }
}
