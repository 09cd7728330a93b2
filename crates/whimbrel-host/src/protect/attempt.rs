//! One protection of a machine after the other: from the first copy until somebody else has it or nobody does.
//!
//! One thread a machine. While it is protected the thread has the machine's turn, so nothing else changes it: whoever wants to
//! stop it, or to end the protection, asks the thread. When the standby is lost the thread settles whose the machine is
//! (`settle`), lets go of the turn, and comes back when the standby does.

use super::{
    arbiter::Arbiter,
    beats::{Beating, Beats},
    epochs::{self, Outcome},
    guard::{Command, Guard, Told},
    heir::{self, Heir, SourceWatch},
    link::{Line, PageLink},
    notes::{Note, Side},
    settle::{self, Settled},
};
use crate::{
    error::HostError,
    host::Host,
    machine::{Machine, Turn},
    record::Phase,
    supervise,
};
use std::{
    sync::{Arc, mpsc::Sender},
    time::{Duration, Instant},
};
use whimbrel_api::ProtectState;
use whimbrel_capture::{Follower, Ledger};
use whimbrel_protect::{
    lease::{self, PrimaryStand, Question},
    protocol::{Begin, ProtectionId},
};

/// How long a standby that was lost is left alone before it is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(2);

/// How one protection ended.
pub(super) enum End {
    /// There is nothing left to protect here, or nobody wants it protected.
    Over,
    /// It did not begin, or lost its standby: the machine runs here alone.
    Alone { reason: String, error: Option<HostError> },
}

/// The thread of a guard. `again` says whether the machine was protected before.
pub(super) fn run(
    host: &Arc<Host>,
    machine: &Arc<Machine>,
    guard: &Arc<Guard>,
    again: bool,
    told: &Sender<Told>,
) {
    let mut first = !again;
    loop {
        let id = ProtectionId(rand::random());
        let end = Attempt { host, machine, guard, id, told }.run();
        let End::Alone { reason, error } = end else { break };
        if first && !guard.was_protected() {
            let error = error.unwrap_or_else(|| HostError::invalid(reason));
            let _ = told.send(Told::Failed(error));
            break;
        }
        first = false;
        tracing::error!(machine = %guard.name, standby = %guard.settings.request.host, reason, "the machine runs unprotected");
        guard.set_state(ProtectState::Unprotected { reason: reason.clone() });
        if !wait_unprotected(host, guard) {
            break;
        }
    }
    host.protecting.leave_guard(guard);
}

/// The thread of a guard whose protection came here with the machine. `runs` is told since when the machine runs.
pub(super) fn inherit(
    host: &Arc<Host>,
    machine: &Arc<Machine>,
    guard: &Arc<Guard>,
    heir: Heir,
    runs: &Sender<Instant>,
) {
    let (told, _nobody) = std::sync::mpsc::channel();
    let end = Attempt { host, machine, guard, id: heir.id, told: &told }.inherited(heir, runs);
    if let End::Alone { reason, .. } = end {
        tracing::error!(machine = %guard.name, standby = %guard.settings.request.host, reason, "the machine runs unprotected, and pages of it may be on another host");
    }
    host.protecting.leave_guard(guard);
    supervise::look(host, machine);
}

/// Waits before the standby is tried again; whether it is to be.
fn wait_unprotected(host: &Host, guard: &Arc<Guard>) -> bool {
    let until = Instant::now() + TRY_AGAIN;
    while Instant::now() < until {
        if guard.is_cancelled() || host.is_closing() {
            return false;
        }
        match guard.wait_command(until.min(Instant::now() + Duration::from_millis(100))) {
            Some(Command::Unprotect(answer)) => {
                host.protecting.leave_guard(guard);
                let _ = answer.send(Ok(()));
                return false;
            }
            Some(Command::Failover(answer)) => {
                let name = guard.name.clone();
                let _ =
                    answer.send(Err(HostError::State { name, state: "unprotected", needed: "protected" }));
            }
            None => {}
        }
    }
    true
}

/// One protection, from its beginning to its end.
struct Attempt<'a> {
    host: &'a Arc<Host>,
    machine: &'a Arc<Machine>,
    guard: &'a Arc<Guard>,
    id: ProtectionId,
    told: &'a Sender<Told>,
}

