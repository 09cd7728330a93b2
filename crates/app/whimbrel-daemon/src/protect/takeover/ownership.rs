//! Ownership: determines which host has a protected machine, after contact was lost or the daemon restarted.
//!
//! The rules are in [`PrimaryLease`](whimbrel_protect::lease::PrimaryLease). This module carries out their
//! actions: it asks the witness and the standby until one of them decides. Until then the machine is fenced
//! unless its lease is valid. It is ended here only once the standby has said that it runs the machine.

use crate::protect::{
    primary::{handle::ProtectionHandle, heartbeat::Heartbeat},
    records::{ProtectionRecord, ProtectionSide},
    witness::client::WitnessClient,
};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::Phase,
    },
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::ProtectState;
use whimbrel_protect::{
    clock::BootTime,
    lease::{PrimaryLeaseAction, PrimaryState, WitnessQuery},
    protocol::StandbyOutcome,
};
use whimbrel_vm::{RunningMachine, runtime_dir};

/// Delays between attempts: the first and the longest.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];
/// How long the standby may take to load a machine.
const YIELD_TIMEOUT: Duration = Duration::from_secs(30);

/// The result of determining the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::protect) enum Ownership {
    /// Only this host has the machine, and no standby can take it over.
    Alone,
    /// The standby has the machine.
    Gone,
    /// The daemon is shutting down before the owner is known.
    Closing,
}

/// Yields the machine to the standby. This host runs it again only if the standby ends the protection.
pub(in crate::protect) fn yield_to_standby(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
    live: Option<&mut RunningMachine>,
) -> Ownership {
    beats.lease().yield_machine();
    determine_owner(host, guard, beats, live, false)
}

/// Determines the owner: the only place that carries out what the rules of the primary demand. With `keep`
/// the standby retains its pages if the protection ends.
pub(in crate::protect) fn determine_owner(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
    mut live: Option<&mut RunningMachine>,
    keep: bool,
) -> Ownership {
    let (mut delay, begun) = (RETRY_DELAYS[0], Instant::now());
    let (mut asked, mut is_recorded) = (false, false);
    loop {
        let has_copy = live.as_ref().is_some_and(|live| live.qemu.process().is_alive());
        let action = beats.lease().next_action(asked, has_copy, BootTime::now());
        match action {
            PrimaryLeaseAction::RunHere => return Ownership::Alone,
            PrimaryLeaseAction::Retire => {
                tracing::warn!(machine = %guard.name, standby = %beats.standby.to(), after_ms = begun.elapsed().as_secs_f64() * 1e3, "the standby has taken over");
                return Ownership::Gone;
            }
            PrimaryLeaseAction::Ask => ask_others(beats, keep),
            PrimaryLeaseAction::AskFenced => {
                ask_others(beats, keep);
                if is_undecided(beats) {
                    pause(live.as_deref_mut());
                    guard.set_state(ProtectState::Fenced { reason: unanswered(beats) });
                }
            }
            PrimaryLeaseAction::Yield => {
                is_recorded = is_recorded || record_yield(host, guard, beats);
                let answer = is_recorded.then(|| beats.standby.yield_to_standby(beats.id, YIELD_TIMEOUT));
                beats.lease().handle_yield_reply(answer.flatten());
                // Not locked while QEMU is waited for.
                let state = beats.lease().state();
                if let PrimaryState::Yielded { refusal } = state {
                    pause(live.as_deref_mut());
                    let why = refusal.map_or("does not answer", |_| "cannot run the machine yet");
                    let reason = format!("{} {why}, and is to take it over", beats.standby.to());
                    guard.set_state(ProtectState::Fenced { reason });
                }
            }
            PrimaryLeaseAction::TakeBack => {
                let answer = beats.standby.end(beats.id, false, beats.timeout());
                beats.lease().handle_take_back_reply(answer);
            }
        }
        asked = true;
        let next = beats.lease().next_action(asked, has_copy, BootTime::now());
        // Whatever has led on is followed at once.
        let waits =
            next == action || (action, next) == (PrimaryLeaseAction::TakeBack, PrimaryLeaseAction::Yield);
        if waits && !host.sleep_unless_closing(delay) {
            return Ownership::Closing;
        }
        delay = (delay * 2).min(RETRY_DELAYS[1]);
    }
}

/// Asks the witness to close the protection, then the standby to end it unless the witness has decided.
fn ask_others(beats: &Heartbeat, keep: bool) {
    beats.ask_witness(&WitnessQuery::Close);
    if is_undecided(beats)
        && let Some(outcome) = beats.standby.end(beats.id, keep, beats.timeout())
    {
        beats.lease().handle_outcome(outcome);
    }
}

