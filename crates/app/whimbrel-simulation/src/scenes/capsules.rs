//! Capsules of scenes: small machines whose content follows from a few numbers.

use crate::world::draw;
use std::{collections::BTreeMap, error::Error, path::Path};
use whimbrel_core::{ByteSize, CapsuleId, MachineConfig, PAGE_SIZE, PageRun, RefName, causes};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_store::{CapsuleWriter, FinishedImage, Options, Result, Store, StoreError};

/// Pages of a machine's memory: two leaves of its tree.
pub(crate) const PAGES: u64 = 400;

/// The number that each page is made of; pages of zeros are left out.
pub(crate) type Pages = BTreeMap<u64, u64>;

/// A page that compresses a little, has its number at the end, and is all zeros for 0.
fn page(number: u64) -> Vec<u8> {
    if number == 0 {
        return vec![0; PAGE_SIZE];
    }
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state & 0x0fff_ffff_0000_00ff
    };
    let words = (1..PAGE_SIZE / 8).map(|_| word()).collect::<Vec<u64>>();
    words.into_iter().chain([number]).flat_map(u64::to_le_bytes).collect()
}

fn number(bytes: &[u8]) -> Option<u64> {
    let number = u64::from_le_bytes(*bytes.last_chunk()?);
    (page(number) == bytes).then_some(number)
}

pub(crate) fn name(text: &str) -> RefName {
    text.parse().expect("a valid name of a ref")
}

/// The folder of a host's store.
pub(crate) fn folder(host: usize) -> String {
    format!("/sim/h{host}/store")
}

/// Opens the store of a host, or makes it.
pub(crate) fn open(host: usize) -> Result<Store> {
    let options = Options { workers: 2, cache: 1 << 20, ..Options::create() };
    Store::open(Path::new(&folder(host)), options)
}

fn manifest(
    image: FinishedImage,
    parents: Vec<CapsuleId>,
    device: Vec<u8>,
    writer: &CapsuleWriter,
) -> Result<Manifest> {
    Ok(Manifest {
        format: FORMAT,
        machine: MachineConfig::minimal(ByteSize(1 << 20)),
        device: vec![writer.put_blob(&device)?],
        images: vec![ImageRef { name: "memory".into(), pages: image.pages, root: image.root, cuts: None }],
        parents,
        time: 1,
        host: "simulated".into(),
        labels: BTreeMap::new(),
        working_set: None,
    })
}

/// Commits a capsule: `changes` over `base`.
pub(crate) fn commit(
    store: &Store,
    base: Option<CapsuleId>,
    changes: &Pages,
    refs: &[RefName],
) -> Result<CapsuleId> {
    let root = base.map(|id| store.manifest(&id)).transpose()?.and_then(|manifest| manifest.images[0].root);
    let writer = store.writer()?;
    let mut image = writer.image(root, PAGES)?;
    for (at, number) in changes {
        image.put(PageRun::new(*at, 1), &page(*number))?;
    }
    let finished = image.finish()?;
    let device = format!("device state {}", changes.len()).into_bytes();
    writer.commit(&manifest(finished, base.into_iter().collect(), device, &writer)?, refs)
}

/// Reads a whole capsule, its blobs too.
pub(crate) fn content(store: &Store, id: &CapsuleId) -> Result<Pages> {
    let manifest = store.manifest(id)?;
    manifest.blobs().try_for_each(|blob| store.blob(&blob).map(drop))?;
    let image = store.image(manifest.images[0].root, manifest.images[0].pages);
    let mut pages = Pages::new();
    let mut bytes = vec![0; PAGE_SIZE];
    for at in image.present()?.iter() {
        image.read(PageRun::new(at, 1), &mut bytes)?;
        pages.insert(at, number(&bytes).unwrap_or(u64::MAX));
    }
    Ok(pages)
}

/// Random changes of at most `most` pages, of `variety` contents.
pub(crate) fn changes(most: u64, variety: u64) -> Pages {
    (0..draw(most)).map(|_| (draw(PAGES), draw(variety))).collect()
}

/// The content after changes.
pub(crate) fn after(before: &Pages, changes: &Pages) -> Pages {
    let mut after = before.clone();
    after.extend(changes);
    after.retain(|_, number| *number != 0);
    after
}

/// Whether an error says itself that a fault of the scene caused it: the system refused a call, or the
/// store refuses work after that.
pub(crate) fn is_excused(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| match cause.downcast_ref::<StoreError>() {
        Some(StoreError::Latched { .. }) => true,
        // The cause of a writer is shared by its threads, and not a `StoreError` to those who look for one.
        Some(StoreError::Writer { source }) => is_excused(&**source),
        _ => cause.is::<std::io::Error>(),
    })
}

/// Whether an error says that a base was collected before it was pinned, which refuses one checkpoint.
pub(crate) fn is_collected(error: &StoreError) -> bool {
    matches!(error, StoreError::Incomplete { .. } | StoreError::Missing { .. })
}
