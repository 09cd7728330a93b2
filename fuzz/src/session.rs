//! Sessions: records of the cache's journal, directory entries, content from the wire, and notes beside
//! files.

use crate::journal;
use whimbrel_session::{
    cache::{FileRecord, JournalRecord, MergedChanges, decode_record, encode_record},
    hint_file::Hint,
    proto::{
        Attr, DigestedPages, DirPacker, Entry, Ident, Kind, Name, Op, PAGE, PackedPages, RelPath, Time,
        Version, WalkedDir, pack_digests, pack_entries, pack_holes, pack_pages, unpack_digests, unpack_dirs,
        unpack_entries, unpack_holes, unpack_pages,
    },
};

const GENERATION: u64 = 3;
const LIMIT: usize = 1 << 20;

/// The first byte says which parser; the rest is for it.
pub fn session(data: &[u8]) {
    let Some((which, rest)) = data.split_first() else { return };
    match which % 8 {
        0 => {
            let Ok((record, len)) = decode_record(rest, GENERATION) else { return };
            let mut again = Vec::new();
            let written =
                encode_record(&record, GENERATION, &mut again).map(|()| decode_record(&again, GENERATION));
            assert!(
                len <= rest.len() && written == Ok(Ok((record, again.len()))),
                "a record survives being written"
            );
        }
        1 => {
            let Ok(entries) = unpack_entries(rest) else { return };
            let again = pack_entries(&entries).map(|packed| unpack_entries(&packed).ok());
            assert!(again.is_none_or(|again| again == Some(entries)), "entries survive being packed");
        }
        2 => {
            let Ok(dirs) = unpack_dirs(rest) else { return };
            let mut packer = DirPacker::default();
            let all = dirs.iter().all(|dir| packer.add(dir));
            let again = packer.finish().map(|packed| unpack_dirs(&packed).ok());
            assert!(!all || again.is_ok_and(|again| again == Some(dirs)), "directories survive being packed");
        }
        3 => {
            let Ok((shape, bytes)) = postcard::take_from_bytes::<PackedPages>(rest) else { return };
            let Ok(content) = unpack_pages(&shape, bytes, LIMIT) else { return };
            assert!(content.len() <= LIMIT && content.len() == shape.len as usize);
            let (shape, bytes) = pack_pages(&content, Some(1));
            assert_eq!(unpack_pages(&shape, &bytes, LIMIT).as_deref(), Ok(&content[..]));
        }
        4 => {
            let Ok((shape, bytes)) = postcard::take_from_bytes::<DigestedPages>(rest) else { return };
            let Ok(digests) = unpack_digests(&shape, bytes, LIMIT) else { return };
            assert!(digests.len() <= LIMIT / PAGE && digests.iter().flatten().count() * 32 == bytes.len());
        }
        5 => {
            let Ok(note) = Hint::parse(rest) else { return };
            assert!(note.zeros.windows(2).all(|pair| pair[0].end <= pair[1].start), "in order");
            assert_eq!(Hint::parse(note.to_text().as_bytes()), Ok(note), "a note survives being stored");
        }
        6 => journal::open(rest),
        _ => {
            let Ok(holes) = unpack_holes(rest) else { return };
            assert_eq!(pack_holes(&holes), rest, "holes survive being packed");
        }
    }
}

/// Whether a seed is what its parser is for.
pub fn accepts_session_seed(seed: &[u8]) -> bool {
    let Some((which, rest)) = seed.split_first() else { return false };
    match which % 8 {
        0 => decode_record(rest, GENERATION).is_ok_and(|(_, len)| len == rest.len()),
        1 => unpack_entries(rest).is_ok(),
        2 => unpack_dirs(rest).is_ok(),
        3 => postcard::take_from_bytes::<PackedPages>(rest)
            .is_ok_and(|(shape, bytes)| unpack_pages(&shape, bytes, LIMIT).is_ok()),
        4 => postcard::take_from_bytes::<DigestedPages>(rest)
            .is_ok_and(|(shape, bytes)| unpack_digests(&shape, bytes, LIMIT).is_ok()),
        5 => Hint::parse(rest).is_ok(),
        6 => postcard::take_from_bytes::<JournalRecord>(rest).is_ok(),
        _ => unpack_holes(rest).is_ok(),
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let path = RelPath::new(b"a/b").unwrap_or_default();
    let time = Time { seconds: 7, nanos: 9 };
    let file = FileRecord {
        path: path.clone(),
        ident: Some(Ident { dev: 1, ino: 2, birth: 3 }),
        made_by: None,
        base: Version { size: 4, mtime: time, ctime: time },
        size: 5,
        zero_from: 4,
        mtime: Some(time),
        stamps: Vec::new(),
        dirty: true,
        removed: false,
    };
    let op = Op::Rename { from: path.clone(), path, no_replace: true };
    let records = [
        JournalRecord::Block { file: 1, block: 2, frame: Some(3), valid: 5, dirty: 4, sums: vec![7, 8] },
        JournalRecord::File { file: 1, record: file },
        JournalRecord::Op { number: 1, op: op.clone() },
        JournalRecord::Sent { below: 7 },
        JournalRecord::Folded(MergedChanges {
            now: vec![(2, op)],
            gone: vec![3, 4],
            makes: vec![(5, Some(6)), (7, None)],
        }),
        JournalRecord::Barrier { records: 9 },
        JournalRecord::End,
    ];
    let mut seeds = vec![[vec![7], pack_holes(&[4096..8192, 1 << 20..1 << 40])].concat()];
    // One after the other, as they would lie in a journal.
    let all = records.iter().filter_map(|record| postcard::to_stdvec(record).ok());
    seeds.push(std::iter::once(vec![6]).chain(all).collect::<Vec<_>>().concat());
    for record in records {
        let mut bytes = vec![0];
        if encode_record(&record, GENERATION, &mut bytes).is_ok() {
            seeds.push(bytes);
        }
    }
    let attr = Attr {
        ident: Ident::default(),
        kind: Kind::File,
        mode: 0o644,
        links: 1,
        uid: 0,
        gid: 0,
        size: 9,
        blocks: 8,
        mtime: time,
        ctime: time,
    };
    let entries: Vec<Entry> = [&b"one"[..], b"two"]
        .iter()
        .filter_map(|name| Some(Entry { name: Name::new(name).ok()?, attr }))
        .collect();
    seeds.extend(pack_entries(&entries).map(|packed| [vec![1], packed].concat()));
    let mut dirs = DirPacker::default();
    if dirs.add(&WalkedDir { ident: attr.ident, entries: Some(entries) }) {
        seeds.extend(dirs.finish().ok().map(|packed| [vec![2], packed].concat()));
    }
    let (shape, bytes) = pack_pages(&[vec![5; 5000], vec![0; 9000]].concat(), Some(1));
    let note = b"\x05whimbrel note 1\nblocks\nof 90000 5 6\nzeros 0 4096\nzeros 8192 90000\n";
    seeds.push(note.to_vec());
    seeds.extend(postcard::to_stdvec(&shape).ok().map(|shape| [vec![3], shape, bytes].concat()));
    let (shape, digests) = pack_digests(&[vec![5; 5000], vec![0; 9000], vec![6; 10]].concat());
    seeds.extend(postcard::to_stdvec(&shape).ok().map(|shape| [vec![4], shape, digests].concat()));
    seeds
}
