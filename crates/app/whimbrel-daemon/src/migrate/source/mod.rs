//! Migration source: moves a machine to another host.
//!
//! The commit point is the record (`handover_record.rs`): once it says `HandedOver` and is durable, this host
//! never runs the machine again. It notifies the target until the target confirms, also after a restart
//! (`committed.rs`). Everything that is begun on the way is a value whose drop takes it back.

mod backup_host;
pub(crate) mod baselines;
mod committed;
mod disk_throttle;
mod fetch_connections;
mod handover_record;
pub(crate) mod limits;
mod outcome;
pub(crate) mod pending_handovers;
pub(crate) mod postcopy;
mod shared_storage;

use crate::{
    capsule::checkpoint::{report, round_info},
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
    guest::{GuestThrottle, ThrottledMachine},
    machine::{
        entry::{Machine, MachineLock},
        record::Record,
    },
    migrate::newer_parts,
    network::{late_frames, offloads},
    protect::StandbySeeding,
    server::peer_rpc::PeerLink,
};
use committed::CommittedMachine;
use handover_record::HandoverRecord;
pub(crate) use limits::plausible_rate as meant_rate;
use outcome::{
    CompletedMigration, GuestCooperation, HandedOverMachine, network_handover, pause_info, stopped_by,
};
use std::{ops::ControlFlow, sync::Arc, thread, time::Instant};
use whimbrel_api::{
    MigrateRequest, MigrationEnd, MigrationRecord, MoveNetwork, Operation, OperationKind, OperationResult,
    ThrottleReport,
};
use whimbrel_capture::{CaptureSource, Consumer, PrecopyPolicy, Progress};
use whimbrel_core::{ByteSize, Digest, MachineName, error_chain};
use whimbrel_migrate::{
    HandedOver, MigrationJob, migrate,
    postcopy::deferred_pages::DelayedPause,
    protocol::{ArrayOffer, HandoverId, HomeNetwork, Offer, TunnelId},
    source::BackupSink,
};
use whimbrel_vm::{NetworkPort, PausableMachine, RunningMachine};

impl Daemon {
    /// Starts the operation that migrates a machine to another host.
    pub(crate) fn migrate(
        self: &Arc<Self>,
        name: &MachineName,
        request: MigrateRequest,
    ) -> Result<Operation, DaemonError> {
        if request.host == self.name {
            return Err(DaemonError::invalid(format!("{name} is on {} already", self.name)));
        }
        let (host, machine) = (self.clone(), self.machines.get(name)?);
        if let Some(moved) = self.migrate_to_standby(name, &request.host) {
            return moved;
        }
        self.route(&request.host)?;
        limits::policy(&request, false)?;
        backup_host::check(self, name, &request)?;
        GuestThrottle::check(&request)?;
        Ok(self.operations().start(OperationKind::Migrate, name.to_string(), move |reporter| {
            let (begun, started_ms) = (Instant::now(), crate::now_ms());
            let outcome = host.migrate_and_free(&machine, &request, reporter);
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            let (rounds, end) = match &outcome {
                Ok(gone) => (gone.rounds.clone(), gone.end()),
                Err(error) => (reporter.rounds(), MigrationEnd::Failed { reason: error_chain(error) }),
            };
            let (machine, from) = (machine.name().clone(), host.name.clone());
            let to = request.host.clone();
            let record = MigrationRecord {
                id: crate::migrate::history::new_id(),
                machine,
                from,
                started_ms,
                request,
                total_ms,
                rounds,
                end,
            };
            crate::migrate::history::save(&host.directories, record);
            let CompletedMigration {
                downtime_ms,
                pause,
                wire_bytes,
                rounds,
                network,
                postcopy,
                throttling: GuestCooperation { slowed, freed },
                paused,
                ..
            } = outcome?;
            host.counts.migrated(downtime_ms, wire_bytes);
            Ok(OperationResult::Migrate {
                host: to,
                downtime_ms,
                pause: Some(Box::new(pause)),
                total_ms,
                wire_bytes,
                rounds,
                network,
                postcopy,
                slowed,
                freed,
                paused,
            })
        }))
    }

