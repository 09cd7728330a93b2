//! Epochs, checked against every order of messages, losses, repetitions and takeovers.
//!
//! A machine of two pages that counts; a standby that applies what the product's rules let it apply; a
//! network that loses, repeats and reorders. In every state: the standby's pages are those of one whole epoch
//! while it stands or has taken over, and the output that has left is of epochs that it accounts for.

use stateright::{Checker, Model, Property};
use std::collections::{BTreeMap, BTreeSet};
use whimbrel_protect::epoch::{
    PrimaryAction, PrimaryEpochs, PrimaryEvent, StandbyEpochAction, StandbyEpochs, StandbyEvent,
};

const EPOCHS: u64 = 2;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    primary: PrimaryEpochs,
    standby: StandbyEpochs,
    /// Pages of the machine now, and as of each cut.
    memory: [u8; 2],
    cuts: Vec<[u8; 2]>,
    writes: u8,
    /// The standby's pages, and what it holds aside.
    copy: [u8; 2],
    aside: BTreeMap<usize, u8>,
    released: u64,
    messages: BTreeSet<Message>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    Page { epoch: u64, page: usize, content: u8 },
    Seal { epoch: u64, pages: u64 },
    Committed { epoch: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Write(usize),
    Cut,
    /// A message stays under way: it may come again, later, after others, or never.
    Deliver(Message),
    Fail,
    TakeOver,
}

/// The rules, or a broken form of them.
struct Epochs {
    standby: fn(StandbyEpochs, StandbyEvent) -> (StandbyEpochs, StandbyEpochAction),
    primary: fn(PrimaryEpochs, PrimaryEvent) -> (PrimaryEpochs, Option<PrimaryAction>),
}

impl Epochs {
    fn cut(&self, world: &mut World) {
        let (state, action) = (self.primary)(world.primary, PrimaryEvent::Due);
        world.primary = state;
        if let Some(PrimaryAction::Release(epoch)) = action {
            world.released = epoch;
        }
        let Some(PrimaryAction::CaptureAndSend(epoch)) = action else { return };
        let before = world.cuts[world.cuts.len() - 1];
        world.cuts.push(world.memory);
        let dirty: Vec<usize> = (0..2).filter(|page| before[*page] != world.memory[*page]).collect();
        for page in &dirty {
            world.messages.insert(Message::Page { epoch, page: *page, content: world.memory[*page] });
        }
        world.messages.insert(Message::Seal { epoch, pages: dirty.len() as u64 });
    }

    fn deliver(&self, world: &mut World, message: Message) {
        let event = match message {
            Message::Page { epoch, page, .. } => {
                StandbyEvent::Page { epoch, new: !world.aside.contains_key(&page) }
            }
            Message::Seal { epoch, pages } => StandbyEvent::EpochEnd { epoch, pages },
            Message::Committed { epoch } => {
                let (state, action) = (self.primary)(world.primary, PrimaryEvent::Committed(epoch));
                world.primary = state;
                if let Some(PrimaryAction::Release(epoch)) = action {
                    world.released = epoch;
                }
                return;
            }
        };
        let (state, action) = (self.standby)(world.standby, event);
        world.standby = state;
        match (action, message) {
            (StandbyEpochAction::Buffer, Message::Page { page, content, .. }) => {
                world.aside.insert(page, content);
            }
            (StandbyEpochAction::Apply, Message::Seal { epoch, .. }) => {
                std::mem::take(&mut world.aside)
                    .into_iter()
                    .for_each(|(page, content)| world.copy[page] = content);
                world.messages.insert(Message::Committed { epoch });
            }
            (StandbyEpochAction::Acknowledge, Message::Seal { epoch, .. }) => {
                world.messages.insert(Message::Committed { epoch });
            }
            _ => {}
        }
    }
}

