//! Scene: a host pulls versions of a machine from another one, beside a collector, over a link that is slow
//! and breaks. The pulling process is killed at any call. The pull is the program's own, with its plan, its
//! holders and the server of the other side; only the wire below it is simulated.

use super::capsules::{self, Pages, after, changes, commit, is_collected, is_excused, name};
use crate::{
    report::violation,
    rules::{acknowledged_exists::Ledger, comes_back, named_is_whole},
    world::{
        draw,
        faults::Rates,
        log,
        processes::{self, Shared},
        with,
    },
};
use bytes::Bytes;
use std::{
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::Duration,
};
use whimbrel_core::{CapsuleId, causes};
use whimbrel_store::{Expected, GcRoots, Store, StoreError};
use whimbrel_transfer::{Answer, Holder, Holders, Link, LinkError, Options, Server, TransferError, pull};
use whimbrel_wire::{Reply, Request};

const HERE: usize = 0;
const THERE: usize = 1;
const LIFE_MAX: Duration = Duration::from_secs(900);

/// Versions of the machine on the other host, oldest first, and what the pulling host has of it.
#[derive(Debug, Default)]
struct Known {
    versions: Vec<(CapsuleId, Pages)>,
    ledger: Ledger<Pages>,
}

pub(crate) fn run() {
    let known = Shared::new(Known::default());
    let prepared = known.clone();
    let process = processes::start(THERE, "there", move || prepare(&prepared));
    if !process.await_end(LIFE_MAX) {
        violation("ends_or_says", "the other host is not prepared after a quarter of an hour");
    }
    let rates = with(|world| Rates {
        stall: [0, 10, 30, 100][world.faults.random.below(4) as usize],
        slow_sync: world.faults.draw_rate(20),
        lost_message: world.faults.draw_rate(15),
        failed_change: world.faults.draw_rate(500),
        ..Rates::default()
    });
    // A slow link lets a pull write what it has in several batches.
    with(|world| {
        world.hosts[THERE].answers_after = [1_000, 10_000, 300_000, 900_000][world.work.below(4) as usize]
    });
    log(&format!("{rates:?}"));
    for life in 0..2 {
        let known = known.clone();
        let process = processes::start(HERE, &format!("here.{life}"), move || live(&known, rates));
        if draw(3) > 0 {
            process.doom(draw(6_000), draw(2) == 0);
        }
        if !process.await_end(LIFE_MAX) {
            violation("ends_or_says", "a pull has not ended after a quarter of an hour");
        }
        comes_back::end_faults();
    }
    check(&open(HERE), &known, "in the end");
}

fn open(host: usize) -> Store {
    capsules::open(host).unwrap_or_else(|error| violation("comes_back", &format!("does not open: {error:?}")))
}

/// A machine that both hosts had once, with versions that only the other one has.
fn prepare(known: &Shared<Known>) {
    let (here, there) = (open(HERE), open(THERE));
    let must = |done: Result<CapsuleId, StoreError>| match done {
        Ok(id) => id,
        Err(error) => violation("no_panic", &format!("a scene cannot be prepared: {error:?}")),
    };
    let first: Pages = (0..40 + draw(40)).map(|at| (at, 1000 + at)).collect();
    let mut versions = vec![(must(commit(&there, None, &first, &[name("v0")])), first.clone())];
    for version in 1..3 + draw(2) {
        let (base, pages) = versions.last().cloned().unwrap_or_else(|| unreachable!("there is one"));
        let changes = changes(12, 1 << 40);
        let id = must(commit(&there, Some(base), &changes, &[name(&format!("v{version}"))]));
        versions.push((id, after(&pages, &changes)));
    }
    // What the pulling host has of it is garbage there, in packs of which a little is needed.
    let own: Pages = (100..100 + draw(40)).map(|at| (at, 5000 + at)).collect();
    must(commit(&here, None, &after(&first, &own), &[name("gone")]));
    if draw(2) == 0 {
        must(commit(&here, None, &(300..310).map(|at| (at, 7000 + at)).collect(), &[name("other")]));
    }
    if let Err(error) = here.delete_ref(&name("gone"), Expected::Anything) {
        violation("no_panic", &format!("a scene cannot be prepared: {error:?}"));
    }
    known.see(|known| known.versions = versions);
}

/// The pulled machine has the content of a version that was acknowledged or begun, and is not partial.
fn check(store: &Store, known: &Shared<Known>, when: &str) {
    let found = named_is_whole::check(store, when);
    let machine = store.get_ref(&name("m")).ok().flatten();
    if machine.is_some_and(|id| store.is_partial(&id).unwrap_or(true)) {
        violation("named_is_whole", &format!("{when}: the machine's name means an incomplete capsule"));
    }
    let pages = found.into_iter().find(|(name, _)| name.as_str() == "m").map(|(_, pages)| pages);
    if let Err(text) = known.see(|known| known.ledger.see("m", pages)) {
        violation("acknowledged_exists", &format!("{when}: {text}"));
    }
}

