//! Capsules to test with.
#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod crash_disk;

use std::collections::BTreeMap;
use whimbrel_core::{ByteSize, CapsuleId, MachineConfig, PAGE_SIZE, PageRun, RefName};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_store::{CapsuleWriter, FinishedImage, Result, Store, StoreError};

/// A page that compresses a little and depends on `seed` alone; 0 is the zero page.
pub fn page(seed: u64) -> Vec<u8> {
    if seed == 0 {
        return vec![0; PAGE_SIZE];
    }
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state & 0x0fff_ffff_0000_00ff
    };
    (0..PAGE_SIZE / 8).flat_map(|_| word().to_le_bytes()).collect()
}

pub fn name(text: &str) -> RefName {
    text.parse().unwrap()
}

pub fn manifest(images: &[(&str, FinishedImage)], parents: &[CapsuleId], time: u64) -> Manifest {
    let machine = MachineConfig::minimal(ByteSize(1 << 20));
    let image = |(name, image): &(&str, FinishedImage)| ImageRef {
        name: (*name).into(),
        pages: image.pages,
        root: image.root,
        cuts: None,
    };
    Manifest {
        format: FORMAT,
        machine,
        device: vec![],
        images: images.iter().map(image).collect(),
        parents: parents.to_vec(),
        time,
        host: "test".into(),
        labels: BTreeMap::new(),
        working_set: None,
    }
}

/// Commits one memory image: `pages` (number, seed) over the image of `base`.
pub fn commit(
    writer: &CapsuleWriter,
    store: &Store,
    base: Option<CapsuleId>,
    len: u64,
    pages: &[(u64, u64)],
    refs: &[RefName],
    time: u64,
) -> Result<CapsuleId> {
    let root = base.map(|id| store.manifest(&id)).transpose()?.and_then(|m| m.images[0].root);
    let mut image = writer.image(root, len)?;
    for (number, seed) in pages {
        image.put(PageRun::new(*number, 1), &page(*seed))?;
    }
    let finished = image.finish()?;
    let parents: Vec<_> = base.into_iter().collect();
    writer.commit(&manifest(&[("memory", finished)], &parents, time), refs)
}

/// The pages of a capsule's first image that are not zero.
pub fn content(store: &Store, id: &CapsuleId) -> Result<BTreeMap<u64, Vec<u8>>> {
    let manifest = store.manifest(id)?;
    let image = store.image(manifest.images[0].root, manifest.images[0].pages);
    let mut pages = BTreeMap::new();
    for number in image.present()?.iter() {
        let mut out = vec![0; PAGE_SIZE];
        image.read(PageRun::new(number, 1), &mut out)?;
        pages.insert(number, out);
    }
    Ok(pages)
}

/// What [`content`] should give for a model of page seeds.
pub fn expected(model: &BTreeMap<u64, u64>) -> BTreeMap<u64, Vec<u8>> {
    model.iter().filter(|(_, seed)| **seed != 0).map(|(number, seed)| (*number, page(*seed))).collect()
}

pub fn is_latched(error: &StoreError) -> bool {
    matches!(error, StoreError::Latched { .. })
}
