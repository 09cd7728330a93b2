//! One function for each public parser of bytes from outside: a file, another host, QEMU, an NBD client.
//! Parsers that their crates keep to themselves (index files, network frames) have property tests of their
//! own there.
//!
//! A target takes any bytes and must return: no panic, no endless loop, no memory beyond what the parser
//! promises. Where a format is canonical it also checks that what was accepted is what would have been
//! written. `cargo xtask fuzz` calls the functions by libFuzzer, guided by what they reach; `tests/seeded.rs`
//! calls them with mutations of [`TARGETS`]' seeds on every test run.

mod container;
mod device;
mod disk;
mod hash_cache;
mod journal;
mod migrate;
mod nbd;
mod pool;
mod postcopy;
mod protect;
mod seeds;
mod session;

pub use container::{container_layer, container_manifest};
pub use device::{disk_image, guest_frame, guest_packet};
pub use disk::disk_layout;
pub use hash_cache::{accepts_hash_cache_seed, hash_cache};
pub use migrate::migrate_message;
pub use nbd::nbd_session;
pub use pool::pool;
pub use postcopy::{accepts_postcopy_seed, postcopy};
pub use protect::protect;
pub use session::{accepts_session_seed, session};

use bytes::BufMut as _;
use whimbrel_alignment::PageAlignment;
use whimbrel_capture::dirty_trace::{DirtyTrace, Reader as TraceReader};
use whimbrel_capture::downtime_model::{Model, Simulation};
use whimbrel_core::{PAGE_SIZE, PageRun};
use whimbrel_image::pack_frame::{MAX_BLOB, PackFrame};
use whimbrel_image::{Manifest, Node};
use whimbrel_migrate::page_batch::{PageBatch, PageBatchHeader};
use whimbrel_qemu::StreamHeader;
use whimbrel_wire::{Decoder, Hello};

/// Pages of the array that batches are checked against.
const ARRAY_PAGES: u64 = 1024;

/// A parser under test.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// The parser and what must hold of what it accepts.
    pub run: fn(&[u8]),
    /// Inputs that it accepts, to begin from.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target { name: "container_layer", run: container_layer, seeds: container::layers },
    Target { name: "container_manifest", run: container_manifest, seeds: container::manifests },
    Target { name: "cuts", run: cuts, seeds: seeds::cuts },
    Target { name: "disk_image", run: disk_image, seeds: device::disk_images },
    Target { name: "disk_layout", run: disk_layout, seeds: seeds::disks },
    Target { name: "guest_frame", run: guest_frame, seeds: device::guest_frames },
    Target { name: "guest_packet", run: guest_packet, seeds: device::guest_packets },
    Target { name: "guest_answers", run: guest_answers, seeds: seeds::guest_answers },
    Target { name: "guest_port", run: guest_port, seeds: seeds::guest_ports },
    Target { name: "hash_cache", run: hash_cache, seeds: hash_cache::seeds },
    Target { name: "image_node", run: image_node, seeds: seeds::image_nodes },
    Target { name: "image_frame", run: image_frame, seeds: seeds::image_frames },
    Target { name: "manifest", run: manifest, seeds: seeds::manifests },
    Target { name: "migrate_batch", run: migrate_batch, seeds: seeds::migrate_batches },
    Target { name: "migrate_message", run: migrate_message, seeds: migrate::seeds },
    Target { name: "nbd_session", run: nbd_session, seeds: seeds::nbd_sessions },
    Target { name: "qemu_state", run: qemu_state, seeds: seeds::qemu_states },
    Target { name: "store_keys", run: store_keys, seeds: seeds::store_keys },
    Target { name: "sync_answer", run: sync_answer, seeds: seeds::sync_answers },
    Target { name: "tunnel_batch", run: tunnel_batch, seeds: seeds::tunnel_batches },
    Target { name: "wws_trace", run: wws_trace, seeds: seeds::wws_traces },
    Target { name: "wire_frame", run: wire_frame, seeds: seeds::wire_frames },
    Target { name: "wire_hello", run: wire_hello, seeds: seeds::wire_hellos },
    Target { name: "postcopy", run: postcopy, seeds: postcopy::seeds },
    Target { name: "pool", run: pool, seeds: pool::seeds },
    Target { name: "protect", run: protect, seeds: protect::seeds },
    Target { name: "session", run: session, seeds: session::seeds },
];

