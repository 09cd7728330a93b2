//! Inputs that the parsers accept, made by the encoders themselves where they are public.

use bytes::BytesMut;
use std::collections::BTreeMap;
use std::time::Duration;
use whimbrel_alignment::{AlignmentChange, PageAlignment};
use whimbrel_capture::dirty_trace::{DirtyTrace, DirtyTraceHeader, Sample};
use whimbrel_core::{ByteSize, CapsuleId, Digest, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::pack_frame::{Encoder, Kind};
use whimbrel_image::{FORMAT, ImageRef, Manifest, Node};
use whimbrel_migrate::page_batch::{Effort, Encoder as BatchEncoder};
use whimbrel_transfer::ChildSet;
use whimbrel_transfer::protocol::{
    BlobRangeReply, LeafAnswer, LeafPagesFrame, LeafPagesReply, ObjectAnswer, ObjectsReply,
};
use whimbrel_wire::{Flags, FrameHead, Hello, ProtocolVersions, Role, VersionRange, encode_head};

pub(crate) fn image_nodes() -> Vec<Vec<u8>> {
    let node = |level: u8, children: &[usize]| {
        let mut node = Node::empty(level);
        children.iter().for_each(|child| node.set(*child, Some(Digest::of(&[*child as u8]))));
        node.encode()
    };
    let all: Vec<usize> = (0..256).collect();
    [node(0, &[0]), node(1, &[3, 64, 255]), node(0, &all)].into_iter().flatten().collect()
}

pub(crate) fn wws_traces() -> Vec<Vec<u8>> {
    let every = Duration::from_millis(50);
    let sample = |runs: &[(u64, u64)]| Sample {
        duration: every,
        dirty: runs.iter().map(|(start, len)| PageRun::new(*start, *len)).collect(),
    };
    let head = DirtyTraceHeader { pages: 40_000, populated: 30_000, interval: every, start_ms: 1 };
    let samples = vec![sample(&[(0, 1), (300, 200), (39_999, 1)]), sample(&[]), sample(&[(5, 20_000)])];
    [vec![], samples].into_iter().map(|samples| DirtyTrace { header: head, samples }.write()).collect()
}

pub(crate) fn image_frames() -> Vec<Vec<u8>> {
    let page: Vec<u8> = (0..2 * PAGE_SIZE).map(|byte| (byte / 7) as u8).collect();
    let mut encoder = Encoder::new(1);
    let pages = encoder.encode(Kind::Pages, &page, &[PAGE_SIZE, PAGE_SIZE]);
    let blob = encoder.encode(Kind::Blob, b"a kernel", &[8]);
    [pages, blob].into_iter().flatten().collect()
}

pub(crate) fn store_keys() -> Vec<Vec<u8>> {
    let (master, data, wrapped) = ("0123456789abcdef", "fedcba9876543210", "5a".repeat(60));
    vec![format!("whimbrel store keys 1\nmaster {master}\ndata {data} {wrapped}\n").into_bytes()]
}

pub(crate) fn manifests() -> Vec<Vec<u8>> {
    let machine = MachineConfig::minimal(ByteSize(64 << 20));
    let digest = Digest::of(b"root");
    let cuts = cuts().pop().and_then(|bytes| PageAlignment::decode(&bytes).ok());
    let manifest = Manifest {
        format: FORMAT,
        machine,
        device: vec![digest],
        images: vec![
            ImageRef { name: "memory".into(), pages: 16384, root: Some(digest), cuts: None },
            ImageRef { name: "disk0".into(), pages: 257, root: None, cuts },
        ],
        parents: vec![CapsuleId(digest)],
        time: 1,
        host: "alpha".into(),
        labels: BTreeMap::from([("why".into(), "a seed".into())]),
        working_set: None,
    };
    manifest.encode().into_iter().collect()
}

/// A disk with a FAT at sector 63, and one without cuts.
pub(crate) fn cuts() -> Vec<Vec<u8>> {
    let borders = [(0, 0), (63 * 512, 3584), (163 * 512, 1536)];
    let fat = PageAlignment::new(1 << 20, borders.map(|(start, phase)| AlignmentChange { start, phase }));
    [PageAlignment::identity(1 << 30), fat].into_iter().flatten().map(|cuts| cuts.encode()).collect()
}

/// Disks behind eight bytes that are their size: a FAT, then tables of every kind. What is not there cannot
/// be read.
pub(crate) fn disks() -> Vec<Vec<u8>> {
    let sized = |size: u64, disk: &[u8]| [&size.to_le_bytes(), disk].concat();
    let boot = |fields: &[(usize, &[u8])]| {
        let mut sector = vec![0; 512];
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        fields.iter().for_each(|(at, bytes)| sector[*at..*at + bytes.len()].copy_from_slice(bytes));
        sector
    };
    let entry = |kind: u8, first: u32, count: u32| {
        [&[0, 0, 0, 0, kind, 0, 0, 0][..], &first.to_le_bytes(), &count.to_le_bytes()].concat()
    };
    let fat = boot(&[(0, &[0xeb]), (11, &[0, 2, 8, 1, 0, 2, 0, 2, 0, 0, 0xf8, 33]), (34, &[1])]);
    let table = [entry(0x83, 3, 4), entry(0x05, 1, 60), entry(0x06, 2, 1)].concat();
    let chain = [entry(0x07, 1, 8), entry(0x05, 1, 8)].concat();
    let nested = [boot(&[(446, &table)]), boot(&[(446, &chain)]), boot(&[(446, &chain)]), fat.clone()];
    let mut nested = nested.concat();
    nested.extend([&b"XFSB\0\0\x10\0"[..], &[0; 4 << 10]].concat());
    let mut gpt = boot(&[(446, &entry(0xee, 1, u32::MAX))]);
    gpt.extend(guid_table());
    let tail = vec![0; 2048];
    vec![
        sized(40 << 20, &[fat, tail].concat()),
        sized(64 << 20, &nested),
        sized(u64::MAX, &nested),
        sized(1 << 20, &gpt),
    ]
}

/// A header and the sector of its entries.
fn guid_table() -> Vec<u8> {
    let mut entries = vec![0; 4 * 128];
    entries[..16].fill(7);
    entries[32] = 34;
    entries[40] = 99;
    let mut header = vec![0; 512];
    header[..16].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0");
    header[24] = 1;
    header[72] = 2;
    header[80] = 4;
    header[84] = 128;
    header[88..92].copy_from_slice(&crc32(&entries).to_le_bytes());
    let checksum = crc32(&header[..92]);
    header[16..20].copy_from_slice(&checksum.to_le_bytes());
    [header, entries].concat()
}

/// The checksum of a GUID partition table.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc: u32, _| crc >> 1 ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

pub(crate) fn migrate_batches() -> Vec<Vec<u8>> {
    let seed = |effort: Effort, pages: &[u64]| {
        let mut encoder = BatchEncoder::default();
        encoder.zero(&[PageRun::new(0, 4), PageRun::new(900, 2)]);
        for page in pages {
            encoder.whole(*page, &[*page as u8; 4096]);
            encoder.delta(page + 10, &[7; 4096], 1 << 63 | 5);
        }
        let (header, payload) = encoder.finish(0, effort).expect("pages can be packed");
        let header = postcard::to_stdvec(&header).expect("a header can be written");
        [&(header.len() as u16).to_le_bytes()[..], &header, &payload].concat()
    };
    vec![seed(Effort::None, &[]), seed(Effort::Zstd(1), &[20, 21, 30]), seed(Effort::None, &[5])]
}

/// A handshake that asks for everything, then one request of each kind.
pub(crate) fn nbd_sessions() -> Vec<Vec<u8>> {
    let option = |kind: u32, data: &[u8]| {
        [&b"IHAVEOPT"[..], &kind.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
    };
    let request = |command: u16, offset: u64, len: u32| {
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(command.to_be_bytes());
        bytes.extend(7_u64.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes
    };
    let context = [&[0; 4][..], &1_u32.to_be_bytes(), &15_u32.to_be_bytes(), b"base:allocation"].concat();
    let session = [
        3_u32.to_be_bytes().to_vec(),
        option(8, &[]),
        option(10, &context),
        option(3, &[]),
        option(7, &[0, 0, 0, 0, 0, 1, 0, 3]),
        request(0, 4096, 512),
        [request(1, 0, 16), vec![5; 16]].concat(),
        request(6, 0, 4096),
        request(4, 4096, 4096),
        request(7, 0, 65536),
        request(3, 0, 0),
        request(2, 0, 0),
    ];
    vec![session.concat()]
}

/// A head with one small block and its one page, then the first byte of a device section, as QEMU writes
/// them.
pub(crate) fn qemu_states() -> Vec<Vec<u8>> {
    let name = |text: &str| [&[text.len() as u8][..], text.as_bytes()].concat();
    let footer = [&[0x7e][..], &2_u32.to_be_bytes()].concat();
    let size = PAGE_SIZE as u64;
    let stream = [
        b"QEVM\0\0\0\x03".to_vec(),
        vec![0x01, 0, 0, 0, 2],
        name("ram"),
        [0_u32.to_be_bytes(), 4_u32.to_be_bytes()].concat(),
        (size | 0x04).to_be_bytes().to_vec(),
        name("pc.rom"),
        [size.to_be_bytes(), 0_u64.to_be_bytes()].concat(),
        0x10_u64.to_be_bytes().to_vec(),
        footer.clone(),
        vec![0x03, 0, 0, 0, 2],
        0x08_u64.to_be_bytes().to_vec(),
        name("pc.rom"),
        vec![9; PAGE_SIZE],
        0x10_u64.to_be_bytes().to_vec(),
        footer,
        vec![0x04, 0, 0, 0, 3],
        name("timer"),
        [0_u32.to_be_bytes(), 2_u32.to_be_bytes()].concat(),
        vec![0; 24],
        vec![0],
    ];
    vec![stream.concat()]
}

/// The answer to a request for pages that all became zero, one for objects that are there and are not, a
/// piece, and the difference of a node.
pub(crate) fn sync_answers() -> Vec<Vec<u8>> {
    let message = |header: Vec<u8>, payload: &[u8]| {
        [&(header.len() as u16).to_le_bytes()[..], &header, payload].concat()
    };
    let slots: ChildSet = (0..3).collect();
    let sent = LeafAnswer::Sent { changed: slots, zero: slots, delta: false };
    let frame = LeafPagesFrame { leaves: 1, bases: 0, bytes: 0 };
    let pages = LeafPagesReply { leaves: vec![LeafAnswer::Large, sent], frames: vec![frame; 2] };
    let objects =
        ObjectsReply { objects: vec![ObjectAnswer::Absent, ObjectAnswer::Long(9), ObjectAnswer::Absent] };
    let piece = BlobRangeReply { total: 50, len: 0 };
    // The piece has no bytes, behind the byte of a codec.
    let answers = [
        (postcard::to_stdvec(&pages), &[][..]),
        (postcard::to_stdvec(&objects), &[]),
        (postcard::to_stdvec(&piece), &[0]),
    ];
    let answers = answers.into_iter().filter_map(|(header, payload)| Some((header.ok()?, payload)));
    let mut seeds: Vec<Vec<u8>> = answers.map(|(header, payload)| message(header, payload)).collect();
    let difference = [&[1, 7, 0][..], &[5; 32]].concat();
    seeds.push(message(Vec::new(), &difference));
    seeds
}

/// Answers of qemu-ga, with what an earlier host left before them.
pub(crate) fn guest_answers() -> Vec<Vec<u8>> {
    let lines: [&[u8]; 3] = [
        b"{\"ret\xff{\"return\": 7}\n",
        b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n",
        b"{\"return\": {\"exited\": true, \"exitcode\": 0, \"out-data\": \"aGk=\"}}\n",
    ];
    lines.into_iter().map(<[u8]>::to_vec).collect()
}

pub(crate) fn guest_ports() -> Vec<Vec<u8>> {
    use whimbrel_guest_protocol::{Command, GuestRequest, Process, Report, RequestOutcome};
    let process = Process { pid: 7, pages: 900, name: "muncher".into() };
    let orders = [
        Command::Hello { host: "alpha".into(), machine: "web".into(), pages: 81_920 },
        Command::Stun { lease_ms: 3000, limit: 40, spare: 10, each: 4, sample: vec![1, 2, 70_000] },
        Command::RequestResult(RequestOutcome::Refused("no".into())),
    ];
    let words = [
        Report::Ready { features: 7, version: "0.1.0".into() },
        Report::Stunned { held: vec![process.clone()], spared: vec![process] },
        Report::Request(GuestRequest::Migrate { host: "beta".into() }),
    ];
    let orders = orders.iter().map(|order| order.to_frame(5, 1).encode());
    orders.chain(words.iter().map(|word| word.to_frame(5, 1).encode())).collect()
}

pub(crate) fn tunnel_batches() -> Vec<Vec<u8>> {
    let frame = |port: u8, length: u32| {
        let mut frame = vec![port];
        frame.extend(length.to_le_bytes());
        frame.resize(5 + length as usize, 0xee);
        frame
    };
    vec![frame(0, 60), [frame(1, 14), frame(0, 1500), frame(7, 64)].concat()]
}

pub(crate) fn wire_frames() -> Vec<Vec<u8>> {
    let mut stream = BytesMut::from(&[5][..]);
    for (request, flags) in [(1, Flags::NONE), (2, Flags::ORDERED), (1, Flags::REPLY)] {
        let head = FrameHead { flags, kind: 0x100, stream: 0, request, header_len: 3, payload_len: 9 };
        encode_head(&head, &mut stream);
        stream.extend_from_slice(&[1; 12]);
    }
    vec![stream.to_vec()]
}

pub(crate) fn wire_hellos() -> Vec<Vec<u8>> {
    let name = "alpha".parse().expect("a name");
    let versions = VersionRange { oldest: 1, newest: 1 };
    let hello = Hello { versions, role: Role::HOST, window: 1 << 20, name, protocols: vec![] };
    let protocols = vec![ProtocolVersions { first_kind: 0x100, versions }];
    vec![hello.encode(), Hello { protocols, ..hello }.encode()]
}
