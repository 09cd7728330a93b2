//! Ownership: determines which host has a protected machine, after contact was lost or the daemon restarted.
//!
//! The rules are in [`PrimaryLease`](whimbrel_protect::lease::PrimaryLease). This module asks the witness and
//! the standby until one of them decides. Until then the machine is fenced unless its lease is valid. If the
//! standby owns it, the machine here is ended.

use crate::protect::{
    primary::{handle::ProtectionHandle, heartbeat::Heartbeat},
    records::{ProtectionRecord, ProtectionSide},
};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::Phase,
        runtime_dir,
    },
    running::RunningMachine,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::ProtectState;
use whimbrel_protect::{
    clock::BootTime,
    lease::{PrimaryState, WitnessQuery},
    protocol::StandbyOutcome,
};

/// Delays between attempts: the first and the longest.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

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

/// Determines the owner. With `keep` the standby retains its pages if the protection ends.
pub(in crate::protect) fn determine_owner(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
    mut live: Option<&mut RunningMachine>,
    keep: bool,
) -> Ownership {
    let mut delay = RETRY_DELAYS[0];
    loop {
        match beats.lease().state() {
            PrimaryState::Alone => return Ownership::Alone,
            PrimaryState::TakenOver => return Ownership::Gone,
            PrimaryState::Protected | PrimaryState::Undecided => {}
        }
        beats.ask_witness(&WitnessQuery::Close);
        if beats.lease().state() == PrimaryState::Alone {
            return Ownership::Alone;
        }
        if let Some(fate) = beats.standby.end(beats.id, keep, beats.timeout()) {
            beats.lease().handle_outcome(fate);
        }
        let (stand, may_run) = {
            let lease = beats.lease();
            (lease.state(), lease.may_run(BootTime::now()))
        };
        match stand {
            PrimaryState::Alone | PrimaryState::TakenOver => continue,
            // Without a witness only a person decides, who would have declared this host dead.
            PrimaryState::Protected if beats.witness.is_none() => return Ownership::Alone,
            PrimaryState::Protected | PrimaryState::Undecided => {}
        }
        if !may_run {
            pause(live.as_deref_mut());
            let reason = match &beats.witness {
                Some(witness) => format!("neither {} nor {} answers", witness.name(), beats.standby.to()),
                None => format!("{} does not answer, and may have taken over", beats.standby.to()),
            };
            guard.set_state(ProtectState::Fenced { reason });
        }
        if !host.sleep_unless_closing(delay) {
            return Ownership::Closing;
        }
        delay = (delay * 2).min(RETRY_DELAYS[1]);
    }
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

/// Yields the machine to the standby: records that durably, so that this host never runs it, then notifies
/// the standby until it answers.
pub(in crate::protect) fn yield_to_standby(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
) -> Ownership {
    if !beats.lease().yield_machine() {
        return Ownership::Alone;
    }
    let request = guard.settings.request.clone();
    let side = ProtectionSide::Primary { request, gave_up: true };
    let note = ProtectionRecord::new(beats.id, &guard.name, guard.handover, side);
    while let Err(error) = host.protections.put_record(note.clone()) {
        tracing::error!(error = &error as &dyn std::error::Error, "cannot record that a machine is yielded");
        if !host.sleep_unless_closing(Duration::from_secs(1)) {
            return Ownership::Closing;
        }
    }
    notify_yield(host, guard, beats)
}

/// Notifies the standby of the yield until the machine runs there, or cannot run there.
pub(in crate::protect) fn notify_yield(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
) -> Ownership {
    let (mut delay, begun) = (RETRY_DELAYS[0], Instant::now());
    loop {
        match beats.standby.yield_to_standby(beats.id, Duration::from_secs(30)) {
            Some(StandbyOutcome::TakenOver) => {
                tracing::warn!(machine = %guard.name, standby = %beats.standby.to(), after_ms = begun.elapsed().as_secs_f64() * 1e3, "the standby has taken over");
                return Ownership::Gone;
            }
            Some(StandbyOutcome::Ended) => return Ownership::Alone,
            // The standby has no complete epoch. An ended protection never will.
            Some(StandbyOutcome::Standing) => {
                if beats.standby.end(beats.id, false, beats.timeout()) == Some(StandbyOutcome::Ended) {
                    return Ownership::Alone;
                }
            }
            Some(StandbyOutcome::Asking) | None => {}
        }
        let reason = format!("{} does not answer, and is to take the machine over", beats.standby.to());
        guard.set_state(ProtectState::Fenced { reason });
        if !host.sleep_unless_closing(delay) {
            return Ownership::Closing;
        }
        delay = (delay * 2).min(RETRY_DELAYS[1]);
    }
}

/// Records that the machine belongs to this host. If that is decided, only the standby must be notified;
/// without a witness, it is decided when the standby knows, and until then a restarted daemon asks again.
pub(in crate::protect) fn record_alone(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
    keep: bool,
) {
    match beats.lease().state() {
        PrimaryState::Alone | PrimaryState::TakenOver => notify_ended(host, guard, beats, keep),
        PrimaryState::Protected | PrimaryState::Undecided => host.protections.notify_later(beats.id),
    }
}

/// Notifies the standby, now or later, that it cannot take over by this protection any more. Until then it
/// retains a QEMU and all of the memory.
pub(in crate::protect) fn notify_ended(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
    keep: bool,
) {
    let standby = beats.standby.to().clone();
    let witness = beats.witness.as_ref().map(|witness| witness.name().clone());
    if beats.standby.end(beats.id, keep, beats.timeout()) == Some(StandbyOutcome::Ended) {
        host.protections.remove_record(beats.id);
        if let Some(witness) = &beats.witness {
            witness.forget();
        }
        return;
    }
    let side = ProtectionSide::Ended { standby, witness, keep };
    match host.protections.put_record(ProtectionRecord::new(beats.id, &guard.name, guard.handover, side)) {
        Ok(()) => host.protections.notify_later(beats.id),
        // The earlier record makes the next daemon determine the owner, with the same result.
        Err(error) => {
            tracing::error!(machine = %guard.name, error = &error as &dyn std::error::Error, "cannot record the end of a protection")
        }
    }
}

/// Ends the machine here after a takeover. Its record says so until the standby has confirmed.
pub(in crate::protect) fn end_machine(
    host: &Arc<Daemon>,
    machine: &Arc<Machine>,
    mut turn: MachineLock<'_>,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
) {
    let to = guard.settings.request.host.clone();
    tracing::warn!(machine = %guard.name, standby = %to, "the machine was taken over; it ends here");
    turn.record.phase = Phase::HandedOver { handover: guard.handover, to: to.clone(), keeps: false };
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
            // The witness may have decided before the standby got its reply: then the standby must be able to
            // ask again.
            if let Some(witness) = &beats.witness
                && beats.standby.end(beats.id, false, beats.timeout()) == Some(StandbyOutcome::TakenOver)
            {
                witness.forget();
            }
        }
        // The record remains, and a later daemon asks again.
        Err(error) => report(&error),
    }
    drop(turn);
    host.finish_handover(machine, guard.handover, to);
}

fn report(error: &DaemonError) {
    tracing::error!(error = error as &dyn std::error::Error, "cannot record a takeover by the standby");
}
