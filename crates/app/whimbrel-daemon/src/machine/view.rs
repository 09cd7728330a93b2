//! View of a machine: the copy of its state that lists, metrics and consoles read. It is never locked across
//! I/O, so listing machines never waits for an operation.

use super::{
    console::ConsoleView,
    record::{DiskBase, Phase, Record},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use whimbrel_api::{DiskInfo, MachineInfo, MachineProcess, MachineState, NicInfo, OperationId};
use whimbrel_capture::dirty_observer::DirtyObserver;
use whimbrel_core::{ByteSize, CapsuleId, NicConfig};
use whimbrel_migrate::postcopy::PageServer;
use whimbrel_qemu::QemuGa;
use whimbrel_vm::{
    PagerView, RunningMachine, RuntimeMark, TrafficView, TunnelView, process_report::ProcessReport,
    runtime_dir,
};

/// The copy of a machine's state for readers.
pub(super) struct View {
    pub(super) info: MachineInfo,
    /// Capsules that must not be collected.
    pub(super) needed: Vec<CapsuleId>,
    pub(super) console: Option<ConsoleView>,
    /// Socket of its screen, if it has one and runs.
    pub(super) display: Option<PathBuf>,
    pub(super) qemu_ga: Option<QemuGa>,
    pub(super) observer: Option<DirtyObserver>,
    pub(super) traffic: TrafficView,
    pager: Option<PagerView>,
    tunnel: Option<TunnelView>,
    page_server: Option<Arc<PageServer>>,
}

impl View {
    pub(super) fn new(
        record: &Record,
        live: Option<&RunningMachine>,
        operation: Option<OperationId>,
    ) -> Self {
        Self {
            info: describe(record, live, operation),
            needed: needed_capsules(record),
            console: live.map(|live| ConsoleView::new(live.console())),
            display: live
                .filter(|_| record.config.display)
                .map(|live| runtime_dir::display_socket(live.runtime_path())),
            qemu_ga: live.and_then(|live| live.qemu_ga.clone()),
            observer: live.map(RunningMachine::dirty_observer),
            traffic: live.map(RunningMachine::traffic).unwrap_or_default(),
            pager: live.and_then(RunningMachine::pager_view),
            tunnel: live.and_then(|live| live.away.as_ref()).map(|tunnel| tunnel.view()),
            page_server: live.and_then(|live| live.page_server.clone()),
        }
    }

    /// The machine as `ps` shows it.
    pub(super) fn info(&self) -> MachineInfo {
        let mut info = self.info.clone();
        if let (MachineState::Running | MachineState::Loading { .. }, Some(pager)) =
            (&info.state, &self.pager)
        {
            info.state = pager.state();
        }
        if let (MachineState::ServingPages { missing_pages, stalled, .. }, Some(giving)) =
            (&mut info.state, &self.page_server)
        {
            let now = giving.status();
            *missing_pages = (now.asked || now.missing_at_start.is_some()).then_some(now.progress.missing);
            *stalled = now.stalled.filter(|_| !now.connected);
        }
        info.tunnel = self.tunnel.as_ref().map(TunnelView::info);
        info
    }

    /// The view of a machine that an earlier daemon left to `process`, which reports. Its runtime directory
    /// is `slot`, and its output is in `console_log`.
    pub(super) fn left(
        record: &Record,
        (slot, console_log): (&Path, &Path),
        (process, report): (MachineProcess, &ProcessReport),
    ) -> Self {
        let mut view = Self::new(record, None, None);
        let is_paused = RuntimeMark::PausedByUser.is_on(slot);
        view.info.state = if is_paused { MachineState::Paused } else { MachineState::Running };
        view.info.pid = record.process.as_ref().map(|qemu| qemu.pid);
        view.show(report);
        view.console = Some(ConsoleView::of_other(console_log));
        view.display = record.config.display.then(|| runtime_dir::display_socket(slot));
        view.pass(slot, process);
        view
    }

    /// Shows what the machine's own process reports.
    pub(super) fn show(&mut self, report: &ProcessReport) {
        for (disk, owned) in self.info.disks.iter_mut().zip(&report.owned) {
            disk.owned = ByteSize(*owned);
        }
    }

    /// Leaves out the parts that the machine's own process has now.
    pub(super) fn pass(&mut self, slot: &Path, process: MachineProcess) {
        (self.pager, self.qemu_ga, self.observer, self.page_server) = (None, None, None, None);
        self.traffic = TrafficView::InProcess(slot.to_owned());
        self.info.process = Some(process);
    }
}

/// The capsules that a machine is, or was handed off as, or that its memory or disks are read from.
fn needed_capsules(record: &Record) -> Vec<CapsuleId> {
    match &record.phase {
        Phase::Suspended { capsule } | Phase::Given { capsule, .. } => vec![*capsule],
        phase => {
            let over_image = record.bases.iter().any(|base| matches!(base, DiskBase::Image { .. }));
            let from_image = record.process.as_ref().is_some_and(|process| process.memory.is_some());
            let read_from = record.origin.filter(|_| over_image || from_image);
            let before = match phase {
                Phase::Prepared { handed_off: Some(before), .. } => needed_capsules(before),
                _ => Vec::new(),
            };
            read_from.into_iter().chain(before).collect()
        }
    }
}

fn describe(record: &Record, live: Option<&RunningMachine>, operation: Option<OperationId>) -> MachineInfo {
    let state = match (&record.phase, live) {
        (Phase::Here, Some(live)) if live.is_paused() => MachineState::Paused,
        (Phase::Here, Some(_)) => MachineState::Running,
        (Phase::Here, None) => MachineState::Starting,
        (Phase::Stopped, _) => MachineState::Stopped,
        (Phase::Crashed { reason }, _) => MachineState::Crashed { reason: reason.clone() },
        (Phase::Suspended { .. }, _) => MachineState::Suspended,
        (Phase::Given { to, .. }, _) => MachineState::HandedOff { to: to.clone() },
        (Phase::HandedOver { to, keeps: true, .. }, _) => {
            MachineState::ServingPages { to: to.clone(), missing_pages: None, stalled: None }
        }
        (Phase::HandedOver { .. } | Phase::Prepared { .. }, _) => MachineState::Migrating,
    };
    let disks =
        record.config.disks.iter().zip(&record.bases).enumerate().map(|(index, (disk, base))| DiskInfo {
            size: disk.size,
            base: match base {
                DiskBase::File { path } => path.display().to_string(),
                DiskBase::Image { root, .. } => root.short(),
                DiskBase::Blank => "blank".to_owned(),
            },
            owned: ByteSize(
                live.and_then(|live| live.disks.get(index)).map_or(0, |disk| disk.allocated_bytes()),
            ),
            cdrom: record.config.cdroms.has(index),
        });
    let nic = |nic: &NicConfig| {
        let (mac, bridge) = (nic.mac.clone(), nic.bridge.clone());
        NicInfo { mac, bridge, addresses: Vec::new() }
    };
    let nics = record.config.nics.iter().map(nic);
    MachineInfo {
        name: record.name.clone(),
        state,
        memory: record.config.memory,
        cpus: record.config.cpus,
        accel: record.config.accel,
        disks: disks.collect(),
        nics: nics.collect(),
        display: record.config.display,
        pid: live.map(RunningMachine::pid),
        process: None,
        since_ms: record.since_ms,
        origin: record.origin,
        follows: record.last.or(record.origin),
        operation,
        vmgenid: record.vmgenid.clone(),
        tunnel: None,
        protection: None,
        taken_over: None,
        uploads: None,
        settings: record.settings.clone(),
        restarts: None,
        failed_care: Vec::new(),
    }
}
