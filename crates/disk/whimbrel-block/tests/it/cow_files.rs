//! Files of the overlay: opening, locking and rejected files.

use std::{fs, sync::Arc};
use whimbrel_block::{
    BlockError, Cow, Device, Extent, ExtentKind, MemDevice, OverlayDir, OverlayError, OverlayKey, ZeroDevice,
};
use whimbrel_core::Digest;

const SIZE: u64 = 1 << 20;

fn place(dir: &tempfile::TempDir) -> OverlayDir {
    OverlayDir { dir: dir.path().join("overlay"), live_dir: dir.path().join("live") }
}

fn create(place: &OverlayDir) -> Result<Cow, OverlayError> {
    Cow::create(place, Arc::new(ZeroDevice { size: SIZE }), Digest([1; 32]))
}

fn open(place: &OverlayDir, size: u64, base: Digest) -> Result<Cow, OverlayError> {
    Cow::open(place, Arc::new(ZeroDevice { size }), base)
}

#[test]
fn an_overlay_in_use_is_not_opened_twice_nor_removed() {
    let dir = tempfile::tempdir().unwrap();
    let place = place(&dir);
    let cow = create(&place).unwrap();
    assert!(matches!(open(&place, SIZE, Digest([1; 32])), Err(OverlayError::InUse { .. })));
    assert!(matches!(place.remove(), Err(OverlayError::InUse { .. })));
    drop(cow);
    assert!(matches!(create(&place), Err(OverlayError::Exists { .. })));
    place.remove().unwrap();
    assert!(!place.dir.exists());
    assert_eq!(fs::read_dir(&place.live_dir).unwrap().count(), 0);
    create(&place).unwrap();
}

#[test]
fn an_overlay_over_another_base_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let place = place(&dir);
    drop(create(&place).unwrap());
    assert!(matches!(open(&place, SIZE, Digest([2; 32])), Err(OverlayError::OtherBase { .. })));
    assert!(matches!(open(&place, SIZE * 2, Digest([1; 32])), Err(OverlayError::OtherBase { .. })));
    assert!(matches!(open(&place, SIZE + 512, Digest([1; 32])), Err(OverlayError::BaseSize { .. })));
    open(&place, SIZE, Digest([1; 32])).unwrap();
}

#[test]
fn a_thief_of_the_disk_reads_nothing_in_an_encrypted_overlay_and_another_key_is_refused() {
    let canary = b"\x8f\x13\xe7\x5a\xc2\x01\xd9\x6b\x3e\xf4\x90\x2d\xb7\x48\xaa\x15";
    let shows = |key: Option<&OverlayKey>| {
        let dir = tempfile::tempdir().unwrap();
        let (place, base) = (place(&dir), Arc::new(ZeroDevice { size: SIZE }));
        let cow = Cow::create_with_key(&place, base.clone(), Digest([1; 32]), key).unwrap();
        for page in 0..20 {
            cow.write_at(page * 4096 + 77, canary).unwrap();
        }
        cow.flush().unwrap();
        drop(cow);
        let open = |key: Option<&OverlayKey>| Cow::open_with_key(&place, base.clone(), Digest([1; 32]), key);
        if key.is_some() {
            assert!(matches!(open(None), Err(OverlayError::KeyNeeded { .. })));
            assert!(matches!(open(Some(&OverlayKey([2; 32]))), Err(OverlayError::WrongKey { .. })));
        }
        let mut found = [0; 16];
        open(key).unwrap().read_at(3 * 4096 + 77, &mut found).unwrap();
        assert_eq!(&found, canary);
        let files = ["data", "owned"].map(|file| fs::read(place.dir.join(file)).unwrap());
        files.iter().any(|bytes| bytes.windows(16).any(|window| window == canary))
    };
    assert!(shows(None), "the search finds what is there");
    assert!(!shows(Some(&OverlayKey([1; 32]))));
}

#[test]
fn an_overlay_from_before_there_was_a_key_opens_with_one() {
    let dir = tempfile::tempdir().unwrap();
    let (place, base) = (place(&dir), Arc::new(ZeroDevice { size: SIZE }));
    let cow = create(&place).unwrap();
    cow.write_at(4096, &[7; 512]).unwrap();
    drop(cow);
    let cow = Cow::open_with_key(&place, base, Digest([1; 32]), Some(&OverlayKey([1; 32]))).unwrap();
    let mut found = [0; 512];
    cow.read_at(4096, &mut found).unwrap();
    assert_eq!(found, [7; 512]);
}

#[test]
fn a_damaged_bitmap_is_refused_and_not_guessed_at() {
    let dir = tempfile::tempdir().unwrap();
    let place = place(&dir);
    drop(create(&place).unwrap());
    let owned = place.dir.join("owned");
    let whole = fs::read(&owned).unwrap();
    for len in [0, 100, 4096, whole.len() - 1] {
        fs::write(&owned, &whole[..len]).unwrap();
        assert!(open(&place, SIZE, Digest([1; 32])).is_err(), "{len} bytes");
    }
    let mut damaged = whole.clone();
    damaged[50] ^= 1;
    fs::write(&owned, &damaged).unwrap();
    assert!(matches!(open(&place, SIZE, Digest([1; 32])), Err(OverlayError::Header { .. })));
    fs::write(&owned, &whole).unwrap();
    open(&place, SIZE, Digest([1; 32])).unwrap();
}

