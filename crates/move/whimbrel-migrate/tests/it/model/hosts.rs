//! Hosts of the handover model: the memory, disk and processes of each, and the effects of the actions on
//! them.

use super::{ATTEMPTS, Rules, Wire, World};
use whimbrel_migrate::handover::{
    AbortedAction, CommittedAction, PausedIncoming, Source, SourceAction, SourceEvent, SourceRecord, Target,
    TargetAction, TargetEvent, TargetRecord,
};

/// A host and its daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Power {
    Up,
    /// The daemon does not run.
    Down,
    /// The host never comes back.
    Lost,
}

/// The record of the machine on a host's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Disk<Record> {
    Nothing,
    /// The machine belongs to this host and was never migrated.
    Ours,
    /// Record of this attempt.
    By(usize, Record),
}

/// The QEMU of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Qemu {
    Running,
    Paused,
    Dead,
}

/// The QEMU of the target, with its directory on a tmpfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    None,
    Filling,
    /// Loaded, and not yet marked so.
    Loaded,
    Marked,
    Running,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct SourceHost {
    pub(crate) power: Power,
    /// Daemon's state of each attempt.
    pub(crate) minds: [Option<Source>; ATTEMPTS],
    pub(crate) begun: usize,
    /// Only `By(_, HandedOver)`, `Ours` and `Nothing`.
    pub(crate) disk: Disk<SourceRecord>,
    /// Durable records of the attempts that have begun.
    pub(crate) noted: [bool; ATTEMPTS],
    pub(crate) qemu: Qemu,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TargetHost {
    pub(crate) power: Power,
    pub(crate) minds: [Option<Target>; ATTEMPTS],
    pub(crate) disk: Disk<TargetRecord>,
    /// Whether disks and record suffice to run the machine without the QEMU.
    pub(crate) whole: bool,
    pub(crate) slot: Slot,
    /// Whether the machine's CPUs ever ran here.
    pub(crate) has_run: bool,
}

impl SourceHost {
    pub(crate) fn new() -> Self {
        let (minds, noted) = ([None; ATTEMPTS], [false; ATTEMPTS]);
        Self { power: Power::Up, minds, begun: 0, disk: Disk::Ours, noted, qemu: Qemu::Running }
    }

    pub(crate) fn may_begin(&self) -> bool {
        let idle = |mind: &Option<Source>| matches!(mind, None | Some(Source::Aborted));
        self.begun < ATTEMPTS
            && self.disk == Disk::Ours
            && self.qemu == Qemu::Running
            && self.minds.iter().all(idle)
    }

    pub(crate) fn lose(&mut self) {
        self.power = Power::Lost;
        self.qemu = Qemu::Dead;
    }

    fn recovered(&self, attempt: usize) -> Option<SourceRecord> {
        match self.disk {
            Disk::By(by, _) if by == attempt => Some(SourceRecord::HandedOver),
            _ if !self.noted[attempt] => None,
            Disk::Ours => Some(SourceRecord::Ours),
            _ => Some(SourceRecord::Other),
        }
    }
}

impl TargetHost {
    pub(crate) fn new() -> Self {
        let minds = [None; ATTEMPTS];
        Self { power: Power::Up, minds, disk: Disk::Nothing, whole: false, slot: Slot::None, has_run: false }
    }

    /// Whether the name is free and the offer new.
    pub(crate) fn may_take(&self, rules: &Rules, attempt: usize) -> bool {
        let new = self.minds[attempt].is_none_or(|state| state == Target::Discarded && !rules.refuse_ended);
        let free = self.minds.iter().all(|mind| matches!(mind, None | Some(Target::Discarded)));
        new && free && self.disk == Disk::Nothing
    }

    pub(crate) fn lose(&mut self) {
        self.power = Power::Lost;
        self.slot = Slot::None;
    }
}

/// Effect that happens entirely or not at all.
type Effect<'a> = &'a dyn Fn(&mut World);

/// Runs effects until the daemon dies; returns whether it lives.
fn run(world: &mut World, effects: &[Effect<'_>], left: &mut Option<usize>) -> bool {
    for effect in effects {
        match left {
            Some(0) => return false,
            Some(left) => *left -= 1,
            None => {}
        }
        effect(world);
    }
    true
}

impl World {
    pub(crate) fn begin(&mut self, rules: &Rules, cut: Option<usize>) {
        let attempt = self.source.begun;
        self.source.begun += 1;
        self.wires[attempt] = Wire { open_at_source: true, open_at_target: true, ..Wire::default() };
        self.source_does(rules, attempt, Source::initial(), cut);
    }

    pub(crate) fn source_hears(
        &mut self,
        rules: &Rules,
        attempt: usize,
        event: SourceEvent,
        cut: Option<usize>,
    ) {
        let Some(state) = self.source.minds[attempt] else { return };
        if event == SourceEvent::Failed {
            self.wires[attempt].open_at_source = false;
        }
        let transition = (rules.source)(state, event);
        self.source_does(rules, attempt, transition, cut);
    }

    fn source_does(
        &mut self,
        rules: &Rules,
        h: usize,
        (state, actions): (Source, &'static [SourceAction]),
        mut cut: Option<usize>,
    ) {
        let note = rules.keep_notes;
        for action in actions {
            let lives = match action {
                SourceAction::RecordAndOffer => {
                    run(self, &[&|w| w.source.noted[h] = note, &|w| w.wires[h].offer = true], &mut cut)
                }
                SourceAction::Pause => {
                    run(self, &[&|w| w.source.stop(), &|w| w.wires[h].last = true], &mut cut)
                }
                // As long as nothing says that it is durable, it may also be missing: `Step::WriteFails`.
                SourceAction::RecordHandover => {
                    run(self, &[&|w| w.source.disk = Disk::By(h, SourceRecord::HandedOver)], &mut cut)
                }
                SourceAction::RecordOurs | SourceAction::Committed(CommittedAction::RecordOurs) => {
                    run(self, &[&|w| w.source.disk = Disk::Ours], &mut cut)
                }
                SourceAction::ResumeHere | SourceAction::Committed(CommittedAction::ResumeHere) => {
                    run(self, &[&|w| w.source.go_on()], &mut cut)
                }
                SourceAction::Committed(CommittedAction::SendCommit) => {
                    run(self, &[&|w| w.wires[h].commit = true], &mut cut)
                }
                // The folder in the trash names the handover until its record is removed: both end at once.
                SourceAction::Committed(CommittedAction::FreeMachine) => {
                    run(self, &[&|w| w.source.remove(h), &|w| w.source.qemu = Qemu::Dead], &mut cut)
                }
                SourceAction::Aborted(AbortedAction::SendAbort) => {
                    run(self, &[&|w| w.wires[h].abort = true], &mut cut)
                }
                SourceAction::Aborted(AbortedAction::RemoveRecord) => {
                    run(self, &[&|w| w.source.noted[h] = false], &mut cut)
                }
            };
            if !lives {
                return self.source_dies();
            }
        }
        self.source.minds[h] = Some(state);
        if cut.is_some() {
            self.source_dies();
        }
    }

    pub(crate) fn source_dies(&mut self) {
        self.source.power = Power::Down;
        self.source.minds = [None; ATTEMPTS];
        self.wires.iter_mut().for_each(|wire| wire.open_at_source = false);
    }

    pub(crate) fn source_restarts(&mut self, rules: &Rules) {
        self.source.power = Power::Up;
        if self.source.disk == Disk::Nothing {
            // A runtime directory that no record owns is removed.
            self.source.qemu = Qemu::Dead;
        }
        for attempt in 0..ATTEMPTS {
            if let Some(record) = self.source.recovered(attempt) {
                self.source_does(rules, attempt, (rules.source_recovered)(record), None);
            }
        }
    }

    pub(crate) fn target_hears(
        &mut self,
        rules: &Rules,
        attempt: usize,
        event: TargetEvent,
        cut: Option<usize>,
    ) {
        if event == TargetEvent::Failed {
            self.wires[attempt].open_at_target = false;
        }
        match (self.target.minds[attempt], event) {
            (Some(state), _) => {
                self.target_does(attempt, (rules.target)(state, event), cut);
            }
            // Aborting an unknown handover is no error, but its offer may still arrive.
            (None, TargetEvent::Abort) => {
                self.target_does(attempt, Target::discard_unknown(), cut);
            }
            // A commit of it is refused.
            (None, _) => {}
        }
    }

    pub(crate) fn target_does(
        &mut self,
        h: usize,
        (state, actions): (Target, &'static [TargetAction]),
        mut cut: Option<usize>,
    ) {
        for action in actions {
            let lives = match action {
                TargetAction::ReserveAndAccept => run(
                    self,
                    &[&|w| w.target.reserve(), &|w| w.target.record(h, TargetRecord::Arriving), &|w| {
                        w.wires[h].accepted = true;
                    }],
                    &mut cut,
                ),
                TargetAction::LoadAndConfirmReady => run(
                    self,
                    &[&|w| w.target.load(), &|w| w.target.mark(), &|w| w.wires[h].ready = true],
                    &mut cut,
                ),
                TargetAction::RunAndConfirm => run(
                    self,
                    &[&|w| w.target.start(), &|w| w.target.record(h, TargetRecord::Ours), &|w| {
                        w.wires[h].runs = true;
                    }],
                    &mut cut,
                ),
                TargetAction::ConfirmRunning => run(self, &[&|w| w.wires[h].runs = true], &mut cut),
                TargetAction::RecordNeverRan => run(
                    self,
                    &[&|w| w.target.record(h, TargetRecord::NeverRan), &|w| w.wires[h].never_ran = true],
                    &mut cut,
                ),
                TargetAction::ConfirmNeverRan => run(self, &[&|w| w.wires[h].never_ran = true], &mut cut),
                TargetAction::Discard => run(
                    self,
                    &[&|w| w.target.slot = Slot::None, &|w| w.target.forget(), &|w| {
                        w.wires[h].forgot = true;
                    }],
                    &mut cut,
                ),
                TargetAction::ConfirmDiscarded => run(self, &[&|w| w.wires[h].forgot = true], &mut cut),
            };
            if !lives {
                return self.target_dies();
            }
        }
        self.target.minds[h] = Some(state);
        if cut.is_some() {
            self.target_dies();
        }
    }

    /// A start that fails: its CPUs ran or did not, and nothing is recorded.
    pub(crate) fn start_fails(&mut self, rules: &Rules, attempt: usize, started: bool) {
        let Some(state @ (Target::Prepared | Target::PerhapsStarted)) = self.target.minds[attempt] else {
            return;
        };
        if started {
            self.target.start();
        }
        self.target_does(attempt, (rules.target)(state, TargetEvent::StartFailed), None);
    }

    /// The target cannot record that the machine never ran, although that reached its disk.
    pub(crate) fn return_fails(&mut self, attempt: usize) {
        if self.target.minds[attempt] == Some(Target::Prepared) && self.target.slot == Slot::None {
            self.target.record(attempt, TargetRecord::NeverRan);
        }
    }

    pub(crate) fn target_dies(&mut self) {
        self.target.power = Power::Down;
        self.target.minds = [None; ATTEMPTS];
        self.wires.iter_mut().for_each(|wire| wire.open_at_target = false);
    }

    pub(crate) fn target_restarts(&mut self, rules: &Rules) {
        self.target.power = Power::Up;
        let Disk::By(attempt, record) = self.target.disk else {
            // A runtime directory that no record owns is removed.
            self.target.slot = Slot::None;
            return;
        };
        let waiting = match self.target.slot {
            Slot::Filling | Slot::Loaded => PausedIncoming::Unfinished,
            Slot::Marked | Slot::Running => PausedIncoming::Complete,
            Slot::None => PausedIncoming::Gone,
        };
        self.target_does(attempt, (rules.target_recovered)(record, waiting), None);
    }
}

impl SourceHost {
    fn remove(&mut self, attempt: usize) {
        (self.disk, self.noted[attempt]) = (Disk::Nothing, false);
    }

    fn stop(&mut self) {
        if self.qemu == Qemu::Running {
            self.qemu = Qemu::Paused;
        }
    }

    fn go_on(&mut self) {
        if self.qemu == Qemu::Paused {
            self.qemu = Qemu::Running;
        }
    }
}

impl TargetHost {
    fn reserve(&mut self) {
        (self.slot, self.whole) = (Slot::Filling, false);
    }

    /// The disks are flushed as part of it.
    fn load(&mut self) {
        (self.slot, self.whole) = (Slot::Loaded, true);
    }

    fn mark(&mut self) {
        if self.slot == Slot::Loaded {
            self.slot = Slot::Marked;
        }
    }

    /// A machine whose QEMU has ended belongs to this host all the same, as one that crashed.
    fn start(&mut self) {
        if self.slot != Slot::None {
            (self.slot, self.has_run) = (Slot::Running, true);
        }
    }

    fn record(&mut self, attempt: usize, record: TargetRecord) {
        self.disk = Disk::By(attempt, record);
    }

    fn forget(&mut self) {
        (self.disk, self.whole) = (Disk::Nothing, false);
    }
}
