//! Crashes of the cache: power failures and kills at any operation of seeded histories.
//!
//! Afterwards a page must hold what was promised at the last sync or written since; after a kill, what was
//! written last. Each page is written whole and with new content, so an old or torn page is recognised.

use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex},
};
use whimbrel_session::{
    cache::{BlockCache, CacheError, CacheRead, FileRecord, Geometry, MergedChanges, Storage, StoragePart},
    proto::{Ident, Op, PAGE, RelPath, Version},
};

#[derive(Default, Clone)]
struct Disk {
    durable: Vec<u8>,
    now: Vec<u8>,
    /// Writes since the last sync; none stands for a truncation.
    since: Vec<(u64, Option<Vec<u8>>)>,
}

#[derive(Default)]
struct State {
    parts: [Disk; 3],
    operations: u64,
    off_at: u64,
}

#[derive(Clone, Default)]
struct CrashMedium(Arc<Mutex<State>>);

fn number(part: StoragePart) -> usize {
    match part {
        StoragePart::Frames => 0,
        StoragePart::Journal(which) => 1 + usize::from(which),
    }
}

fn apply(bytes: &mut Vec<u8>, at: u64, data: Option<&[u8]>) {
    let at = at as usize;
    match data {
        None => bytes.resize(at, 0),
        Some(data) => {
            bytes.resize(bytes.len().max(at + data.len()), 0);
            bytes[at..at + data.len()].copy_from_slice(data);
        }
    }
}

impl CrashMedium {
    fn step(&self) -> io::Result<std::sync::MutexGuard<'_, State>> {
        let mut state = self.0.lock().unwrap();
        state.operations += 1;
        if state.operations >= state.off_at { Err(io::Error::other("no power")) } else { Ok(state) }
    }

    fn record(&self, part: StoragePart, at: u64, data: Option<&[u8]>) -> io::Result<()> {
        let mut state = self.step()?;
        let disk = &mut state.parts[number(part)];
        apply(&mut disk.now, at, data);
        disk.since.push((at, data.map(<[u8]>::to_vec)));
        Ok(())
    }

    fn after_kill(&self) -> Self {
        let parts = self.0.lock().unwrap().parts.clone();
        Self(Arc::new(Mutex::new(State { parts, operations: 0, off_at: u64::MAX })))
    }

    /// Each sector of every write since the last sync may or may not have reached the disk.
    fn after_power_failure(&self, random: &mut StdRng) -> Self {
        let mut parts = self.0.lock().unwrap().parts.clone();
        for disk in &mut parts {
            let mut bytes = std::mem::take(&mut disk.durable);
            for (at, data) in disk.since.drain(..) {
                match data {
                    None => {
                        if random.random() {
                            apply(&mut bytes, at, None)
                        }
                    }
                    Some(data) => {
                        for (number, sector) in data.chunks(512).enumerate() {
                            if random.random_ratio(3, 4) {
                                apply(&mut bytes, at + number as u64 * 512, Some(sector));
                            }
                        }
                    }
                }
            }
            disk.now = bytes.clone();
            disk.durable = bytes;
        }
        Self(Arc::new(Mutex::new(State { parts, operations: 0, off_at: u64::MAX })))
    }
}

impl Storage for CrashMedium {
    fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> io::Result<usize> {
        let state = self.0.lock().unwrap();
        let bytes = &state.parts[number(part)].now;
        let from = (at as usize).min(bytes.len());
        let len = out.len().min(bytes.len() - from);
        out[..len].copy_from_slice(&bytes[from..from + len]);
        Ok(len)
    }

    fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> io::Result<()> {
        self.record(part, at, Some(data))
    }

    fn sync(&self, part: StoragePart) -> io::Result<()> {
        let mut state = self.step()?;
        let disk = &mut state.parts[number(part)];
        disk.durable = disk.now.clone();
        disk.since.clear();
        Ok(())
    }

    fn truncate(&self, part: StoragePart, len: u64) -> io::Result<()> {
        self.record(part, len, None)
    }

