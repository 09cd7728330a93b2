//! Model of the handover: hosts, disks, QEMUs, a network, and the faults of all of them.

mod heal;
mod hosts;

use hosts::{Disk, Power, Slot};
pub(crate) use hosts::{Qemu, SourceHost, TargetHost};
use stateright::{Model, Property};
use whimbrel_migrate::handover::{
    PausedIncoming, Source, SourceAction, SourceEvent, SourceRecord, Target, TargetAction, TargetEvent,
    TargetRecord,
};

/// Number of times the user migrates the machine.
pub(crate) const ATTEMPTS: usize = 2;

/// A property of a state.
type Holds = fn(&Handover, &World) -> bool;

/// Properties of every state that can be reached.
pub(crate) const PROPERTIES: [(&str, Holds); 8] = [
    ("at most one side runs", |_, w| !(w.source.qemu == Qemu::Running && w.target.slot == Slot::Running)),
    ("the source never runs again after the commit", |_, w| {
        w.source.disk == Disk::Ours || w.source.qemu != Qemu::Running
    }),
    ("no user may start it on both sides", |_, w| {
        !(w.source.disk == Disk::Ours && matches!(w.target.disk, Disk::By(_, TargetRecord::Ours)))
    }),
    ("after the commit the target has all of it", |_, w| {
        w.source.disk == Disk::Ours || (w.target.whole && matches!(w.target.disk, Disk::By(..)))
    }),
    ("nothing runs that is not whole", |_, w| w.target.slot != Slot::Running || w.target.whole),
    ("a machine that has run on the target never runs on the source again", |_, w| {
        !w.target.has_run || (w.source.disk != Disk::Ours && w.source.qemu != Qemu::Running)
    }),
    ("nothing is left of a machine that the target forgot", |_, w| {
        w.target.disk != Disk::Nothing || w.target.slot == Slot::None || w.target.power == Power::Down
    }),
    ("if the faults end, exactly one side has it and no state is without an exit", |model, w| {
        heal::ends_well(&model.rules, w)
    }),
];

/// The rules under test: the product's, or broken ones.
#[derive(Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) source: fn(Source, SourceEvent) -> (Source, &'static [SourceAction]),
    pub(crate) target: fn(Target, TargetEvent) -> (Target, &'static [TargetAction]),
    pub(crate) source_recovered: fn(SourceRecord) -> (Source, &'static [SourceAction]),
    pub(crate) target_recovered: fn(TargetRecord, PausedIncoming) -> (Target, &'static [TargetAction]),
    /// Whether the start of a handover is recorded durably.
    pub(crate) keep_notes: bool,
    /// Whether a target refuses an offer whose handover it has seen the end of.
    pub(crate) refuse_ended: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            source: Source::step,
            target: Target::step,
            source_recovered: Source::recovered,
            target_recovered: Target::recovered,
            keep_notes: true,
            refuse_ended: true,
        }
    }
}

/// State of the model.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) source: SourceHost,
    pub(crate) target: TargetHost,
    pub(crate) wires: [Wire; ATTEMPTS],
}

/// Messages of one attempt. A message that was sent stays deliverable: a lost one is never delivered, a
/// repeated one again, a late one after younger ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Wire {
    /// Messages on the connection of the pages, which ends for each side when that side notices.
    pub(crate) open_at_source: bool,
    pub(crate) open_at_target: bool,
    pub(crate) offer: bool,
    pub(crate) accepted: bool,
    pub(crate) last: bool,
    pub(crate) ready: bool,
    /// Messages over any connection, at any time.
    pub(crate) commit: bool,
    pub(crate) runs: bool,
    pub(crate) never_ran: bool,
    pub(crate) abort: bool,
    pub(crate) forgot: bool,
}

/// Step of the model. `cut` is the number of effects after which the daemon dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Begin {
        cut: Option<usize>,
    },
    Source {
        attempt: usize,
        event: SourceEvent,
        cut: Option<usize>,
    },
    /// A write of the source's record fails, and leaves either record on the disk.
    WriteFails {
        attempt: usize,
        disk: Disk<SourceRecord>,
        cut: Option<usize>,
    },
    Offer {
        attempt: usize,
        cut: Option<usize>,
    },
    Target {
        attempt: usize,
        event: TargetEvent,
        cut: Option<usize>,
    },
    /// The target tries to start the machine, and reports a failure.
    StartFails {
        attempt: usize,
        started: bool,
    },
    /// The target cannot record that the machine never ran, although that reached its disk.
    ReturnFails {
        attempt: usize,
    },
    SourceCrash,
    SourceRestart,
    SourcePowerLoss,
    SourceLost,
    SourceQemuDies,
    TargetCrash,
    TargetRestart,
    TargetPowerLoss,
    TargetLost,
    TargetQemuDies,
}

/// Model of the handover for the checker.
#[derive(Clone)]
pub(crate) struct Handover {
    pub(crate) rules: Rules,
}

