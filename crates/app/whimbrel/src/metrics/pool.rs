//! Metrics of the members of a pool.

use whimbrel_metrics::{CallDurations, Metric, Page};
use whimbrel_pool::{
    benefactor::Usage,
    protocol::{MemberReport, PoolStatus, ScrubReport},
};

/// Reports of benefactors about their scrubs, by name.
type Scrubs = [(String, ScrubReport)];

whimbrel_metrics::metrics! {
    /// Metrics of a whole pool.
    POOL_METRICS:
    FILES = Gauge "whimbrel_pool_files" [] "Files.";
    VERSIONS = Gauge "whimbrel_pool_versions" [] "Versions of files.";
    LOGICAL = Gauge "whimbrel_pool_logical_bytes" [] "Bytes of all versions.";
    UNIQUE = Gauge "whimbrel_pool_unique_bytes" [] "Bytes of their distinct chunks.";
    CHUNKS = Gauge "whimbrel_pool_chunks" [] "Chunks in use.";
    REPAIR = Gauge "whimbrel_pool_repair_chunks" [] "Chunks with fewer copies than required.";
    LOST = Gauge "whimbrel_pool_lost_chunks" [] "Chunks without a reachable copy.";
    REPAIRED = Counter "whimbrel_pool_repaired_total" [] "Copies made by repair.";
    SESSIONS = Gauge "whimbrel_pool_sessions" [] "Open write sessions.";
    PINNED = Gauge "whimbrel_pool_pinned_versions" [] "Versions that are pinned.";
    CROWDED = Gauge "whimbrel_pool_crowded_chunks" [] "Chunks whose copies are nearer to each other than they could be.";
    QUARANTINE = Gauge "whimbrel_pool_quarantine_seconds" [] "Seconds until unknown chunks may be deleted after a restore.";
    BACKUP_AGE = Gauge "whimbrel_pool_backup_age_seconds" [] "Age of the newest backup of the metadata.";
    ONLINE = Gauge "whimbrel_pool_benefactor_online" ["benefactor"] "Whether the benefactor is online.";
    USED = Gauge "whimbrel_pool_benefactor_used_bytes" ["benefactor"] "Bytes of its chunks.";
    FREE = Gauge "whimbrel_pool_benefactor_free_bytes" ["benefactor"] "Bytes that it can still store.";
    FAULTS = Counter "whimbrel_pool_benefactor_faults_total" ["benefactor"] "Damaged and missing chunks that were reported of it.";
    SCRUBBED = Gauge "whimbrel_pool_benefactor_scrub_checked_bytes" ["benefactor"] "Bytes that its present scrub has checked.";
    DAMAGED = Gauge "whimbrel_pool_benefactor_scrub_damaged_chunks" ["benefactor"] "Damaged copies that its present or last scrub found.";
}

whimbrel_metrics::metrics! {
    /// Metric of the calls of a pool.
    CALL_METRICS:
    CALLS = Histogram "whimbrel_pool_request_duration_seconds" ["call", "outcome"] "Requests to this member until they were answered: done or refused.";
}

whimbrel_metrics::metrics! {
    /// Metrics of one benefactor.
    BENEFACTOR_METRICS:
    OWN_CAPACITY = Gauge "whimbrel_benefactor_capacity_bytes" [] "Bytes that this benefactor offers.";
    OWN_USED = Gauge "whimbrel_benefactor_used_bytes" [] "Bytes of its segments.";
    OWN_FREE = Gauge "whimbrel_benefactor_free_bytes" [] "Bytes that it can still store.";
    OWN_CHUNKS = Gauge "whimbrel_benefactor_chunks" [] "Chunks that it has.";
    OWED = Gauge "whimbrel_benefactor_owed_bytes" [] "Bytes that it should free because the owner of the disk needs them.";
}