    fn len(&self, part: StoragePart) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().parts[number(part)].now.len() as u64)
    }
}

const PAGES: u64 = 48;
const BLOCK_PAGES: u64 = 4;

/// Content number `n`; zero is zeros.
fn page(content: u32) -> Vec<u8> {
    content.to_le_bytes().repeat(PAGE / 4)
}

fn content_of(bytes: &[u8]) -> Option<u32> {
    let first = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    (bytes == &page(first)[..]).then_some(first)
}

/// What each page may hold, and what the server has.
struct Model {
    server: Vec<u32>,
    now: Vec<u32>,
    allowed: Vec<Vec<u32>>,
}

struct History {
    random: StdRng,
    model: Model,
    next: u32,
}

impl History {
    fn new(seed: u64) -> Self {
        let server: Vec<u32> =
            (0..PAGES as u32).map(|page| if page % 3 == 0 { 0 } else { 1_000_000 + page }).collect();
        let model = Model {
            now: server.clone(),
            allowed: server.iter().map(|content| vec![*content]).collect(),
            server,
        };
        Self { random: StdRng::seed_from_u64(seed), model, next: 1 }
    }

    /// One random operation; an error means that the power failed.
    fn step(&mut self, cache: &BlockCache, file: u64) -> Result<(), CacheError> {
        match self.random.random_range(0..10) {
            0..=4 => self.write(cache, file),
            5..=6 => self.fill(cache, file),
            7 => self.flush(cache, file),
            _ => {
                cache.sync()?;
                for (allowed, now) in self.model.allowed.iter_mut().zip(&self.model.now) {
                    *allowed = vec![*now];
                }
                Ok(())
            }
        }
    }

    fn write(&mut self, cache: &BlockCache, file: u64) -> Result<(), CacheError> {
        let first = self.random.random_range(0..PAGES);
        let count = self.random.random_range(1..=6).min(PAGES - first);
        let mut bytes = Vec::new();
        for number in first..first + count {
            let content = if self.random.random_ratio(1, 5) { 0 } else { self.next };
            self.next += 1;
            self.model.allowed[number as usize].push(content);
            bytes.extend(page(content));
        }
        match cache.write(file, first * PAGE as u64, &bytes) {
            // A part may have been accepted before the cache was full.
            Err(CacheError::Full) => self.flush(cache, file)?,
            written => assert_eq!(written?, CacheRead::Complete),
        }
        for number in first..first + count {
            let mut found = page(0);
            let here = cache.read(file, number * PAGE as u64, &mut found)? == CacheRead::Complete;
            let content = if here { content_of(&found).unwrap() } else { self.model.server[number as usize] };
            assert!(self.model.allowed[number as usize].contains(&content));
            self.model.now[number as usize] = content;
        }
        Ok(())
    }

    fn fill(&mut self, cache: &BlockCache, file: u64) -> Result<(), CacheError> {
        let first = self.random.random_range(0..PAGES);
        let count = self.random.random_range(1..=8).min(PAGES - first);
        let bytes: Vec<u8> =
            (first..first + count).flat_map(|number| page(self.model.server[number as usize])).collect();
        let epoch = cache.epoch(file).unwrap();
        cache.fill(file, epoch, first * PAGE as u64, &bytes).map(drop)
    }

    fn flush(&mut self, cache: &BlockCache, file: u64) -> Result<(), CacheError> {
        for block in cache.dirty_blocks(file) {
            if let Some(dirty) = cache.take_dirty(file, block)? {
                for (at, run) in &dirty.runs {
                    for (number, bytes) in run.chunks(PAGE).enumerate() {
                        self.model.server[*at as usize / PAGE + number] =
                            content_of(bytes).expect("a whole page");
                    }
                }
                let content = cache.content_epoch(file).unwrap();
                cache.mark_sent(file, content, &dirty, None)?;
            }
        }
        Ok(())
    }

