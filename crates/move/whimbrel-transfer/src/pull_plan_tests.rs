//! Tests of the pull plan against made-up holders: a seed decides what they lack, when they fail and when
//! they send wrong data.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

const RETRY: Duration = Duration::from_millis(500);
const LIMITS: Limits = Limits { window: 50_000, answer: 20_000 };

fn digest(n: u32) -> Digest {
    Digest::of(&n.to_le_bytes())
}

fn node(n: u32) -> FetchItem {
    FetchItem::Object(ObjectKind::Node, WantedObject { digest: digest(n), similar: None })
}

fn pages(n: u32, count: usize) -> FetchItem {
    FetchItem::Pages { leaf: digest(n), similar: None, slots: (0..count).collect() }
}

#[test]
fn a_dsl_line_has_one_window_under_way_and_answers_of_one_size() {
    let mut plan = PullPlan::new(1, LIMITS, RETRY);
    (0..10).for_each(|n| plan.want(pages(n, 256)));
    assert_eq!(plan.next(Duration::ZERO), Action::Dial(0));
    plan.up(0);
    let mut asked = 0;
    while let Action::Request(ask) = plan.next(Duration::ZERO) {
        let count: usize = ask
            .items
            .iter()
            .map(|q| if let FetchItem::Pages { slots, .. } = &q.item { slots.len() } else { 0 })
            .sum();
        assert!((1..=14).contains(&count), "{count} pages for 20 kB");
        asked += 1;
    }
    assert_eq!(asked, 2);
    assert!(plan.bytes_in_flight(0) <= LIMITS.window);
}

#[test]
fn while_somebody_waits_for_a_page_nothing_is_prefetched() {
    let mut plan = PullPlan::new(1, LIMITS, RETRY);
    plan.want(node(1));
    plan.up(0);
    plan.demand = true;
    assert!(matches!(plan.next(Duration::ZERO), Action::Sleep(_)));
    plan.demand = false;
    assert!(matches!(plan.next(Duration::ZERO), Action::Request(_)));
}

#[test]
fn the_nearest_comes_back_and_what_one_lacks_the_other_is_asked() {
    let mut plan = PullPlan::new(2, LIMITS, RETRY);
    let now = Duration::ZERO;
    plan.want(node(1));
    assert_eq!(plan.next(now), Action::Dial(0));
    plan.down(0, now);
    assert_eq!(plan.next(now), Action::Dial(1));
    plan.up(1);
    let Action::Request(ask) = plan.next(now) else { panic!() };
    assert_eq!(ask.peer, 1);
    plan.answered(ask.ticket, vec![], vec![node(1)]);
    let Action::Sleep(until) = plan.next(now) else { panic!() };
    assert_eq!(plan.next(until), Action::Dial(0), "the only one who may have it");
    plan.up(0);
    let Action::Request(ask) = plan.next(until) else { panic!() };
    assert_eq!(ask.peer, 0);
    plan.answered(ask.ticket, vec![], vec![node(1)]);
    assert!(matches!(plan.next(until), Action::NoHolder(_) | Action::Sleep(_)));
}

#[test]
fn what_nobody_has_is_said_so() {
    let mut plan = PullPlan::new(1, LIMITS, RETRY);
    plan.want(node(1));
    plan.up(0);
    let Action::Request(ask) = plan.next(Duration::ZERO) else { panic!() };
    plan.answered(ask.ticket, vec![], vec![node(1)]);
    assert_eq!(plan.next(Duration::ZERO), Action::NoHolder(node(1)));
}

#[test]
fn while_the_nearest_is_dialled_the_next_is_asked_and_its_waits_grow() {
    let mut plan = PullPlan::new(2, LIMITS, RETRY);
    let mut now = Duration::ZERO;
    plan.want(node(1));
    assert_eq!(plan.next(now), Action::Dial(0));
    plan.dialling(0, now);
    assert_eq!(plan.next(now), Action::AwaitDial, "it is probably up in a moment");
    now += HEAD_START;
    assert_eq!(plan.next(now), Action::Dial(1));
    plan.dialling(1, now);
    assert_eq!(plan.next(now), Action::AwaitDial);
    plan.up(1);
    let Action::Request(ask) = plan.next(now) else { panic!() };
    assert_eq!(ask.peer, 1);
    plan.answered(ask.ticket, vec![], vec![node(1)]);
    assert_eq!(plan.next(now), Action::AwaitDial, "only the one that is dialled may have it");
    let mut waits = Vec::new();
    for _ in 0..7 {
        plan.down(0, now);
        let Action::Sleep(until) = plan.next(now) else { panic!() };
        waits.push((until - now).as_millis());
        now = until;
        assert_eq!(plan.next(now), Action::Dial(0));
        plan.dialling(0, now);
    }
    assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
}

