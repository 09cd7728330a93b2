//! Whose is the machine? Asked when primary and standby have lost each other, and by a daemon that finds a protection of its
//! predecessor.
//!
//! The rules are [`Primary`](whimbrel_protect::lease::Primary). This file asks those who know, again and again, while nothing of the machine is seen unless
//! the lease allows it; and does what follows when the machine is the standby's.

use super::{
    beats::Beats,
    guard::Guard,
    notes::{Note, Side},
};
use crate::{
    error::HostError,
    host::Host,
    live::Live,
    machine::{Machine, Turn},
    record::Phase,
    slot,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::ProtectState;
use whimbrel_protect::{
    clock::Moment,
    lease::{PrimaryStand, Question},
    protocol::Fate,
};

/// Pauses between questions: the first and the longest.
const ASK_AGAIN: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// Whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Settled {
    /// This host's, and no standby can take it over.
    Alone,
    /// The standby's.
    Gone,
    /// Not known yet, and the daemon ends.
    Closing,
}

/// Finds out. A standby that keeps its pages can be told to with `keep`.
pub(super) fn settle(
    host: &Host,
    guard: &Guard,
    beats: &Beats,
    mut live: Option<&mut Live>,
    keep: bool,
) -> Settled {
    let mut pause = ASK_AGAIN[0];
    loop {
        match beats.lease().stand() {
            PrimaryStand::Alone => return Settled::Alone,
            PrimaryStand::Gone => return Settled::Gone,
            PrimaryStand::Guarded | PrimaryStand::Unsure => {}
        }
        beats.ask_witness(&Question::Close);
        if beats.lease().stand() == PrimaryStand::Alone {
            return Settled::Alone;
        }
        if let Some(fate) = beats.standby.end(beats.id, keep, beats.patience()) {
            beats.lease().standby_is(fate);
        }
        let (stand, may_run) = {
            let lease = beats.lease();
            (lease.stand(), lease.may_run(Moment::now()))
        };
        match stand {
            PrimaryStand::Alone | PrimaryStand::Gone => continue,
            // Nobody decides but a person, who would have said that this host is dead.
            PrimaryStand::Guarded if beats.witness.is_none() => return Settled::Alone,
            PrimaryStand::Guarded | PrimaryStand::Unsure => {}
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
            return Settled::Closing;
        }
        pause = (pause * 2).min(ASK_AGAIN[1]);
    }
}

/// The machine stands still for as long as nobody knows whose it is.
fn stop(live: Option<&mut Live>) {
    if let Some(live) = live.filter(|live| !live.is_paused())
        && let Err(error) = live.set_paused(true)
    {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "a machine whose lease has run out does not stop; it is cut off all the same"
        );
    }
}

/// Gives the machine to the standby: written down first, so that this host never runs it, then said until it is heard.
pub(super) fn give(host: &Host, guard: &Guard, beats: &Beats) -> Settled {
    if !beats.lease().give_up() {
        return Settled::Alone;
    }
    let request = guard.settings.request.clone();
    let side = Side::Primary { request, gave_up: true };
    let note = Note::new(beats.id, &guard.name, guard.handover, side);
    while let Err(error) = host.protecting.put_note(note.clone()) {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot write down that a machine is given up"
        );
        if !host.sleep_unless_closing(Duration::from_secs(1)) {
            return Settled::Closing;
        }
    }
    say_until_heard(host, guard, beats)
}

/// Says that the machine is the standby's until it runs there, or has turned out to have nothing to run.
pub(super) fn say_until_heard(host: &Host, guard: &Guard, beats: &Beats) -> Settled {
    let (mut pause, begun) = (ASK_AGAIN[0], Instant::now());
    loop {
        match beats.standby.give(beats.id, Duration::from_secs(30)) {
            Some(Fate::TakenOver) => {
                tracing::warn!(machine = %guard.name, standby = %beats.standby.to(), after_ms = begun.elapsed().as_secs_f64() * 1e3, "the standby has taken over");
                return Settled::Gone;
            }
            Some(Fate::Ended) => return Settled::Alone,
            // It has no whole epoch. Told to end, it never will.
            Some(Fate::Standing) => {
                if beats.standby.end(beats.id, false, beats.patience()) == Some(Fate::Ended) {
                    return Settled::Alone;
                }
            }
            Some(Fate::Asking) | None => {}
        }
        let reason = format!("{} is to take it over and does not answer", beats.standby.to());
        guard.set_state(ProtectState::Fenced { reason });
        if !host.sleep_unless_closing(pause) {
            return Settled::Closing;
        }
        pause = (pause * 2).min(ASK_AGAIN[1]);
    }
}

/// The machine is this host's. Where that is decided only the standby is to hear of it; without a witness it is not before the
/// standby has heard, and is settled again by a later daemon.
pub(super) fn note_alone(host: &Host, guard: &Guard, beats: &Beats, keep: bool) {
    match beats.lease().stand() {
        PrimaryStand::Alone | PrimaryStand::Gone => tell_ended(host, guard, beats, keep),
        PrimaryStand::Guarded | PrimaryStand::Unsure => host.protecting.tell_ended(beats.id),
    }
}

/// No standby can take over by this protection any more: it is told, now or when it can be reached again. Until it has heard
/// it keeps a QEMU and all of the memory.
pub(super) fn tell_ended(host: &Host, guard: &Guard, beats: &Beats, keep: bool) {
    let standby = beats.standby.to().clone();
    let witness = beats.witness.as_ref().map(|witness| witness.name().clone());
    if beats.standby.end(beats.id, keep, beats.patience()) == Some(Fate::Ended) {
        host.protecting.remove_note(beats.id);
        if let Some(witness) = &beats.witness {
            witness.forget();
        }
        return;
    }
    let side = Side::Ended { standby, witness, keep };
    match host.protecting.put_note(Note::new(beats.id, &guard.name, guard.handover, side)) {
        Ok(()) => host.protecting.tell_ended(beats.id),
        // The note of before says that it is to be settled, which comes to the same.
        Err(error) => {
            tracing::error!(machine = %guard.name, error = &error as &dyn std::error::Error, "the end of a protection could not be written down")
        }
    }
}

/// The machine is the standby's: here it ends, and the record says so until the standby has confirmed it.
pub(super) fn retire(
    host: &Arc<Host>,
    machine: &Arc<Machine>,
    mut turn: Turn<'_>,
    guard: &Guard,
    beats: &Beats,
) {
    let to = guard.settings.request.host.clone();
    tracing::warn!(machine = %guard.name, standby = %to, "the machine was taken over; it ends here");
    turn.record.phase = Phase::HandedOver { handover: guard.handover, to: to.clone(), keeps: false };
    // What it lacked is with its next host as well: nobody needs to keep it.
    let owed = turn.record.owed.take();
    let saved = turn.record.save(&host.layout);
    match (turn.live.take(), &turn.record.process) {
        (Some(live), _) => live.end(),
        (None, Some(process)) => slot::end(&host.layout.slot(&process.slot)),
        (None, None) => {}
    }
    turn.record.process = None;
    if saved.is_ok() {
        owed.iter().for_each(|owed| host.release(owed.handover));
    }
    match saved {
        Ok(()) => {
            host.protecting.remove_note(beats.id);
            // The witness may have said so before the standby heard its yes: then it must be able to ask again.
            if let Some(witness) = &beats.witness
                && beats.standby.end(beats.id, false, beats.patience()) == Some(Fate::TakenOver)
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

fn report(error: &HostError) {
    tracing::error!(error = error as &dyn std::error::Error, "a takeover could not be written down");
}
