//! Model test of postcopy after the commit, against everything that may happen around it.
//!
//! The transition functions are those of the product (`whimbrel_migrate::postcopy::completion`). Around them
//! are a source with its record and its pages, a target with its record, two pages of a disk, a guest that
//! writes to them, and a network on which any message may be lost, repeated, delayed and overtaken. Either
//! daemon dies at any time and restarts with what is durable; the target loses power, and with it what was
//! not synced.

use stateright::{Checker, Model, Property};
use whimbrel_migrate::postcopy::completion::{
    FetchAction, FetchEvent, FetchState, ServeAction, ServeEvent, ServeState,
};

const PAGES: usize = 2;

/// Rules under test: the product's, or broken ones.
#[derive(Clone, Copy)]
struct Rules {
    keeper: fn(ServeState, ServeEvent) -> (ServeState, &'static [ServeAction]),
    keeper_recovered: fn(bool) -> (ServeState, &'static [ServeAction]),
    lacker: fn(FetchState, FetchEvent) -> (FetchState, &'static [FetchAction]),
    lacker_recovered: fn(bool) -> (FetchState, &'static [FetchAction]),
    /// Whether an arriving page is stored only where none is.
    fills_only: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            keeper: ServeState::step,
            keeper_recovered: ServeState::recovered,
            lacker: FetchState::step,
            lacker_recovered: FetchState::recovered,
            fills_only: true,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Page {
    Missing,
    Came { synced: bool },
    Written { synced: bool },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    /// None while the daemon is down.
    keeper: Option<ServeState>,
    /// Record of the pages that are served, and the pages.
    kept: bool,
    lacker: Option<FetchState>,
    /// Record of the missing pages.
    owed: bool,
    pages: [Page; PAGES],
    /// Pages written by the guest, and not lost with the power since.
    written: [bool; PAGES],
    /// Actions that the target still has to do.
    to_do: &'static [FetchAction],
    sent: Sent,
}

/// Messages. Those that were sent stay deliverable: a lost one is never delivered, a repeated one again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Sent {
    attend: bool,
    fetch: [bool; PAGES],
    page: [bool; PAGES],
    whole: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    SourceNotices,
    TargetNotices,
    DeliverAttend,
    DeliverFetch(usize),
    DeliverPage(usize),
    DeliverWhole,
    /// Carries out the next action of the target.
    Act,
    GuestWrites(usize),
    GuestSyncs,
    SourceDies,
    SourceComes,
    TargetDies,
    TargetLosesPower,
    TargetComes,
}

impl Step {
    const ALL: [Step; 17] = [
        Step::SourceNotices,
        Step::TargetNotices,
        Step::DeliverAttend,
        Step::DeliverFetch(0),
        Step::DeliverFetch(1),
        Step::DeliverPage(0),
        Step::DeliverPage(1),
        Step::DeliverWhole,
        Step::Act,
        Step::GuestWrites(0),
        Step::GuestWrites(1),
        Step::GuestSyncs,
        Step::SourceDies,
        Step::SourceComes,
        Step::TargetDies,
        Step::TargetLosesPower,
        Step::TargetComes,
    ];
}

struct Postcopy {
    rules: Rules,
}

impl Postcopy {
    fn apply(&self, world: &World, step: Step) -> Option<World> {
        let mut next = world.clone();
        match step {
            Step::SourceNotices => self.source(&mut next, ServeEvent::LinkLost, None)?,
            Step::DeliverFetch(page) if world.sent.fetch[page] => {
                self.source(&mut next, ServeEvent::Fetch, Some(page))?;
            }
            Step::DeliverWhole if world.sent.whole => self.source(&mut next, ServeEvent::Complete, None)?,
            Step::TargetNotices => self.target(&mut next, FetchEvent::LinkLost)?,
            Step::DeliverAttend if world.sent.attend => self.target(&mut next, FetchEvent::FetchOffered)?,
            Step::DeliverPage(page) if world.sent.page[page] => self.page(&mut next, page)?,
            Step::Act => self.act(&mut next)?,
            Step::GuestWrites(page) => {
                next.lacker?;
                // A durable version is not lost by a newer one that is not durable.
                let synced =
                    matches!(next.pages[page], Page::Came { synced: true } | Page::Written { synced: true });
                next.pages[page] = Page::Written { synced };
                next.written[page] = true;
                self.look(&mut next);
            }
            Step::GuestSyncs => {
                next.lacker?;
                sync(&mut next);
            }
            Step::SourceDies => next.keeper = next.keeper.map(|_| None)?,
            Step::TargetDies => {
                next.lacker = next.lacker.map(|_| None)?;
                next.to_do = &[];
            }
            Step::TargetLosesPower => {
                next.lacker = None;
                next.to_do = &[];
                for (page, written) in next.pages.iter_mut().zip(&mut next.written) {
                    if let Page::Came { synced: false } | Page::Written { synced: false } = page {
                        (*page, *written) = (Page::Missing, false);
                    }
                }
            }
            Step::SourceComes if world.keeper.is_none() => {
                let (keeper, actions) = (self.rules.keeper_recovered)(next.kept);
                next.keeper = Some(keeper);
                next.sent.attend |= actions.contains(&ServeAction::OfferFetch);
            }
            Step::TargetComes if world.lacker.is_none() => {
                next.lacker = Some((self.rules.lacker_recovered)(next.owed).0);
                self.look(&mut next);
            }
            _ => return None,
        }
        Some(next)
    }

    fn source(&self, world: &mut World, event: ServeEvent, page: Option<usize>) -> Option<()> {
        let (keeper, actions) = (self.rules.keeper)(world.keeper?, event);
        world.keeper = Some(keeper);
        for action in actions {
            match (action, page) {
                (ServeAction::OfferFetch, _) => world.sent.attend = true,
                (ServeAction::SendPages, Some(page)) => world.sent.page[page] = true,
                (ServeAction::Release, _) => world.kept = false,
                (ServeAction::SendPages | ServeAction::Refuse, _) => {}
            }
        }
        Some(())
    }

    fn target(&self, world: &mut World, event: FetchEvent) -> Option<()> {
        if !world.to_do.is_empty() {
            return None;
        }
        let (lacker, actions) = (self.rules.lacker)(world.lacker?, event);
        world.lacker = Some(lacker);
        world.to_do = actions;
        Some(())
    }

    fn act(&self, world: &mut World) -> Option<()> {
        world.lacker?;
        let (action, rest) = world.to_do.split_first()?;
        world.to_do = rest;
        match action {
            FetchAction::Request => {
                for (page, fetch) in world.pages.iter().zip(&mut world.sent.fetch) {
                    *fetch |= *page == Page::Missing;
                }
            }
            FetchAction::Reschedule => {}
            FetchAction::RemoveRecord => {
                sync(world);
                world.owed = false;
            }
            FetchAction::ReportComplete => world.sent.whole = true,
        }
        Some(())
    }

    fn page(&self, world: &mut World, page: usize) -> Option<()> {
        world.lacker?;
        if world.pages[page] == Page::Missing || !self.rules.fills_only {
            world.pages[page] = Page::Came { synced: false };
        }
        self.look(world);
        Some(())
    }

    /// Makes the target check whether anything is missing.
    fn look(&self, world: &mut World) {
        if world.lacker == Some(FetchState::Incomplete) && !world.pages.contains(&Page::Missing) {
            // A busy target checks again later: each page and each start of the daemon makes it.
            let _ = self.target(world, FetchEvent::LastStored);
        }
    }

    /// Whether both sides finish once nothing fails any more.
    fn ends_well(&self, world: &World) -> bool {
        let mut world = world.clone();
        for step in [Step::SourceDies, Step::SourceComes, Step::TargetDies, Step::TargetComes] {
            world = self.apply(&world, step).unwrap_or(world);
        }
        for _ in 0..12 {
            for step in [
                Step::SourceNotices,
                Step::TargetNotices,
                Step::Act,
                Step::DeliverAttend,
                Step::Act,
                Step::Act,
                Step::DeliverFetch(0),
                Step::DeliverFetch(1),
                Step::DeliverPage(0),
                Step::DeliverPage(1),
                Step::Act,
                Step::Act,
                Step::DeliverWhole,
            ] {
                world = self.apply(&world, step).unwrap_or(world);
            }
        }
        !world.kept && !world.owed && !world.pages.contains(&Page::Missing)
    }
}

fn sync(world: &mut World) {
    for page in &mut world.pages {
        match page {
            Page::Came { synced } | Page::Written { synced } => *synced = true,
            Page::Missing => {}
        }
    }
}

impl Model for Postcopy {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World {
            keeper: Some(ServeState::initial().0),
            kept: true,
            lacker: Some(FetchState::initial().0),
            owed: true,
            pages: [Page::Missing; PAGES],
            written: [false; PAGES],
            to_do: &[],
            sent: Sent { attend: true, ..Sent::default() },
        }]
    }

    fn actions(&self, _: &World, actions: &mut Vec<Step>) {
        actions.extend(Step::ALL);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        self.apply(world, step)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("the source keeps what is missing", |_, w: &World| {
                let lasts = |page: &Page| {
                    matches!(page, Page::Came { synced: true } | Page::Written { synced: true })
                };
                w.kept || w.pages.iter().all(lasts)
            }),
            Property::always("what was written is not overwritten", |_, w: &World| {
                w.written
                    .iter()
                    .zip(&w.pages)
                    .all(|(written, page)| !written || matches!(page, Page::Written { .. }))
            }),
            Property::always("nothing is struck out that is missing", |_, w: &World| {
                w.owed || !w.pages.contains(&Page::Missing)
            }),
            Property::always(
                "if the faults end, the target has all of it and the source nothing",
                |model: &Postcopy, w: &World| model.ends_well(w),
            ),
        ]
    }
}

fn broken(rules: Rules) -> Vec<&'static str> {
    Postcopy { rules }.checker().spawn_bfs().join().discoveries().into_keys().collect()
}

