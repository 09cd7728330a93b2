//! Scene: a disk is full for a while, and then has room again. The store comes back without a restart.

use super::capsules::{self, Pages, after, changes, commit, is_excused, name};
use crate::{
    report::violation,
    rules::{acknowledged_exists::Ledger, comes_back, named_is_whole},
    world::{
        draw, log,
        processes::{self, Shared},
        with,
    },
};
use std::time::Duration;
use whimbrel_store::{GcRoots, Store, StoreError};

/// Checkpoints until the disk must be full.
const CHECKPOINTS: u64 = 200;
/// Bytes that a store sets aside at least, if the disk has them.
const RESERVE: u64 = 1 << 20;

pub(crate) fn run() {
    let process = processes::start(0, "store", work);
    if !process.await_end(Duration::from_secs(3600)) {
        violation("ends_or_says", "a store on a full disk has not ended after an hour");
    }
}

fn work() {
    let store = capsules::open(0).unwrap_or_else(|error| violation("comes_back", &format!("{error:?}")));
    let ledger = Shared::new(Ledger::default());
    with(|world| world.hosts[0].disk.capacity = 300_000 + world.work.below(2_000_000));
    let mut pages = Pages::new();
    let mut checkpoint = |store: &Store| {
        let tag = format!("r{}", draw(3));
        let changes = changes(30, 1 << 40);
        let new = after(&Pages::new(), &changes);
        ledger.see(|ledger| ledger.begin(&tag, Some(new.clone())));
        commit(store, None, &changes, &[name(&tag)])?;
        ledger.see(|ledger| ledger.acknowledge(&tag, Some(new.clone())));
        pages = new;
        Ok::<_, StoreError>(())
    };
    match (0..CHECKPOINTS).find_map(|_| checkpoint(&store).err()) {
        Some(error) if is_excused(&error) => log(&format!("the disk is full: {error}")),
        Some(error) => violation("ends_or_says", &format!("a checkpoint fails for no reason: {error:?}")),
        None => return,
    }
    // A disk that was too small for the reserve gives no promise.
    let has_reserve = store.reserved_bytes().is_ok_and(|bytes| bytes >= RESERVE);
    if has_reserve && draw(2) == 0 {
        // What the error recommends. On a full disk it removes what nothing needs.
        comes_back::check("garbage collection on a full disk", || store.gc(GcRoots::Referenced));
    }
    comes_back::end_faults();
    comes_back::check("a checkpoint", || checkpoint(&store));
    let found = named_is_whole::check(&store, "after a full disk");
    let seen = ledger
        .see(|ledger| found.into_iter().try_for_each(|(name, pages)| ledger.see(name.as_str(), Some(pages))));
    if let Err(text) = seen {
        violation("acknowledged_exists", &text);
    }
}
