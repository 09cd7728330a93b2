//! Healing of the handover model: the outcome of any state once nothing fails any more.
//!
//! Messages in flight are lost, connections end and both sides notice, daemons that are down restart unless
//! their host is lost. Then only repeated messages count: commits and aborts, which are repeated until they
//! are answered.

use super::{
    ATTEMPTS, Rules, Wire, World,
    hosts::{Disk, Power, Qemu, Slot},
};
use whimbrel_migrate::handover::{Source, SourceEvent, TargetEvent, TargetRecord};

/// Whether the world ends with one owner of the machine and nothing that waits in vain.
pub(crate) fn ends_well(rules: &Rules, world: &World) -> bool {
    let healed = heal(rules, world);
    let (source, target) = (&healed.source, &healed.target);
    match (source.power, target.power) {
        (Power::Up, Power::Up) => has_one_owner(world, &healed),
        // A machine that is prepared here, or lost with the host: a person decides.
        (_, Power::Up) => target.disk != Disk::Nothing || target.slot == Slot::None,
        (Power::Up, _) => match source.disk {
            Disk::Ours => source.qemu != Qemu::Paused,
            Disk::Nothing | Disk::By(..) => source.qemu != Qemu::Running,
        },
        _ => true,
    }
}

fn has_one_owner(before: &World, healed: &World) -> bool {
    let (source, target) = (&healed.source, &healed.target);
    match (source.disk, target.disk) {
        (Disk::Ours, Disk::Nothing) => {
            let as_before = (source.qemu == Qemu::Dead) == (before.source.qemu == Qemu::Dead);
            let nothing_noted = source.noted == [false; ATTEMPTS];
            source.qemu != Qemu::Paused && as_before && nothing_noted && target.slot == Slot::None
        }
        (Disk::Nothing, Disk::By(_, TargetRecord::Ours)) => {
            let runs = if before.target.slot == Slot::None { Slot::None } else { Slot::Running };
            source.qemu == Qemu::Dead && target.slot == runs
        }
        _ => false,
    }
}

fn heal(rules: &Rules, world: &World) -> World {
    let mut now = world.clone();
    if now.source.power == Power::Down {
        now.source_restarts(rules);
    }
    if now.target.power == Power::Down {
        now.target_restarts(rules);
    }
    now.wires = [Wire::default(); ATTEMPTS];
    for attempt in 0..ATTEMPTS {
        if now.source.power == Power::Up {
            now.source_hears(rules, attempt, SourceEvent::Recorded, None);
            now.source_hears(rules, attempt, SourceEvent::Failed, None);
        }
        if now.target.power == Power::Up && now.target.minds[attempt].is_some() {
            now.target_hears(rules, attempt, TargetEvent::Failed, None);
        }
    }
    now.wires = [Wire::default(); ATTEMPTS];
    for _ in 0..2 {
        (0..ATTEMPTS).for_each(|attempt| ask_again(&mut now, rules, attempt));
    }
    now
}

/// Repeats the messages of the source that were not answered, and lets the target answer.
fn ask_again(now: &mut World, rules: &Rules, attempt: usize) {
    let unanswered = match now.source.minds[attempt] {
        Some(Source::Committed) => true,
        Some(Source::Aborted) => now.source.noted[attempt],
        _ => false,
    };
    if now.source.power != Power::Up || now.target.power != Power::Up || !unanswered {
        return;
    }
    now.source_hears(rules, attempt, SourceEvent::Failed, None);
    if now.wires[attempt].commit {
        let ended = now.target.slot == Slot::None;
        let commit = if ended { TargetEvent::CommitOfEnded } else { TargetEvent::Commit };
        now.target_hears(rules, attempt, commit, None);
    }
    if now.wires[attempt].abort {
        now.target_hears(rules, attempt, TargetEvent::Abort, None);
    }
    if now.wires[attempt].runs {
        now.source_hears(rules, attempt, SourceEvent::TargetRuns, None);
    }
    if now.wires[attempt].never_ran {
        now.source_hears(rules, attempt, SourceEvent::TargetNeverRan, None);
        now.source_hears(rules, attempt, SourceEvent::Recorded, None);
    }
    if now.wires[attempt].forgot {
        now.source_hears(rules, attempt, SourceEvent::TargetDiscarded, None);
    }
}
