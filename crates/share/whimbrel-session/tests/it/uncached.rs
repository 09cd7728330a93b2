//! Sessions without a cache: what programs get, what is stored on the disk, and what is refused.

use crate::common::{World, pattern, until};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
};
use whimbrel_session::client::{Policy, Session, SessionError, SessionOptions};

fn nothing(options: &mut SessionOptions) {
    options.capacity = 0;
    options.settings.fresh = None;
}

/// Sizes of the files below a directory, by name.
fn held(dir: &Path) -> Vec<(String, u64)> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
    files
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.metadata().unwrap().len()))
        .filter(|(_, len)| *len > 0)
        .collect()
}

#[test]
fn what_is_read_and_written_is_right_and_none_of_it_is_on_this_disk() {
    // More than fits into memory in transit.
    let (large, small) = (pattern(24 << 20, 3), pattern(300_000, 4));
    let mut world = World::new(nothing, |server| {
        fs::write(server.join("large"), &large).unwrap();
        fs::write(server.join("small"), &small).unwrap();
    });
    for _ in 0..2 {
        assert!(fs::read(world.mount().join("large")).unwrap() == large);
        assert!(fs::read(world.mount().join("small")).unwrap() == small);
        fs::write(world.mount().join("made"), &large).unwrap();
        assert!(fs::read(world.server().join("made")).unwrap() == large, "the server has it at the close");
        assert!(world.session().status().received > small.len() as u64, "nothing is left of the last time");
        fs::rename(world.mount().join("made"), world.mount().join("moved")).unwrap();
        assert!(world.server().join("moved").exists());
        // The id of this client, and nothing else.
        assert_eq!(held(&world.options.cache), [("lock".to_owned(), 16)]);
        world.end();
        world.begin();
    }
    assert_eq!(world.session().status().events, []);
}

#[test]
fn nothing_can_be_promised_for_later() {
    let world = World::new(nothing, |_| {});
    for (name, value) in [("write", "back"), ("*.log", "back")] {
        let refused = world.session().set(name, value).unwrap_err();
        assert!(refused.contains("without a cache"), "{refused}");
    }
    assert!(!world.session().status().settings.writes_back());
    fs::write(world.mount().join("a.log"), "through").unwrap();
    assert_eq!(fs::read_to_string(world.server().join("a.log")).unwrap(), "through");
    let mut options = world.options.clone();
    options.cache = world.dir.path().join("other");
    options.settings.policy = Policy::Back;
    let begun = world.runtime.block_on(Session::start(world.wire.clone(), options));
    assert!(matches!(begun, Err(SessionError::NoCache)));
}

#[test]
fn what_an_earlier_session_owes_is_not_passed_over() {
    let back = |options: &mut SessionOptions| {
        (options.settings.policy, options.settings.delay) = (Policy::Back, None);
    };
    let mut world = World::new(back, |_| {});
    let file = File::create(world.mount().join("owed")).unwrap();
    file.write_all_at(b"synced here", 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    world.crash();
    let mut options = world.options.clone();
    nothing(&mut options);
    options.settings.policy = Policy::Through;
    // The threads of the crashed session lock its directory until they have ended.
    until("it says so", || {
        match world.runtime.block_on(Session::start(world.wire.clone(), options.clone())) {
            Err(SessionError::Directory { .. }) => false,
            Err(SessionError::UnsentData { dir }) => dir == options.cache,
            other => panic!("{:?}", other.err()),
        }
    });
    world.begin();
    world.end();
    assert_eq!(fs::read_to_string(world.server().join("owed")).unwrap(), "synced here");
    (world.options.capacity, world.options.settings.policy) = (0, Policy::Through);
    world.begin();
    assert_eq!(fs::read_to_string(world.mount().join("owed")).unwrap(), "synced here");
}

#[test]
fn what_the_server_cannot_be_given_at_the_end_is_put_aside_and_said() {
    let world = World::new(
        |options| {
            nothing(options);
            (options.settings.patience, options.settings.delay) = (1, None);
        },
        |server| fs::write(server.join("file"), "server's").unwrap(),
    );
    let file = File::options().write(true).open(world.mount().join("file")).unwrap();
    file.write_all_at(b"what we wrote", 0).unwrap();
    world.wire.cut(true);
    file.sync_all().unwrap_err();
    world.session().end().unwrap_err();
    let kept = fs::read_dir(world.options.cache.join("kept")).unwrap().next().unwrap().unwrap();
    assert_eq!(fs::read_to_string(kept.path()).unwrap(), "what we wrote");
    let events = world.session().status().events;
    assert!(events.iter().any(|event| event.text.contains("could not be written back")), "{events:?}");
}