/// What comes through the port of a guest, either way: frames are found in whatever it is, and what is
/// understood is said the same way again.
pub fn guest_port(data: &[u8]) {
    let mut decoder = whimbrel_guest_protocol::frame::Decoder::default();
    for piece in data.chunks(61) {
        decoder.push(piece);
        while let Some(frame) = decoder.next_frame() {
            let again =
                |other: whimbrel_guest_protocol::frame::Frame| assert_eq!(other.payload, frame.payload);
            if let Ok(order) = whimbrel_guest_protocol::Command::from_frame(&frame) {
                // A beginning has no text, so one that came with a text is said without.
                let beginning = whimbrel_guest_protocol::Command::RequestResult(
                    whimbrel_guest_protocol::RequestOutcome::Started,
                );
                if order != beginning {
                    again(order.to_frame(frame.session, frame.id));
                }
            }
            if let Ok(word) = whimbrel_guest_protocol::Report::from_frame(&frame) {
                again(word.to_frame(frame.session, frame.id));
            }
        }
    }
}

/// What qemu-ga in a guest says: lines are found in whatever it is, none longer than it may be.
pub fn guest_answers(data: &[u8]) {
    const LIMIT: usize = 4096;
    let mut decoder = whimbrel_qemu::AnswerDecoder::default();
    for piece in data.chunks(61) {
        let fits = decoder.push(piece, LIMIT);
        assert!(fits || decoder.is_empty(), "a refused line is kept");
        while let Some(line) = decoder.next_line() {
            assert!(line.len() <= LIMIT && line.ends_with(b"\n"));
            if let Some(whimbrel_qemu::AgentAnswer::Error(words)) = whimbrel_qemu::AgentAnswer::parse(&line) {
                assert!(words.len() <= 300 && !words.contains(char::is_control));
            }
        }
    }
}

/// Frames of a tunnel: a whole number of them up to the first that is none, which is the last thing that is
/// said.
pub fn tunnel_batch(data: &[u8]) {
    let frames: Vec<_> = whimbrel_net::tunnel::frames(data).collect();
    let bytes: usize = frames.iter().flatten().map(|(_, frame)| 5 + frame.len()).sum();
    let broken = frames.iter().filter(|frame| frame.is_err()).count();
    assert!(bytes <= data.len() && (broken == 0) == (bytes == data.len()), "{bytes} of {} bytes", data.len());
    assert!(
        broken == 0 || (broken == 1 && frames.last().is_some_and(Result::is_err)),
        "it goes on after an error"
    );
}

/// How a disk is cut into pages: canonical, and every page holds something.
pub fn cuts(data: &[u8]) {
    let Ok(cuts) = PageAlignment::decode(data) else { return };
    assert_eq!(cuts.encode(), data, "cuts have one encoding");
    assert!(cuts.page_count() <= cuts.size().div_ceil(PAGE_SIZE as u64) + 2 * cuts.changes().count() as u64);
    let ends = [cuts.page_count().checked_sub(1), Some(0), Some(cuts.page_count())];
    for page in ends.into_iter().flatten() {
        match cuts.disk_bytes(page) {
            Some(bytes) => assert_eq!(cuts.pages_of(bytes), PageRun::new(page, 1)),
            None => assert_eq!(page, cuts.page_count()),
        }
    }
}

/// The wrapped key of a store: canonical.
pub fn store_keys(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(keys) = whimbrel_store::KeyFile::parse(text) {
        assert_eq!(keys.encode(), text, "wrapped keys have one encoding");
    }
}

/// A node of an image tree: canonical.
pub fn image_node(data: &[u8]) {
    if let Ok(node) = Node::decode(data) {
        assert_eq!(node.encode().as_deref(), Some(data), "a node has one encoding");
    }
}

/// A frame of a pack: its objects lie inside what it decodes to.
pub fn image_frame(data: &[u8]) {
    let Ok(frame) = PackFrame::parse(data) else { return };
    let ranges = frame.ranges();
    let Ok(raw) = frame.decode(&[]) else { return };
    assert!(raw.len() <= MAX_BLOB);
    assert!(ranges.iter().all(|range| range.end <= raw.len()), "an object outside of its frame");
}