fn is_undecided(beats: &Heartbeat) -> bool {
    matches!(beats.lease().state(), PrimaryState::Protected | PrimaryState::Undecided)
}

fn unanswered(beats: &Heartbeat) -> String {
    match &beats.witness {
        Some(witness) => format!("neither {} nor {} answers", witness.name(), beats.standby.to()),
        None => format!("{} does not answer, and may have taken over", beats.standby.to()),
    }
}

/// Records durably that this host has yielded the machine, before the standby hears of it. Returns whether it
/// is recorded.
fn record_yield(host: &Daemon, guard: &ProtectionHandle, beats: &Heartbeat) -> bool {
    let side = ProtectionSide::Primary { request: guard.settings().request.clone(), gave_up: true };
    let note = ProtectionRecord::new(beats.id, &guard.name, guard.handover(), side);
    let recorded = host.protections.put_record(note);
    recorded
        .inspect_err(|error| {
            let error = error as &dyn std::error::Error;
            tracing::error!(error, "cannot record that a machine is yielded; trying again");
        })
        .is_ok()
}

/// Pauses the machine while its owner is unknown.
fn pause(live: Option<&mut RunningMachine>) {
    if let Some(live) = live.filter(|live| !live.is_paused())
        && let Err(error) = live.set_paused(true)
    {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot pause a machine whose lease has run out; its network stays fenced"
        );
    }
}

/// Records that the machine belongs to this host. If that is decided, only the standby must be notified;
/// without a witness, it is decided when the standby knows, and until then a restarted daemon asks again.
/// Returns whether the standby has answered.
pub(in crate::protect) fn record_alone(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
    keep: bool,
) -> bool {
    match beats.lease().state() {
        PrimaryState::Alone | PrimaryState::TakenOver => notify_ended(host, guard, beats, keep),
        PrimaryState::Protected | PrimaryState::Undecided | PrimaryState::Yielded { .. } => {
            host.protections.notify_later(beats.id);
            false
        }
    }
}

/// Notifies the standby, now or later, that it cannot take over by this protection any more. Until then it
/// retains a QEMU and all of the memory. Returns whether it has answered. One that has not is not the next to
/// be tried if there are spares, and then need not keep its pages.
pub(in crate::protect) fn notify_ended(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
    keep: bool,
) -> bool {
    let standby = beats.standby.to().clone();
    let witness = beats.witness.as_ref().map(|witness| witness.name().clone());
    if beats.standby.end(beats.id, keep, beats.timeout()) == Some(StandbyOutcome::Ended) {
        host.protections.remove_record(beats.id);
        if let Some(witness) = &beats.witness {
            witness.forget();
        }
        return true;
    }
    let keep = keep && guard.settings().request.spares.is_empty();
    let side = ProtectionSide::Ended { standby, witness, keep };
    match host.protections.put_record(ProtectionRecord::new(beats.id, &guard.name, guard.handover(), side)) {
        Ok(()) => host.protections.notify_later(beats.id),
        // The earlier record makes the next daemon determine the owner, with the same result.
        Err(error) => {
            tracing::error!(machine = %guard.name, error = &error as &dyn std::error::Error, "cannot record the end of a protection")
        }
    }
    false
}

/// Ends the machine here after a takeover. Its record says so until the standby has confirmed.
pub(in crate::protect) fn end_machine(
    host: &Arc<Daemon>,
    machine: &Arc<Machine>,
    mut turn: MachineLock<'_>,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
) {
    let to = guard.settings().request.host.clone();
    tracing::warn!(machine = %guard.name, standby = %to, "the machine was taken over; it ends here");
    turn.record.phase = Phase::HandedOver { handover: guard.handover(), to: to.clone(), keeps: false };
    // The new owner has the missing pages as well, so the source may free them.
    let owed = turn.record.owed.take();
    let saved = turn.record.save(&host.directories);
    match (turn.running.take(), &turn.record.process) {
        (Some(live), _) => live.end(),
        (None, Some(process)) => runtime_dir::end(&host.directories.runtime_dir(&process.slot)),
        (None, None) => {}
    }
    turn.record.process = None;
    if saved.is_ok() {
        owed.iter().for_each(|owed| host.notify_complete(owed.handover));
    }
    match saved {
        Ok(()) => {
            host.protections.remove_record(beats.id);
            // The standby itself has said that it has the machine, so nobody asks the witness any more.
            beats.witness.iter().for_each(WitnessClient::forget);
        }
        // The record remains, and a later daemon asks again.
        Err(error) => report(&error),
    }
    drop(turn);
    host.finish_handover(machine, guard.handover(), to);
}

fn report(error: &DaemonError) {
    tracing::error!(error = error as &dyn std::error::Error, "cannot record a takeover by the standby");
}

#[cfg(test)]
#[path = "ownership_tests.rs"]
mod tests;