#[cfg(test)]
pub(super) fn manager_metrics() -> Vec<Metric> {
    [whimbrel_metrics::PROCESS, POOL_METRICS, CALL_METRICS].concat()
}

#[cfg(test)]
pub(super) fn benefactor_metrics() -> Vec<Metric> {
    [whimbrel_metrics::PROCESS, BENEFACTOR_METRICS, CALL_METRICS].concat()
}

/// What `whimbrel pool status --metrics` prints.
pub(crate) fn status_page(status: &PoolStatus, scrubs: &Scrubs, members: &MemberReport) -> String {
    let mut page = Page::new();
    pool(&mut page, status, scrubs);
    about_members(&mut page, members);
    page.into_text()
}

/// The page of a manager. Without a status, as while its database does not answer, the rest is there.
pub(crate) fn manager_page(
    status: Option<(&PoolStatus, &Scrubs)>,
    members: Option<&MemberReport>,
    calls: &CallDurations,
) -> String {
    let mut page = Page::new();
    whimbrel_metrics::own_process(&mut page, env!("CARGO_PKG_VERSION"));
    status.iter().for_each(|(status, scrubs)| pool(&mut page, status, scrubs));
    members.iter().for_each(|members| about_members(&mut page, members));
    calls.write(page.family(&CALLS));
    page.into_text()
}

/// The page of a benefactor that offers `capacity` bytes.
pub(crate) fn benefactor_page(usage: &Usage, capacity: u64, calls: &CallDurations) -> String {
    let mut page = Page::new();
    whimbrel_metrics::own_process(&mut page, env!("CARGO_PKG_VERSION"));
    page.single(&OWN_CAPACITY, capacity as f64);
    page.single(&OWN_USED, usage.used as f64);
    page.single(&OWN_FREE, usage.free as f64);
    page.single(&OWN_CHUNKS, usage.chunks as f64);
    page.single(&OWED, usage.bytes_to_free as f64);
    calls.write(page.family(&CALLS));
    page.into_text()
}

fn about_members(page: &mut Page, members: &MemberReport) {
    page.single(&CROWDED, members.crowded as f64);
    page.single(&QUARANTINE, members.quarantine.unwrap_or(0) as f64);
    // Without a backup there is no age: a rule that asks for it must not be silent then.
    members.backup_age.iter().for_each(|age| page.single(&BACKUP_AGE, *age as f64));
}

fn pool(page: &mut Page, status: &PoolStatus, scrubs: &Scrubs) {
    let numbers: [(&Metric, u64); 10] = [
        (&FILES, status.files),
        (&VERSIONS, status.versions),
        (&LOGICAL, status.logical),
        (&UNIQUE, status.unique),
        (&CHUNKS, status.chunks),
        (&REPAIR, status.repair),
        (&LOST, status.lost),
        (&REPAIRED, status.repaired),
        (&SESSIONS, status.sessions),
        (&PINNED, status.pinned),
    ];
    numbers.iter().for_each(|(metric, number)| page.single(metric, *number as f64));
    type Number = fn(&whimbrel_pool::protocol::BenefactorInfo) -> u64;
    let numbers: [(&Metric, Number); 4] = [
        (&ONLINE, |one| u64::from(one.state == "online")),
        (&USED, |one| one.used),
        (&FREE, |one| one.free),
        (&FAULTS, |one| one.faults),
    ];
    for (metric, number) in numbers {
        let mut family = page.family(metric);
        status.benefactors.iter().for_each(|one| family.sample(&[&one.name], number(one) as f64));
    }
    type Report = fn(&ScrubReport) -> u64;
    let numbers: [(&Metric, Report); 2] =
        [(&SCRUBBED, |scrub| scrub.bytes), (&DAMAGED, |scrub| scrub.damaged.max(scrub.last_damaged))];
    for (metric, number) in numbers {
        let mut family = page.family(metric);
        scrubs.iter().for_each(|(name, scrub)| family.sample(&[name], number(scrub) as f64));
    }
}
