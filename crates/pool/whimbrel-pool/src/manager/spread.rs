//! Looks for chunks whose copies are too near to each other, and queues them for repair.
//!
//! Writes keep copies apart. This finds what has changed since: labels, benefactors that left, clients of
//! earlier versions. It reads the chunks page by page beside other chores, again when the domains have
//! changed, and else rarely.

use super::{ManagerService, placement::BenefactorState};
use crate::{
    domains::Domains,
    meta::{BenefactorRow, MetaError, SharedNumber},
    protocol::{BenefactorId, ChunkId},
};
use std::time::{Duration, Instant};

/// Chunks in one page; one is read in each round of maintenance.
const PAGE: u32 = 10_000;
/// Time between two looks at a pool in which nothing was found.
const PAUSE: Duration = Duration::from_secs(3600);
/// If something was found, the time until the next look, in durations of the last one.
const PART: u32 = 10;
/// Least time between two looks.
const LEAST: Duration = Duration::from_secs(1);

/// State of the look through all chunks.
#[derive(Debug)]
pub(super) struct SpreadScan {
    /// The domains that it is about.
    domains: Domains,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// Chunks up to `after` were looked at, of which `crowded` were too near.
    Reading { after: ChunkId, crowded: u64, began: Instant },
    /// The next look begins then.
    Resting { until: Instant },
}

impl Default for SpreadScan {
    fn default() -> Self {
        Self { domains: Domains::default(), phase: Phase::Resting { until: Instant::now() + PAUSE } }
    }
}

fn start() -> Phase {
    Phase::Reading { after: 0, crowded: 0, began: Instant::now() }
}

impl ManagerService {
    /// Looks at the next page, if a look is due.
    pub(super) async fn scan_spread(&self, members: &[BenefactorRow]) -> Result<(), MetaError> {
        let (meta, domains) = (&self.shared.meta, self.domains(members));
        let mut scan = self.shared.spread.lock().await;
        if scan.domains != domains {
            *scan = SpreadScan { domains, phase: start() };
        }
        if matches!(scan.phase, Phase::Resting { until } if Instant::now() >= until) {
            scan.phase = start();
        }
        let Phase::Reading { after, crowded, began } = scan.phase else { return Ok(()) };
        if scan.domains.is_empty() {
            // Nothing can be too near.
            meta.set_shared_number(SharedNumber::Crowded, 0).await?;
            scan.phase = Phase::Resting { until: Instant::now() + PAUSE };
            return Ok(());
        }
        let page = meta.chunk_places(after, PAGE).await?;
        let now = self.now();
        let counts = |id: &BenefactorId| {
            members.iter().any(|member| member.id == *id && BenefactorState::of(member, now).counts())
        };
        let mut near = Vec::new();
        for (chunk, want, mut places) in page.iter().cloned() {
            places.retain(counts);
            if scan.domains.is_crowded(&places, want.into()) {
                near.push(chunk);
            }
        }
        meta.queue_repair(&near, now).await?;
        let crowded = crowded + near.len() as u64;
        scan.phase = match page.last().filter(|_| page.len() == PAGE as usize) {
            Some((after, ..)) => Phase::Reading { after: *after, crowded, began },
            None => {
                meta.set_shared_number(SharedNumber::Crowded, crowded).await?;
                let pause = if crowded == 0 { PAUSE } else { (began.elapsed() * PART).clamp(LEAST, PAUSE) };
                Phase::Resting { until: Instant::now() + pause }
            }
        };
        Ok(())
    }
}