#[test]
fn post_copy_is_safe_and_ends_whatever_happens() {
    let checked = Postcopy { rules: Rules::default() }.checker().threads(2).spawn_bfs().join();
    println!("{} states, {} transitions", checked.unique_state_count(), checked.state_count());
    checked.assert_properties();
    assert!(checked.unique_state_count() > 1000, "only {} states", checked.unique_state_count());
}

#[test]
fn a_page_that_overwrites_is_found() {
    assert!(
        broken(Rules { fills_only: false, ..Rules::default() })
            .contains(&"what was written is not overwritten")
    );
}

#[test]
fn a_target_that_says_so_before_it_is_durable_is_found() {
    fn hasty(state: FetchState, event: FetchEvent) -> (FetchState, &'static [FetchAction]) {
        match (state, event) {
            (FetchState::Incomplete, FetchEvent::LastStored) => {
                (FetchState::Complete, &[FetchAction::ReportComplete, FetchAction::RemoveRecord])
            }
            _ => state.step(event),
        }
    }
    let found = broken(Rules { lacker: hasty, ..Rules::default() });
    assert!(found.contains(&"the source keeps what is missing"), "{found:?}");
}

#[test]
fn a_target_that_says_it_only_once_is_found() {
    fn silent(state: FetchState, event: FetchEvent) -> (FetchState, &'static [FetchAction]) {
        match (state, event) {
            (FetchState::Complete, FetchEvent::FetchOffered) => (FetchState::Complete, &[]),
            _ => state.step(event),
        }
    }
    let found = broken(Rules { lacker: silent, ..Rules::default() });
    assert!(found.iter().any(|name| name.starts_with("if the faults end")), "{found:?}");
}

