//! Tests of the page batch: its bytes, encoding and decoding; invalid batches are refused.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn page(kind: u8, seed: u64) -> Vec<u8> {
    match kind % 3 {
        0 => vec![0; PAGE_SIZE],
        1 => seed.to_le_bytes().repeat(PAGE_SIZE / 8),
        _ => (0..PAGE_SIZE as u64).map(|i| (i.wrapping_mul(seed | 1) >> 11) as u8).collect(),
    }
}

/// Decodes a batch and applies it to the target's pages.
fn receive(header: &PageBatchHeader, payload: &[u8], pages: &mut BTreeMap<u64, Vec<u8>>) {
    let batch = PageBatch::decode(header, Bytes::copy_from_slice(payload)).unwrap();
    let mut whole = batch.whole().chunks_exact(PAGE_SIZE);
    for page in header.whole.iter().flat_map(|run| run.pages()) {
        pages.insert(page, whole.next().unwrap().to_vec());
    }
    let mut patches = batch.patches();
    for page in header.delta.iter().flat_map(|run| run.pages()) {
        patches.next().unwrap().apply(pages.get_mut(&page).unwrap());
    }
    assert!(whole.next().is_none() && patches.next().is_none());
    for page in header.zero.iter().flat_map(|run| run.pages()) {
        pages.insert(page, vec![0; PAGE_SIZE]);
    }
}

proptest! {
    #[test]
    fn what_arrives_is_what_was_sent(
        start in 0..50u64, level in -5..6i32, pack: bool,
        kinds in prop::collection::vec((0..3u8, any::<u64>(), prop::option::of(any::<u64>())), 1..40),
    ) {
        let mut encoder = Encoder::default();
        let (mut there, mut expected, mut zero) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for (number, (kind, seed, touched)) in (start..).zip(&kinds) {
            let content = page(*kind, *seed);
            if let Some(touched) = touched {
                let mut old = content.clone();
                for at in (0..BLOCKS).filter(|at| touched >> at & 1 == 1) { old[at * BLOCK + at % 7] ^= 1; }
                prop_assert_eq!(delta_blocks::changed(&old, &content, BLOCK), *touched);
                encoder.delta(number, &content, *touched);
                there.insert(number, old);
            } else if whimbrel_core::is_zero(&content) {
                push(&mut zero, number);
            } else {
                encoder.whole(number, &content);
            }
            expected.insert(number, content);
        }
        encoder.zero(&zero);
        let effort = if pack { Effort::Zstd(level) } else { Effort::None };
        let (header, payload) = encoder.finish(3, effort).unwrap();
        header.check(start + kinds.len() as u64).unwrap();
        prop_assert!(encoder.is_empty());
        receive(&header, &payload, &mut there);
        prop_assert_eq!(there, expected);
    }

    #[test]
    fn garbage_is_refused_without_allocating_for_it(
        whole in prop::collection::vec((any::<u64>(), any::<u64>()), 0..5), delta in 0..300u64, blocks: u32,
        pack: bool, payload: Vec<u8>,
    ) {
        let whole: Vec<_> = whole.iter().map(|(s, l)| PageRun::new(*s, *l)).collect();
        let packing = if pack { Packing::Zstd } else { Packing::None };
        let header = PageBatchHeader { array: 0, packing, zero: vec![], whole, delta: vec![PageRun::new(0, delta)], blocks };
        let _ = PageBatch::decode(&header, payload.into());
    }
}

#[test]
fn a_header_is_these_bytes() {
    let header = PageBatchHeader {
        array: 2,
        packing: Packing::Zstd,
        zero: vec![PageRun::new(1, 300)],
        whole: vec![PageRun::new(5, 1), PageRun::new(9, 2)],
        delta: vec![PageRun::new(7, 1)],
        blocks: 3,
    };
    let bytes = [2, 1, 1, 1, 0xac, 2, 2, 5, 1, 9, 2, 1, 7, 1, 3];
    assert_eq!(postcard::to_stdvec(&header).unwrap(), bytes);
}

#[test]
fn blocks_that_the_header_does_not_list_are_refused() {
    let header = PageBatchHeader { delta: vec![PageRun::new(0, 1)], blocks: 1, ..PageBatchHeader::default() };
    let payload = |changed: u64| [&changed.to_le_bytes()[..], &[7; BLOCK]].concat();
    assert!(PageBatch::decode(&header, payload(1 << 63).into()).is_ok());
    assert!(PageBatch::decode(&header, payload(3).into()).is_err(), "two blocks are marked, one is there");
    assert!(PageBatch::decode(&header, payload(0).into()).is_err());
    let more = PageBatchHeader { blocks: 65, ..header };
    assert!(matches!(PageBatch::decode(&more, Bytes::new()), Err(PageBatchError::TooLarge { .. })));
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let byte = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(byte).collect()
}

#[test]
fn what_does_not_shrink_is_sent_as_it_is() {
    for pages in [1, BATCH_PAGES_MAX as usize] {
        let noise = noise(pages * PAGE_SIZE);
        let mut encoder = Encoder::default();
        encoder.all_whole(&[PageRun::new(7, pages as u64)], noise.clone());
        let (header, payload) = encoder.finish(0, Effort::Zstd(1)).unwrap();
        assert_eq!((header.packing, &payload), (Packing::None, &noise));
        assert_eq!(header.whole, [PageRun::new(7, pages as u64)]);
    }
}

#[test]
fn a_batch_of_which_a_part_shrinks_is_compressed() {
    let mut pages = noise(BATCH_PAGES_MAX as usize * PAGE_SIZE);
    let text = b"a sentence that memory has again and again ".repeat(2000);
    pages[64 * PAGE_SIZE..][..text.len()].copy_from_slice(&text);
    let mut encoder = Encoder::default();
    encoder.whole(3, &pages[..PAGE_SIZE]);
    encoder.all_whole(&[PageRun::new(4, BATCH_PAGES_MAX - 1)], pages[PAGE_SIZE..].to_vec());
    let (header, payload) = encoder.finish(0, Effort::Zstd(3)).unwrap();
    assert_eq!(header.packing, Packing::Zstd);
    assert!(payload.len() < pages.len() - text.len() / 2, "{} bytes", payload.len());
    assert_eq!(PageBatch::decode(&header, payload.into()).unwrap().whole(), pages);
}
