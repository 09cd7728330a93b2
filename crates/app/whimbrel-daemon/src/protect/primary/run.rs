//! Protection thread: starts protections of a machine one after another, until it moves or none is wanted.
//!
//! One thread for each machine. While the machine is protected, the thread holds the machine lock, so nothing
//! else changes it: requests to stop it or to end the protection go to the thread. When the standby is lost,
//! the thread determines the owner (`takeover::ownership`), releases the lock, and tries again later.

use super::{
    epochs::{self, EpochsEnd},
    handle::{ProtectionCommand, ProtectionEvent, ProtectionHandle},
    heartbeat::{Heartbeat, HeartbeatThreads, Output},
    inherited::{self, InheritedProtection, SourceWatch},
    stall::StallWatch,
};
use crate::protect::{
    link::{ControlLink, PageLink},
    records::{ProtectionRecord, ProtectionSide},
    takeover::ownership::{self, Ownership},
    witness::client::WitnessClient,
};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::Phase,
        supervisor,
    },
    migrate::newer_parts,
    network::offloads,
};
use std::{
    sync::{Arc, mpsc::Sender},
    time::{Duration, Instant},
};
use whimbrel_api::ProtectState;
use whimbrel_capture::{Consumer, DirtyLog};
use whimbrel_core::error_chain;
use whimbrel_protect::{
    lease::{self, PrimaryState, WitnessQuery},
    protocol::{ProtectionId, StartRequest},
};
use whimbrel_vm::RunningMachine;

/// How long to wait before a lost standby is tried again.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// End of one protection.
pub(in crate::protect) enum RunEnd {
    /// There is nothing left to protect here, or the protection was ended.
    Over,
    /// The start failed, or the standby was lost: the machine runs here alone. `answers` says whether the
    /// standby has heard of that end, so that it is worth another attempt.
    Alone { reason: String, error: Option<DaemonError>, answers: bool },
}

/// Runs the protection thread. `again` says whether the machine was protected before.
pub(in crate::protect) fn run(
    host: &Arc<Daemon>,
    machine: &Arc<Machine>,
    guard: &Arc<ProtectionHandle>,
    again: bool,
    told: &Sender<ProtectionEvent>,
) {
    let mut first = !again;
    loop {
        let id = ProtectionId(rand::random());
        let end = Attempt { host, machine, handle: guard, id, events: told }.run();
        let RunEnd::Alone { reason, error, answers } = end else { break };
        // What keeps the machine from being protected may be here: a pause, or another operation.
        let is_lost =
            !answers && !matches!(error, Some(DaemonError::Busy { .. } | DaemonError::State { .. }));
        if first && !guard.was_protected() {
            let error = error.unwrap_or_else(|| DaemonError::invalid(reason));
            let _ = told.send(ProtectionEvent::Failed(error));
            break;
        }
        first = false;
        tracing::error!(machine = %guard.name, standby = %guard.settings().request.host, reason, "the machine runs unprotected");
        guard.set_state(ProtectState::Unprotected { reason: reason.clone() });
        if !wait_unprotected(host, guard) {
            break;
        }
        if is_lost {
            guard.choose_next_spare();
        }
    }
    host.protections.remove_handle(guard);
}

/// Runs the thread of an inherited protection. `runs` gets the time since when the machine runs.
pub(in crate::protect) fn inherit(
    host: &Arc<Daemon>,
    machine: &Arc<Machine>,
    guard: &Arc<ProtectionHandle>,
    heir: InheritedProtection,
    runs: &Sender<Instant>,
) {
    let (told, _nobody) = std::sync::mpsc::channel();
    let end = Attempt { host, machine, handle: guard, id: heir.id, events: &told }.run_inherited(heir, runs);
    if let RunEnd::Alone { reason, .. } = end {
        tracing::error!(machine = %guard.name, standby = %guard.settings().request.host, reason, "the machine runs unprotected, and some of its pages may be on another host");
    }
    host.protections.remove_handle(guard);
    supervisor::end_if_gone(host, machine);
}

/// Waits before the standby is tried again. Returns whether to try.
fn wait_unprotected(host: &Daemon, guard: &Arc<ProtectionHandle>) -> bool {
    let until = Instant::now() + RETRY_DELAY;
    while Instant::now() < until {
        if guard.is_cancelled() || host.is_closing() {
            return false;
        }
        match guard.wait_command(until.min(Instant::now() + Duration::from_millis(100))) {
            Some(ProtectionCommand::Unprotect(answer)) => {
                host.protections.remove_handle(guard);
                let _ = answer.send(Ok(()));
                return false;
            }
            Some(ProtectionCommand::Failover(answer)) => {
                let name = guard.name.clone();
                let _ =
                    answer.send(Err(DaemonError::State { name, state: "unprotected", needed: "protected" }));
            }
            // The caller hears that the protection is busy.
            Some(ProtectionCommand::Work(work)) => drop(work),
            None => {}
        }
    }
    true
}

