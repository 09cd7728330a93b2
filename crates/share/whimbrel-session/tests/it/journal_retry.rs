//! A journal that cannot be appended to goes on in another place before anything is refused.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};
use whimbrel_session::{
    cache::{BlockCache, CacheError, CacheRead, DiskStorage, FileRecord, Geometry, Storage, StoragePart},
    proto::{RelPath, Version},
};

/// A disk on which journals go bad: bit 0 and 1 say which one, and bit 2 and 3 which one was written last.
struct Failing {
    disk: DiskStorage,
    state: Arc<AtomicU8>,
}

fn bit(which: bool) -> u8 {
    1 << u8::from(which)
}

impl Storage for Failing {
    fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> io::Result<usize> {
        self.disk.read(part, at, out)
    }

    fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> io::Result<()> {
        if let StoragePart::Journal(which) = part {
            let bad = self.state.load(Ordering::SeqCst) & 3;
            if bad & bit(which) != 0 {
                // A part of it arrives all the same.
                self.disk.write(part, at, &data[..data.len() / 2])?;
                return Err(io::Error::from_raw_os_error(5));
            }
            self.state.store(bad | bit(which) << 2, Ordering::SeqCst);
        }
        self.disk.write(part, at, data)
    }

    fn sync(&self, part: StoragePart) -> io::Result<()> {
        self.disk.sync(part)
    }

    fn truncate(&self, part: StoragePart, len: u64) -> io::Result<()> {
        self.disk.truncate(part, len)
    }

    fn len(&self, part: StoragePart) -> io::Result<u64> {
        self.disk.len(part)
    }
}

#[test]
fn a_failed_append_is_repeated_in_the_other_journal_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let state = Arc::new(AtomicU8::new(0));
    let storage = Failing { disk: DiskStorage::open(dir.path()).unwrap(), state: state.clone() };
    let geometry = Geometry::new(64 << 10, 16 << 20).unwrap();
    let (cache, _) = BlockCache::open(Box::new(storage), geometry).unwrap();
    let record = FileRecord {
        path: RelPath::new(b"disk").unwrap(),
        ident: None,
        made_by: None,
        base: Version::default(),
        size: 0,
        zero_from: 0,
        mtime: None,
        stamps: Vec::new(),
        dirty: false,
        removed: false,
    };
    let file = cache.add_file(record).unwrap();
    cache.write(file, 0, &[1; 8192]).unwrap();
    // Each in turn goes bad, in a write and in a sync.
    for round in 0..4_u8 {
        state.store(state.load(Ordering::SeqCst) >> 2, Ordering::SeqCst);
        if round % 2 == 0 {
            cache.write(file, u64::from(round) * 4096, &[round + 2; 4096]).unwrap();
        }
        cache.sync().unwrap();
    }
    drop(cache);
    let storage = Failing { disk: DiskStorage::open(dir.path()).unwrap(), state: Arc::default() };
    let (cache, recovered) = BlockCache::open(Box::new(storage), geometry).unwrap();
    assert_eq!((recovered.dirty, recovered.lost.len()), (vec![file], 0));
    let mut content = [0; 12288];
    assert_eq!(cache.read(file, 0, &mut content).unwrap(), CacheRead::Complete);
    assert!(content[..4096] == [2; 4096] && content[4096..8192] == [1; 4096] && content[8192..] == [4; 4096]);
}

#[test]
fn a_cache_without_any_place_for_its_journal_refuses_what_it_could_not_keep() {
    let dir = tempfile::tempdir().unwrap();
    let state = Arc::new(AtomicU8::new(0));
    let storage = Failing { disk: DiskStorage::open(dir.path()).unwrap(), state: state.clone() };
    let (cache, _) = BlockCache::open(Box::new(storage), Geometry::new(64 << 10, 16 << 20).unwrap()).unwrap();
    let op =
        |path: &[u8]| whimbrel_session::proto::Op::Mkdir { path: RelPath::new(path).unwrap(), mode: 0o755 };
    cache.add_op(op(b"before")).unwrap();
    cache.sync().unwrap();
    state.store(3, Ordering::SeqCst);
    assert!(matches!(cache.add_op(op(b"refused")), Err(CacheError::Io { .. })));
    assert!(matches!(cache.add_op(op(b"after")), Err(CacheError::Latched { .. })));
    drop(cache);
    let storage = Failing { disk: DiskStorage::open(dir.path()).unwrap(), state: Arc::default() };
    let (cache, _) = BlockCache::open(Box::new(storage), Geometry::new(64 << 10, 16 << 20).unwrap()).unwrap();
    assert_eq!(cache.ops().into_iter().map(|(_, op)| op).collect::<Vec<_>>(), [op(b"before")]);
}
