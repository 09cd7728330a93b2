//! The task that scrubs the chunks of a benefactor and tells the managers what it found.

use super::{Scrub, manager_reports::ManagerReporter};
use crate::protocol::{MAX_BATCH, ReportDamage, ReportScrub, ScrubReport, put_digests};
use bytes::Bytes;
use std::time::Duration;
use tokio::time::sleep;
use whimbrel_core::Digest;

/// Seconds between two reports, and between two writes of the progress.
const REPORTED: u64 = 5;
const SAVED: u64 = 60;

/// Reads and checks chunks at the set pace, and reports; ends only with the program.
pub(super) async fn run(member: &ManagerReporter) {
    let mut scrub = Scrub::open(&member.options.data, member.options.scrub);
    // Damaged chunks of which no manager knows. What is lost here, the next inventories tell.
    let mut unreported: Vec<Digest> = Vec::new();
    for second in 1_u64.. {
        sleep(Duration::from_secs(1)).await;
        let store = member.store.clone();
        let ticked = tokio::task::spawn_blocking(move || {
            let damaged = scrub.tick(&store);
            if (!damaged.is_empty() || second % SAVED == 0)
                && let Err(error) = scrub.save()
            {
                tracing::warn!(%error, "the progress of the scrub cannot be stored");
            }
            (scrub, damaged)
        });
        let Ok((same, damaged)) = ticked.await else { return };
        scrub = same;
        let found = !damaged.is_empty();
        unreported.extend(damaged);
        report_damage(member, &mut unreported).await;
        if found || second % REPORTED == 0 {
            report(member, &scrub.report(member.store.usage().used)).await;
        }
    }
}

/// Tells one manager of damaged chunks; they stay in the list if none can be reached.
async fn report_damage(member: &ManagerReporter, unreported: &mut Vec<Digest>) {
    while !unreported.is_empty() {
        let Some(connection) = member.manager().await else { return };
        let batch = unreported.len().min(MAX_BATCH);
        let digests = put_digests(&unreported[..batch]);
        if let Err(error) = connection.request::<ReportDamage>(&(), digests).await {
            tracing::warn!(%error, "damaged copies could not be reported");
            return;
        }
        unreported.drain(..batch);
    }
}

async fn report(member: &ManagerReporter, report: &ScrubReport) {
    for manager in &member.options.managers {
        if let Ok(connection) = member.managers.connect(&manager.address, manager.key).await
            && let Err(error) = connection.request::<ReportScrub>(report, Bytes::new()).await
        {
            tracing::debug!(%error, manager = %manager.address, "the scrub was not reported");
        }
    }
}