fn live(known: &Shared<Known>, rates: Rates) {
    let (here, there) = (open(HERE), open(THERE));
    check(&here, known, "after the start");
    with(|world| world.faults.rates = rates);
    let versions = known.see(|known| known.versions.clone());
    let ended = Shared::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.see(|ended| *ended) {
                thread::sleep(Duration::from_millis(draw(150)));
                match here.gc(GcRoots::Referenced) {
                    Ok(_) => {}
                    Err(error) if is_excused(&error) => {}
                    Err(error) => violation(
                        "ends_or_says",
                        &format!("garbage collection fails for no reason: {error:?}"),
                    ),
                }
            }
        });
        for version in &versions {
            thread::sleep(Duration::from_millis(draw(60)));
            follow(&here, &there, known, version);
        }
        ended.see(|ended| *ended = true);
    });
    comes_back::end_faults();
    let (id, pages) = &versions[versions.len() - 1];
    known.see(|known| known.ledger.begin("m", Some(pages.clone())));
    comes_back::check("a pull", || {
        here.reopen().map_err(|source| TransferError::Commit { source })?;
        bring(&here, &there, *id)
    });
    known.see(|known| known.ledger.acknowledge("m", Some(pages.clone())));
    check(&here, known, "after the pulls");
}

fn follow(here: &Store, there: &Store, known: &Shared<Known>, (id, pages): &(CapsuleId, Pages)) {
    known.see(|known| known.ledger.begin("m", Some(pages.clone())));
    match bring(here, there, *id) {
        Ok(()) => known.see(|known| known.ledger.acknowledge("m", Some(pages.clone()))),
        Err(error) => {
            log(&format!("the pull fails: {error}"));
            let collected =
                || causes(&error).any(|cause| cause.downcast_ref::<StoreError>().is_some_and(is_collected));
            let lost = matches!(error, TransferError::NoHolder { .. });
            if !is_excused(&error) && !lost && !collected() {
                violation("ends_or_says", &format!("a pull fails for no reason: {error:?}"));
            }
            drop(here.reopen());
        }
    }
}

fn bring(here: &Store, there: &Store, id: CapsuleId) -> Result<(), TransferError> {
    let holders = Holders::new(vec![Box::new(Other { server: Server::new(there.clone()) })]);
    let options = Options {
        bases: Vec::new(),
        page_sources: &[],
        cancel: &AtomicBool::new(false),
        progress: &mut |_| {},
        holder_timeout: Duration::from_secs(5),
    };
    pull(here, &holders, id, &[name("m")], options).map(drop)
}

/// Holder that stands for the other host.
struct Other {
    server: Server,
}

impl Holder for Other {
    fn name(&self) -> &str {
        "there"
    }

    fn connect(&self) -> Result<Arc<dyn Link>, LinkError> {
        thread::sleep(Duration::from_micros(500 + draw(2_000)));
        match is_lost() {
            true => Err(LinkError::lost("the simulated link is cut")),
            false => Ok(Arc::new(Wire { server: self.server.clone() })),
        }
    }
}

fn is_lost() -> bool {
    with(|world| world.faults.loses_message())
}

/// A link to it.
struct Wire {
    server: Server,
}

impl Link for Wire {
    fn start(&self, request: Request) -> Result<Box<dyn Answer>, LinkError> {
        match is_lost() {
            true => Err(LinkError::lost("the simulated link is cut")),
            false => Ok(Box::new(Awaited { server: self.server.clone(), request })),
        }
    }

    fn bytes(&self) -> (u64, u64) {
        (0, 0)
    }
}

/// A reply that is computed when it is waited for.
struct Awaited {
    server: Server,
    request: Request,
}

impl Answer for Awaited {
    fn wait(self: Box<Self>) -> Result<Reply, LinkError> {
        thread::sleep(Duration::from_micros(200 + with(|world| world.hosts[THERE].answers_after)));
        let anyone = |_: &CapsuleId| true;
        let answer = self.server.answer(&anyone, &self.request);
        if is_lost() {
            return Err(LinkError::lost("the simulated link is cut"));
        }
        let reply = answer.map_err(|source| LinkError::Refused { source })?;
        // The bytes are a buffer of their own, as from a socket.
        Ok(Reply { payload: Bytes::copy_from_slice(&reply.payload), ..reply })
    }
}
