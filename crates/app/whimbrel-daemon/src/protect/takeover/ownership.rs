//! Whose is the machine? Asked when primary and standby have lost each other, and by a daemon that finds a
//! protection of its predecessor.
//!
//! The rules are [`Primary`](whimbrel_protect::lease::Primary). This file asks those who know, again and
//! again, while nothing of the machine is seen unless the lease allows it; and does what follows when the
//! machine is the standby's.

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

/// Pauses between questions: the first and the longest.
const ASK_AGAIN: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// Whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::protect) enum Ownership {
    /// This host's, and no standby can take it over.
    Alone,
    /// The standby's.
    Gone,
    /// Not known yet, and the daemon ends.
    Closing,
}

/// Finds out. A standby that keeps its pages can be told to with `keep`.
pub(in crate::protect) fn determine_owner(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
    mut live: Option<&mut RunningMachine>,
    keep: bool,
) -> Ownership {
    let mut pause = ASK_AGAIN[0];
    loop {
        match beats.lease().state() {
            PrimaryState::Alone => return Ownership::Alone,
            PrimaryState::Gone => return Ownership::Gone,
            PrimaryState::Guarded | PrimaryState::Unsure => {}
        }
        beats.ask_witness(&WitnessQuery::Close);
        if beats.lease().state() == PrimaryState::Alone {
            return Ownership::Alone;
        }
        if let Some(fate) = beats.standby.end(beats.id, keep, beats.patience()) {
            beats.lease().standby_is(fate);
        }
        let (stand, may_run) = {
            let lease = beats.lease();
            (lease.state(), lease.may_run(BootTime::now()))
        };
        match stand {
            PrimaryState::Alone | PrimaryState::Gone => continue,
            // Nobody decides but a person, who would have said that this host is dead.
            PrimaryState::Guarded if beats.witness.is_none() => return Ownership::Alone,
            PrimaryState::Guarded | PrimaryState::Unsure => {}
        }
        if !may_run {
            stop(live.as_deref_mut());
            let reason = match &beats.witness {
                Some(witness) => format!("neither {} nor {} answers", witness.name(), beats.standby.to()),
                None => format!("{} does not answer, and may have taken it over", beats.standby.to()),
            };
            guard.set_state(ProtectState::Fenced { reason });
        }
        if !host.sleep_unless_closing(pause) {
            return Ownership::Closing;
        }
        pause = (pause * 2).min(ASK_AGAIN[1]);
    }
}

/// The machine stands still for as long as nobody knows whose it is.
fn stop(live: Option<&mut RunningMachine>) {
    if let Some(live) = live.filter(|live| !live.is_paused())
        && let Err(error) = live.set_paused(true)
    {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "a machine whose lease has run out does not stop; it is cut off all the same"
        );
    }
}

/// Gives the machine to the standby: written down first, so that this host never runs it, then said until it
/// is heard.
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
    while let Err(error) = host.protecting.put_note(note.clone()) {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot write down that a machine is given up"
        );
        if !host.sleep_unless_closing(Duration::from_secs(1)) {
            return Ownership::Closing;
        }
    }
    say_until_heard(host, guard, beats)
}

/// Says that the machine is the standby's until it runs there, or has turned out to have nothing to run.
pub(in crate::protect) fn say_until_heard(
    host: &Daemon,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
) -> Ownership {
    let (mut pause, begun) = (ASK_AGAIN[0], Instant::now());
    loop {
        match beats.standby.yield_to_standby(beats.id, Duration::from_secs(30)) {
            Some(StandbyOutcome::TakenOver) => {
                tracing::warn!(machine = %guard.name, standby = %beats.standby.to(), after_ms = begun.elapsed().as_secs_f64() * 1e3, "the standby has taken over");
                return Ownership::Gone;
            }
            Some(StandbyOutcome::Ended) => return Ownership::Alone,
            // It has no whole epoch. Told to end, it never will.
            Some(StandbyOutcome::Standing) => {
                if beats.standby.end(beats.id, false, beats.patience()) == Some(StandbyOutcome::Ended) {
                    return Ownership::Alone;
                }
            }
            Some(StandbyOutcome::Asking) | None => {}
        }
        let reason = format!("{} is to take it over and does not answer", beats.standby.to());
        guard.set_state(ProtectState::Fenced { reason });
        if !host.sleep_unless_closing(pause) {
            return Ownership::Closing;
        }
        pause = (pause * 2).min(ASK_AGAIN[1]);
    }
}