impl Model for Handover {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        let (source, target) = (SourceHost::new(), TargetHost::new());
        vec![World { source, target, wires: [Wire::default(); ATTEMPTS] }]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        faults(world, steps);
        // Deaths after every number of effects; those beyond the last change nothing and are the same state.
        for cut in [None, Some(0), Some(1), Some(2), Some(3)] {
            if world.source.power == Power::Up {
                source_steps(world, cut, steps);
            }
            if world.target.power == Power::Up {
                target_steps(&self.rules, world, cut, steps);
            }
        }
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut next = world.clone();
        next.take(&self.rules, step);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all: Vec<_> =
            PROPERTIES.iter().map(|(name, holds)| Property::<Self>::always(name, *holds)).collect();
        // A model in which nothing ever happens would be safe too.
        all.extend([
            Property::<Self>::sometimes("a machine moves", |_, w: &World| {
                w.source.disk == Disk::Nothing && w.target.slot == Slot::Running
            }),
            Property::<Self>::sometimes("a machine moves at the second attempt", |_, w: &World| {
                w.source.disk == Disk::Nothing
                    && w.target.disk == Disk::By(1, TargetRecord::Ours)
                    && w.target.slot == Slot::Running
            }),
            Property::<Self>::sometimes("a machine comes back", |_, w: &World| {
                w.wires[0].never_ran && w.source.qemu == Qemu::Running
            }),
            Property::<Self>::sometimes("a machine moves after it came back", |_, w: &World| {
                w.wires[0].never_ran
                    && w.target.disk == Disk::By(1, TargetRecord::Ours)
                    && w.target.slot == Slot::Running
            }),
        ]);
        all
    }
}

fn faults(world: &World, steps: &mut Vec<Step>) {
    match world.source.power {
        Power::Up => steps.extend([Step::SourceCrash, Step::SourcePowerLoss]),
        Power::Down => steps.extend([Step::SourceRestart, Step::SourcePowerLoss, Step::SourceLost]),
        Power::Lost => {}
    }
    match world.target.power {
        Power::Up => steps.extend([Step::TargetCrash, Step::TargetPowerLoss]),
        Power::Down => steps.extend([Step::TargetRestart, Step::TargetPowerLoss, Step::TargetLost]),
        Power::Lost => {}
    }
    if world.source.qemu != Qemu::Dead && world.source.power != Power::Lost {
        steps.push(Step::SourceQemuDies);
    }
    if world.target.slot != Slot::None && world.target.power != Power::Lost {
        steps.push(Step::TargetQemuDies);
    }
}

fn source_steps(world: &World, cut: Option<usize>, steps: &mut Vec<Step>) {
    if world.source.may_begin() {
        steps.push(Step::Begin { cut });
    }
    for (attempt, wire) in world.wires.iter().enumerate() {
        let Some(state) = world.source.minds[attempt] else { continue };
        let mut hear = |event| steps.push(Step::Source { attempt, event, cut });
        if matches!(state, Source::Recording | Source::Reverting | Source::TakingBack) {
            hear(SourceEvent::Recorded);
            let both = [Disk::Ours, Disk::By(attempt, SourceRecord::HandedOver)];
            steps.extend(both.map(|disk| Step::WriteFails { attempt, disk, cut }));
            continue;
        }
        hear(SourceEvent::Failed);
        if state == Source::Copying && wire.open_at_source && wire.accepted {
            hear(SourceEvent::RoundsOver);
        }
        if wire.open_at_source && wire.ready {
            hear(SourceEvent::TargetReady);
        }
        if wire.runs {
            hear(SourceEvent::TargetRuns);
        }
        if wire.never_ran {
            hear(SourceEvent::TargetNeverRan);
        }
        if wire.forgot {
            hear(SourceEvent::TargetDiscarded);
        }
    }
}

fn target_steps(rules: &Rules, world: &World, cut: Option<usize>, steps: &mut Vec<Step>) {
    for (attempt, wire) in world.wires.iter().enumerate() {
        if wire.open_at_target && wire.offer && world.target.may_take(rules, attempt) {
            steps.push(Step::Offer { attempt, cut });
        }
        let mut hear = |event| steps.push(Step::Target { attempt, event, cut });
        if wire.commit {
            // Any commit may be of a source that takes no machine back.
            hear(TargetEvent::Commit);
            if world.target.slot == Slot::None {
                hear(TargetEvent::CommitOfEnded);
            }
        }
        if wire.open_at_target {
            hear(TargetEvent::Failed);
        }
        if wire.open_at_target && wire.last && world.target.minds[attempt] == Some(Target::Receiving) {
            let loads = world.target.slot == Slot::Filling;
            hear(if loads { TargetEvent::Finished } else { TargetEvent::Failed });
        }
        if wire.abort {
            hear(TargetEvent::Abort);
        }
        if wire.commit {
            steps.extend([false, true].map(|started| Step::StartFails { attempt, started }));
            steps.push(Step::ReturnFails { attempt });
        }
    }
}

impl World {
    pub(crate) fn take(&mut self, rules: &Rules, step: Step) {
        match step {
            Step::Begin { cut } => self.begin(rules, cut),
            Step::Source { attempt, event, cut } => self.source_hears(rules, attempt, event, cut),
            Step::WriteFails { attempt, disk, cut } => {
                self.source.disk = disk;
                self.source_hears(rules, attempt, SourceEvent::Failed, cut);
            }
            Step::Offer { attempt, cut } => self.target_does(attempt, Target::initial(), cut),
            Step::Target { attempt, event, cut } => self.target_hears(rules, attempt, event, cut),
            Step::StartFails { attempt, started } => self.start_fails(rules, attempt, started),
            Step::ReturnFails { attempt } => self.return_fails(attempt),
            Step::SourceCrash => self.source_dies(),
            Step::SourceRestart => self.source_restarts(rules),
            Step::SourcePowerLoss => {
                self.source_dies();
                self.source.qemu = Qemu::Dead;
            }
            Step::SourceLost => self.source.lose(),
            Step::SourceQemuDies => self.source.qemu = Qemu::Dead,
            Step::TargetCrash => self.target_dies(),
            Step::TargetRestart => self.target_restarts(rules),
            Step::TargetPowerLoss => {
                self.target_dies();
                self.target.slot = Slot::None;
            }
            Step::TargetLost => self.target.lose(),
            Step::TargetQemuDies => self.target.slot = Slot::None,
        }
    }
}