    fn check(&self, cache: &BlockCache, file: u64, killed: bool, seed: u64) {
        for number in 0..PAGES as usize {
            let mut bytes = page(9);
            let content = match cache.read(file, (number * PAGE) as u64, &mut bytes).unwrap() {
                CacheRead::Complete => {
                    content_of(&bytes).unwrap_or_else(|| panic!("seed {seed}: page {number} is torn"))
                }
                CacheRead::Missing(_) => self.model.server[number],
            };
            let allowed = &self.model.allowed[number];
            assert!(
                allowed.contains(&content),
                "seed {seed}: page {number} holds {content}, not one of {allowed:?}"
            );
            if killed {
                // The operation during the kill may or may not have succeeded.
                let from = allowed.iter().rposition(|content| *content == self.model.now[number]).unwrap();
                assert!(
                    allowed[from..].contains(&content),
                    "seed {seed}: page {number} fell back to {content}"
                );
            }
        }
    }
}

fn open(medium: &CrashMedium) -> Result<BlockCache, CacheError> {
    let geometry = Geometry::new(BLOCK_PAGES * PAGE as u64, 9 * BLOCK_PAGES * PAGE as u64).unwrap();
    BlockCache::open(Box::new(medium.clone()), geometry).map(|(cache, _)| cache)
}

/// After a crash: clean pages may be older than the server's. The client notices by the file's version, and
/// drops them.
fn reopen(medium: &CrashMedium, file: u64) -> BlockCache {
    let cache = open(medium).unwrap();
    cache.invalidate(file).unwrap();
    cache
}

fn a_file() -> FileRecord {
    let size = PAGES * PAGE as u64;
    FileRecord {
        path: RelPath::new(b"disk").unwrap(),
        ident: Some(Ident::default()),
        made_by: None,
        base: Version::default(),
        size,
        zero_from: size,
        mtime: None,
        stamps: Vec::new(),
        dirty: false,
        removed: false,
    }
}

fn history(seed: u64, killed: bool) {
    let mut history = History::new(seed);
    let mut medium = CrashMedium::default();
    medium.0.lock().unwrap().off_at = u64::MAX;
    let file = open(&medium).unwrap().add_file(a_file()).unwrap();
    // Several crashes in succession: recovery must leave a cache from which it can recover.
    for _ in 0..3 {
        let cache = reopen(&medium, file);
        cache.sync().unwrap();
        // Take what the crash left as the new content.
        for number in 0..PAGES as usize {
            let mut bytes = page(0);
            let here = cache.read(file, (number * PAGE) as u64, &mut bytes).unwrap() == CacheRead::Complete;
            let content = if here { content_of(&bytes).unwrap() } else { history.model.server[number] };
            history.model.now[number] = content;
            history.model.allowed[number] = vec![content];
        }
        let off = medium.0.lock().unwrap().operations + history.random.random_range(1..400);
        medium.0.lock().unwrap().off_at = off;
        while history.step(&cache, file).is_ok() {}
        drop(cache);
        medium = if killed { medium.after_kill() } else { medium.after_power_failure(&mut history.random) };
        history.check(&reopen(&medium, file), file, killed, seed);
    }
}

#[test]
fn what_was_synced_survives_every_power_failure() {
    for seed in 0..400 {
        history(seed, false);
    }
}

#[test]
fn what_was_written_survives_the_death_of_the_process() {
    for seed in 1000..1300 {
        history(seed, true);
    }
}

#[test]
fn a_damaged_clean_page_is_missing_and_a_damaged_dirty_one_is_said() {
    let medium = CrashMedium::default();
    medium.0.lock().unwrap().off_at = u64::MAX;
    let cache = open(&medium).unwrap();
    let file = cache.add_file(a_file()).unwrap();
    cache.fill(file, cache.epoch(file).unwrap(), 0, &[page(5), page(6)].concat()).unwrap();
    cache.write(file, 4 * PAGE as u64, &page(7)).unwrap();
    for bytes in medium.0.lock().unwrap().parts[0].now.chunks_mut(PAGE) {
        bytes[100] ^= 1;
    }
    let mut out = page(0);
    assert_eq!(cache.read(file, 0, &mut out).unwrap(), CacheRead::Missing(vec![0]));
    assert_eq!(cache.stats().damaged, 1);
    let damaged = cache.read(file, 4 * PAGE as u64, &mut out);
    assert!(matches!(damaged, Err(CacheError::Damaged { offset: 16384 })), "{damaged:?}");
}