/// A capsule's manifest: canonical.
pub fn manifest(data: &[u8]) {
    if let Ok(manifest) = Manifest::decode(data) {
        let again = manifest.encode().expect("what was read can be written");
        assert_eq!(again, data, "a manifest has one encoding");
    }
}

/// A batch of a migration: two bytes of header length, the header, the payload.
pub fn migrate_batch(data: &[u8]) {
    let Some((length, rest)) = data.split_first_chunk::<2>() else { return };
    let Some((header, payload)) = rest.split_at_checked(u16::from_le_bytes(*length).into()) else { return };
    let Ok(header) = postcard::from_bytes::<PageBatchHeader>(header) else { return };
    if header.check(ARRAY_PAGES).is_err() {
        return;
    }
    let Ok(batch) = PageBatch::decode(&header, bytes::Bytes::copy_from_slice(payload)) else { return };
    let pages = |runs: &[whimbrel_core::PageRun]| runs.iter().map(|run| run.len as usize).sum::<usize>();
    assert_eq!(batch.whole().len(), pages(&header.whole) * PAGE_SIZE, "other pages than the header lists");
    let mut page = vec![0; PAGE_SIZE];
    let patches = batch.patches().inspect(|patch| patch.apply(&mut page)).count();
    assert_eq!(patches, pages(&header.delta), "other differences than the header lists");
}

/// The state of a QEMU, as another host sends it.
pub fn qemu_state(data: &[u8]) {
    if let Ok(head) = StreamHeader::parse(data) {
        assert!(head.blocks().len() <= data.len(), "more blocks than bytes");
    }
}

/// Answers of a sync, of every sort: two bytes of header length, the header, the payload.
pub fn sync_answer(data: &[u8]) {
    whimbrel_transfer::decode_any(data);
}

/// The trace of a working set, whole and in pieces: canonical up to its last whole record, and fit to be
/// played.
pub fn wws_trace(data: &[u8]) {
    let whole = DirtyTrace::read(data);
    let mut reader = TraceReader::default();
    let mut samples = Vec::new();
    for piece in data.chunks(7) {
        reader.feed(piece);
        loop {
            match reader.sample() {
                Ok(Some(sample)) => samples.push(sample),
                Ok(None) => break,
                Err(error) => return assert_eq!(whole, Err(error), "pieces are read as the whole is"),
            }
        }
    }
    let Ok(trace) = whole else { return };
    assert_eq!(trace.samples, samples);
    assert!(data.starts_with(&trace.write()), "a trace has one encoding");
    if let Some(simulation) = Simulation::new(&trace).filter(|_| trace.header.pages < 1 << 16) {
        let played = simulation.simulate(0.1, 1 << 20, 2, &Model::default());
        assert!(played.iter().all(|prediction| prediction.left <= simulation.unique_pages() as f64 + 1e-3));
    }
}

/// A stream of wire frames, in pieces whose sizes are the first byte's.
pub fn wire_frame(data: &[u8]) {
    let Some((piece, stream)) = data.split_first() else { return };
    let mut decoder = Decoder::default();
    for piece in stream.chunks(usize::from(*piece).max(1)) {
        let mut rest = piece;
        while !rest.is_empty() {
            let mut space = decoder.space();
            let taken = rest.len().min(space.remaining_mut());
            assert!(taken > 0, "no room though no frame is complete");
            space.put_slice(&rest[..taken]);
            drop(space);
            rest = &rest[taken..];
            loop {
                match decoder.next_frame() {
                    Ok(Some(frame)) => assert_eq!(frame.head.payload_len as usize, frame.payload.len()),
                    Ok(None) => break,
                    Err(_) => return,
                }
            }
        }
    }
}

/// The first message of a connection: canonical.
pub fn wire_hello(data: &[u8]) {
    if let Ok(hello) = Hello::parse(data) {
        let again = Hello::parse(&hello.encode()).expect("what was read can be written");
        assert_eq!(again, hello);
    }
}
