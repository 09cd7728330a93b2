//! Postcopy on the source: serves pages after the commit, while the machine runs on the target.
//!
//! The machine's record says `HandedOver` with `keeps` until the target has every page. Memory stays in the
//! memory file of the paused QEMU, disks in their overlays: a restarted daemon recovers both and continues to
//! serve them. Only after that is everything freed.

use super::fetch_connections;
use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::{InheritedProtectionRecord, Record},
    },
};
use std::{sync::Arc, thread, time::Duration};
use whimbrel_api::{MigrateMode, MigrateRequest, PostcopyInfo, Unit};
use whimbrel_core::{HostName, PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError};
use whimbrel_migrate::{
    postcopy::{PageServer, deferred_pages::DeferredPages, page_server::PageServerStatus},
    protocol::HandoverId,
};
use whimbrel_vm::{RunningMachine, StoppedDisk};

/// How long a machine without rounds is watched first: pages it writes then are sent in the pause.
const WATCH_TIME: Duration = Duration::from_millis(200);
/// Assumed rate of a link that has not been measured: 1 Gbit/s.
const ASSUMED_RATE: u64 = 125_000_000;
/// Pages that may always be sent in the pause, on any link.
const PAGES_MIN: u64 = 64;
/// Interval of progress reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of looks whether a machine has been removed here, which takes a rename.
const REMOVAL_INTERVAL: Duration = Duration::from_millis(5);

/// A migration that may leave pages on the source.
pub(super) struct PostcopyMigration {
    pub(super) page_server: Arc<PageServer>,
    pub(super) deferred_pages: DeferredPages,
}

/// Whether the request is for a postcopy migration.
pub(super) fn is_postcopy(request: &MigrateRequest) -> bool {
    matches!(request.mode, MigrateMode::Lazy | MigrateMode::Hybrid)
}

/// How long the machine is watched right before its pause.
pub(super) fn watch_time(request: &MigrateRequest) -> Duration {
    if request.mode == MigrateMode::Lazy { WATCH_TIME } else { Duration::ZERO }
}

/// Starts a page server, which serves the pages from the pause on.
pub(super) fn start(
    host: &Arc<Daemon>,
    live: &RunningMachine,
    request: &MigrateRequest,
    handover: HandoverId,
    downtime: Duration,
) -> Result<Option<PostcopyMigration>, DaemonError> {
    if !is_postcopy(request) {
        return Ok(None);
    }
    let giving = Arc::new(PageServer::new(handover, arrays_of(live)?));
    let rate = request.rate_max.map_or(ASSUMED_RATE, |rate| rate.0) as f64;
    let pages_max = ((rate * downtime.as_secs_f64()) as u64 / PAGE_SIZE as u64).max(PAGES_MIN);
    let leaving = DeferredPages::new(giving.clone(), pages_max);
    fetch_connections::keep_connected(host, giving.clone(), request.host.clone(), request.rate_max);
    Ok(Some(PostcopyMigration { page_server: giving, deferred_pages: leaving }))
}

impl Drop for PostcopyMigration {
    fn drop(&mut self) {
        // A failed migration serves no pages. A committed one was taken out by `committed`.
        self.page_server.end();
    }
}

impl PostcopyMigration {
    /// Returns the page server of a committed migration, which must continue.
    pub(super) fn committed(self) -> Arc<PageServer> {
        let this = std::mem::ManuallyDrop::new(self);
        this.page_server.clone()
    }
}

fn arrays_of(live: &RunningMachine) -> Result<Vec<Box<dyn PageArray>>, DaemonError> {
    let disks = live.disks.iter().map(whimbrel_vm::RunningDisk::pages);
    Ok(std::iter::once(live.memory.view()?).chain(disks).collect())
}

/// Memory that ended with its QEMU.
struct LostMemory(u64);

impl PageArray for LostMemory {
    fn name(&self) -> &str {
        "memory"
    }
    fn page_count(&self) -> u64 {
        self.0
    }
    fn populated(&mut self) -> Result<PageSet, PageError> {
        Ok(PageSet::empty(self.0))
    }
    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        Ok(PageSet::empty(self.0))
    }
    fn put_back(&mut self, _: &PageSet) {}
    fn read(&self, _: PageRun, _: &mut [u8]) -> Result<(), PageError> {
        Err(PageError::new("memory", "read", "the memory ended with its QEMU"))
    }
}

