//! The hash cache: its table file, whole, and the qcow2 images it is pointed to.

use tempfile::NamedTempFile;
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_hashcache::format::{Header, RECORD_SIZE, SourceRecord};
use whimbrel_hashcache::qcow2::Map;
use whimbrel_hashcache::{Geometry, HashCache, OnMissing, SourceKind};

/// More extents than pages of the image cannot be.
const MIN_CLUSTER: usize = 512;

/// The first byte chooses: a qcow2 image, a source record, or a table file.
pub fn hash_cache(data: &[u8]) {
    match data.split_first() {
        Some((0..=99, image)) => qcow2(image),
        Some((100..=149, record)) => source_record(record),
        Some((_, table)) => table_file(table),
        None => {}
    }
}

/// Extents lie inside of the file, follow each other in the image and are no more than the file has room for.
fn qcow2(image: &[u8]) {
    let Ok(map) = Map::open(image) else { return };
    let size = map.size();
    let (mut at, mut count, mut bytes) = (0, 0, 0);
    for extent in map.extents() {
        let Ok(extent) = extent else { break };
        assert!(extent.length > 0 && extent.guest >= at, "extents in order");
        at = extent.guest + extent.length;
        bytes += extent.length;
        count += 1;
        assert!(at <= size && extent.host + extent.length <= image.len() as u64, "outside of the image");
        assert!(bytes <= image.len() as u64 && count <= image.len() / MIN_CLUSTER + 1, "more than there is");
    }
}

/// A record is canonical beyond its two counters.
fn source_record(record: &[u8]) {
    let Some(record) = record.first_chunk::<RECORD_SIZE>() else { return };
    if let Some(source) = SourceRecord::decode(record) {
        let again = source.encode().expect("what was read can be written");
        assert_eq!(again[16..], record[16..], "a record has one encoding");
    }
}

/// A table opens or says why not; whatever it says lies nowhere gives no page.
fn table_file(table: &[u8]) {
    if let Some(header) = table.first_chunk()
        && let Ok(header) = Header::decode(header)
    {
        assert_eq!(header.encode()[..], table[..PAGE_SIZE], "a header has one encoding");
    }
    let file = NamedTempFile::new().expect("a file for the table");
    std::fs::write(file.path(), table).expect("a table can be written");
    let Ok(cache) = HashCache::open_seeded(file.path(), OnMissing::Fail, 1) else { return };
    let stats = cache.stats();
    assert!(stats.used <= stats.slots);
    let mut page = [0; PAGE_SIZE];
    for number in 0..64_u64 {
        let digest = Digest::of(&number.to_le_bytes());
        assert!(!cache.get(&digest, &mut page), "no page has this digest");
        if let Some(source) = stats.sources.first() {
            cache.record_page(
                &digest,
                whimbrel_hashcache::Location { source: source.id, offset: number * 512 },
            );
        }
    }
}

/// A small image with two tables and data, a record, a small table with a source.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let mut image = vec![0; 5 * 4096];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &12_u32.to_be_bytes());
    put(24, &(1_u64 << 21).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &4096_u64.to_be_bytes());
    put(4096, &(1_u64 << 63 | 8192).to_be_bytes());
    put(8192, &(1_u64 << 63 | 12288).to_be_bytes());
    put(8200, &(1_u64 << 63 | 16384).to_be_bytes());
    let record = SourceRecord {
        kind: SourceKind::Raw,
        identity: (1, 2),
        size: 4096,
        changed: (1, 2),
        pages: 1,
        alignment_hash: 3,
        path: "/images/debian.raw".into(),
    };
    let record = record.encode().expect("a short path");
    let folder = tempfile::tempdir().expect("a folder for the table");
    let path = folder.path().join("table");
    let geometry = Geometry::for_pages(100).with_sources(4);
    let cache = HashCache::open_seeded(&path, OnMissing::Create(geometry), 1).expect("a table");
    cache.register(&path, SourceKind::Raw).expect("any file is a source");
    drop(cache);
    let table = std::fs::read(&path).expect("the table can be read");
    let tagged = |tag: u8, bytes: &[u8]| [&[tag], bytes].concat();
    vec![tagged(0, &image), tagged(100, &record), tagged(200, &table)]
}

/// Whether a seed is accepted whole.
pub fn accepts_hash_cache_seed(seed: &[u8]) -> bool {
    match seed.split_first() {
        Some((0, image)) => Map::open(image).is_ok_and(|map| map.extents().count() == 1),
        Some((100, record)) => record.first_chunk().and_then(SourceRecord::decode).is_some(),
        Some((_, table)) => table.first_chunk().is_some_and(|header| Header::decode(header).is_ok()),
        None => false,
    }
}
