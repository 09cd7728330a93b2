//! Scene: one store with writers, a collector and readers beside each other. The process is killed at any
//! call, the host may lose power then, and another process goes on with what is there.

use super::capsules::{self, Pages, after, changes, commit, is_collected, is_excused, name};
use crate::{
    report::violation,
    rules::{acknowledged_exists::Ledger, comes_back, named_is_whole, reachable_stays},
    world::{
        draw,
        faults::Rates,
        log,
        processes::{self, Shared},
        with,
    },
};
use std::{thread, time::Duration};
use whimbrel_core::CapsuleId;
use whimbrel_store::{Expected, GcRoots, Store, StoreError};

/// Processes one after another.
const LIVES: u64 = 3;
/// Longest life in simulated time.
const LIFE_MAX: Duration = Duration::from_secs(600);

/// Content of a ref, and where the newest capsule of it is.
type Refs = Ledger<Pages>;

#[derive(Debug, Default)]
struct Known {
    ledger: Refs,
    /// Capsules that can be built on, with their content.
    newest: Vec<(String, CapsuleId, Pages)>,
}

pub(crate) fn run() {
    let known = Shared::new(Known::default());
    let rates = with(|world| Rates {
        stall: world.faults.draw_rate(60),
        slow_sync: world.faults.draw_rate(20),
        failed_sync: world.faults.draw_rate(120),
        failed_read: world.faults.draw_rate(400),
        failed_change: world.faults.draw_rate(400),
        no_descriptor: world.faults.draw_rate(300),
        ..Rates::default()
    });
    log(&format!("{rates:?}"));
    for life in 0..LIVES {
        let known = known.clone();
        let process = processes::start(0, &format!("store.{life}"), move || live(&known, rates));
        match draw(4) {
            0 => {
                process.await_end(LIFE_MAX);
            }
            1 => {
                thread::sleep(Duration::from_micros(draw(600_000)));
                process.kill();
                if draw(2) == 0 {
                    processes::lose_power(process.host());
                }
            }
            _ => {
                process.doom(draw(3_000), draw(2) == 0);
                process.await_end(LIFE_MAX);
            }
        }
        if !process.has_ended() {
            violation("ends_or_says", "a process of a store has not ended after ten minutes");
        }
        comes_back::end_faults();
    }
    let store = open();
    check(&store, &known, "in the end");
}

fn open() -> Store {
    capsules::open(0).unwrap_or_else(|error| violation("comes_back", &format!("does not open: {error:?}")))
}

/// Every ref has what was acknowledged, or what was begun.
fn check(store: &Store, known: &Shared<Known>, when: &str) {
    let found = named_is_whole::check(store, when);
    let seen = known.see(|known| {
        known.ledger.names().into_iter().try_for_each(|tag| {
            let pages = found.iter().find(|(name, _)| name.as_str() == tag).map(|(_, pages)| pages.clone());
            known.ledger.see(&tag, pages)
        })
    });
    if let Err(text) = seen {
        violation("acknowledged_exists", &format!("{when}: {text}"));
    }
}

/// One process, from its start to its orderly end.
fn live(known: &Shared<Known>, rates: Rates) {
    let store = open();
    check(&store, known, "after the start");
    refill(&store, known);
    with(|world| world.faults.rates = rates);
    let writers = 1 + draw(3);
    thread::scope(|scope| {
        for writer in 0..writers {
            let (store, known) = (&store, known);
            scope.spawn(move || write(store, known, &format!("r{writer}")));
        }
        if draw(3) > 0 {
            scope.spawn(|| read(&store, known));
        }
        if draw(4) > 0 {
            scope.spawn(|| collect(&store));
        }
    });
    comes_back::end_faults();
    comes_back::check("garbage collection", || store.gc(GcRoots::Referenced));
    refill(&store, known);
    comes_back::check("a checkpoint", || write_once(&store, known, "r0"));
    check(&store, known, "after the work");
}

/// Forgets what can no longer be built on.
fn refill(store: &Store, known: &Shared<Known>) {
    let refs = store.list_refs().unwrap_or_default();
    known.see(|known| {
        known.newest.retain(|(tag, id, _)| refs.iter().any(|(name, now)| name.as_str() == tag && now == id));
    });
}

fn write(store: &Store, known: &Shared<Known>, tag: &str) {
    for _ in 0..1 + draw(5) {
        let written = if draw(8) == 0 { remove(store, known, tag) } else { write_once(store, known, tag) };
        match written {
            Ok(()) => {}
            Err(error) if is_collected(&error) => {}
            Err(error) if is_excused(&error) => {
                // What an operator does: collect garbage, which opens a latched store again.
                drop(store.gc(GcRoots::Referenced));
            }
            Err(error) => violation("ends_or_says", &format!("a checkpoint fails for no reason: {error:?}")),
        }
    }
}

fn write_once(store: &Store, known: &Shared<Known>, tag: &str) -> Result<(), StoreError> {
    let (fresh, at) = (draw(3) == 0, draw(64) as usize);
    let base = known.see(|known| {
        let all = &known.newest;
        let own = all.iter().find(|(other, ..)| fresh && other == tag);
        own.or_else(|| all.get(at % all.len().max(1))).cloned()
    });
    let changes = changes(30, 50);
    let pages = after(base.as_ref().map_or(&Pages::new(), |(_, _, pages)| pages), &changes);
    known.see(|known| known.ledger.begin(tag, Some(pages.clone())));
    let committed = commit(store, base.map(|(_, id, _)| id), &changes, &[name(tag)]);
    // The ref may have moved all the same: then nothing retains the version before.
    known.see(|known| known.newest.retain(|(other, ..)| committed.is_ok() || other != tag));
    let id = committed?;
    known.see(|known| {
        known.ledger.acknowledge(tag, Some(pages.clone()));
        known.newest.retain(|(other, ..)| other != tag);
        known.newest.push((tag.to_owned(), id, pages));
    });
    Ok(())
}

fn remove(store: &Store, known: &Shared<Known>, tag: &str) -> Result<(), StoreError> {
    known.see(|known| known.ledger.begin(tag, None));
    match store.delete_ref(&name(tag), Expected::Anything) {
        Err(StoreError::Unknown { .. }) | Ok(()) => {}
        Err(error) => return Err(error),
    }
    known.see(|known| {
        known.ledger.acknowledge(tag, None);
        known.newest.retain(|(other, ..)| other != tag);
    });
    Ok(())
}

/// A machine that runs from a capsule while its ref moves on.
fn read(store: &Store, known: &Shared<Known>) {
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(draw(100)));
        let at = draw(64) as usize;
        let some = known.see(|known| known.newest.get(at % known.newest.len().max(1)).cloned());
        let Some((_, id, pages)) = some else { continue };
        let Ok(pin) = store.pin(&id) else { continue };
        thread::sleep(Duration::from_millis(draw(400)));
        reachable_stays::check(store, &id, &pages);
        drop(pin);
    }
}

fn collect(store: &Store) {
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(draw(60)));
        match store.gc(GcRoots::Referenced) {
            Ok(_) => {}
            Err(error) if is_excused(&error) => {}
            Err(error) => {
                violation("ends_or_says", &format!("garbage collection fails for no reason: {error:?}"))
            }
        }
    }
}
