//! Images that are partly in another store: read on demand, stored, collected, verified, used as a base.

use crate::common::{commit, content, crash_disk::CrashDisk, expected, name, page};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE, PageRun, PageSet};
use whimbrel_image::{Node, pack_frame::Kind};
use whimbrel_store::{
    Expected, GcRoots, ObjectWant, Options, PageWant, RemoteObjects, RemoteObjectsError, Store, StoreError,
    StoredImage,
};

const PAGES: u64 = 3000;

/// Another store in the same process; counts requests, may be unavailable, may return wrong data.
struct Other {
    store: Store,
    away: AtomicBool,
    lies: AtomicBool,
    asked: Mutex<(usize, usize)>,
}

impl Other {
    fn reach(&self) -> Result<(), RemoteObjectsError> {
        match self.away.load(Ordering::Relaxed) {
            true => Err(RemoteObjectsError { source: "away".into(), retryable: true }),
            false => Ok(()),
        }
    }
}

impl RemoteObjects for Other {
    fn objects(&self, _: Kind, wants: &[ObjectWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        self.reach()?;
        self.asked.lock().unwrap().0 += wants.len();
        Ok(wants.iter().map(|want| self.store.blob(&want.digest).unwrap()).collect())
    }

    fn pages(&self, wants: &[PageWant]) -> Result<Vec<Vec<u8>>, RemoteObjectsError> {
        self.reach()?;
        let mut pages = Vec::new();
        for want in wants {
            pages.extend(want.digests.iter().map(|digest| self.store.blob(digest).unwrap()));
            // A holder that has the leaf does not need the digests.
            let Ok(leaf) = self.store.blob(&want.leaf) else { continue };
            let leaf = Node::decode(&leaf).unwrap();
            let slots = (0..256).filter(|slot| want.slots[slot / 64] >> (slot % 64) & 1 == 1);
            assert_eq!(slots.filter_map(|slot| leaf.child(slot)).collect::<Vec<_>>(), want.digests);
        }
        if self.lies.load(Ordering::Relaxed) {
            pages.iter_mut().for_each(|page| page[7] ^= 1);
        }
        self.asked.lock().unwrap().1 += pages.len();
        Ok(pages)
    }

    fn cluster(&self) -> u64 {
        8
    }
}

struct Pair {
    _dirs: [tempfile::TempDir; 2],
    there: Store,
    here: Store,
    other: Arc<Other>,
}

fn pair() -> Pair {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [there, here] = dirs.each_ref().map(|dir| Store::open(dir.path(), Options::create()).unwrap());
    let other = Arc::new(Other {
        store: there.clone(),
        away: AtomicBool::new(false),
        lies: AtomicBool::new(false),
        asked: Mutex::default(),
    });
    here.set_remote_objects(other.clone());
    Pair { _dirs: dirs, there, here, other }
}

/// Capsule of the other store, of which this store has only the manifest.
fn capsule(pair: &Pair, writes: &[(u64, u64)]) -> (CapsuleId, StoredImage, BTreeMap<u64, u64>) {
    let id =
        commit(&pair.there.writer().unwrap(), &pair.there, None, PAGES, writes, &[name("m")], 1).unwrap();
    let manifest = pair.there.manifest(&id).unwrap();
    pair.here.fetched_objects_writer().store(Kind::Manifest, &[&manifest.encode().unwrap()]).unwrap();
    pair.here.adopt_partial(&id, &[name("m")]).unwrap();
    let image = &manifest.images[0];
    let image = pair.here.image(image.root, image.pages).with_remote_fetch(None);
    (id, image, writes.iter().copied().collect())
}

fn some_writes() -> Vec<(u64, u64)> {
    (0..600).map(|n| (n * 5 % PAGES, 1 + n % 500)).collect()
}

fn read(image: &StoredImage, run: PageRun) -> Result<Vec<u8>, StoreError> {
    let mut out = vec![9; run.bytes()];
    image.read(run, &mut out).map(|()| out)
}

fn wanted(model: &BTreeMap<u64, u64>, run: PageRun) -> Vec<u8> {
    run.pages().flat_map(|at| page(model.get(&at).copied().unwrap_or(0))).collect()
}

#[test]
fn pages_come_on_demand_once_and_stay_after_a_restart_and_a_collection() {
    let pair = pair();
    let (id, image, model) = capsule(&pair, &some_writes());
    let run = PageRun::new(250, 300);
    assert_eq!(read(&image, run).unwrap(), wanted(&model, run));
    let asked = *pair.other.asked.lock().unwrap();
    assert!(asked.1 > 0 && asked.1 <= 60, "{asked:?}: the pages that are not zero, each once");
    pair.here.fetched_objects_writer().flush().unwrap();
    pair.here.gc(GcRoots::Referenced).unwrap();
    assert!(pair.here.is_partial(&id).unwrap());

    let again = Store::open(pair._dirs[1].path(), Options::default()).unwrap();
    let image = again.image(image.root(), PAGES);
    assert_eq!(read(&image, run).unwrap(), wanted(&model, run), "from here alone");
    assert!(read(&image, PageRun::new(1000, 10)).is_err(), "never asked for");
    let report = again.verify(|_, _| true).unwrap();
    assert!(report.is_complete() && report.partial == [id], "{report:?}");
}

#[test]
fn a_later_version_is_whole_only_when_every_page_that_differs_has_come() {
    let pair = pair();
    let (id, image, _) = capsule(&pair, &some_writes());
    image.fetch(&PageSet::full(PAGES)).unwrap();
    pair.here.complete(&id).unwrap();
    let writer = pair.there.writer().unwrap();
    let changes = [(7, 9001), (300, 9002), (2999, 9003)];
    let next = commit(&writer, &pair.there, Some(id), PAGES, &changes, &[name("next")], 2).unwrap();
    let manifest = pair.there.manifest(&next).unwrap();
    pair.here.fetched_objects_writer().store(Kind::Manifest, &[&manifest.encode().unwrap()]).unwrap();
    pair.here.adopt_partial(&next, &[name("next")]).unwrap();
    let later = pair.here.image(manifest.images[0].root, PAGES).with_remote_fetch(image.root());
    for (page, _) in changes {
        let not_yet = pair.here.complete(&next);
        assert!(matches!(not_yet, Err(StoreError::Incomplete { .. })), "before page {page}: {not_yet:?}");
        read(&later, PageRun::new(page, 1)).unwrap();
    }
    pair.here.complete(&next).unwrap();
    assert!(pair.here.is_complete(&next).unwrap(), "every node and page looked at");
}

#[test]
fn what_was_just_fetched_is_read_before_it_is_written() {
    let pair = pair();
    let bytes = page(77);
    pair.here.fetched_objects_writer().store(Kind::Blob, &[&bytes]).unwrap();
    assert_eq!(pair.here.blob(&Digest::of(&bytes)).unwrap(), bytes);
    pair.here.fetched_objects_writer().flush().unwrap();
    assert_eq!(pair.here.blob(&Digest::of(&bytes)).unwrap(), bytes);
}

#[test]
fn a_set_of_pages_comes_in_few_requests_and_completes_the_capsule() {
    let pair = pair();
    let (id, image, model) = capsule(&pair, &some_writes());
    assert_eq!(image.possibly_present().unwrap().count(), PAGES, "nothing is known yet");
    assert_eq!(image.missing().unwrap(), (0, true));
    assert!(matches!(
        pair.here.complete(&id),
        Err(StoreError::Incomplete { .. } | StoreError::Missing { .. })
    ));
    image.fetch(&PageSet::full(PAGES)).unwrap();
    assert_eq!(image.missing().unwrap(), (0, false));
    assert_eq!(image.possibly_present().unwrap(), image.present().unwrap());
    pair.here.complete(&id).unwrap();
    assert!(!pair.here.is_partial(&id).unwrap());
    pair.other.away.store(true, Ordering::Relaxed);
    assert_eq!(content(&pair.here, &id).unwrap(), expected(&model));
    let report = pair.here.verify(|_, _| true).unwrap();
    assert!(report.is_complete() && report.partial.is_empty(), "{report:?}");
}

#[test]
fn a_holder_that_is_away_is_a_retryable_error_and_wrong_data_is_never_kept() {
    let pair = pair();
    let (_, image, model) = capsule(&pair, &[(3, 1), (700, 2)]);
    pair.other.away.store(true, Ordering::Relaxed);
    assert!(read(&image, PageRun::new(3, 1)).unwrap_err().is_retryable());
    pair.other.away.store(false, Ordering::Relaxed);
    pair.other.lies.store(true, Ordering::Relaxed);
    assert!(matches!(read(&image, PageRun::new(3, 1)), Err(StoreError::Digest { .. })));
    pair.other.lies.store(false, Ordering::Relaxed);
    assert_eq!(read(&image, PageRun::new(3, 1)).unwrap(), wanted(&model, PageRun::new(3, 1)));
}

#[test]
fn a_capsule_written_over_a_partial_one_is_partial_and_reads_right() {
    let pair = pair();
    let (id, _, mut model) = capsule(&pair, &some_writes());
    let writes = [(5, 41), (2999, 42), (1500, 0)];
    let next =
        commit(&pair.here.writer().unwrap(), &pair.here, Some(id), PAGES, &writes, &[name("n")], 2).unwrap();
    model.extend(writes);
    assert!(pair.here.is_partial(&next).unwrap());
    pair.here.gc(GcRoots::Referenced).unwrap();
    let root = pair.here.manifest(&next).unwrap().images[0].root;
    let image = pair.here.image(root, PAGES).with_remote_fetch(None);
    assert_eq!(read(&image, PageRun::new(0, PAGES)).unwrap(), wanted(&model, PageRun::new(0, PAGES)));
    image.fetch(&PageSet::full(PAGES)).unwrap();
    pair.here.complete(&next).unwrap();
    assert_eq!(wanted(&model, PageRun::new(5, 1)).len(), PAGE_SIZE);
}

#[test]
fn what_no_ref_of_a_partial_capsule_keeps_is_collected() {
    let pair = pair();
    let (id, image, _) = capsule(&pair, &some_writes());
    image.fetch(&PageSet::full(PAGES)).unwrap();
    pair.here.fetched_objects_writer().flush().unwrap();
    pair.here.delete_ref(&name("m"), whimbrel_store::Expected::Anything).unwrap();
    pair.here.gc(GcRoots::Referenced).unwrap();
    pair.here.gc(GcRoots::Referenced).unwrap();
    assert!(pair.here.partials().unwrap().is_empty() && pair.here.manifest(&id).is_err());
    let left: u64 = std::fs::read_dir(pair._dirs[1].path().join("packs"))
        .unwrap()
        .map(|f| f.unwrap().metadata().unwrap().len())
        .sum();
    assert_eq!(left, 0);
}

#[test]
fn a_machine_that_lives_from_a_partial_capsule_keeps_it_partial_when_its_ref_moves_on() {
    let pair = pair();
    let (id, image, model) = capsule(&pair, &some_writes());
    read(&image, PageRun::new(0, 10)).unwrap();
    let pin = pair.here.pin(&id).unwrap();
    pair.here.delete_ref(&name("m"), whimbrel_store::Expected::Anything).unwrap();
    pair.here.gc(GcRoots::Referenced).unwrap();
    pair.here.gc(GcRoots::Referenced).unwrap();
    assert!(pair.here.is_partial(&id).unwrap(), "who reads it next must know where the rest lies");
    assert_eq!(read(&image, PageRun::new(0, 60)).unwrap(), wanted(&model, PageRun::new(0, 60)));
    drop(pin);
    pair.here.gc(GcRoots::Referenced).unwrap();
    assert!(pair.here.partials().unwrap().is_empty());
}

#[test]
fn a_tree_that_reaches_past_its_image_never_becomes_a_whole_capsule() {
    let pair = pair();
    let writes = some_writes();
    let id = commit(&pair.there.writer().unwrap(), &pair.there, None, PAGES, &writes, &[name("m")], 1);
    let mut manifest = pair.there.manifest(&id.unwrap()).unwrap();
    manifest.images[0].pages = 2000;
    let bytes = manifest.encode().unwrap();
    let liar = CapsuleId(whimbrel_core::Digest::of(&bytes));
    pair.here.fetched_objects_writer().store(Kind::Manifest, &[&bytes]).unwrap();
    pair.here.adopt_partial(&liar, &[name("liar")]).unwrap();
    // All of it is here, as an image of the right length.
    let root = manifest.images[0].root;
    pair.here.image(root, PAGES).with_remote_fetch(None).fetch(&PageSet::full(PAGES)).unwrap();
    assert!(pair.here.complete(&liar).is_err());
}

/// A pull that ends while a collection is between its marking and its last step.
#[test]
fn a_capsule_that_becomes_complete_during_a_collection_keeps_what_looked_dead() {
    let disk = CrashDisk::new();
    let options = || Options { workers: 1, ..Options::create() };
    let open = |disk: &CrashDisk| Store::open_on(Arc::new(disk.clone()), options()).unwrap();
    let (here, there) = (open(&disk), open(&CrashDisk::new()));
    let writes: Vec<(u64, u64)> = (0..1000).map(|n| (n, n + 1)).collect();
    let old = commit(&here.writer().unwrap(), &here, None, PAGES, &writes, &[name("m")], 1).unwrap();
    here.delete_ref(&name("m"), Expected::Anything).unwrap();

    // The new version differs in a page of every leaf, so that none of its nodes is here.
    let changed = writes.iter().map(|(n, seed)| (*n, if n % 200 == 0 { 9_000 + n } else { *seed }));
    let changed = changed.collect::<Vec<_>>();
    let new = commit(&there.writer().unwrap(), &there, None, PAGES, &changed, &[name("m")], 2).unwrap();
    let manifest = there.manifest(&new).unwrap();
    here.fetched_objects_writer().store(Kind::Manifest, &[&manifest.encode().unwrap()]).unwrap();
    here.adopt_partial(&new, &[name("m")]).unwrap();

    let (pulling, source) = (here.clone(), there.clone());
    disk.stall_before_lock("gate.lock", move || {
        let mut fetch = |kind, digest: &Digest| {
            if pulling.has(&[*digest]) == [false] {
                pulling.fetched_objects_writer().store(kind, &[&source.blob(digest).unwrap()]).unwrap();
            }
        };
        pull(&source, manifest.images[0].root.unwrap(), &mut fetch);
        pulling.complete(&new).unwrap();
    });
    here.gc(GcRoots::Referenced).unwrap();
    assert!(here.is_complete(&new).unwrap());
    let again = open(&disk);
    assert_eq!(content(&again, &new).unwrap(), expected(&changed.into_iter().collect()));
    assert!(again.verify(|_, _| true).unwrap().is_complete());
    assert!(again.manifest(&old).is_err(), "the stalled collection removed nothing");
}

fn pull(from: &Store, node: Digest, fetch: &mut dyn FnMut(Kind, &Digest)) {
    fetch(Kind::Nodes, &node);
    let node = Node::decode(&from.blob(&node).unwrap()).unwrap();
    for (_, child) in node.children() {
        match node.level() {
            0 => fetch(Kind::Pages, &child),
            _ => pull(from, child, fetch),
        }
    }
}
