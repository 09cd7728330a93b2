//! Damage to the table, changes of the files, concurrent processes: the cache never returns wrong bytes.

use crate::common::{Fixture, count, found, image, onward, page};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_hashcache::format::HeaderError;
use whimbrel_hashcache::{CacheError, Geometry, HashCache, Location, OnMissing, SourceKind};

fn open(path: &Path, missing: OnMissing) -> Result<HashCache, CacheError> {
    HashCache::open_seeded(path, missing, 1)
}

#[test]
fn a_table_that_cannot_be_used_says_so_and_is_made_anew_only_when_asked() {
    let Fixture { folder, cache } = Fixture::new(1000);
    let path = cache.path().to_owned();
    drop(cache);
    let good = std::fs::read(&path).unwrap();
    let geometry = Geometry::for_pages(500);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let spoilt = [
        ("version", with(8, 2)),
        ("checksum", with(33, 0xff)),
        ("short", good[..good.len() - 4096].to_vec()),
        ("long", [good.clone(), vec![0; 10]].concat()),
        ("zeros", vec![0; good.len()]),
        ("empty", Vec::new()),
        ("torn", good[..100].to_vec()),
    ];
    for (name, bytes) in spoilt {
        std::fs::write(&path, &bytes).unwrap();
        for missing in [OnMissing::Fail, OnMissing::Create(geometry)] {
            let error = open(&path, missing).unwrap_err();
            assert!(matches!(error, CacheError::Unusable { .. }), "{name}: {error}");
            assert!(error.to_string().contains("recreated"), "{error}");
        }
        let cache = open(&path, OnMissing::Recreate(geometry)).unwrap();
        assert_eq!(cache.geometry(), geometry, "{name}");
        drop(cache);
        assert_eq!(open(&path, OnMissing::Fail).unwrap().stats().used, 0, "{name}");
    }
    std::fs::write(&path, with(8, 2)).unwrap();
    let error = open(&path, OnMissing::Fail).unwrap_err();
    assert!(
        matches!(error, CacheError::Unusable { source: HeaderError::Version { found: 2 }, .. }),
        "{error:?}"
    );
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside the table");
}

