//! Scene: packs of a store are damaged on the disk. A byte changes, which checksums show, or a whole frame
//! lands in the place of another, which only digests show. Verification says so, and a repair from another
//! store heals it, also if it is killed on the way.

use super::capsules::{self, Pages, after, changes, commit, name};
use crate::{
    report::violation,
    rules::{comes_back, named_is_whole},
    world::{
        disk::ROOT,
        draw, log,
        processes::{self, Shared},
        with,
    },
};
use std::{ops::Range, time::Duration};
use whimbrel_image::pack_frame::{Kind, PackFrame};
use whimbrel_store::{ObjectWant, PageWant, RemoteObjects, RemoteObjectsError, Store};

const HERE: usize = 0;
const THERE: usize = 1;
const MOST: Duration = Duration::from_secs(900);

pub(crate) fn run() {
    let content = Shared::new(Pages::new());
    let prepared = content.clone();
    must_end(processes::start(HERE, "prepare", move || prepare(&prepared)));
    let damaged = Shared::new(false);
    for life in 0..2 {
        let (content, damaged) = (content.clone(), damaged.clone());
        let process = processes::start(HERE, &format!("repair.{life}"), move || heal(&content, &damaged));
        if life == 0 && draw(2) == 0 {
            process.doom(draw(2_000), draw(2) == 0);
        }
        must_end(process);
    }
}

fn must_end(process: processes::Running) {
    if !process.await_end(MOST) {
        violation("ends_or_says", "a process has not ended after a quarter of an hour");
    }
}

fn open(host: usize) -> Store {
    capsules::open(host).unwrap_or_else(|error| violation("comes_back", &format!("does not open: {error:?}")))
}

/// Two hosts with equal capsules.
fn prepare(content: &Shared<Pages>) {
    let (here, there) = (open(HERE), open(THERE));
    let first: Pages = (0..30 + draw(40)).map(|at| (at, 1000 + at)).collect();
    let changes = changes(20, 1 << 40);
    for store in [&here, &there] {
        let made = commit(store, None, &first, &[name("m")])
            .and_then(|base| commit(store, Some(base), &changes, &[name("m")]));
        if let Err(error) = made {
            violation("no_panic", &format!("a scene cannot be prepared: {error:?}"));
        }
    }
    content.see(|content| *content = after(&first, &changes));
}

/// Damages each pack in one place.
fn damage() {
    with(|world| {
        let disk = &mut world.hosts[HERE].disk;
        let folder = disk.look_up(ROOT, "store/packs");
        let packs = folder.and_then(|folder| disk.list(folder)).unwrap_or_default();
        for (_, inode, _) in packs {
            let mut bytes = vec![0; disk.size(inode) as usize];
            let _ = disk.read(inode, 0, &mut bytes);
            let at = world.work.below(bytes.len() as u64) as usize;
            let misdirected = (world.work.below(2) == 0).then(|| misdirect_a_write(&bytes, at)).flatten();
            let (at, wrong) = misdirected.unwrap_or_else(|| (at, vec![bytes[at] ^ 0x55]));
            disk.damage(inode, at as u64, &wrong);
        }
    });
    log("each pack is damaged in one place");
}

/// A frame at or after `from`, and where a longer one begins that is to be overwritten by it, as by a disk
/// that writes to a wrong place. Nothing if the pack has no such frames.
fn misdirect_a_write(pack: &[u8], from: usize) -> Option<(usize, Vec<u8>)> {
    let frames = frames(pack);
    let moved = &pack[frames.iter().find(|frame| frame.end > from)?.clone()];
    let is_hit =
        |frame: &&Range<usize>| frame.len() >= moved.len() && !pack[frame.start..].starts_with(moved);
    frames.iter().find(is_hit).map(|hit| (hit.start, moved.to_vec()))
}

/// The places of a pack's frames.
fn frames(pack: &[u8]) -> Vec<Range<usize>> {
    let whole = |at: usize| PackFrame::parse(&pack[at..]).ok().map(|frame| at..at + frame.head.total());
    (0..pack.len()).filter_map(whole).collect()
}

fn heal(content: &Shared<Pages>, damaged: &Shared<bool>) {
    if !damaged.see(|damaged| std::mem::replace(damaged, true)) {
        damage();
    }
    let (here, there) = (open(HERE), open(THERE));
    let source = Other(there);
    let report = comes_back::check("verification", || here.verify(|_, _| true));
    let readable = here.get_ref(&name("m")).ok().flatten().map(|id| capsules::content(&here, &id));
    let expected = content.see(|content| content.clone());
    let is_right = matches!(&readable, Some(Ok(pages)) if *pages == expected);
    if report.is_complete() && !is_right {
        violation("named_is_whole", &format!("verification finds nothing, and reading gives {readable:?}"));
    }
    let repaired = comes_back::check("a repair", || here.repair(None, &[], &source, |_, _| true));
    log(&format!("{repaired:?}"));
    let found = named_is_whole::check(&here, "after the repair");
    if found != [(name("m"), expected)] {
        violation("acknowledged_exists", "the repaired capsule has other content");
    }
}

/// The undamaged store, as a source of objects.
struct Other(Store);

impl Other {
    fn blob(&self, digest: &whimbrel_core::Digest) -> Result<Vec<u8>, RemoteObjectsError> {
        self.0.blob(digest).map_err(|error| RemoteObjectsError { retryable: false, source: error.into() })
    }
}

impl RemoteObjects for Other {
    fn objects(&self, _: Kind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        wants.iter().map(|want| self.blob(&want.digest)).collect()
    }

    fn pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        wants.iter().flat_map(|want| &want.digests).map(|digest| self.blob(digest)).collect()
    }
}
