//! Metrics of the host: pauses and epochs of all machines, operations, calls of the API, store, memory.

use crate::{daemon::Daemon, server::access::Access};
use whimbrel_metrics::Page;

whimbrel_metrics::metrics! {
    /// Metrics of the host.
    pub(super) HOST_METRICS:
    CHECKPOINT = Histogram "whimbrel_checkpoint_pause_seconds" [] "Pauses of machines for checkpoints.";
    DOWNTIME = Histogram "whimbrel_migration_downtime_seconds" [] "Downtimes of machines that moved away from this host.";
    MIGRATED = Counter "whimbrel_migration_sent_bytes_total" [] "Bytes on the wire, both ways, of migrations that ended well.";
    PAGE_WAIT = Histogram "whimbrel_page_wait_seconds" [] "Times to fill pages, and to read disks, of which some content is still elsewhere.";
    EPOCH_PAUSE = Histogram "whimbrel_epoch_pause_seconds" [] "Pauses at the ends of epochs.";
    EPOCH_LENGTH = Histogram "whimbrel_epoch_length_seconds" [] "Times between the pauses of epochs.";
    EPOCH_DELAY = Histogram "whimbrel_epoch_output_delay_seconds" [] "Times from the end of an epoch until its output left.";
    EPOCH_SENT = Histogram "whimbrel_epoch_sent_bytes" [] "Bytes sent for an epoch.";
    TAKEOVERS = Counter "whimbrel_takeovers_total" [] "Machines that this host took over.";
    SCHEDULE_FAILED = Gauge "whimbrel_schedule_failed" ["schedule"] "Whether the last run of a schedule failed.";
    SCHEDULE_SUCCESS = Gauge "whimbrel_schedule_last_success_timestamp_seconds" ["schedule"] "Time at which the last run that succeeded began.";
    RUNNING = Gauge "whimbrel_operations" ["kind"] "Operations under way.";
    ENDED = Counter "whimbrel_operations_ended_total" ["kind", "outcome"] "Operations that have ended: succeeded, cancelled or failed.";
    CALLS = Histogram "whimbrel_api_request_duration_seconds" ["call", "outcome"] "Requests to the API until their answer began: done, failed or refused.";
    STORE_BYTES = Gauge "whimbrel_store_bytes" [] "Bytes of the store on the disk.";
    STORE_REFS = Gauge "whimbrel_store_refs" [] "Names of capsules in the store.";
    STORE_FREE = Gauge "whimbrel_store_free_bytes" [] "Free bytes of the file system of the store and the disks.";
    STORE_SIZE = Gauge "whimbrel_store_filesystem_bytes" [] "Size of that file system.";
    LATCHED = Gauge "whimbrel_store_latched" [] "Whether the store refuses writes since one failed.";
    MEMORY_SIZE = Gauge "whimbrel_memory_filesystem_bytes" [] "Size of the file system for guest memory.";
    MEMORY_FREE = Gauge "whimbrel_memory_free_bytes" [] "Free bytes of the file system for guest memory.";
    MEMORY_SPARE = Gauge "whimbrel_memory_spare_bytes" [] "Free bytes of it that are promised to no machine.";
}

pub(super) fn write(page: &mut Page, host: &Daemon, access: &Access) {
    let counts = &host.counts;
    page.family(&CHECKPOINT).histogram(&[], &counts.checkpoint_pause);
    page.family(&DOWNTIME).histogram(&[], &counts.migration_downtime);
    page.single(&MIGRATED, counts.migration_bytes() as f64);
    page.family(&PAGE_WAIT).histogram(&[], &whimbrel_memory::PAGE_WAITS);
    page.family(&EPOCH_PAUSE).histogram(&[], &counts.epochs.pause);
    page.family(&EPOCH_LENGTH).histogram(&[], &counts.epochs.length);
    page.family(&EPOCH_DELAY).histogram(&[], &counts.epochs.output_delay);
    page.family(&EPOCH_SENT).histogram(&[], &counts.epochs.sent_bytes);
    page.single(&TAKEOVERS, counts.takeovers() as f64);
    operations(page, host);
    schedules(page, host);
    access.calls.write(page.family(&CALLS));
    space(page, host);
}

fn operations(page: &mut Page, host: &Daemon) {
    let mut running = std::collections::BTreeMap::<String, u64>::new();
    for operation in host.operations().running() {
        *running.entry(operation.kind.to_string()).or_default() += 1;
    }
    let mut family = page.family(&RUNNING);
    running.iter().for_each(|(kind, count)| family.sample(&[kind], *count as f64));
    let mut family = page.family(&ENDED);
    for ((kind, outcome), count) in host.operations().ended() {
        family.sample(&[&kind.to_string(), outcome], count as f64);
    }
}

fn schedules(page: &mut Page, host: &Daemon) {
    let health = host.schedules.health();
    let mut family = page.family(&SCHEDULE_FAILED);
    health.iter().for_each(|(name, failed, _)| family.sample(&[name.as_str()], f64::from(*failed)));
    let mut family = page.family(&SCHEDULE_SUCCESS);
    for (name, _, success) in &health {
        success.iter().for_each(|ms| family.sample(&[name.as_str()], *ms as f64 / 1e3));
    }
}

fn space(page: &mut Page, host: &Daemon) {
    let store = host.store_sample.read(host);
    page.single(&STORE_BYTES, store.bytes as f64);
    page.single(&STORE_REFS, store.refs as f64);
    page.single(&LATCHED, f64::from(host.store.is_latched()));
    let folders = [
        (host.directories.data().to_owned(), &STORE_SIZE, &STORE_FREE),
        (host.directories.runtime_dirs(), &MEMORY_SIZE, &MEMORY_FREE),
    ];
    for (folder, size, free) in folders {
        if let Ok(space) = rustix::fs::statvfs(&folder) {
            page.single(size, (space.f_blocks * space.f_frsize) as f64);
            page.single(free, (space.f_bavail * space.f_frsize) as f64);
        }
    }
    if let Ok(spare) = host.memory.spare() {
        page.single(&MEMORY_SPARE, spare as f64);
    }
}
