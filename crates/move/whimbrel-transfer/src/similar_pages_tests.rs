//! Tests of similar pages through a server: contents that moved, invalid replies, images that are gone.

use crate::{
    BaseImage, ChildSet, LocalObjects, Server,
    answer_decoder::{ReceivedLeaf, RequestedLeaf, RequestedSlots, decode_leaf_pages},
    local_objects,
    protocol::*,
};
use bytes::Bytes;
use tempfile::TempDir;
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE};
use whimbrel_image::{Node, pack_frame::Kind};
use whimbrel_store::{Options, Store};
use whimbrel_wire::Request;

const PAGES: u64 = 200;

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..bytes).map(next).collect()
}

/// Store with an older image of noise and a newer one, in which the same noise is elsewhere and begins 777
/// bytes later.
struct Moved {
    _dir: TempDir,
    store: Store,
    old: BaseImage,
    new: Digest,
}

fn moved() -> Moved {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::create()).unwrap();
    let shelf = store.fetched_objects_writer();
    // The image has one extent, so the roots are the leaves.
    let image = |first: usize, bytes: &[u8]| {
        let mut leaf = Node::empty(0);
        let pages: Vec<&[u8]> = bytes.chunks(PAGE_SIZE).collect();
        pages.iter().enumerate().for_each(|(i, page)| leaf.set(first + i, Some(Digest::of(page))));
        let leaf = leaf.encode().unwrap();
        shelf.store(Kind::Pages, &pages).unwrap();
        shelf.store(Kind::Nodes, &[&leaf]).unwrap();
        Digest::of(&leaf)
    };
    let (old, mut later) = (noise(64 * PAGE_SIZE, 1), noise(777, 2));
    later.extend_from_slice(&old[..64 * PAGE_SIZE - 777]);
    let (old, new) = (image(10, &old), image(120, &later));
    shelf.flush().unwrap();
    Moved { _dir: dir, store, old: BaseImage { root: old, pages: PAGES }, new }
}

fn ask(moved: &Moved, bases: Vec<BaseImage>) -> (LeafPagesReply, Bytes) {
    let slots = WantedSlots::These((120..184).collect());
    let wants = vec![WantedLeafPages::Leaf { leaf: moved.new, similar: None, slots }];
    let ask = LeafPagesRequest { wants, bases, level: 3, max_bytes: 1 << 20 };
    let request = Request::of::<LeafPages>(&ask, Bytes::new()).unwrap();
    let reply = Server::new(moved.store.clone()).answer(&|_: &CapsuleId| true, &request).unwrap();
    (reply.decode::<LeafPages>().unwrap(), reply.payload)
}

fn asked(moved: &Moved) -> [RequestedLeaf; 1] {
    let slots: ChildSet = (120..184).collect();
    let leaf = local_objects::node(&moved.store, &moved.new).unwrap();
    [RequestedLeaf { leaf: moved.new, old: None, similar: false, slots: RequestedSlots::Given(slots, leaf) }]
}

#[test]
fn contents_that_moved_are_sent_as_what_they_resemble() {
    let moved = moved();
    let (answer, payload) = ask(&moved, vec![moved.old]);
    assert!(payload.len() < 8 * PAGE_SIZE, "{} bytes for 64 pages that moved", payload.len());
    let came = decode_leaf_pages(&moved.store, &asked(&moved), &[moved.old], &answer, &payload).unwrap();
    assert!(matches!(&came.leaves[..], [ReceivedLeaf::Pages { pages, .. }] if pages.len() == 64));
    assert!(ask(&moved, vec![]).1.len() > 60 * PAGE_SIZE, "without the older image they are noise");
}

#[test]
fn an_answer_that_names_pages_that_no_image_has_is_refused() {
    let moved = moved();
    let (mut answer, payload) = ask(&moved, vec![moved.old]);
    for bases in [vec![], vec![BaseImage { pages: 3, ..moved.old }]] {
        assert!(decode_leaf_pages(&moved.store, &asked(&moved), &bases, &answer, &payload).is_err());
    }
    answer.frames[0].bases -= 1;
    answer.frames[0].bytes += 1;
    assert!(decode_leaf_pages(&moved.store, &asked(&moved), &[moved.old], &answer, &payload).is_err());
}

#[test]
fn an_older_image_that_cannot_be_read_any_more_is_nobodys_fault() {
    let (moved, empty) = (moved(), tempfile::tempdir().unwrap());
    let (answer, payload) = ask(&moved, vec![moved.old]);
    let lost = Store::open(empty.path(), Options::create()).unwrap();
    assert!(!lost.has(&[moved.old.root])[0]);
    let came = decode_leaf_pages(&lost as &dyn LocalObjects, &asked(&moved), &[moved.old], &answer, &payload)
        .unwrap();
    assert!(matches!(came.leaves[..], [ReceivedLeaf::NoBases]));
}
