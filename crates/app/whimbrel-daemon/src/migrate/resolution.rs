//! Resolution of a handover whose other host is gone: a person decides who has the machine. So it is with a
//! machine that cannot start because its standby does not answer.
//!
//! Neither host can decide that alone, because each has to wait for the other. What is known here is said
//! first, and nothing is decided for a source whose target answers: that one confirms the handover by itself.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::Phase,
        supervisor,
    },
    network::late_frames,
    server::peer_rpc::PeerLink,
};
use bytes::Bytes;
use std::sync::Arc;
use whimbrel_api::{HandoverDecision, ResolveRequest};
use whimbrel_capture::Consumer;
use whimbrel_core::{HostName, MachineName};
use whimbrel_migrate::protocol::{ABORT, HandoverId};
use whimbrel_vm::RunningMachine;

impl Daemon {
    /// Decides a handover, or says what is known of it if the request decides nothing.
    pub(crate) fn resolve(
        self: &Arc<Self>,
        name: &MachineName,
        request: &ResolveRequest,
    ) -> Result<(), DaemonError> {
        let machine = self.machines.get(name)?;
        let turn = machine.lock_to_resolve()?;
        self.machines.check_current(&machine)?;
        let state = turn.record.phase.name();
        match turn.record.phase.clone() {
            Phase::Prepared { handover, .. } => {
                let Some(decision) = request.decision else { return Err(known_of_incoming(&turn)) };
                drop(turn);
                self.decide_incoming(handover, decision)
            }
            Phase::HandedOver { handover, to, .. } => {
                let decided = self.decide_handed_over(&machine, turn, (handover, &to), request.decision);
                if decided.is_err() {
                    self.finish_handover(&machine, handover, to);
                }
                decided
            }
            Phase::Stopped | Phase::Crashed { .. } if self.has_unheard_standby(name) => {
                self.decide_standby(turn, request.decision)
            }
            _ => Err(DaemonError::State { name: name.clone(), state, needed: "between two hosts" }),
        }
    }

    /// Takes the place of a standby that does not answer: starts the machine here, or deletes it.
    fn decide_standby(
        self: &Arc<Self>,
        mut turn: MachineLock<'_>,
        decision: Option<HandoverDecision>,
    ) -> Result<(), DaemonError> {
        let name = turn.record.name.clone();
        self.decide_start(&name, decision.is_some())?;
        match decision {
            Some(HandoverDecision::RunHere) => {
                self.start_again(&mut turn)?;
                self.self_starts.forget(&name);
            }
            Some(HandoverDecision::Discard) => {
                drop(turn);
                self.delete(&name)?;
            }
            None => {}
        }
        Ok(())
    }

    /// Takes the place of the source: keeps or aborts.
    fn decide_incoming(&self, handover: HandoverId, decision: HandoverDecision) -> Result<(), DaemonError> {
        let decided = match decision {
            HandoverDecision::RunHere => self.arrivals().decide_here(handover),
            HandoverDecision::Discard => {
                let header = postcard::to_stdvec(&handover)
                    .map_err(|error| DaemonError::invalid(error.to_string()))?;
                self.arrivals().handle(&self.name, ABORT, &header, Bytes::new()).map(drop)
            }
        };
        decided.map_err(|source| DaemonError::Resolve { source: Box::new(source) })
    }

    fn decide_handed_over(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        mut turn: MachineLock<'_>,
        (handover, to): (HandoverId, &HostName),
        decision: Option<HandoverDecision>,
    ) -> Result<(), DaemonError> {
        let answers = PeerLink::connect(self, to).is_ok();
        match decision.filter(|_| !answers) {
            None => Err(known_of_handed_over(&turn, to, answers)),
            Some(HandoverDecision::Discard) => {
                self.clean_up(machine, turn, handover);
                Ok(())
            }
            Some(HandoverDecision::RunHere) => {
                take_back(self, &mut turn)?;
                self.handovers.abort(handover);
                run_again(self, machine, &mut turn)?;
                self.notify_aborted();
                Ok(())
            }
        }
    }
}

/// Records durably that the machine belongs to this host again: as crashed if its QEMU has ended.
pub(super) fn take_back(host: &Daemon, turn: &mut MachineLock<'_>) -> Result<(), DaemonError> {
    let before = turn.record.clone();
    turn.record.phase = match &turn.running {
        Some(live) if live.qemu.process().is_alive() => Phase::Here,
        _ => Phase::Crashed { reason: "its QEMU ended after it was handed over".to_owned() },
    };
    (turn.record.leaving, turn.record.inherited) = (None, None);
    turn.record.since_ms = crate::now_ms();
    let saved = turn.record.save(&host.directories);
    if saved.is_err() {
        turn.record = before;
    }
    saved
}

/// Lets a machine run here that was handed over and taken back, unless its user has paused it. All of it is
/// dirty for a later migration.
pub(super) fn run_again(
    host: &Arc<Daemon>,
    machine: &Arc<Machine>,
    turn: &mut MachineLock<'_>,
) -> Result<(), DaemonError> {
    host.tunnels.end_unused(&turn.record.name, &turn.record.config);
    if turn.record.phase != Phase::Here {
        turn.running.take().into_iter().for_each(RunningMachine::end);
    }
    let Some(live) = &mut turn.running else { return Ok(()) };
    live.page_server.take().into_iter().for_each(|server| server.end());
    live.dirty_logs.iter_mut().for_each(|log| log.detach(Consumer::Migration));
    late_frames::deliver_locally(&live.ports);
    live.open_ports();
    if !live.is_paused_by_user() {
        live.set_paused(false)?;
    }
    supervisor::watch(host, machine, live.events());
    Ok(())
}

fn known_of_incoming(turn: &MachineLock<'_>) -> DaemonError {
    if let Phase::Prepared { never_ran: true, .. } = turn.record.phase {
        let known = "it never ran here and goes back to its source, which has not taken it yet; here it would \
                     start from its disks";
        return DaemonError::Unresolved { name: turn.record.name.clone(), known: known.to_owned() };
    }
    let alive = turn.running.as_ref().is_some_and(|live| live.qemu.process().is_alive());
    let here = match alive {
        true => "all of it is here, paused",
        false => "its memory is lost here: it would start from its disks",
    };
    let known = format!("the source has not said whether the machine was handed over; {here}");
    DaemonError::Unresolved { name: turn.record.name.clone(), known }
}

fn known_of_handed_over(turn: &MachineLock<'_>, to: &HostName, answers: bool) -> DaemonError {
    let name = turn.record.name.clone();
    if answers {
        return DaemonError::Unconfirmed { name, host: to.clone() };
    }
    let alive = turn.running.as_ref().is_some_and(|live| live.qemu.process().is_alive());
    let here = match alive {
        true => "all of it is here, paused as it was handed over",
        false => "its memory is lost here: it would start from its disks",
    };
    let known =
        format!("it was handed over to {to}, which has not confirmed it and cannot be reached; {here}");
    DaemonError::Unresolved { name, known }
}

#[cfg(test)]
#[path = "resolution_tests.rs"]
mod tests;