/// Zeros begin beyond the server's content, even while the file is still being written; otherwise a later
/// read would miss that content.
#[test]
fn what_was_written_back_while_more_was_written_comes_from_the_server_again() {
    let medium = CrashMedium::default();
    medium.0.lock().unwrap().off_at = u64::MAX;
    let cache = open(&medium).unwrap();
    let file = cache.add_file(FileRecord { size: 0, zero_from: 0, ..a_file() }).unwrap();
    cache.write(file, 0, &page(5)).unwrap();
    let content = cache.content_epoch(file).unwrap();
    let sent = cache.take_dirty(file, 0).unwrap().unwrap();
    let far = 40 * PAGE as u64;
    cache.write(file, far, &page(6)).unwrap();
    let seen = Version { size: 100, ..Version::default() };
    cache.mark_sent(file, content, &sent, Some(seen)).unwrap();
    assert_eq!(cache.file(file).unwrap().zero_from, 100, "and not behind the end of what is there");
    cache.mark_clean(file, content, Version { size: PAGE as u64, ..Version::default() }).unwrap();
    // Evict the clean pages.
    cache.invalidate(file).unwrap();
    let mut out = page(0);
    assert_eq!(cache.read(file, 0, &mut out).unwrap(), CacheRead::Missing(vec![0]));
    assert_eq!(cache.read(file, far, &mut out).unwrap(), CacheRead::Complete);
    assert!(out == page(6));

    // A block taken before the file was truncated is sent again, since the server has yet to truncate.
    let content = cache.content_epoch(file).unwrap();
    let sent = cache.take_dirty(file, far / cache.block_size()).unwrap().unwrap();
    cache.truncate(file, far + 2 * PAGE as u64).unwrap();
    cache.truncate(file, far + PAGE as u64).unwrap();
    cache.mark_sent(file, content, &sent, None).unwrap();
    assert_eq!(cache.dirty_blocks(file), [far / cache.block_size()]);
}

/// The reply is older than the write-back: it must not be stored after the written block was evicted.
#[test]
fn a_block_that_is_on_its_way_does_not_leave_with_what_was_written_to_it() {
    let medium = CrashMedium::default();
    medium.0.lock().unwrap().off_at = u64::MAX;
    let cache = open(&medium).unwrap();
    let size = 100 * BLOCK_PAGES * PAGE as u64;
    let file = cache.add_file(FileRecord { size, zero_from: size, ..a_file() }).unwrap();
    let (epoch, block) = (cache.epoch(file).unwrap(), BLOCK_PAGES as usize * PAGE);
    let fill_all = || {
        for number in 1..40 {
            let content = page(number as u32).repeat(BLOCK_PAGES as usize);
            cache.fill(file, epoch, (number * block) as u64, &content).unwrap();
        }
    };
    let asked = cache.content_mark(file).unwrap();
    cache.mark_fetching(file, &[0]);
    cache.write(file, 0, &page(7)).unwrap();
    let sent = cache.take_dirty(file, 0).unwrap().unwrap();
    cache.mark_sent(file, cache.content_epoch(file).unwrap(), &sent, Some(Version::default())).unwrap();
    fill_all();
    cache.fill(file, epoch, 0, &page(1).repeat(BLOCK_PAGES as usize)).unwrap();
    let mut out = page(0);
    assert_eq!(cache.read(file, 0, &mut out).unwrap(), CacheRead::Complete);
    assert!(out == page(7), "what was there before came back");
    cache.unmark_fetching(file, &[0]);
    fill_all();
    assert_eq!(cache.read(file, 0, &mut out).unwrap(), CacheRead::Missing(vec![0]), "room is made again");
    assert!(!cache.set_holes(file, asked, &[0..4096, 8192..size]), "holes of before the write are none");
}