#[test]
fn an_overlay_grows_with_what_was_acknowledged_and_is_zeros_beyond() {
    let dir = tempfile::tempdir().unwrap();
    let (place, key) = (place(&dir), OverlayKey([7; 32]));
    let base = |size| Arc::new(ZeroDevice { size });
    let open = |size| Cow::open_with_key(&place, base(size), Digest([1; 32]), Some(&key));
    let cow = Cow::create_with_key(&place, base(SIZE), Digest([1; 32]), Some(&key)).unwrap();
    cow.write_at(4096, &[1; 4096]).unwrap();
    cow.flush().unwrap();
    // Acknowledged, and in no durable bitmap yet.
    cow.write_at(SIZE - 4096, &[2; 4096]).unwrap();
    let grow = |size, base| Cow::grow(&place, size, base, Some(&key));
    assert!(matches!(grow(2 * SIZE, Digest([1; 32])), Err(OverlayError::InUse { .. })));
    drop(cow);
    assert!(matches!(grow(2 * SIZE, Digest([2; 32])), Err(OverlayError::OtherBase { .. })));
    assert!(Cow::grow(&place, 2 * SIZE, Digest([1; 32]), None).is_err(), "without its key");
    open(SIZE).expect("the former size after refusals");
    // A growth that was interrupted before its last step.
    fs::OpenOptions::new().write(true).open(place.dir.join("data")).unwrap().set_len(2 * SIZE).unwrap();
    for size in [2 * SIZE, SIZE, 16 * SIZE] {
        grow(size, Digest([1; 32])).unwrap();
    }
    assert!(matches!(open(SIZE), Err(OverlayError::OtherBase { .. })));
    for written in [0, 3] {
        let cow = open(16 * SIZE).unwrap();
        let pages: Vec<_> = cow.allocated().iter().collect();
        let last = SIZE / 4096 - 1;
        let expected = [Some(1), Some(last), (written > 0).then_some(16 * SIZE / 4096 - 1)];
        assert_eq!(pages, expected.into_iter().flatten().collect::<Vec<_>>());
        let read = |offset| {
            let mut page = [9; 4096];
            cow.read_at(offset, &mut page).unwrap();
            page
        };
        assert_eq!((read(4096), read(SIZE - 4096)), ([1; 4096], [2; 4096]));
        assert_eq!((read(SIZE), read(16 * SIZE - 4096)), ([0; 4096], [written; 4096]));
        cow.write_at(16 * SIZE - 4096, &[3; 4096]).unwrap();
    }
}

#[test]
fn a_live_bitmap_of_another_boot_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let place = place(&dir);
    let cow = create(&place).unwrap();
    cow.write_at(0, &[1; 4096]).unwrap();
    cow.flush().unwrap();
    let live = fs::read_dir(&place.live_dir).unwrap().next().unwrap().unwrap().path();
    let of_this_boot = fs::read(&live).unwrap();
    assert_ne!(of_this_boot[32..48], [0; 16], "the boot id");
    cow.write_at(8192, &[2; 4096]).unwrap();
    drop(cow);
    // State left by another boot: the same header except for the boot id, checksum included.
    let mut other = fs::read(&live).unwrap();
    other[32] ^= 1;
    let sum = xxhash_rust::xxh3::xxh3_64(&other[..4088]);
    other[4088..4096].copy_from_slice(&sum.to_le_bytes());
    fs::write(&live, &other).unwrap();
    let cow = open(&place, SIZE, Digest([1; 32])).unwrap();
    assert_eq!(cow.allocated().iter().collect::<Vec<_>>(), [0], "page 2 was never flushed");
    let mut page = [9; 4096];
    cow.read_at(8192, &mut page).unwrap();
    assert_eq!(page, [0; 4096]);
}

#[test]
fn writers_of_different_parts_of_one_page_do_not_lose_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let base = Arc::new(MemDevice::new(vec![0xBB; SIZE as usize]));
    let cow = Cow::create(&place(&dir), base, Digest([1; 32])).unwrap();
    std::thread::scope(|scope| {
        for part in 0..8u64 {
            let cow = &cow;
            scope.spawn(move || {
                for page in 0..SIZE / 4096 {
                    cow.write_at(page * 4096 + part * 500, &[part as u8 + 1; 500]).unwrap();
                }
            });
        }
    });
    let mut content = vec![0; SIZE as usize];
    cow.read_at(0, &mut content).unwrap();
    for (index, page) in content.chunks(4096).enumerate() {
        let fine = (0..8).all(|part| page[part * 500..][..500].iter().all(|b| *b == part as u8 + 1));
        assert!(fine && page[4000..].iter().all(|b| *b == 0xBB), "page {index}");
    }
}

#[test]
fn holes_are_reported_through_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let cow = create(&place(&dir)).unwrap();
    cow.write_at(40960, &[1; 8192]).unwrap();
    cow.trim(45056, 4096).unwrap();
    let hole = |len| Extent { len, kind: ExtentKind::Hole };
    let data = |len| Extent { len, kind: ExtentKind::Data };
    assert_eq!(cow.extents(0, SIZE).unwrap(), [hole(40960), data(4096), hole(SIZE - 45056)]);
    assert!(matches!(cow.extents(1, SIZE), Err(BlockError::OutOfRange { .. })));
}