/// The machine is this host's. Where that is decided only the standby is to hear of it; without a witness it
/// is not before the standby has heard, and is settled again by a later daemon.
pub(in crate::protect) fn note_alone(host: &Daemon, guard: &ProtectionHandle, beats: &Heartbeat, keep: bool) {
    match beats.lease().state() {
        PrimaryState::Alone | PrimaryState::Gone => tell_ended(host, guard, beats, keep),
        PrimaryState::Guarded | PrimaryState::Unsure => host.protecting.tell_ended(beats.id),
    }
}

/// No standby can take over by this protection any more: it is told, now or when it can be reached again.
/// Until it has heard it keeps a QEMU and all of the memory.
pub(in crate::protect) fn tell_ended(host: &Daemon, guard: &ProtectionHandle, beats: &Heartbeat, keep: bool) {
    let standby = beats.standby.to().clone();
    let witness = beats.witness.as_ref().map(|witness| witness.name().clone());
    if beats.standby.end(beats.id, keep, beats.patience()) == Some(StandbyOutcome::Ended) {
        host.protecting.remove_note(beats.id);
        if let Some(witness) = &beats.witness {
            witness.forget();
        }
        return;
    }
    let side = ProtectionSide::Ended { standby, witness, keep };
    match host.protecting.put_note(ProtectionRecord::new(beats.id, &guard.name, guard.handover, side)) {
        Ok(()) => host.protecting.tell_ended(beats.id),
        // The note of before says that it is to be settled, which comes to the same.
        Err(error) => {
            tracing::error!(machine = %guard.name, error = &error as &dyn std::error::Error, "the end of a protection could not be written down")
        }
    }
}

/// The machine is the standby's: here it ends, and the record says so until the standby has confirmed it.
pub(in crate::protect) fn retire(
    host: &Arc<Daemon>,
    machine: &Arc<Machine>,
    mut turn: MachineLock<'_>,
    guard: &ProtectionHandle,
    beats: &Heartbeat,
) {
    let to = guard.settings.request.host.clone();
    tracing::warn!(machine = %guard.name, standby = %to, "the machine was taken over; it ends here");
    turn.record.phase = Phase::HandedOver { handover: guard.handover, to: to.clone(), keeps: false };
    // What it lacked is with its next host as well: nobody needs to keep it.
    let owed = turn.record.owed.take();
    let saved = turn.record.save(&host.layout);
    match (turn.live.take(), &turn.record.process) {
        (Some(live), _) => live.end(),
        (None, Some(process)) => runtime_dir::end(&host.layout.slot(&process.slot)),
        (None, None) => {}
    }
    turn.record.process = None;
    if saved.is_ok() {
        owed.iter().for_each(|owed| host.release(owed.handover));
    }
    match saved {
        Ok(()) => {
            host.protecting.remove_note(beats.id);
            // The witness may have said so before the standby heard its yes: then it must be able to ask
            // again.
            if let Some(witness) = &beats.witness
                && beats.standby.end(beats.id, false, beats.patience()) == Some(StandbyOutcome::TakenOver)
            {
                witness.forget();
            }
        }
        // The note stays, and a later daemon asks again.
        Err(error) => report(&error),
    }
    drop(turn);
    host.finish_handover(machine, guard.handover, to);
}

fn report(error: &DaemonError) {
    tracing::error!(error = error as &dyn std::error::Error, "a takeover could not be written down");
}