#[test]
fn a_source_whose_next_daemon_forgets_is_found() {
    fn forgetful(_: bool) -> (ServeState, &'static [ServeAction]) {
        (ServeState::Released, &[])
    }
    let found = broken(Rules { keeper_recovered: forgetful, ..Rules::default() });
    assert!(found.iter().any(|name| name.starts_with("if the faults end")), "{found:?}");
}

#[test]
fn a_source_that_gives_each_page_only_once_is_found() {
    fn once(state: ServeState, event: ServeEvent) -> (ServeState, &'static [ServeAction]) {
        match (state, event) {
            (ServeState::Serving, ServeEvent::Fetch) => {
                (ServeState::Released, &[ServeAction::SendPages, ServeAction::Release])
            }
            _ => state.step(event),
        }
    }
    let found = broken(Rules { keeper: once, ..Rules::default() });
    assert!(found.contains(&"the source keeps what is missing"), "{found:?}");
}

#[test]
fn a_target_whose_next_daemon_takes_itself_for_whole_is_found() {
    fn careless(_: bool) -> (FetchState, &'static [FetchAction]) {
        (FetchState::Complete, &[])
    }
    let found = broken(Rules { lacker_recovered: careless, ..Rules::default() });
    assert!(found.contains(&"the source keeps what is missing"), "{found:?}");
}