impl Model for Epochs {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let (standby, action) =
            (self.standby)(StandbyEpochs::Seeding, StandbyEvent::EpochEnd { epoch: 0, pages: 0 });
        assert_eq!(action, StandbyEpochAction::Apply);
        vec![World {
            primary: PrimaryEpochs::initial(),
            standby,
            memory: [0; 2],
            cuts: vec![[0; 2]],
            writes: 0,
            copy: [0; 2],
            aside: BTreeMap::new(),
            released: 0,
            messages: BTreeSet::new(),
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.writes < 3 {
            actions.extend([Action::Write(0), Action::Write(1)]);
        }
        if (world.cuts.len() as u64) <= EPOCHS {
            actions.push(Action::Cut);
        }
        for message in &world.messages {
            actions.push(Action::Deliver(*message));
        }
        actions.extend([Action::Fail, Action::TakeOver]);
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut next = world.clone();
        match action {
            Action::Write(page) => {
                next.writes += 1;
                next.memory[page] = next.writes;
            }
            Action::Cut => self.cut(&mut next),
            Action::Deliver(message) => self.deliver(&mut next, message),
            Action::Fail => next.primary = (self.primary)(next.primary, PrimaryEvent::Failed).0,
            Action::TakeOver => {
                let (state, action) = (self.standby)(next.standby, StandbyEvent::TakeOver);
                next.standby = state;
                if action == StandbyEpochAction::Run {
                    next.aside.clear();
                }
            }
        }
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("the standby's machine is that of a whole epoch", |_, world: &World| {
                let epoch = match world.standby {
                    StandbyEpochs::Seeding => return false,
                    StandbyEpochs::Complete { committed, .. } => Some(committed),
                    StandbyEpochs::Over { from } => from,
                };
                epoch.is_none_or(|epoch| world.copy == world.cuts[epoch as usize])
            }),
            Property::always(
                "no output has left that the standby does not account for",
                |_, world: &World| match world.standby {
                    StandbyEpochs::Seeding => false,
                    StandbyEpochs::Complete { committed, .. } => world.released <= committed,
                    StandbyEpochs::Over { from } => from.is_none_or(|from| world.released <= from),
                },
            ),
            Property::sometimes("epochs are committed and released", |_, world: &World| {
                world.released == EPOCHS
            }),
            Property::sometimes("the standby takes over in the middle of an epoch", |_, world: &World| {
                world.standby == StandbyEpochs::Over { from: Some(1) } && world.cuts.len() == 3
            }),
        ]
    }
}

fn broken(rules: Epochs) -> bool {
    let checked = rules.checker().threads(2).spawn_bfs().join();
    Epochs::properties(&Epochs { standby: StandbyEpochs::step, primary: PrimaryEpochs::step })[..2]
        .iter()
        .any(|property| checked.discovery(property.name).is_some())
}

#[test]
fn a_whole_epoch_or_none_and_no_output_ahead_of_it() {
    let begun = std::time::Instant::now();
    let checked = Epochs { standby: StandbyEpochs::step, primary: PrimaryEpochs::step }
        .checker()
        .threads(2)
        .spawn_bfs()
        .join();
    println!("{} states, {:.1} s", checked.unique_state_count(), begun.elapsed().as_secs_f64());
    checked.assert_properties();
    assert!(checked.unique_state_count() > 1_000);
}

#[test]
fn a_standby_that_takes_a_seal_for_an_epoch_is_found() {
    fn trusting(state: StandbyEpochs, event: StandbyEvent) -> (StandbyEpochs, StandbyEpochAction) {
        match (state, event) {
            (StandbyEpochs::Complete { committed, .. }, StandbyEvent::EpochEnd { epoch, .. })
                if epoch == committed + 1 =>
            {
                (StandbyEpochs::Complete { committed: epoch, buffered: 0 }, StandbyEpochAction::Apply)
            }
            _ => state.step(event),
        }
    }
    assert!(broken(Epochs { standby: trusting, primary: PrimaryEpochs::step }));
}

#[test]
fn a_standby_that_holds_pages_of_any_epoch_is_found() {
    fn greedy(state: StandbyEpochs, event: StandbyEvent) -> (StandbyEpochs, StandbyEpochAction) {
        match (state, event) {
            (StandbyEpochs::Complete { committed, buffered: held }, StandbyEvent::Page { new, .. }) => (
                StandbyEpochs::Complete { committed, buffered: held + u64::from(new) },
                StandbyEpochAction::Buffer,
            ),
            _ => state.step(event),
        }
    }
    assert!(broken(Epochs { standby: greedy, primary: PrimaryEpochs::step }));
}

#[test]
fn a_primary_that_releases_when_it_has_sent_is_found() {
    fn hasty(state: PrimaryEpochs, event: PrimaryEvent) -> (PrimaryEpochs, Option<PrimaryAction>) {
        match (state, event) {
            (PrimaryEpochs::Waiting { epoch }, PrimaryEvent::Due) => {
                (PrimaryEpochs::Idle { committed: epoch }, Some(PrimaryAction::Release(epoch)))
            }
            _ => state.step(event),
        }
    }
    assert!(broken(Epochs { standby: StandbyEpochs::step, primary: hasty }));
}
