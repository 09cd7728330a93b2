//! Migration source: moves a machine to another host.
//!
//! The commit point is the record: once it says `HandedOver` and is durable, this host never runs the machine
//! again. It notifies the target until the target confirms, also after a restart.

mod backup_host;
pub(crate) mod baselines;
mod disk_throttle;
mod fetch_connections;
pub(crate) mod limits;
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
    running::{NetworkPort, PausableMachine},
    server::peer_rpc::PeerLink,
};
pub(crate) use limits::meant as meant_rate;
use std::{sync::Arc, thread, time::Instant};
use whimbrel_api::{
    DowntimeInfo, MigrateRequest, MigrationEnd, MigrationRecord, MoveNetwork, NetworkHandover, Operation,
    OperationKind, OperationResult, PostcopyInfo, RoundInfo, RoundsEnd, ThrottleReport,
};
use whimbrel_capture::{CaptureSource, Consumer, StopReason};
use whimbrel_core::{ByteSize, Digest, HostName, MachineName};
use whimbrel_migrate::{
    HandedOver, MigrationJob, PendingCommit, confirm,
    downtime::DowntimeParts,
    link::Link,
    migrate,
    postcopy::{PageServer, deferred_pages::DelayedPause},
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
        let (host, machine) = (self.clone(), self.machine(name)?);
        self.route(&request.host)?;
        limits::policy(&request, false)?;
        backup_host::check(self, name, &request)?;
        GuestThrottle::check(&request)?;
        Ok(self.operations().start(OperationKind::Migrate, name.to_string(), move |reporter| {
            let (begun, started_ms) = (Instant::now(), crate::now_ms());
            let outcome = host.move_and_retire(&machine, &request, reporter);
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            let (rounds, end) = match &outcome {
                Ok(gone) => (gone.rounds.clone(), gone.end()),
                Err(error) => (reporter.rounds(), MigrationEnd::Failed { reason: in_full(error) }),
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
            crate::migrate::history::save(&host.layout, record);
            let Gone {
                downtime_ms,
                pause,
                wire_bytes,
                rounds,
                network,
                postcopy,
                helped: Helped { slowed, freed },
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
    fn move_and_retire(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        request: &MigrateRequest,
        reporter: &ProgressReporter,
    ) -> Result<Gone, DaemonError> {
        let mut turn = machine.try_lock("migrate", Some(reporter.id))?;
        // Missing pages are fetched first: no target has to fetch from two hosts.
        self.wait_until_complete(&mut turn, reporter)?;
        let link = PeerLink::connect(self, &request.host)?;
        // Until the rounds start and have their own limits.
        link.limit(limits::first(request)?);
        self.tell_over(&request.host, &link);
        let moved = self.move_out(&mut turn, &link, request, reporter)?;
        let (handover, to) = (moved.handover, &request.host);
        let inherited = turn.record.inherited.clone();
        let runs_there = match self.confirm(machine, handover, (to, inherited.as_ref()), moved.commit) {
            Err(error @ DaemonError::WentToThird { .. }) => {
                self.retire(machine, turn, handover);
                return Err(error);
            }
            confirmed => confirmed?,
        };
        send_last(&link, handover, &turn);
        let postcopy = match moved.giving {
            None => {
                self.retire(machine, turn, handover);
                None
            }
            Some(giving) => {
                drop(turn);
                self.keep_until_whole(machine, giving.clone(), handover, inherited.clone());
                Some(self.watch_until_complete(machine, &giving, (to, inherited.as_ref()), reporter)?)
            }
        };
        let rest = postcopy.as_ref().map_or(0, |postcopy| postcopy.bytes);
        Ok(Gone {
            downtime_ms: (runs_there - moved.paused_at).as_secs_f64() * 1e3,
            pause: pause_info(&moved.pause.runs(moved.paused_at, runs_there)),
            wire_bytes: link.bytes_both_ways() + rest,
            postcopy,
            rounds: moved.rounds.iter().map(round_info).collect(),
            stopped_by: stopped_by(moved.why),
            network: moved.network,
            helped: moved.helped,
            paused: moved.paused,
        })
    }

    fn move_out(
        self: &Arc<Self>,
        turn: &mut MachineLock<'_>,
        link: &PeerLink,
        request: &MigrateRequest,
        reporter: &ProgressReporter,
    ) -> Result<Moved, DaemonError> {
        let (record, live) = turn.parts()?;
        let freed = self.free_caches(record, live, request.free_caches, reporter)?;
        let was_paused = live.is_paused();
        let filling = backup_host::start(self, record, live, request)?;
        let tunnel = self.tunnel_after(record, request);
        let mut offer = self.offer(record, live, tunnel)?;
        let policy = limits::policy(request, was_paused)?;
        let mut lazy = postcopy::start(self, live, request, offer.handover, policy.downtime_max)?;
        offer.leaves = lazy.as_ref().map(|_| self.name.clone());
        offer.third = filling.as_ref().map(StandbySeeding::third).transpose()?;
        let mut copying =
            backup_host::fill(filling.as_ref(), record, &mut live.ledgers, &live.ports, reporter)?;
        // In place until the migration has ended.
        let _marks = shared_storage::lay(record, &mut offer);
        let brake = GuestThrottle::new(live, request, reporter)?;
        let before = record.clone();
        let (handover, keeps) = (offer.handover, offer.leaves.is_some());
        record.inherited = filling.as_ref().map(StandbySeeding::inherited);
        let leaving = PendingHandover { handover, to: request.host.clone(), keeps };
        let mark = self.make_ready_to_leave(record, leaving)?;
        let ports = &live.ports;
        let stoppable = PausableMachine {
            qemu: &mut live.qemu,
            disks: &live.disks,
            keep_paused: was_paused,
            keeping: ports,
        };
        let giving = lazy.as_ref().map(|lazy| lazy.giving.clone());
        let mut stoppable = DelayedPause { machine: stoppable, giving, linger: postcopy::linger(request) };
        let mut braked = ThrottledMachine::new(&mut stoppable, brake);
        let mut subject =
            CaptureSource { machine: &mut braked, ledgers: &mut live.ledgers, follower: Consumer::Migration };
        let away = &live.away;
        let parts = baselines::DirtySources { record: &before, disks: &live.disks, stored: &live.bases };
        let mut record_handover = || {
            self.hand_over(record, &before, &offer, &mark)?;
            // From here on the home end belongs to the target.
            away.iter().for_each(crate::network::tunnel::AwayEnd::close);
            Ok(())
        };
        let mut brake = disk_throttle::DiskThrottle::new(&live.disks);
        let mirrors = brake.mirrors();
        let outcome = migrate(MigrationJob {
            subject: &mut subject,
            link,
            offer: &offer,
            blob: &|digest| Ok(Box::new(std::fs::File::open(self.layout.boot_file(&digest))?)),
            base: &|ledger, begun| self.base(&parts, ledger, begun),
            seed: rand::random(),
            ports: &|| ports.iter().map(NetworkPort::addresses).collect(),
            strays: &mut || late_frames::all(ports),
            record_handover: &mut record_handover,
            policy: &policy,
            leaving: lazy.as_mut().map(|lazy| &mut lazy.leaving),
            third: copying.as_mut().map(|copying| copying as &mut dyn BackupSink),
            mirrors: &mirrors,
            observe: &mut |progress| {
                match progress.ended {
                    Some(round) => {
                        brake.ended(&round);
                        reporter.round(round_info(&round));
                    }
                    None => report(reporter, progress),
                }
                reporter.flow()
            },
        });
        drop(copying);
        // A machine that stays may write to its disks without a limit again.
        let slowed = ThrottleReport { mirrored: brake.release().map(Box::new), ..braked.release() };
        match outcome {
            Ok(done) => {
                filling.into_iter().for_each(StandbySeeding::committed);
                let network = network_handover(record, offer.tunnel.as_ref(), &request.host);
                if offer.tunnel.is_none() {
                    self.leave_home(record);
                }
                self.send_permits(&request.host, &record.name, done.handover, &record.self_service);
                // Set from the commit on, so that a machine that waits for pages while it starts gets them.
                let giving = lazy.map(postcopy::PostcopyMigration::committed);
                live.giving = giving.clone();
                Ok(Moved::of(done, network, giving, Helped { slowed, freed }, was_paused))
            }
            Err(source) => {
                (record.leaving, record.inherited) = (None, None);
                live.ledgers.iter_mut().for_each(|ledger| ledger.unfollow(Consumer::Standby));
                self.drop_network(record, &offer);
                self.call_off(offer.handover, &request.host, link);
                let name = turn.record.name.clone();
                Err(DaemonError::Migrate { name, host: request.host.clone(), source: Box::new(source) })
            }
        }
    }

    /// Durably records the handover before the target hears of it, and everything that its commit point needs
    /// except the mark. None of the three files means anything without the mark, so they are written
    /// concurrently: the syncs run together.
    fn make_ready_to_leave(
        &self,
        record: &mut Record,
        leaving: PendingHandover,
    ) -> Result<CommitMark, DaemonError> {
        let dir = self.layout.machine(&record.name);
        record.leaving = Some(leaving.clone());
        let (noted, mark, saved) = thread::scope(|scope| {
            let noted = scope.spawn(|| self.handovers.start(leaving.handover, &leaving.to));
            let mark = scope.spawn(|| CommitMark::prepare(&dir));
            let saved = record.save(&self.layout);
            (joined(noted), joined(mark), saved)
        });
        let mark = mark.map_err(|source| DaemonError::io("write to", &dir, source));
        let ready = noted.and(saved).and(mark);
        ready.inspect_err(|_| {
            (record.leaving, record.inherited) = (None, None);
            self.handovers.abandon(leaving.handover);
        })
    }

    /// The commit point: from here on the machine belongs to the target, whatever happens.
    fn hand_over(
        &self,
        record: &mut Record,
        before: &Record,
        offer: &Offer,
        mark: &CommitMark,
    ) -> Result<(), BoxError> {
        let leaving = record.leaving.clone().ok_or("the handover was not recorded before its commit")?;
        let PendingHandover { handover, to, keeps } = leaving;
        self.keep_network(record, offer, &to)?;
        if let Err(error) = mark.make(handover) {
            // The failed write may have reached the disk all the same: write again who runs the machine, and
            // only then let the target discard it.
            *record = before.clone();
            record.save(&self.layout)?;
            return Err(error.into());
        }
        record.phase = Phase::HandedOver { handover, to, keeps };
        Ok(())
    }

    /// Aborts: the machine stays here. The target is notified now or later.
    fn call_off(self: &Arc<Self>, handover: HandoverId, to: &HostName, link: &PeerLink) {
        self.handovers.abandon(handover);
        self.tell_over(to, link);
        self.tell_given_up();
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
    fn keep_network(&self, record: &Record, offer: &Offer, to: &HostName) -> Result<(), BoxError> {
        match &offer.tunnel {
            Some(tunnel) if tunnel.home == self.name => {
                let begun = self.tunnels.start_home(tunnel.id, &record.name, &record.config, to);
                begun.map_err(BoxError::from)
            }
            _ => Ok(()),
        }
    }

    fn drop_network(&self, record: &Record, offer: &Offer) {
        let here = |tunnel: &&HomeNetwork| tunnel.home == self.name && record.tunnel.is_none();
        offer.tunnel.iter().filter(here).for_each(|tunnel| self.tunnels.end(tunnel.id));
    }

    fn offer(
        &self,
        record: &Record,
        live: &crate::running::RunningMachine,
        tunnel: Option<HomeNetwork>,
    ) -> Result<Offer, DaemonError> {
        let file_len = |digest: Digest| {
            let path = self.layout.boot_file(&digest);
            let meta = std::fs::metadata(&path).map_err(|source| DaemonError::io("read", &path, source))?;
            Ok((digest, meta.len()))
        };
        let boot = record.config.boot.iter().flat_map(|boot| [Some(boot.kernel), boot.initrd]).flatten();
        let arrays = live.ledgers.iter();
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
            bases: self.ancestors_here(record),
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
        let is_the_targets = || !self.protecting.third_has(inherited);
        let wait = |pause| self.sleep_unless_closing(pause) && is_the_targets();
        let confirmed = confirm(handover, commit, &connect, &wait);
        confirmed.ok_or_else(|| match inherited.filter(|_| !is_the_targets()) {
            Some(inherited) => backup_host::went(machine.name(), inherited),
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
        let giving = keeps.then(|| self.keep_again(&mut turn, handover, to)).transpose()?;
        if let (Some(live), Some(giving)) = (&mut turn.live, &giving) {
            live.giving = Some(giving.clone());
        }
        turn.publish();
        let inherited = turn.record.inherited.clone();
        match self.confirm(machine, handover, (to, inherited.as_ref()), PendingCommit::unsent()) {
            Err(DaemonError::WentToThird { .. }) => {
                self.retire(machine, turn, handover);
                return Ok(());
            }
            confirmed => confirmed?,
        };
        match giving {
            None => self.retire(machine, turn, handover),
            Some(giving) => {
                drop(turn);
                self.keep_until_whole(machine, giving, handover, inherited);
            }
        }
        Ok(())
    }
}

/// Sends late frames to the target before the machine's ports here are removed.
fn send_last(link: &PeerLink, handover: HandoverId, turn: &MachineLock<'_>) {
    let last = turn.live.iter().flat_map(|live| late_frames::last(&live.ports)).collect::<Vec<_>>();
    let sent = whimbrel_migrate::late_frames::send(link, handover, &last);
    let heard = sent.and_then(|answers| answers.into_iter().try_for_each(|answer| answer.wait().map(drop)));
    if let Err(unheard) = heard {
        tracing::debug!(%handover, %unheard, "late frames of a migrated machine are lost");
    }
}

/// Joins a scoped thread and re-raises its panic.
pub(crate) fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A machine that was handed over.
struct Moved {
    /// Present if pages may be missing on the target.
    giving: Option<Arc<PageServer>>,
    handover: HandoverId,
    rounds: Vec<whimbrel_capture::RoundStats>,
    why: StopReason,
    paused_at: Instant,
    pause: DowntimeParts,
    commit: PendingCommit,
    network: NetworkHandover,
    helped: Helped,
    /// Whether the user has paused the machine.
    paused: bool,
}

impl Moved {
    fn of(
        done: HandedOver,
        network: NetworkHandover,
        giving: Option<Arc<PageServer>>,
        helped: Helped,
        paused: bool,
    ) -> Self {
        let HandedOver { handover, rounds, why, paused_at, pause, commit } = done;
        Self { giving, handover, rounds, why, paused_at, pause, commit, network, helped, paused }
    }
}

/// How the guest was slowed down, and the memory that it freed.
struct Helped {
    slowed: ThrottleReport,
    freed: Option<ByteSize>,
}

/// Result of a completed migration.
struct Gone {
    downtime_ms: f64,
    pause: DowntimeInfo,
    wire_bytes: u64,
    rounds: Vec<RoundInfo>,
    stopped_by: RoundsEnd,
    network: NetworkHandover,
    postcopy: Option<PostcopyInfo>,
    helped: Helped,
    paused: bool,
}

impl Gone {
    fn end(&self) -> MigrationEnd {
        let Self { downtime_ms, pause, wire_bytes, stopped_by, .. } = *self;
        let (pause, network) = (Some(pause), self.network.clone());
        MigrationEnd::Moved { downtime_ms, pause, wire_bytes, stopped_by, network }
    }
}

fn pause_info(pause: &DowntimeParts) -> DowntimeInfo {
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

fn stopped_by(why: StopReason) -> RoundsEnd {
    match why {
        StopReason::LittleLeft => RoundsEnd::LittleLeft,
        StopReason::WithinDowntime => RoundsEnd::WithinDowntime,
        StopReason::RateAboveMax => RoundsEnd::RateAboveMax,
        StopReason::Plateau => RoundsEnd::Plateau,
        StopReason::RoundsOver => RoundsEnd::RoundsOver,
    }
}

/// Formats an error with its causes in one line.
fn in_full(error: &DaemonError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

fn network_handover(record: &Record, tunnel: Option<&HomeNetwork>, to: &HostName) -> NetworkHandover {
    let tunnel = tunnel.filter(|tunnel| tunnel.home != *to);
    match (record.config.nics.iter().filter(|nic| nic.bridge.is_some()).count(), tunnel) {
        (0, _) => NetworkHandover::NoPorts,
        (ports, Some(tunnel)) => {
            NetworkHandover::Tunnelled { ports: ports as u32, home: tunnel.home.clone() }
        }
        (ports, None) => NetworkHandover::Announced { ports: ports as u32 },
    }
}
