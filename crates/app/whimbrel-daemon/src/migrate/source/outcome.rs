//! Outcome of a migration: the machine that was handed over, and the figures that users see.

use crate::machine::record::Record;
use std::{sync::Arc, time::Instant};
use whimbrel_api::{
    DowntimeInfo, MigrationEnd, NetworkHandover, PostcopyInfo, RoundInfo, RoundsEnd, ThrottleReport,
};
use whimbrel_capture::StopReason;
use whimbrel_core::{ByteSize, HostName};
use whimbrel_migrate::{
    HandedOver, PendingCommit,
    downtime::DowntimeParts,
    postcopy::PageServer,
    protocol::{HandoverId, HomeNetwork},
};

/// A machine that was handed over.
pub(super) struct HandedOverMachine {
    /// Present if pages may be missing on the target.
    pub(super) page_server: Option<Arc<PageServer>>,
    pub(super) handover: HandoverId,
    pub(super) rounds: Vec<whimbrel_capture::RoundStats>,
    pub(super) stop_reason: StopReason,
    pub(super) paused_at: Instant,
    pub(super) pause: DowntimeParts,
    pub(super) commit: PendingCommit,
    pub(super) network: NetworkHandover,
    /// Whether its network moves with it.
    pub(super) leaves_home: bool,
    pub(super) throttling: GuestCooperation,
    /// Whether the user has paused the machine.
    pub(super) paused: bool,
}

impl HandedOverMachine {
    pub(super) fn of(
        done: HandedOver,
        (network, leaves_home): (NetworkHandover, bool),
        page_server: Option<Arc<PageServer>>,
        throttling: GuestCooperation,
        paused: bool,
    ) -> Self {
        let HandedOver { handover, rounds, stop_reason, paused_at, downtime: pause, commit } = done;
        Self {
            page_server,
            handover,
            rounds,
            stop_reason,
            paused_at,
            pause,
            commit,
            network,
            leaves_home,
            throttling,
            paused,
        }
    }
}

/// How the guest was slowed down, and the memory that it freed.
pub(super) struct GuestCooperation {
    pub(super) slowed: ThrottleReport,
    pub(super) freed: Option<ByteSize>,
}

/// Result of a completed migration.
pub(super) struct CompletedMigration {
    pub(super) downtime_ms: f64,
    pub(super) pause: DowntimeInfo,
    pub(super) wire_bytes: u64,
    pub(super) rounds: Vec<RoundInfo>,
    pub(super) stopped_by: RoundsEnd,
    pub(super) network: NetworkHandover,
    pub(super) postcopy: Option<PostcopyInfo>,
    pub(super) throttling: GuestCooperation,
    pub(super) paused: bool,
}

impl CompletedMigration {
    pub(super) fn end(&self) -> MigrationEnd {
        let Self { downtime_ms, pause, wire_bytes, stopped_by, .. } = *self;
        let (pause, network) = (Some(pause), self.network.clone());
        MigrationEnd::Moved { downtime_ms, pause, wire_bytes, stopped_by, network }
    }
}

pub(super) fn pause_info(pause: &DowntimeParts) -> DowntimeInfo {
    let ms = |part: std::time::Duration| part.as_secs_f64() * 1e3;
    let DowntimeParts { stop, scan, devices, pages, load, link, commit, start } = *pause;
    DowntimeInfo {
        stop_ms: ms(stop),
        scan_ms: ms(scan),
        devices_ms: ms(devices),
        pages_ms: ms(pages),
        load_ms: ms(load),
        link_ms: ms(link),
        commit_ms: ms(commit),
        start_ms: ms(start),
    }
}

pub(super) fn stopped_by(why: StopReason) -> RoundsEnd {
    match why {
        StopReason::LittleLeft => RoundsEnd::LittleLeft,
        StopReason::WithinDowntime => RoundsEnd::WithinDowntime,
        StopReason::RateAboveMax => RoundsEnd::RateAboveMax,
        StopReason::Plateau => RoundsEnd::Plateau,
        StopReason::RoundsOver => RoundsEnd::RoundsOver,
    }
}

pub(super) fn network_handover(
    record: &Record,
    tunnel: Option<&HomeNetwork>,
    to: &HostName,
) -> NetworkHandover {
    let tunnel = tunnel.filter(|tunnel| tunnel.home != *to);
    match (record.config.nics.iter().filter(|nic| nic.bridge.is_some()).count(), tunnel) {
        (0, _) => NetworkHandover::NoPorts,
        (ports, Some(tunnel)) => {
            NetworkHandover::Tunnelled { ports: ports as u32, home: tunnel.home.clone() }
        }
        (ports, None) => NetworkHandover::Announced { ports: ports as u32 },
    }
}