/// Items as single things that can be counted.
fn things(item: &FetchItem) -> Vec<(Digest, usize)> {
    match item {
        FetchItem::Object(_, want) => vec![(want.digest, 0)],
        FetchItem::Pages { leaf, slots, .. } => slots.iter().map(|slot| (*leaf, slot)).collect(),
        FetchItem::Children { node, children, .. } => children.iter().map(|child| (*node, child)).collect(),
        FetchItem::Leaf { leaf, .. } => vec![(*leaf, 0)],
        FetchItem::BlobRange { digest, offset, .. } => vec![(*digest, *offset as usize)],
    }
}

proptest! {
    #[test]
    fn everything_comes_once_whatever_fails(
        counts in prop::collection::vec(1..256usize, 1..12), fate in prop::collection::vec(0..12u8, 1..200), window in 10_000..500_000u64,
    ) {
        let mut plan = PullPlan::new(3, Limits { window, answer: window / 2 }, RETRY);
        let mut missing = HashSet::new();
        for (n, count) in counts.iter().enumerate() {
            let n = n as u32;
            for item in [node(1000 + n), pages(n, *count), FetchItem::Children { node: digest(2000 + n), similar: digest(1), children: (0..*count).collect() }] {
                missing.extend(things(&item));
                plan.want(item);
            }
        }
        let (mut now, mut fate, mut flying, mut gone) = (Duration::ZERO, fate.into_iter(), HashSet::new(), HashSet::new());
        let mut flights = BTreeMap::new();
        for step in 0.. {
            prop_assert!(step < 100_000, "no end");
            match plan.next(now) {
                Action::Done => break,
                // The last holder is never blamed and lacks nothing.
                Action::NoHolder(item) => prop_assert!(false, "{:?}", item),
                Action::Sleep(until) => { prop_assert!(until > now); now = until; }
                Action::Dial(peer) => {
                    prop_assert!(!gone.contains(&peer));
                    match fate.next().unwrap_or(9) {
                        0..3 => plan.down(peer, now),
                        3..6 => plan.dialling(peer, now),
                        _ => plan.up(peer),
                    }
                }
                Action::AwaitDial => {
                    let dialled: Vec<usize> = plan.dialled().collect();
                    prop_assert!(!dialled.is_empty());
                    for peer in dialled {
                        if fate.next().unwrap_or(9) < 3 { plan.down(peer, now) } else { plan.up(peer) }
                    }
                }
                Action::Request(ask) => {
                    prop_assert!(!gone.contains(&ask.peer) && !ask.items.is_empty() && ask.items.len() <= WANTS_MAX);
                    let before = plan.bytes_in_flight(ask.peer);
                    for thing in ask.items.iter().flat_map(|queued| things(&queued.item)) {
                        prop_assert!(missing.contains(&thing), "asked again though it came: {:?}", thing);
                        prop_assert!(flying.insert(thing), "asked while under way: {:?}", thing);
                    }
                    prop_assert!(before <= window + 8192, "{} under way", before);
                    flights.insert(ask.ticket, ask);
                }
                Action::Wait(ticket) => {
                    let ask = flights.remove(&ticket).unwrap();
                    ask.items.iter().flat_map(|q| things(&q.item)).for_each(|thing| { flying.remove(&thing); });
                    match fate.next().unwrap_or(9) {
                        0 => { plan.unanswered(ticket); plan.down(ask.peer, now); }
                        1 if ask.peer < 2 => { plan.unanswered(ticket); plan.blamed(ask.peer); gone.insert(ask.peer); }
                        2 if ask.peer < 2 => plan.answered(ticket, vec![], ask.items.into_iter().map(|q| q.item).collect()),
                        fate => {
                            // Some items may be left out.
                            let keep = if fate == 3 { ask.items.len().div_ceil(2) } else { ask.items.len() };
                            let mut items = ask.items.into_iter().map(|q| q.item);
                            for item in items.by_ref().take(keep) {
                                things(&item).into_iter().for_each(|thing| { missing.remove(&thing); });
                            }
                            plan.answered(ticket, items.collect(), vec![]);
                        }
                    }
                    now += Duration::from_millis(100);
                }
            }
        }
        prop_assert!(missing.is_empty(), "{} never came", missing.len());
    }
}