#[test]
fn files_and_operations_are_found_again_and_an_orderly_end_is_told_from_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry::new(65536, 1 << 20).unwrap();
    let open = || {
        BlockCache::open(Box::new(whimbrel_session::cache::DiskStorage::open(dir.path()).unwrap()), geometry)
            .unwrap()
    };
    let (cache, recovered) = open();
    assert_eq!(recovered, Default::default());
    let file = cache.add_file(a_file()).unwrap();
    let op = Op::Rmdir { path: RelPath::new(b"x").unwrap() };
    let number = cache.add_op(op.clone()).unwrap();
    cache.write(file, 0, &page(3)).unwrap();
    let taken = whimbrel_session::cache::DiskStorage::open(dir.path()).unwrap_err();
    assert_eq!(taken.kind(), io::ErrorKind::WouldBlock, "one process at a time");
    drop(cache);
    let (cache, recovered) = open();
    assert_eq!((recovered.dirty.as_slice(), recovered.unclean), (&[file][..], true));
    assert_eq!(cache.ops(), [(number, op)]);
    let mut sums = HashMap::new();
    for block in cache.dirty_blocks(file) {
        let dirty = cache.take_dirty(file, block).unwrap().unwrap();
        sums.insert(block, dirty.runs.clone());
        let content = cache.content_epoch(file).unwrap();
        cache.mark_sent(file, content, &dirty, None).unwrap();
    }
    assert_eq!(sums, HashMap::from([(0, vec![(0, page(3))])]));
    cache.op_done(number).unwrap();
    cache.update_file(file, |record| record.dirty = false).unwrap();
    cache.end().unwrap();
    drop(cache);
    assert_eq!(open().1, Default::default());
}

#[test]
fn a_file_is_where_a_change_of_names_put_it_though_the_crash_came_before_its_own_record() {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry::new(65536, 1 << 20).unwrap();
    let open = || {
        BlockCache::open(Box::new(whimbrel_session::cache::DiskStorage::open(dir.path()).unwrap()), geometry)
            .unwrap()
            .0
    };
    let path = |text: &str| RelPath::new(text.as_bytes()).unwrap();
    let cache = open();
    let file = cache.add_file(FileRecord { path: path("dir/a"), ..a_file() }).unwrap();
    let rename = |from, to| Op::Rename { from: path(from), path: path(to), no_replace: false };
    cache.add_op(rename("dir", "other")).unwrap();
    drop(cache);
    let cache = open();
    assert_eq!(cache.file(file).unwrap().path, path("other/a"));
    // A file created later under the old name is not moved by the change, however often the journal is
    // replayed.
    let new = cache.add_file(FileRecord { path: path("dir/a"), ..a_file() }).unwrap();
    drop(cache);
    for _ in 0..2 {
        let cache = open();
        assert_eq!(cache.file(new).unwrap().path, path("dir/a"));
        assert_eq!(cache.file(file).unwrap().path, path("other/a"));
    }
}

#[test]
fn what_a_change_of_names_took_away_is_gone_though_the_crash_came_before_its_own_record() {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry::new(65536, 1 << 20).unwrap();
    let open = || {
        BlockCache::open(Box::new(whimbrel_session::cache::DiskStorage::open(dir.path()).unwrap()), geometry)
            .unwrap()
    };
    let path = |text: &str| RelPath::new(text.as_bytes()).unwrap();
    let (cache, _) = open();
    let files = ["a", "b", "c"].map(|name| {
        let file = cache.add_file(FileRecord { path: path(name), ..a_file() }).unwrap();
        cache.write(file, 0, &page(1)).unwrap();
        file
    });
    cache.add_op(Op::Unlink { path: path("a"), ident: None, keep: false }).unwrap();
    cache.add_op(Op::Rename { from: path("b"), path: path("c"), no_replace: false }).unwrap();
    drop(cache);
    let (cache, recovered) = open();
    assert_eq!(recovered.dirty, [files[1]]);
    assert_eq!(cache.file(files[1]).unwrap().path, path("c"));
}