    /// Migrates the machine and deletes it here.
    fn migrate_and_free(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        request: &MigrateRequest,
        reporter: &ProgressReporter,
    ) -> Result<CompletedMigration, DaemonError> {
        let mut turn = machine.try_lock("migrate", Some(reporter.id))?;
        // Missing pages are fetched first: no target has to fetch from two hosts.
        self.wait_until_complete(&mut turn, reporter)?;
        let link = PeerLink::connect(self, &request.host)?;
        // Until the rounds start and have their own limits.
        link.limit(limits::first_rate(request)?);
        self.notify_aborted_over(&request.host, &link);
        newer_parts::check(link.connection(), &request.host, &turn.record.config)?;
        let moved = self.run_migration(&mut turn, &link, request, reporter)?;
        let (handover, to) = (moved.handover, &request.host);
        let (inherited, page_server) = (turn.record.inherited.clone(), moved.page_server.clone());
        let (daemon, turn, link) = (self, Some(turn), &link);
        let mut committed = CommittedMachine {
            daemon,
            machine,
            turn,
            handover,
            to,
            inherited,
            page_server,
            link: Some(link),
            leaves_home: moved.leaves_home,
        };
        let runs_there = committed.confirm(moved.commit)?;
        let inherited = committed.inherited.as_ref();
        let watched = moved.page_server.as_ref();
        let watched =
            watched.map(|server| self.watch_until_complete(machine, server, (to, inherited), reporter));
        let postcopy = watched.transpose()?;
        let rest = postcopy.as_ref().map_or(0, |postcopy| postcopy.bytes);
        Ok(CompletedMigration {
            downtime_ms: (runs_there - moved.paused_at).as_secs_f64() * 1e3,
            pause: pause_info(&moved.pause.runs(moved.paused_at, runs_there)),
            wire_bytes: link.bytes_both_ways() + rest,
            postcopy,
            rounds: moved.rounds.iter().map(round_info).collect(),
            stopped_by: stopped_by(moved.stop_reason),
            network: moved.network,
            throttling: moved.throttling,
            paused: moved.paused,
        })
    }

    fn run_migration(
        self: &Arc<Self>,
        turn: &mut MachineLock<'_>,
        link: &PeerLink,
        request: &MigrateRequest,
        reporter: &ProgressReporter,
    ) -> Result<HandedOverMachine, DaemonError> {
        let (record, live) = turn.parts()?;
        offloads::check(link.connection(), &request.host, live)?;
        let mut prepared = self.prepare(record, live, request, reporter)?;
        // The markers stay until the migration has ended.
        let _marks = shared_storage::write_markers(record, &mut prepared.offer);
        let (offer, brake) = (&prepared.offer, GuestThrottle::new(live, request, reporter)?);
        let (before, to) = (record.clone(), (&request.host, link));
        let inherited = prepared.seeding.as_ref().map(StandbySeeding::inherited_record);
        let mut handover = HandoverRecord::new(self, record, to, offer, inherited);
        handover.away = live.away.as_deref();
        let (ports, qemu, disks) = (&live.ports, &mut live.qemu, &live.disks);
        let mut stoppable = DelayedPause {
            machine: PausableMachine {
                qemu,
                disks,
                keep_paused: prepared.was_paused,
                buffering_ports: ports,
            },
            page_server: prepared.postcopy.as_ref().map(|postcopy| postcopy.page_server.clone()),
            extra_delay: postcopy::watch_time(request),
        };
        let mut braked = ThrottledMachine::new(&mut stoppable, brake);
        let seeding = prepared.seeding.as_ref();
        let mut copying = backup_host::seed(seeding, &before, &mut live.dirty_logs, ports, reporter)?;
        let mut subject = CaptureSource {
            machine: &mut braked,
            dirty_logs: &mut live.dirty_logs,
            consumer: Consumer::Migration,
        };
        let parts = baselines::DirtySources { record: &before, disks: &live.disks, stored: &live.bases };
        let mut brake = disk_throttle::DiskThrottle::new(&live.disks);
        let (mirrors, cancelled) = (brake.mirrors(), || reporter.is_cancelled());
        let job = MigrationJob {
            budget: &limits::budget(request, &cancelled),
            link,
            offer,
            open_boot_file: &|digest| Ok(Box::new(std::fs::File::open(self.directories.boot_file(&digest))?)),
            open_baseline: &|ledger, begun| self.baseline(&parts, ledger, begun),
            seed: rand::random(),
            ports: &|| ports.iter().map(NetworkPort::addresses).collect(),
            take_late_frames: &mut || late_frames::take_buffered(ports),
            policy: &prepared.policy,
            deferred: prepared.postcopy.as_mut().map(|postcopy| &mut postcopy.deferred_pages),
            backup: copying.as_mut().map(|copying| copying as &mut dyn BackupSink),
            mirrors: &mirrors,
            observe: &mut |progress| {
                progress.ended.iter().for_each(|round| brake.round_ended(round));
                observe(reporter, progress)
            },
        };
        let outcome = migrate(&mut subject, &mut handover, job);
        drop(copying);
        // A machine that stays may write to its disks without a limit again.
        let slowed = ThrottleReport { mirrored: brake.release().map(Box::new), ..braked.release() };
        drop(handover);
        match outcome {
            Ok(done) => Ok(self.committed(record, live, prepared, done, slowed)),
            Err(source) => {
                let (name, host) = (record.name.clone(), request.host.clone());
                Err(DaemonError::Migrate { name, host, source: Box::new(source) })
            }
        }
    }