impl Attempt<'_> {
    fn run(&self) -> End {
        let failed =
            |error: HostError| End::Alone { reason: crate::peers::chain(&error), error: Some(error) };
        let mut turn = match self.machine.begin("protection", None) {
            Ok(turn) => turn,
            Err(error) => return failed(error),
        };
        // Somebody may have ended it since the turn was let go of.
        if let Err(error) = self.host.check_current(self.machine).and_then(|()| turn.live().map(drop)) {
            return match self.guard.was_protected() {
                true => End::Over,
                false => failed(error),
            };
        }
        match self.begin(&mut turn) {
            Ok((link, beats, has_pages)) => self.protect(turn, link, beats, has_pages),
            Err(error) => failed(error),
        }
    }

    /// Up to where the standby has room for the machine and all is written down.
    fn begin(&self, turn: &mut Turn<'_>) -> Result<(Arc<PageLink>, Arc<Beats>, bool), HostError> {
        let (host, settings) = (self.host, &self.guard.settings);
        let request = &settings.request;
        let (record, live) = turn.parts()?;
        if live.is_paused() {
            return Err(HostError::State { name: record.name.clone(), state: "paused", needed: "running" });
        }
        if live.away.is_some() {
            return Err(HostError::invalid(format!("{} runs away from its network", record.name)));
        }
        let offer = super::offer::of(host, record, live, self.guard.handover)?;
        let link = Arc::new(PageLink::connect(host, &request.host, settings.rate_max)?);
        let standby = Arc::new(Line::new(host, &request.host));
        let witness = request.witness.as_ref();
        let witness = witness.map(|witness| Arbiter::new(host, witness, self.id, settings.term));
        let ports = live.ports.iter().map(crate::live::LivePort::port).collect();
        let rules = lease::Primary::begin(witness.is_some(), settings.term);
        let beats = Arc::new(Beats::new(
            self.id,
            rules,
            settings.term,
            (standby, witness),
            (ports, Arc::downgrade(&link)),
            Arc::downgrade(self.guard),
        ));
        if let Some(witness) = &beats.witness {
            let term_ms = settings.term.as_millis() as u32;
            let question = Question::Register { standby: request.host.clone(), term_ms };
            let verdict = witness.ask(&question, Duration::from_secs(5));
            if verdict != Some(lease::Verdict::Yes) {
                let says =
                    verdict.map_or("it does not answer".to_owned(), |verdict| format!("it says {verdict:?}"));
                return Err(HostError::invalid(format!(
                    "{} does not act as a witness: {says}",
                    witness.name()
                )));
            }
            beats.ask_witness(&Question::Renew);
        }
        let side = Side::Primary { request: request.clone(), gave_up: false };
        host.protecting.put_note(Note::new(self.id, &self.guard.name, self.guard.handover, side))?;
        let begin = Begin {
            id: self.id,
            offer,
            coding: settings.coding,
            lease_ms: settings.term.as_millis() as u32,
            witness: request.witness.clone(),
            then: settings.of_whoever_takes_over(),
            keep: settings.keep,
            heir: None,
        };
        let read =
            |digest| std::fs::read(host.layout.boot_file(&digest)).map_err(whimbrel_protect::BoxError::from);
        let begun = epochs::sender(&*link, self.id, settings, record.config.memory.0)
            .and_then(|sender| sender.begin(&begin, &read).map_err(epochs::failed));
        match begun {
            Ok(has_pages) => Ok((link, beats, has_pages)),
            Err(error) => {
                // The standby has never had a whole epoch of this one: it cannot take over by it.
                self.call_off(&beats);
                Err(error)
            }
        }
    }

    /// Nothing came of it, and nothing can: no epoch was ever sealed.
    fn call_off(&self, beats: &Beats) {
        let keep = self.guard.was_protected();
        settle::tell_ended(self.host, self.guard, beats, keep);
    }

    fn protect(&self, mut turn: Turn<'_>, link: Arc<PageLink>, beats: Arc<Beats>, has_pages: bool) -> End {
        let beating = match Beating::start(beats.clone()) {
            Ok(beating) => beating,
            Err(error) => {
                self.call_off(&beats);
                return End::Alone { reason: error.to_string(), error: None };
            }
        };
        let outcome = match turn.parts() {
            Ok((record, live)) => {
                let memory = record.config.memory.0;
                epochs::run(self.host, self.guard, live, memory, (&link, &beats), has_pages, self.told)
            }
            Err(error) => Outcome::Failed(error),
        };
        link.cut();
        let end = self.after_epochs(turn, outcome, &beats);
        drop(beating);
        end
    }

    /// Lets a machine run that has come here, and protects it.
    fn inherited(&self, heir: Heir, runs: &Sender<Instant>) -> End {
        let mut turn = self.machine.begin_when_free("protection");
        let ports = turn.live.iter().flat_map(|live| live.ports.iter().map(crate::live::LivePort::port));
        let beats = heir.beats(self.host, self.guard, ports.collect());
        let (outcome, beating) = match self.go_on_here(&mut turn, &heir, &beats, runs) {
            Ok((outcome, beating)) => (outcome, Some(beating)),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(machine = %self.guard.name, error, "a machine that has come does not run here");
                turn.live.iter().for_each(|live| live.qemu.process().kill());
                (Outcome::QemuGone, None)
            }
        };
        heir.link.cut();
        let end = self.after_epochs(turn, outcome, &beats);
        drop(beating);
        end
    }

    fn go_on_here(
        &self,
        turn: &mut Turn<'_>,
        heir: &Heir,
        beats: &Arc<Beats>,
        runs: &Sender<Instant>,
    ) -> Result<(Outcome, Beating), HostError> {
        // Whatever becomes of it now is for its protection to say, which is noted.
        turn.record.phase = Phase::Here;
        turn.record.since_ms = crate::now_ms();
        let (record, live) = turn.parts()?;
        let (log, process) = (live.slot_dir().join("qemu.log"), live.qemu.process().identity());
        let events = live.events();
        heir::hold(beats);
        live.open_ports();
        let beating = Beating::start(beats.clone())
            .map_err(|source| HostError::io("start a thread for", self.host.layout.data(), source))?;
        if beats.may_run() {
            live.ports.iter().for_each(crate::live::LivePort::announce);
        }
        live.set_paused(false)?;
        let since = Instant::now();
        record.save(&self.host.layout)?;
        self.host.bring_the_rest(self.machine, live);
        supervise::watch(self.host, self.machine, events);
        self.guard.set_state(ProtectState::Protected);
        let taking = crate::owing::taking_of(self.host, record);
        let watch = SourceWatch::start(taking, beats, process, log);
        let _ = runs.send(since);
        // The turn is kept for as long as it is protected, and all that time it is looked at.
        turn.publish();
        let (record, live) = turn.parts()?;
        tracing::info!(machine = %self.guard.name, standby = %beats.standby.to(), "a machine has arrived with its protection");
        let memory = record.config.memory.0;
        let outcome = epochs::inherit(self.host, self.guard, live, memory, (&heir.link, beats), self.told);
        drop(watch);
        Ok((outcome, beating))
    }

    fn after_epochs(&self, mut turn: Turn<'_>, outcome: Outcome, beats: &Arc<Beats>) -> End {
        if let Some(live) = &mut turn.live {
            live.ledgers.iter_mut().for_each(|ledger: &mut Ledger| ledger.unfollow(Follower::Standby));
        }
        match outcome {
            Outcome::Closing => End::Over,
            Outcome::Failed(error) if !beats.is_armed() => {
                self.call_off(beats);
                End::Alone { reason: crate::peers::chain(&error), error: Some(error) }
            }
            Outcome::Unprotect(answer) => match self.settle(&mut turn, beats, false) {
                Settled::Alone => {
                    self.let_out(&mut turn, beats, false);
                    // Whoever hears of it may work on the machine at once.
                    drop(turn);
                    self.host.protecting.leave_guard(self.guard);
                    let _ = answer.send(Ok(()));
                    End::Over
                }
                settled => {
                    let _ = answer.send(Err(HostError::invalid("the standby has taken the machine over")));
                    self.done(turn, beats, settled)
                }
            },
            Outcome::Failover { answer, paused_at } => {
                let given = settle::give(self.host, self.guard, beats);
                match given {
                    Settled::Gone => {
                        let _ = answer.send(Ok(paused_at.elapsed().as_secs_f64() * 1e3));
                    }
                    _ => {
                        let _ = answer.send(Err(HostError::invalid("the standby did not take it")));
                        turn.live.iter_mut().for_each(crate::live::Live::go_on);
                    }
                }
                self.done(turn, beats, given)
            }
            Outcome::QemuGone => {
                // Its guest is lost here, and the standby has all of it that anybody has seen.
                let given = settle::give(self.host, self.guard, beats);
                self.done(turn, beats, given)
            }
            Outcome::SwitchedOff | Outcome::Whole => {
                let settled = self.settle(&mut turn, beats, false);
                if matches!(settled, Settled::Alone) {
                    self.let_out(&mut turn, beats, false);
                    return End::Over;
                }
                self.done(turn, beats, settled)
            }
            Outcome::Failed(error) => {
                let reason = crate::peers::chain(&error);
                tracing::warn!(machine = %self.guard.name, reason, "the standby is lost");
                let settled = self.settle(&mut turn, beats, true);
                match settled {
                    Settled::Alone => {
                        self.let_out(&mut turn, beats, true);
                        End::Alone { reason, error: None }
                    }
                    settled => self.done(turn, beats, settled),
                }
            }
        }
    }

    fn settle(&self, turn: &mut Turn<'_>, beats: &Arc<Beats>, keep: bool) -> Settled {
        settle::settle(self.host, self.guard, beats, turn.live.as_mut(), keep)
    }

    /// The machine is this host's alone: whatever it has said may be heard. Its standby is told afterwards, which may take long.
    fn let_out(&self, turn: &mut Turn<'_>, beats: &Arc<Beats>, keep: bool) {
        beats.ports().for_each(|port| port.set_gates(whimbrel_net::Gates::OPEN));
        beats.ports().for_each(|port| port.release_all());
        if let Some(live) = &mut turn.live
            && live.is_paused()
        {
            live.go_on();
        }
        settle::note_alone(self.host, self.guard, beats, keep);
    }

    fn done(&self, turn: Turn<'_>, beats: &Arc<Beats>, settled: Settled) -> End {
        match settled {
            Settled::Gone => settle::retire(self.host, self.machine, turn, self.guard, beats),
            Settled::Alone => {
                // It was to be given away and was not: it is this host's, whatever is left of it.
                let mut turn = turn;
                self.let_out(&mut turn, beats, false);
            }
            // A later daemon settles it: the note says that it must.
            Settled::Closing => {}
        }
        debug_assert!(
            beats.lease().stand() != PrimaryStand::Guarded
                || beats.witness.is_none()
                || self.host.is_closing()
        );
        End::Over
    }
}
