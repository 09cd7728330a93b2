//! An encrypted cache tells a thief nothing, and loses nothing.

use crate::common::{World, back, pattern, until};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use whimbrel_session::client::{
    CacheDir, CacheKeyError, Keep, Session, SessionError, SessionOptions, kept_copies,
};

/// Words that stand in content and in names.
const CANARY: &str = "canary-7f3a91";

fn key_file(dir: &Path, digits: &str) -> PathBuf {
    let path = dir.join("key");
    fs::write(&path, digits.repeat(32)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

fn files_below(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        if entry.path().is_dir() { files_below(&entry.path(), files) } else { files.push(entry.path()) }
    }
}

/// Fails if any file of the cache has the words in it or in its name.
fn assert_tells_nothing(cache: &Path) {
    let mut files = Vec::new();
    files_below(cache, &mut files);
    assert!(files.iter().any(|file| file.ends_with("frames") && file.metadata().unwrap().len() > 0));
    for file in files {
        let content = fs::read(&file).unwrap();
        let found = content.windows(CANARY.len()).any(|part| part == CANARY.as_bytes());
        assert!(!found && !file.to_string_lossy().contains(CANARY), "{}", file.display());
    }
}

fn refusal(world: &World, options: SessionOptions) -> SessionError {
    let begun = world.runtime.block_on(Session::start(world.wire.clone(), options));
    begun.err().expect("a session that is refused")
}

#[test]
fn nothing_of_an_encrypted_cache_is_readable_and_all_of_it_comes_back() {
    let keys = tempfile::tempdir().unwrap();
    let key = key_file(keys.path(), "3b");
    let name = format!("{CANARY}.txt");
    let text = format!("{CANARY} of the server, ").repeat(10_000);
    let mut world = World::new(
        |options| {
            back(options);
            options.cache_key = Some(key.clone());
        },
        |server| {
            fs::write(server.join(&name), &text).unwrap();
            fs::write(server.join("disputed"), "first").unwrap();
        },
    );
    assert_eq!(fs::read_to_string(world.mount().join(&name)).unwrap(), text);
    let ours = format!("{CANARY}, written here, ").repeat(20_000);
    fs::write(world.mount().join("new"), &ours).unwrap();
    fs::rename(world.mount().join(&name), world.mount().join(format!("{CANARY}-renamed"))).unwrap();
    let synced = fs::File::open(world.mount().join("new")).unwrap();
    synced.sync_all().unwrap();
    drop(synced);
    assert_tells_nothing(&world.options.cache);

    world.crash();
    let without = SessionOptions { cache_key: None, ..world.options.clone() };
    for capacity in [without.capacity, 0] {
        let mut without = SessionOptions { capacity, ..without.clone() };
        without.settings.policy = whimbrel_session::client::Policy::Through;
        let said = refusal(&world, without);
        assert!(matches!(said, SessionError::Key { source: CacheKeyError::Missing, .. }), "{said}");
    }
    let other = tempfile::tempdir().unwrap();
    let wrong = SessionOptions { cache_key: Some(key_file(other.path(), "3c")), ..world.options.clone() };
    let said = refusal(&world, wrong);
    assert!(matches!(said, SessionError::Key { source: CacheKeyError::Other { .. }, .. }), "{said}");

    world.begin();
    assert_eq!(fs::read_to_string(world.mount().join("new")).unwrap(), ours);
    world.session().flush().unwrap();
    assert_eq!(fs::read_to_string(world.server().join("new")).unwrap(), ours);
    assert_eq!(fs::read_to_string(world.server().join(format!("{CANARY}-renamed"))).unwrap(), text);
    // With the history of reads, which names files.
    world.end();
    assert_tells_nothing(&world.options.cache);
}

#[test]
fn a_conflict_of_an_encrypted_cache_is_kept_encrypted_and_resolved() {
    let keys = tempfile::tempdir().unwrap();
    let key = key_file(keys.path(), "3b");
    let (disputed, theirs) = (format!("{CANARY}-disputed"), pattern(5000, 3));
    let world = World::new(
        |options| {
            back(options);
            options.settings.fresh = Some(0);
            options.cache_key = Some(key);
        },
        |server| fs::write(server.join(&disputed), "first").unwrap(),
    );
    let ours = format!("{CANARY}, and more, ").repeat(1000);
    let path = world.mount().join(&disputed);
    fs::write(&path, &ours).unwrap();
    fs::write(world.server().join(&disputed), &theirs).unwrap();
    let cache = CacheDir::open(&world.options.cache, world.options.cache_key.as_deref()).unwrap();
    until("there is a conflict", || {
        let _ = world.session().flush();
        !kept_copies(&cache).unwrap().is_empty()
    });
    assert_tells_nothing(&world.options.cache);
    assert!(CacheDir::open(&world.options.cache, None).is_err());
    let kept = kept_copies(&cache).unwrap().remove(0);
    assert_eq!(kept.path.to_string(), disputed);
    until("the change of the server is seen", || fs::read(&path).is_ok_and(|seen| seen == theirs));
    assert_eq!(kept.compare(&cache, &world.mount()).unwrap(), vec![0..ours.len() as u64; 1]);
    kept.resolve(&cache, &world.mount(), Keep::Both).unwrap();
    world.session().flush().unwrap();
    assert_eq!(fs::read_to_string(world.server().join(format!("{disputed}.ours"))).unwrap(), ours);
    assert_eq!(kept_copies(&cache).unwrap(), []);
}

#[test]
fn a_cache_in_use_does_not_become_an_encrypted_one() {
    let keys = tempfile::tempdir().unwrap();
    let mut world = World::new(back, |server| fs::write(server.join("file"), "content").unwrap());
    assert_eq!(fs::read_to_string(world.mount().join("file")).unwrap(), "content");
    world.end();
    world.options.cache_key = Some(key_file(keys.path(), "3b"));
    let said = refusal(&world, world.options.clone());
    assert!(matches!(said, SessionError::Key { source: CacheKeyError::NotEncrypted, .. }), "{said}");
    world.options.cache_key = None;
    world.begin();
    assert_eq!(fs::read_to_string(world.mount().join("file")).unwrap(), "content");
}