    /// Frees caches of the guest, seeds the backup host and describes the machine.
    fn prepare<'r>(
        self: &Arc<Self>,
        record: &mut Record,
        live: &mut RunningMachine,
        request: &'r MigrateRequest,
        reporter: &ProgressReporter,
    ) -> Result<PreparedMigration<'r>, DaemonError> {
        let freed = self.free_caches(record, live, request.free_caches, reporter)?;
        let was_paused = live.is_paused();
        let seeding = backup_host::start(self, record, live, request)?;
        let tunnel = self.tunnel_after(record, request);
        let mut offer = self.offer(record, live, tunnel)?;
        let policy = limits::policy(request, was_paused)?;
        let postcopy = postcopy::start(self, live, request, offer.handover, policy.downtime_max)?;
        offer.leaves = postcopy.as_ref().map(|_| self.name.clone());
        offer.third = seeding.as_ref().map(StandbySeeding::backup_host).transpose()?;
        Ok(PreparedMigration { request, offer, policy, postcopy, seeding, was_paused, freed })
    }

    /// Work of the source right after the commit point.
    fn committed(
        self: &Arc<Self>,
        record: &mut Record,
        live: &mut RunningMachine,
        prepared: PreparedMigration<'_>,
        done: HandedOver,
        slowed: ThrottleReport,
    ) -> HandedOverMachine {
        let PreparedMigration { request, offer, postcopy, seeding, was_paused, freed, .. } = prepared;
        seeding.into_iter().for_each(StandbySeeding::committed);
        let network = network_handover(record, offer.tunnel.as_ref(), &request.host);
        self.send_guest_permissions(&request.host, &record.name, done.handover, &record.self_service);
        // Set from the commit on, so that a machine that waits for pages while it starts gets them.
        let page_server = postcopy.map(postcopy::PostcopyMigration::committed);
        live.page_server = page_server.clone();
        let cooperation = GuestCooperation { slowed, freed };
        let leaves_home = offer.tunnel.is_none();
        HandedOverMachine::of(done, (network, leaves_home), page_server, cooperation, was_paused)
    }

    /// Network of the machine after the migration; none if it uses the target's own.
    fn tunnel_after(&self, record: &Record, request: &MigrateRequest) -> Option<HomeNetwork> {
        match (&record.tunnel, request.network) {
            (Some(tunnel), _) if tunnel.home == request.host => Some(tunnel.clone()),
            (_, Some(MoveNetwork::Local)) | (None, None) => None,
            (Some(tunnel), _) => Some(tunnel.clone()),
            (None, Some(MoveNetwork::Home)) => {
                let id = TunnelId(rand::random());
                Some(HomeNetwork { home: self.name.clone(), id, capsule: None })
            }
        }
    }

    pub(crate) fn offer(
        &self,
        record: &Record,
        live: &RunningMachine,
        tunnel: Option<HomeNetwork>,
    ) -> Result<Offer, DaemonError> {
        let file_len = |digest: Digest| {
            let path = self.directories.boot_file(&digest);
            let meta = std::fs::metadata(&path).map_err(|source| DaemonError::io("read", &path, source))?;
            Ok((digest, meta.len()))
        };
        let arrays = live.dirty_logs.iter();
        let arrays = arrays.map(|l| ArrayOffer { name: l.name().to_owned(), pages: l.page_count() });
        Ok(Offer {
            handover: HandoverId(rand::random()),
            name: record.name.clone(),
            config: record.config.clone(),
            arrays: arrays.collect(),
            vmgenid: record.vmgenid.clone().unwrap_or_default(),
            origin: record.last.or(record.origin),
            blobs: record.config.boot_files().map(file_len).collect::<Result<_, DaemonError>>()?,
            qemu_version: self.qemu()?.version.to_string(),
            disk_bytes: crate::migrate::target::incoming::disk_bytes(record, live),
            processor: crate::migrate::target::incoming::processor(),
            tunnel,
            bases: self.local_ancestors(record),
            files: Vec::new(),
            leaves: None,
            third: None,
            paused: live.is_paused(),
        })
    }
}

/// Joins a scoped thread and re-raises its panic.
pub(crate) fn join_scoped<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A migration that is ready to copy pages.
struct PreparedMigration<'r> {
    request: &'r MigrateRequest,
    offer: Offer,
    policy: PrecopyPolicy,
    postcopy: Option<postcopy::PostcopyMigration>,
    seeding: Option<StandbySeeding>,
    was_paused: bool,
    /// Memory that the guest freed before the first round.
    freed: Option<ByteSize>,
}

/// Shows the progress of a migration; breaks it off if it was cancelled.
fn observe(reporter: &ProgressReporter, progress: Progress) -> ControlFlow<()> {
    match &progress.ended {
        Some(round) => reporter.round(round_info(round)),
        None => report(reporter, progress),
    }
    reporter.flow()
}