#[test]
fn a_file_that_never_was_a_table_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.raw");
    for content in [b"short".to_vec(), vec![7; 10000]] {
        std::fs::write(&path, &content).unwrap();
        let result = open(&path, OnMissing::Recreate(Geometry::for_pages(10)));
        assert!(matches!(result, Err(CacheError::Foreign { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
}

#[test]
fn a_table_replaced_under_an_open_handle_does_it_no_harm() {
    let fixture = Fixture::new(1000);
    let file = fixture.write("image", 1..100);
    fixture.add(&file).unwrap();
    std::fs::remove_file(fixture.cache.path()).unwrap();
    let other = open(fixture.cache.path(), OnMissing::Create(Geometry::for_pages(10))).unwrap();
    assert_eq!(count(&fixture.cache, 1..100), 99);
    assert_eq!(count(&other, 1..100), 0);
}

/// Random event of the test.
#[derive(Debug, Clone)]
enum Event {
    Write { file: usize, at: u64, numbers: Vec<u64> },
    Truncate { file: usize, pages: u64, odd: u64 },
    Remove(usize),
    Swap(usize, usize),
    Add(usize),
    Forget(usize),
    Flip { at: prop::sample::Index, bit: u8 },
    Blank { at: prop::sample::Index, length: u64 },
    Get(Vec<u64>),
    Reopen,
}

const FILES: usize = 3;
const NUMBERS: u64 = 120;

fn event() -> impl Strategy<Value = Event> {
    let numbers = |most| prop::collection::vec(0..NUMBERS, 1..most);
    let file = 0..FILES;
    prop_oneof![
        4 => (file.clone(), 0..60u64, numbers(40)).prop_map(|(file, at, numbers)| Event::Write { file, at, numbers }),
        1 => (file.clone(), 0..60u64, 0..4096u64).prop_map(|(file, pages, odd)| Event::Truncate { file, pages, odd }),
        1 => file.clone().prop_map(Event::Remove),
        1 => (file.clone(), file.clone()).prop_map(|(a, b)| Event::Swap(a, b)),
        6 => file.clone().prop_map(Event::Add),
        1 => file.prop_map(Event::Forget),
        3 => (any::<prop::sample::Index>(), 0..8u8).prop_map(|(at, bit)| Event::Flip { at, bit }),
        1 => (any::<prop::sample::Index>(), 1..9000u64).prop_map(|(at, length)| Event::Blank { at, length }),
        8 => numbers(60).prop_map(Event::Get),
        1 => Just(Event::Reopen),
    ]
}

struct World {
    folder: tempfile::TempDir,
    cache: Option<HashCache>,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut world = Self { folder, cache: None };
        world.reopen();
        world
    }

    fn table(&self) -> PathBuf {
        self.folder.path().join("table")
    }

    fn file(&self, number: usize) -> PathBuf {
        self.folder.path().join(number.to_string())
    }

    fn cache(&self) -> &HashCache {
        self.cache.as_ref().unwrap()
    }

    fn reopen(&mut self) {
        self.cache = None;
        let missing = OnMissing::Recreate(Geometry::for_pages(3000));
        self.cache = Some(match open(&self.table(), missing) {
            Err(CacheError::Foreign { .. }) => {
                std::fs::remove_file(self.table()).unwrap();
                open(&self.table(), missing).unwrap()
            }
            opened => opened.unwrap(),
        });
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Write { file, at, numbers } => {
                let file = File::options().write(true).create(true).truncate(false).open(self.file(*file));
                file.unwrap().write_all_at(&image(numbers.iter().copied()), at * 4096).unwrap();
            }
            Event::Truncate { file, pages, odd } => {
                if let Ok(file) = File::options().write(true).open(self.file(*file)) {
                    file.set_len(pages * 4096 + odd).unwrap();
                }
            }
            Event::Remove(file) => _ = std::fs::remove_file(self.file(*file)),
            Event::Swap(a, b) => {
                let between = self.folder.path().join("between");
                let _ = std::fs::rename(self.file(*a), &between);
                let _ = std::fs::rename(self.file(*b), self.file(*a));
                let _ = std::fs::rename(&between, self.file(*b));
            }
            Event::Add(file) => {
                let kind = if *file == 2 { SourceKind::Memory } else { SourceKind::Raw };
                let added = self.cache().add(&self.file(*file), kind, None, &onward);
                assert!(added.is_ok() || !self.file(*file).exists(), "{added:?}");
            }
            Event::Forget(file) => _ = self.cache().remove(&self.file(*file)),
            Event::Flip { at, bit } => self.spoil(at, 1, |byte| byte ^ 1 << bit),
            Event::Blank { at, length } => self.spoil(at, *length, |_| 0),
            Event::Get(numbers) => _ = count(self.cache(), numbers.iter().copied()),
            Event::Reopen => self.reopen(),
        }
    }

    /// Changes bytes of the table without the cache's knowledge, as another process or a bad disk would.
    fn spoil(&self, at: &prop::sample::Index, length: u64, change: impl Fn(u8) -> u8) {
        let file = File::options().read(true).write(true).open(self.table()).unwrap();
        let size = file.metadata().unwrap().len();
        let at = at.index(size as usize) as u64;
        let mut bytes = vec![0; length.min(size - at) as usize];
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes.iter_mut().for_each(|byte| *byte = change(*byte));
        file.write_all_at(&bytes, at).unwrap();
    }

    /// Afterwards the cache still works.
    fn check_usefulness(&mut self) {
        self.reopen();
        let path = self.folder.path().join("fresh");
        std::fs::write(&path, image(5000..5200)).unwrap();
        let added = self.cache().add(&path, SourceKind::Raw, None, &onward).unwrap();
        assert_eq!(added.pages, 200);
        let found = count(self.cache(), 5000..5200);
        assert!(found as u64 + self.cache().stats().evictions >= 200, "{found}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn never_wrong_bytes_whatever_happens(events in prop::collection::vec(event(), 1..60)) {
        let mut world = World::new();
        for event in &events {
            world.apply(event);
        }
        world.check_usefulness();
    }
}

#[test]
fn a_table_full_of_noise_finds_nothing_and_can_be_filled() {
    let fixture = Fixture::new(2000);
    let table = File::options().write(true).open(fixture.cache.path()).unwrap();
    let size = fixture.cache.geometry().file_size() - 8192;
    let noise = image(1..=size / 4096);
    table.write_all_at(&noise, 8192).unwrap();
    assert_eq!(count(&fixture.cache, 3000..3500), 0);
    assert!(fixture.cache.stats().sources.is_empty());
    let file = fixture.write("image", 3000..3200);
    fixture.add(&file).unwrap();
    let found = count(&fixture.cache, 3000..3200);
    assert!(found >= 150, "{found}");
}

#[test]
fn memory_that_changes_while_it_is_read_gives_right_pages_or_none() {
    let fixture = Fixture::new(4000);
    let ram = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    ram.as_file().write_all_at(&image(1..65), 0).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut turn = 0;
            while !stop.load(Relaxed) {
                // Word by word, so that pages are seen half changed.
                turn += 1;
                let (at, new) = (turn % 64, page(1 + (turn * 7) % 90));
                for (i, word) in new.chunks_exact(512).enumerate() {
                    ram.as_file().write_all_at(word, at * 4096 + i as u64 * 512).unwrap();
                }
            }
        });
        // Ends the writer also when an assertion below fails.
        let _stop = Stop(&stop);
        let mut hits = 0;
        for _ in 0..20 {
            fixture.cache.add(ram.path(), SourceKind::Memory, None, &onward).unwrap();
            hits += count(&fixture.cache, 1..91);
        }
        assert!(hits > 0);
    });
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// The work of each of two processes: adds files, gets their pages, forgets and adds again.
fn write_and_read(table: &Path, own: &Path, common: &Path, numbers: std::ops::Range<u64>) {
    let cache = HashCache::open(table, OnMissing::Fail).unwrap();
    for round in 0..8 {
        cache.add(own, SourceKind::Raw, None, &onward).unwrap();
        cache.add(common, SourceKind::Raw, None, &onward).unwrap();
        let _ = count(&cache, numbers.clone().chain(1..300));
        if round % 3 == 1 {
            let _ = cache.remove(own);
            let _ = cache.remove(common);
        }
    }
}

