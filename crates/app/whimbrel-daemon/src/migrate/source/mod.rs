//! Migration source: moves a machine to another host.
//!
//! The commit point is the record: once it says `HandedOver` and is durable, this host never runs the machine
//! again. It notifies the target until the target confirms, also after a restart.

mod backup_host;
pub(crate) mod baselines;
mod disk_throttle;
mod fetch_connections;
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
        commit_mark::CommitMark,
        entry::{Machine, MachineLock},
        record::{InheritedProtectionRecord, PendingHandover, Phase, Record},
    },
    network::late_frames,
    protect::StandbySeeding,
    running::{NetworkPort, PausableMachine, RunningMachine},
    server::peer_rpc::PeerLink,
};
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
use whimbrel_core::{ByteSize, Digest, HostName, MachineName, error_chain};
use whimbrel_migrate::{
    HandedOver, MigrationJob, PendingCommit, confirm,
    link::Link,
    migrate,
    postcopy::deferred_pages::DelayedPause,
    protocol::{ArrayOffer, HandoverId, HomeNetwork, Offer, TunnelId},
    source::{BackupSink, BoxError},
};

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
        let moved = self.run_migration(&mut turn, &link, request, reporter)?;
        let (handover, to) = (moved.handover, &request.host);
        let inherited = turn.record.inherited.clone();
        let runs_there = match self.confirm(machine, handover, (to, inherited.as_ref()), moved.commit) {
            Err(error @ DaemonError::RunsOnBackupHost { .. }) => {
                self.clean_up(machine, turn, handover);
                return Err(error);
            }
            confirmed => confirmed?,
        };
        send_late_frames(&link, handover, &turn);
        let postcopy = match moved.page_server {
            None => {
                self.clean_up(machine, turn, handover);
                None
            }
            Some(giving) => {
                drop(turn);
                self.serve_until_complete(machine, giving.clone(), handover, inherited.clone());
                Some(self.watch_until_complete(machine, &giving, (to, inherited.as_ref()), reporter)?)
            }
        };
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
        let mut prepared = self.prepare(record, live, request, reporter)?;
        let seeding = prepared.seeding.as_ref();
        let mut copying = backup_host::seed(seeding, record, &mut live.dirty_logs, &live.ports, reporter)?;
        // The markers stay until the migration has ended.
        let _marks = shared_storage::write_markers(record, &mut prepared.offer);
        let (offer, brake) = (&prepared.offer, GuestThrottle::new(live, request, reporter)?);
        let before = record.clone();
        let mark = self.record_pending(record, &prepared)?;
        let (ports, away) = (&live.ports, &live.away);
        let keep_paused = prepared.was_paused;
        let (qemu, disks) = (&mut live.qemu, &live.disks);
        let mut stoppable = DelayedPause {
            machine: PausableMachine { qemu, disks, keep_paused, buffering_ports: ports },
            page_server: prepared.postcopy.as_ref().map(|postcopy| postcopy.page_server.clone()),
            extra_delay: postcopy::watch_time(request),
        };
        let mut braked = ThrottledMachine::new(&mut stoppable, brake);
        let mut subject = CaptureSource {
            machine: &mut braked,
            dirty_logs: &mut live.dirty_logs,
            consumer: Consumer::Migration,
        };
        let parts = baselines::DirtySources { record: &before, disks: &live.disks, stored: &live.bases };
        let mut record_handover = || {
            self.commit_handover(record, &before, offer, &mark)?;
            // From here on the home end belongs to the target.
            away.iter().for_each(crate::network::tunnel::AwayEnd::close);
            Ok(())
        };
        let mut brake = disk_throttle::DiskThrottle::new(&live.disks);
        let mirrors = brake.mirrors();
        let outcome = migrate(MigrationJob {
            source: &mut subject,
            link,
            offer,
            open_boot_file: &|digest| Ok(Box::new(std::fs::File::open(self.directories.boot_file(&digest))?)),
            open_baseline: &|ledger, begun| self.baseline(&parts, ledger, begun),
            seed: rand::random(),
            ports: &|| ports.iter().map(NetworkPort::addresses).collect(),
            take_late_frames: &mut || late_frames::take_buffered(ports),
            record_handover: &mut record_handover,
            policy: &prepared.policy,
            deferred: prepared.postcopy.as_mut().map(|postcopy| &mut postcopy.deferred_pages),
            backup: copying.as_mut().map(|copying| copying as &mut dyn BackupSink),
            mirrors: &mirrors,
            observe: &mut |progress| {
                progress.ended.iter().for_each(|round| brake.round_ended(round));
                observe(reporter, progress)
            },
        });
        drop(copying);
        // A machine that stays may write to its disks without a limit again.
        let slowed = ThrottleReport { mirrored: brake.release().map(Box::new), ..braked.release() };
        match outcome {
            Ok(done) => Ok(self.committed(record, live, prepared, done, slowed)),
            Err(source) => {
                self.stays_here(record, live, &prepared, link);
                let (name, host) = (record.name.clone(), request.host.clone());
                Err(DaemonError::Migrate { name, host, source: Box::new(source) })
            }
        }
    }

    /// Undoes what was prepared for a machine that runs on here.
    fn stays_here(
        self: &Arc<Self>,
        record: &mut Record,
        live: &mut RunningMachine,
        prepared: &PreparedMigration<'_>,
        link: &PeerLink,
    ) {
        (record.leaving, record.inherited) = (None, None);
        live.dirty_logs.iter_mut().for_each(|log| log.detach(Consumer::Standby));
        self.end_home_network(record, &prepared.offer);
        self.abort_handover(prepared.offer.handover, &prepared.request.host, link);
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
        if offer.tunnel.is_none() {
            self.leave_home(record);
        }
        self.send_guest_permissions(&request.host, &record.name, done.handover, &record.self_service);
        // Set from the commit on, so that a machine that waits for pages while it starts gets them.
        let page_server = postcopy.map(postcopy::PostcopyMigration::committed);
        live.page_server = page_server.clone();
        HandedOverMachine::of(done, network, page_server, GuestCooperation { slowed, freed }, was_paused)
    }

    /// Durably records the handover before the target hears of it, and everything that its commit point needs
    /// except the mark. None of the three files means anything without the mark, so they are written
    /// concurrently: the syncs run together.
    fn record_pending(
        &self,
        record: &mut Record,
        prepared: &PreparedMigration<'_>,
    ) -> Result<CommitMark, DaemonError> {
        let PreparedMigration { request, offer, seeding, .. } = prepared;
        record.inherited = seeding.as_ref().map(StandbySeeding::inherited_record);
        let (to, keeps) = (request.host.clone(), offer.leaves.is_some());
        let leaving = PendingHandover { handover: offer.handover, to, keeps };
        let dir = self.directories.machine(&record.name);
        record.leaving = Some(leaving.clone());
        let (noted, mark, saved) = thread::scope(|scope| {
            let noted = scope.spawn(|| self.handovers.start(leaving.handover, &leaving.to));
            let mark = scope.spawn(|| CommitMark::prepare(&dir));
            let saved = record.save(&self.directories);
            (join_scoped(noted), join_scoped(mark), saved)
        });
        let mark = mark.map_err(|source| DaemonError::io("write to", &dir, source));
        let ready = noted.and(saved).and(mark);
        ready.inspect_err(|_| {
            (record.leaving, record.inherited) = (None, None);
            self.handovers.abort(leaving.handover);
        })
    }

    /// The commit point: from here on the machine belongs to the target, whatever happens.
    fn commit_handover(
        &self,
        record: &mut Record,
        before: &Record,
        offer: &Offer,
        mark: &CommitMark,
    ) -> Result<(), BoxError> {
        let leaving = record.leaving.clone().ok_or("the handover was not recorded before its commit")?;
        let PendingHandover { handover, to, keeps } = leaving;
        self.start_home_network(record, offer, &to)?;
        if let Err(error) = mark.make(handover) {
            // The failed write may have reached the disk all the same: write again who runs the machine, and
            // only then let the target discard it.
            *record = before.clone();
            record.save(&self.directories)?;
            return Err(error.into());
        }
        record.phase = Phase::HandedOver { handover, to, keeps };
        Ok(())
    }

    /// Aborts: the machine stays here. The target is notified now or later.
    fn abort_handover(self: &Arc<Self>, handover: HandoverId, to: &HostName, link: &PeerLink) {
        self.handovers.abort(handover);
        self.notify_aborted_over(to, link);
        self.notify_aborted();
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

    /// Records that this host serves the machine's network, before the handover.
    fn start_home_network(&self, record: &Record, offer: &Offer, to: &HostName) -> Result<(), BoxError> {
        match &offer.tunnel {
            Some(tunnel) if tunnel.home == self.name => {
                let begun = self.tunnels.start_home(tunnel.id, &record.name, &record.config, to);
                begun.map_err(BoxError::from)
            }
            _ => Ok(()),
        }
    }

    fn end_home_network(&self, record: &Record, offer: &Offer) {
        let here = |tunnel: &&HomeNetwork| tunnel.home == self.name && record.tunnel.is_none();
        offer.tunnel.iter().filter(here).for_each(|tunnel| self.tunnels.end(tunnel.id));
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
        let boot = record.config.boot.iter().flat_map(|boot| [Some(boot.kernel), boot.initrd]).flatten();
        let arrays = live.dirty_logs.iter();
        let arrays = arrays.map(|l| ArrayOffer { name: l.name().to_owned(), pages: l.page_count() });
        Ok(Offer {
            handover: HandoverId(rand::random()),
            name: record.name.clone(),
            config: record.config.clone(),
            arrays: arrays.collect(),
            vmgenid: record.vmgenid.clone().unwrap_or_default(),
            origin: record.last.or(record.origin),
            blobs: boot.map(file_len).collect::<Result<_, DaemonError>>()?,
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

    /// Notifies the target until it confirms that the machine runs there. Returns since when it runs.
    fn confirm(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        handover: HandoverId,
        (to, inherited): (&HostName, Option<&InheritedProtectionRecord>),
        commit: PendingCommit,
    ) -> Result<Instant, DaemonError> {
        let connect = || {
            let link = PeerLink::connect(self, to).map_err(BoxError::from)?;
            Ok(Box::new(link) as Box<dyn Link>)
        };
        let is_the_targets = || !self.protections.backup_has_machine(inherited);
        let wait = |pause| self.sleep_unless_closing(pause) && is_the_targets();
        let confirmed = confirm(handover, commit, &connect, &wait);
        confirmed.ok_or_else(|| match inherited.filter(|_| !is_the_targets()) {
            Some(inherited) => backup_host::taken_over_error(machine.name(), inherited),
            None => DaemonError::Unconfirmed { name: machine.name().clone(), host: to.clone() },
        })
    }

    /// Continues a handover that an earlier daemon has committed.
    pub(crate) fn finish_handover(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        handover: HandoverId,
        to: HostName,
    ) {
        let (host, machine) = (self.clone(), machine.clone());
        let finish = move || {
            if let Err(error) = host.finish_committed(&machine, handover, &to) {
                tracing::warn!(error = &error as &dyn std::error::Error, "a handover is still unconfirmed");
            }
        };
        if let Err(error) = thread::Builder::new().name("handover".into()).spawn(finish) {
            tracing::error!(%error, "cannot start the thread that finishes a handover");
        }
    }

    fn finish_committed(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        handover: HandoverId,
        to: &HostName,
    ) -> Result<(), DaemonError> {
        let mut turn = machine.lock("migrate");
        let keeps = matches!(turn.record.phase, Phase::HandedOver { keeps: true, .. });
        // Set first, so that a machine that waits for pages while it starts gets them.
        let giving = keeps.then(|| self.resume_serving(&mut turn, handover, to)).transpose()?;
        if let (Some(live), Some(giving)) = (&mut turn.running, &giving) {
            live.page_server = Some(giving.clone());
        }
        turn.publish();
        let inherited = turn.record.inherited.clone();
        match self.confirm(machine, handover, (to, inherited.as_ref()), PendingCommit::unsent()) {
            Err(DaemonError::RunsOnBackupHost { .. }) => {
                self.clean_up(machine, turn, handover);
                return Ok(());
            }
            confirmed => confirmed?,
        };
        match giving {
            None => self.clean_up(machine, turn, handover),
            Some(giving) => {
                drop(turn);
                self.serve_until_complete(machine, giving, handover, inherited);
            }
        }
        Ok(())
    }
}

/// Sends late frames to the target before the machine's ports here are removed.
fn send_late_frames(link: &PeerLink, handover: HandoverId, turn: &MachineLock<'_>) {
    let last = turn.running.iter().flat_map(|live| late_frames::take_last(&live.ports)).collect::<Vec<_>>();
    let sent = whimbrel_migrate::late_frames::send(link, handover, &last);
    let heard = sent.and_then(|answers| answers.into_iter().try_for_each(|answer| answer.wait().map(drop)));
    if let Err(unheard) = heard {
        tracing::debug!(%handover, %unheard, "late frames of a migrated machine are lost");
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
