//! Overlays that go on from the open files that another process has passed.

use std::{fs, sync::Arc};
use whimbrel_block::{
    Cow, Device, MemDevice, OverlayDir, OverlayError, OverlayKey, OverlayState, ZeroDevice,
};
use whimbrel_core::Digest;

const SIZE: u64 = 1 << 30;
const BASE: Digest = Digest([1; 32]);
/// Page in the second block of the bitmap, which is written as a whole.
const FAR: u64 = 40_000;

fn place(dir: &tempfile::TempDir) -> OverlayDir {
    OverlayDir { dir: dir.path().join("overlay"), live_dir: dir.path().join("live") }
}

fn zeros() -> Arc<dyn Device> {
    Arc::new(ZeroDevice { size: SIZE })
}

#[test]
fn an_acknowledged_write_is_read_and_made_durable_by_whoever_goes_on() {
    for tells in [true, false] {
        goes_on(tells);
    }
}

fn goes_on(tells: bool) {
    let dir = tempfile::tempdir().unwrap();
    let place = place(&dir);
    let old = Cow::create(&place, zeros(), BASE).unwrap();
    old.write_at(0, &[1; 4096]).unwrap();
    old.flush().unwrap();
    old.write_at(FAR * 4096, &[2; 4096]).unwrap();
    let (files, state) = (old.files().unwrap(), old.state().unwrap());
    drop(old);
    assert!(
        matches!(Cow::open(&place, zeros(), BASE), Err(OverlayError::InUse { .. })),
        "the lock went along"
    );
    let new = Cow::from_parts(files, tells.then_some(&state), zeros(), BASE, None).unwrap();
    assert_eq!(new.allocated().iter().collect::<Vec<_>>(), [0, FAR]);
    let mut page = [0; 4096];
    new.read_at(FAR * 4096, &mut page).unwrap();
    assert_eq!(page, [2; 4096]);
    new.flush().unwrap();
    drop(new);
    // As after a power failure: only the durable bitmap is left.
    fs::remove_dir_all(&place.live_dir).unwrap();
    let later = Cow::open(&place, zeros(), BASE).unwrap();
    assert_eq!(later.allocated().iter().collect::<Vec<_>>(), [0, FAR]);
}

#[test]
fn files_of_two_overlays_or_over_another_base_are_refused() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = Cow::create(&place(&one), zeros(), BASE).unwrap();
    let second = Cow::create(&place(&other), zeros(), BASE).unwrap();
    let state = first.state().unwrap();
    let mut mixed = first.files().unwrap();
    mixed.live = second.files().unwrap().live;
    let result = Cow::from_parts(mixed, Some(&state), zeros(), BASE, None).map(drop);
    assert!(matches!(result, Err(OverlayError::OtherBase { .. })), "{result:?}");
    let result =
        Cow::from_parts(first.files().unwrap(), Some(&state), zeros(), Digest([2; 32]), None).map(drop);
    assert!(matches!(result, Err(OverlayError::OtherBase { .. })), "{result:?}");
    let small: Arc<dyn Device> = Arc::new(MemDevice::new(vec![0; 1 << 20]));
    let result = Cow::from_parts(first.files().unwrap(), Some(&state), small, BASE, None).map(drop);
    assert!(matches!(result, Err(OverlayError::OtherBase { .. })), "{result:?}");
    let result = Cow::from_parts(first.files().unwrap(), Some(&OverlayState::default()), zeros(), BASE, None)
        .map(drop);
    assert!(matches!(result, Err(OverlayError::OtherBase { .. })), "{result:?}");
    let mut unlocked = first.files().unwrap();
    unlocked.data = fs::File::options().read(true).write(true).open(place(&one).dir.join("data")).unwrap();
    let result = Cow::from_parts(unlocked, Some(&state), zeros(), BASE, None).map(drop);
    assert!(matches!(result, Err(OverlayError::InUse { .. })), "{result:?}");
}

#[test]
fn an_encrypted_overlay_passes_only_to_who_has_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let key = OverlayKey([7; 32]);
    let old = Cow::create_with_key(&place(&dir), zeros(), BASE, Some(&key)).unwrap();
    old.write_at(4096, &[5; 4096]).unwrap();
    let state = old.state().unwrap();
    let passed = |key| Cow::from_parts(old.files().unwrap(), Some(&state), zeros(), BASE, key);
    assert!(matches!(passed(None), Err(OverlayError::KeyNeeded { .. })));
    assert!(matches!(passed(Some(&OverlayKey([8; 32]))), Err(OverlayError::WrongKey { .. })));
    let mut read = [0; 4096];
    passed(Some(&key)).unwrap().read_at(4096, &mut read).unwrap();
    assert_eq!(read, [5; 4096]);
}