const CHILD: &str = "WHIMBREL_HASHCACHE_TEST_FOLDER";

#[test]
fn two_processes_write_one_table_without_harm() {
    // The second process is this program, told by an environment variable to run its part only.
    let numbers = [10_000..10_400, 20_000..20_400];
    if let Some(folder) = std::env::var_os(CHILD).map(PathBuf::from) {
        write_and_read(&folder.join("table"), &folder.join("b"), &folder.join("common"), numbers[1].clone());
        std::fs::write(folder.join("finished"), "").unwrap();
        return;
    }
    let fixture = Fixture::new(8000);
    let own = [fixture.write("a", numbers[0].clone()), fixture.write("b", numbers[1].clone())];
    let shared = fixture.write("common", 1..300);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "damage::two_processes_write_one_table_without_harm"])
        .env(CHILD, fixture.folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    write_and_read(fixture.cache.path(), &own[0], &shared, numbers[0].clone());
    assert!(child.wait().unwrap().success());
    assert!(fixture.folder.path().join("finished").exists(), "the child ran its part");
    for path in own.iter().chain([&shared]) {
        let _ = fixture.cache.remove(path);
        fixture.add(path).unwrap();
    }
    assert_eq!(fixture.cache.stats().sources.len(), 3, "one record for each file");
    assert_eq!(count(&fixture.cache, numbers[0].clone().chain(numbers[1].clone()).chain(1..300)), 1099);
}

#[test]
fn used_entries_outlast_unused_ones() {
    let fixture = Fixture::new(800);
    let (hot, cold) = (fixture.write("hot", 1..201), fixture.write("cold", 1001..1201));
    fixture.add(&hot).unwrap();
    fixture.add(&cold).unwrap();
    for _ in 0..4 {
        assert!(count(&fixture.cache, 1..201) >= 199);
    }
    // Twice the table's capacity is inserted and never used.
    let stream = fixture.write("stream", []);
    let source = fixture.cache.register(&stream, SourceKind::Raw).unwrap();
    for number in 0..2 * fixture.cache.geometry().slots() {
        let offset = number * PAGE_SIZE as u64;
        fixture.cache.record_page(&Digest::of(&number.to_le_bytes()), Location { source, offset });
    }
    let known = |path: &Path| fixture.entries(path);
    let (hot, cold) = (known(&hot), known(&cold));
    assert!(hot >= 160 && cold <= 60, "{hot} of the used and {cold} of the unused stayed");
    assert!(fixture.cache.stats().evictions > 0);
    // Uses age: after many more turnovers the used entries are evicted as well.
    for number in 0..40 * fixture.cache.geometry().slots() {
        let offset = number * PAGE_SIZE as u64;
        fixture.cache.record_page(&Digest::of(&(number << 20).to_le_bytes()), Location { source, offset });
    }
    assert!(fixture.entries(&fixture.path("hot")) <= 20);
    assert!(!found(&fixture.cache, 999_999));
}