/// The arrays of a machine whose QEMU is gone: only the disks are left.
fn remaining_arrays(host: &Daemon, record: &Record) -> Result<Vec<Box<dyn PageArray>>, DaemonError> {
    let mut arrays: Vec<Box<dyn PageArray>> = vec![Box::new(LostMemory(record.config.memory_pages()))];
    let dirs = host.directories.machine_dirs(&record.name);
    for (index, (disk, base)) in record.config.disks.iter().zip(&record.bases).enumerate() {
        arrays.push(StoppedDisk::open((&dirs, &host.store), (index, disk.size.0), base)?.pages(None)?);
    }
    Ok(arrays)
}

impl Daemon {
    /// Serves the pages of a machine that runs on the target until all are there, then deletes the machine
    /// here.
    pub(super) fn serve_until_complete(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        giving: Arc<PageServer>,
        handover: HandoverId,
        inherited: Option<InheritedProtectionRecord>,
    ) {
        let (host, machine) = (self.clone(), machine.clone());
        let keep = move || {
            while !giving.wait_finished(REPORT_INTERVAL) {
                if !host.is_open() {
                    return;
                }
                // The backup host has the complete machine, so the target will never report that.
                if host.protections.backup_has_machine(inherited.as_ref()) {
                    giving.mark_complete();
                }
            }
            let whole = giving.status().complete;
            drop(giving);
            if whole {
                let turn = machine.lock("migrate");
                host.clean_up(&machine, turn, handover);
            }
        };
        if let Err(error) = thread::Builder::new().name("keeping".into()).spawn(keep) {
            tracing::error!(%error, "cannot start the thread that waits for the end of a migration");
        }
    }

    /// Reports the progress of the page server until the target has every page and the machine is no longer
    /// here, so that it can come back at once. Cancelling ends only the report.
    pub(super) fn watch_until_complete(
        &self,
        machine: &Arc<Machine>,
        giving: &PageServer,
        (to, inherited): (&HostName, Option<&InheritedProtectionRecord>),
        reporter: &ProgressReporter,
    ) -> Result<PostcopyInfo, DaemonError> {
        let stage = format!("runs on {to}, which fetches the remaining pages");
        loop {
            let over = giving.wait_finished(REPORT_INTERVAL);
            let view = giving.status();
            let (total, missing) = (view.missing_at_start.unwrap_or(view.sent), view.progress.missing);
            reporter.progress(&stage, Unit::Pages, total.saturating_sub(missing), Some(total));
            reporter.postcopy(info_of(&view));
            if over && view.complete {
                self.check_not_at_backup(machine.name(), inherited)?;
                let is_here = || self.machines.check_current(machine).is_ok();
                while is_here() && !reporter.is_cancelled() && self.sleep_unless_closing(REMOVAL_INTERVAL) {}
                return Ok(info_of(&view));
            }
            if over || reporter.is_cancelled() {
                let name = machine.name();
                let left = match over {
                    true => format!("{name} runs on {to}; this host stopped sending its missing pages"),
                    false => format!("{name} runs on {to}, which still fetches pages from this host"),
                };
                return Err(DaemonError::Cancelled { left });
            }
        }
    }

    /// Continues to serve pages that an earlier daemon served.
    pub(super) fn resume_serving(
        self: &Arc<Self>,
        turn: &mut MachineLock<'_>,
        handover: HandoverId,
        to: &HostName,
    ) -> Result<Arc<PageServer>, DaemonError> {
        let arrays = match &turn.running {
            Some(live) => arrays_of(live)?,
            None => {
                tracing::error!(machine = %turn.record.name, %to, "the memory that another host still needs is gone");
                remaining_arrays(self, &turn.record)?
            }
        };
        let giving = Arc::new(PageServer::new(handover, arrays));
        giving.reopen();
        fetch_connections::keep_connected(self, giving.clone(), to.clone(), None);
        Ok(giving)
    }
}

/// The figures that callers see.
fn info_of(view: &PageServerStatus) -> PostcopyInfo {
    let ms = |micros: u64| micros as f64 / 1e3;
    PostcopyInfo {
        initial_missing_pages: view.missing_at_start,
        missing_pages: view.progress.missing,
        faults: view.progress.faults,
        waited_ms: ms(view.progress.waited_us),
        longest_ms: ms(view.progress.longest_us),
        bytes: view.bytes,
        stalled: view.stalled.clone().filter(|_| !view.connected),
    }
}