#[test]
fn changes_that_were_folded_are_found_as_they_were_and_so_is_how_far_they_were_sent() {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry::new(65536, 1 << 20).unwrap();
    let open = || {
        BlockCache::open(Box::new(whimbrel_session::cache::DiskStorage::open(dir.path()).unwrap()), geometry)
            .unwrap()
            .0
    };
    let path = |text: &str| RelPath::new(text.as_bytes()).unwrap();
    let cache = open();
    let numbers = [0, 1, 2, 3].map(|_| cache.add_op(Op::Rmdir { path: path("x") }).unwrap());
    let files = [1, 2].map(|by: usize| {
        let made = FileRecord { path: path("y"), made_by: Some(numbers[by]), ident: None, ..a_file() };
        cache.add_file(made).unwrap()
    });
    cache.mark_sent_below(numbers[0] + 1).unwrap();
    let now = Op::Replace { path: path("y"), mode: 0o600, stamp: a_file().base.mtime };
    let folded = MergedChanges {
        now: vec![(numbers[3], now.clone())],
        gone: numbers[1..3].to_vec(),
        makes: vec![(numbers[1], None), (numbers[2], Some(numbers[3]))],
    };
    cache.merge_ops(folded).unwrap();
    drop(cache);
    // From the journal, and from a restarted one.
    for _ in 0..2 {
        let cache = open();
        assert_eq!(cache.ops(), [(numbers[0], Op::Rmdir { path: path("x") }), (numbers[3], now.clone())]);
        assert_eq!(cache.first_unsent_op(), numbers[0] + 1);
        assert_eq!(cache.file(files[0]), None, "nothing makes it any more");
        assert_eq!(cache.file(files[1]).unwrap().made_by, Some(numbers[3]));
    }
}

#[test]
fn a_cut_is_spared_only_if_everything_behind_it_is_written_again() {
    let medium = CrashMedium::default();
    medium.0.lock().unwrap().off_at = u64::MAX;
    let cache = open(&medium).unwrap();
    let size = 10 * PAGE as u64;
    let base = Version { size, ..Version::default() };
    let file = cache.add_file(FileRecord { base, size, zero_from: size, ..a_file() }).unwrap();
    let zero_from = |file| {
        cache.avoid_truncation(file).unwrap();
        cache.file(file).unwrap().zero_from
    };
    assert_eq!(zero_from(file), size, "nothing was cut");
    let at = |page: u64| page * PAGE as u64;
    cache.truncate(file, at(2)).unwrap();
    assert_eq!(zero_from(file), at(2), "the end is cut off");
    for number in [2, 3, 5, 6, 7, 8, 9] {
        cache.write(file, at(number), &page(number as u32)).unwrap();
    }
    assert_eq!(zero_from(file), at(2), "page 4 is a hole, which the server has to make");
    let mut hole = page(1);
    assert_eq!(
        (cache.read(file, at(4), &mut hole).unwrap(), content_of(&hole)),
        (CacheRead::Complete, Some(0))
    );
    cache.write(file, at(4), &page(4)).unwrap();
    assert_eq!(zero_from(file), size);
    // Shorter than before: the server's content beyond the end is cut off.
    cache.truncate(file, 0).unwrap();
    for number in 0..5 {
        cache.write(file, at(number), &page(number as u32)).unwrap();
    }
    assert_eq!(zero_from(file), at(5));
    // Longer: beyond the server's end there are zeros as before.
    cache.truncate(file, 0).unwrap();
    for number in 0..12 {
        cache.write(file, at(number), &page(number as u32)).unwrap();
    }
    assert_eq!(zero_from(file), size);
}