/// One protection, from its start to its end.
struct Attempt<'a> {
    host: &'a Arc<Daemon>,
    machine: &'a Arc<Machine>,
    handle: &'a Arc<ProtectionHandle>,
    id: ProtectionId,
    events: &'a Sender<ProtectionEvent>,
}

impl Attempt<'_> {
    fn run(&self) -> RunEnd {
        let failed = |error: DaemonError| {
            let reason = error_chain(&error);
            RunEnd::Alone { reason, error: Some(error), answers: false }
        };
        let mut turn = match self.machine.try_lock("protection", None) {
            Ok(turn) => turn,
            Err(error) => return failed(error),
        };
        // The machine may have ended since the lock was released.
        if let Err(error) =
            self.host.machines.check_current(self.machine).and_then(|()| turn.running().map(drop))
        {
            return match self.handle.was_protected() {
                true => RunEnd::Over,
                false => failed(error),
            };
        }
        match self.start(&mut turn) {
            Ok((link, beats, has_pages)) => self.protect(turn, link, beats, has_pages),
            Err(error) => failed(error),
        }
    }

    /// Starts the protection: the standby has accepted the machine, and the record is durable.
    fn start(
        &self,
        turn: &mut MachineLock<'_>,
    ) -> Result<(Arc<PageLink>, Arc<Heartbeat>, bool), DaemonError> {
        let (host, settings) = (self.host, self.handle.settings());
        let request = &settings.request;
        let (record, live) = turn.parts()?;
        if live.is_paused() {
            return Err(DaemonError::State { name: record.name.clone(), state: "paused", needed: "running" });
        }
        if live.away.is_some() {
            return Err(DaemonError::invalid(format!("{} runs away from its network", record.name)));
        }
        let offer = super::offer::of(host, record, live, self.handle.handover(), settings.replay)?;
        let link = Arc::new(PageLink::connect(host, &request.host, settings.rate_max)?);
        offloads::check(link.connection(), &request.host, live)?;
        newer_parts::check(link.connection(), &request.host, &record.config)?;
        let standby = Arc::new(ControlLink::new(host, &request.host));
        let witness = request.witness.as_ref();
        let witness = witness.map(|witness| WitnessClient::new(host, witness, self.id, settings.term));
        let rules = lease::PrimaryLease::initial(witness.is_some(), settings.term);
        let beats = Arc::new(Heartbeat::new(
            self.id,
            rules,
            settings.term,
            (standby, witness),
            (Output::of(live), Arc::downgrade(&link)),
            Arc::downgrade(self.handle),
        ));
        self.register_witness(&beats)?;
        let side = ProtectionSide::Primary { request: request.clone(), gave_up: false };
        host.protections.put_record(ProtectionRecord::new(
            self.id,
            &self.handle.name,
            self.handle.handover(),
            side,
        ))?;
        let begin = StartRequest {
            id: self.id,
            offer,
            coding: settings.coding,
            lease_ms: settings.term.as_millis() as u32,
            witness: request.witness.clone(),
            then: settings.next_protection(&host.name),
            keep: settings.snapshots,
            heir: None,
        };
        let read = |digest| {
            std::fs::read(host.directories.boot_file(&digest)).map_err(whimbrel_protect::BoxError::from)
        };
        let begun = epochs::sender(&*link, self.id, &settings, record.config.memory.0)
            .and_then(|sender| sender.start(&begin, &read).map_err(epochs::failed));
        match begun {
            Ok(has_pages) => Ok((link, beats, has_pages)),
            Err(error) => {
                // The standby has never had a complete epoch of this protection, so it cannot take over.
                self.abort(&beats);
                Err(error)
            }
        }
    }

    /// Registers the protection at its witness, if it has one.
    fn register_witness(&self, beats: &Heartbeat) -> Result<(), DaemonError> {
        let Some(witness) = &beats.witness else { return Ok(()) };
        let settings = self.handle.settings();
        let (standby, term_ms) = (settings.request.host.clone(), settings.term.as_millis() as u32);
        let reply = witness.ask(&WitnessQuery::Register { standby, term_ms }, Duration::from_secs(5));
        if reply != Some(lease::WitnessReply::Yes) {
            let says = reply.map_or("no answer".to_owned(), |reply| format!("its reply is {reply:?}"));
            return Err(DaemonError::invalid(format!(
                "{} does not act as a witness: {says}",
                witness.name()
            )));
        }
        beats.ask_witness(&WitnessQuery::Renew);
        Ok(())
    }

    /// Ends a protection that never had a complete epoch.
    fn abort(&self, beats: &Heartbeat) {
        let keep = self.handle.was_protected() && self.handle.settings().request.spares.is_empty();
        ownership::notify_ended(self.host, self.handle, beats, keep);
    }

    fn protect(
        &self,
        mut turn: MachineLock<'_>,
        link: Arc<PageLink>,
        beats: Arc<Heartbeat>,
        has_pages: bool,
    ) -> RunEnd {
        let beating = match HeartbeatThreads::start(beats.clone()) {
            Ok(beating) => beating,
            Err(error) => {
                self.abort(&beats);
                return RunEnd::Alone { reason: error.to_string(), error: None, answers: true };
            }
        };
        let outcome = match turn
            .parts()
            .and_then(|(record, live)| Ok((self.watch_stalls(live, &beats)?, record, live)))
        {
            Ok((_watch, record, live)) => {
                let parts = (record, live);
                epochs::run(self.host, self.handle, parts, (&link, &beats), has_pages, self.events)
            }
            Err(error) => EpochsEnd::Failed(error),
        };
        link.close();
        let end = self.after_epochs(turn, outcome, &beats);
        drop(beating);
        end
    }

    fn watch_stalls(&self, live: &RunningMachine, beats: &Arc<Heartbeat>) -> Result<StallWatch, DaemonError> {
        let qemu = (live.qemu.process().identity(), live.qemu.dir().join("qemu.log"));
        StallWatch::start(self.host, self.handle, beats, qemu)
            .map_err(|source| DaemonError::io("start a thread for", self.host.directories.data(), source))
    }

    /// Runs an incoming machine and protects it.
    fn run_inherited(&self, heir: InheritedProtection, runs: &Sender<Instant>) -> RunEnd {
        let mut turn = self.machine.lock("protection");
        let output = turn.running.as_ref().map(Output::of).unwrap_or_default();
        let beats = heir.heartbeat(self.host, self.handle, output);
        let (outcome, beating) = match self.run_here(&mut turn, &heir, &beats, runs) {
            Ok((outcome, beating)) => (outcome, Some(beating)),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(machine = %self.handle.name, error, "cannot run a machine with an inherited protection");
                turn.running.iter().for_each(|live| live.qemu.process().kill());
                (EpochsEnd::QemuGone, None)
            }
        };
        heir.link.close();
        let end = self.after_epochs(turn, outcome, &beats);
        drop(beating);
        end
    }

    fn run_here(
        &self,
        turn: &mut MachineLock<'_>,
        heir: &InheritedProtection,
        beats: &Arc<Heartbeat>,
        runs: &Sender<Instant>,
    ) -> Result<(EpochsEnd, HeartbeatThreads), DaemonError> {
        // From here on the protection decides about the machine, which is recorded.
        turn.record.phase = Phase::Here;
        turn.record.since_ms = crate::now_ms();
        let (record, live) = turn.parts()?;
        let (log, process) = (live.qemu.dir().join("qemu.log"), live.qemu.process().identity());
        let events = live.events();
        inherited::buffer_output(beats);
        live.open_ports();
        let beating = HeartbeatThreads::start(beats.clone())
            .map_err(|source| DaemonError::io("start a thread for", self.host.directories.data(), source))?;
        if beats.may_run() {
            live.ports.iter().for_each(whimbrel_vm::NetworkPort::announce);
        }
        live.set_paused(false)?;
        let since = Instant::now();
        record.save(&self.host.directories)?;
        self.host.start_fetching(self.machine, live);
        supervisor::watch(self.host, self.machine, events);
        self.handle.set_state(ProtectState::Protected);
        let taking = crate::migrate::target::missing_pages::fetcher_of(self.host, record);
        let watch = SourceWatch::start(taking, beats, process, log);
        let _ = runs.send(since);
        // The lock is held as long as the machine is protected; publish its state meanwhile.
        turn.publish();
        let (record, live) = turn.parts()?;
        tracing::info!(machine = %self.handle.name, standby = %beats.standby.to(), "a migration with a backup host has completed here");
        let _stalls = self.watch_stalls(live, beats)?;
        let outcome = epochs::inherit(self.host, self.handle, (record, live), (&heir.link, beats));
        drop(watch);
        Ok((outcome, beating))
    }

    fn after_epochs(&self, mut turn: MachineLock<'_>, outcome: EpochsEnd, beats: &Arc<Heartbeat>) -> RunEnd {
        if let Some(live) = &mut turn.running {
            live.dirty_logs.iter_mut().for_each(|ledger: &mut DirtyLog| ledger.detach(Consumer::Standby));
        }
        match outcome {
            EpochsEnd::Closing => RunEnd::Over,
            EpochsEnd::Failed(error) if !beats.is_armed() => {
                self.abort(beats);
                RunEnd::Alone { reason: error_chain(&error), error: Some(error), answers: false }
            }
            EpochsEnd::Unprotect(answer) => match self.determine_owner(&mut turn, beats, false) {
                Ownership::Alone => {
                    self.release_output(&mut turn, beats, false);
                    // The caller may use the machine as soon as it gets the answer.
                    drop(turn);
                    self.host.protections.remove_handle(self.handle);
                    let _ = answer.send(Ok(()));
                    RunEnd::Over
                }
                settled => {
                    let _ = answer.send(Err(DaemonError::invalid("the standby has taken the machine over")));
                    self.finish(turn, beats, settled)
                }
            },
            EpochsEnd::Failover { answer, paused_at } => {
                let given = self.yield_to_standby(&mut turn, beats);
                match given {
                    Ownership::Gone => {
                        let _ = answer.send(Ok(paused_at.elapsed().as_secs_f64() * 1e3));
                    }
                    _ => {
                        let _ = answer.send(Err(DaemonError::invalid("the standby did not take over")));
                        turn.running.iter_mut().for_each(RunningMachine::unpause);
                    }
                }
                self.finish(turn, beats, given)
            }
            EpochsEnd::QemuGone => {
                // The guest is lost here, and the standby has all of it that anybody has seen.
                let given = self.yield_to_standby(&mut turn, beats);
                self.finish(turn, beats, given)
            }
            EpochsEnd::SwitchedOff | EpochsEnd::Complete => {
                let settled = self.determine_owner(&mut turn, beats, false);
                if matches!(settled, Ownership::Alone) {
                    self.release_output(&mut turn, beats, false);
                    return RunEnd::Over;
                }
                self.finish(turn, beats, settled)
            }
            EpochsEnd::Failed(error) => {
                let reason = error_chain(&error);
                tracing::warn!(machine = %self.handle.name, reason, "the standby is lost");
                let settled = self.determine_owner(&mut turn, beats, true);
                match settled {
                    Ownership::Alone => {
                        let answers = self.release_output(&mut turn, beats, true);
                        RunEnd::Alone { reason, error: None, answers }
                    }
                    settled => self.finish(turn, beats, settled),
                }
            }
        }
    }

    fn determine_owner(&self, turn: &mut MachineLock<'_>, beats: &Arc<Heartbeat>, keep: bool) -> Ownership {
        ownership::determine_owner(self.host, self.handle, beats, turn.running.as_mut(), keep)
    }

    fn yield_to_standby(&self, turn: &mut MachineLock<'_>, beats: &Heartbeat) -> Ownership {
        ownership::yield_to_standby(self.host, self.handle, beats, turn.running.as_mut())
    }

    /// Releases all output: only this host has the machine. The standby is notified afterwards, which may
    /// take long. Returns whether it has answered.
    fn release_output(&self, turn: &mut MachineLock<'_>, beats: &Arc<Heartbeat>, keep: bool) -> bool {
        beats.ports().for_each(|port| port.set_gates(whimbrel_net::Gates::OPEN));
        beats.release_output();
        if let Some(live) = &mut turn.running
            && live.is_paused()
        {
            live.unpause();
        }
        ownership::record_alone(self.host, self.handle, beats, keep)
    }

    fn finish(&self, turn: MachineLock<'_>, beats: &Arc<Heartbeat>, settled: Ownership) -> RunEnd {
        match settled {
            Ownership::Gone => ownership::end_machine(self.host, self.machine, turn, self.handle, beats),
            Ownership::Alone => {
                // The standby returned the machine, so it belongs to this host, whatever is left of it.
                let mut turn = turn;
                self.release_output(&mut turn, beats, false);
            }
            // A later daemon determines the owner, because the record remains.
            Ownership::Closing => {}
        }
        let is_protected = beats.lease().state() == PrimaryState::Protected && beats.witness.is_some();
        if is_protected && !self.host.is_closing() {
            tracing::error!("a protection ended while its lease was held");
        }
        RunEnd::Over
    }
}
