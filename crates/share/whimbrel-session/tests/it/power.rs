//! Power failures of the server between a change and its sync: what it lost is sent again, or reported.

use crate::common::{Fate, World, back};
use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};
use whimbrel_session::{
    client::{Policy, SessionOptions},
    proto::{OpenCall, SyncCall},
};
use whimbrel_wire::{Call, Reply};

/// The answer of a server that was booted again.
fn booted_again(mut reply: Reply) -> Reply {
    reply.payload = vec![7; 16].into();
    reply
}

/// The first request to sync finds that the server was without power: `undo` does what that did to its disk.
fn fails_before_the_first_sync(world: &World, undo: impl Fn(&Path) + Send + Sync + 'static) {
    let (failed, server) = (AtomicBool::new(false), world.server());
    world.wire.decide(move |request| match request.kind {
        SyncCall::KIND if !failed.swap(true, Ordering::SeqCst) => {
            undo(&server);
            Fate::Lost
        }
        OpenCall::KIND if failed.load(Ordering::SeqCst) => Fate::Changed(booted_again),
        _ => Fate::Answered,
    });
}

/// What a file is now; a later power failure gives it back.
fn remembered(path: PathBuf) -> impl Fn() + Send + Sync {
    let (content, time) = (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
    move || {
        fs::write(&path, &content).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    }
}

fn through(options: &mut SessionOptions) {
    options.settings.policy = Policy::Through;
    options.settings.delay = None;
}

#[test]
fn names_that_a_power_failure_undid_are_made_again() {
    let world = World::new(back, |server| {
        fs::write(server.join("old"), "kept").unwrap();
        fs::write(server.join("gone"), "gone").unwrap();
    });
    let mount = world.mount();
    fs::write(mount.join("made"), "content").unwrap();
    fs::rename(mount.join("old"), mount.join("new")).unwrap();
    fs::remove_file(mount.join("gone")).unwrap();
    fails_before_the_first_sync(&world, |server| {
        // The one directory forgets all changes.
        fs::remove_file(server.join("made")).unwrap();
        fs::rename(server.join("new"), server.join("old")).unwrap();
    });
    world.session().flush().unwrap();
    assert_eq!(world.session().status().events, []);
    assert_eq!(world.session().status().queued, 0);
    let mut names: Vec<_> =
        fs::read_dir(world.server()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["made", "new"]);
    assert_eq!(fs::read_to_string(world.server().join("made")).unwrap(), "content");
    assert_eq!(fs::read_to_string(mount.join("made")).unwrap(), "content");
}

#[test]
fn a_sync_under_write_through_sends_again_what_a_power_failure_undid() {
    let world = World::new(through, |server| fs::write(server.join("file"), "before").unwrap());
    let file = File::options().write(true).open(world.mount().join("file")).unwrap();
    let restore = remembered(world.server().join("file"));
    fails_before_the_first_sync(&world, move |_| restore());
    file.write_all_at(b"behind", 0).unwrap();
    file.sync_all().unwrap();
    assert_eq!(fs::read_to_string(world.server().join("file")).unwrap(), "behind");
}

#[test]
fn a_sync_fails_if_the_server_restarted_after_it_got_the_data() {
    let world = World::new(through, |server| fs::write(server.join("file"), "before").unwrap());
    let file = File::options().write(true).open(world.mount().join("file")).unwrap();
    (&file).write_all(b"behind").unwrap();
    // Closing any descriptor sends what was written.
    drop(file.try_clone().unwrap());
    fs::create_dir(world.mount().join("dir")).unwrap();
    let root = File::open(world.mount()).unwrap();
    assert_eq!(fs::read_to_string(world.server().join("file")).unwrap(), "behind");
    world.wire.decide(|request| match request.kind {
        OpenCall::KIND => Fate::Changed(booted_again),
        _ => Fate::Answered,
    });
    for opened in [&file, &root] {
        assert_eq!(opened.sync_all().unwrap_err().raw_os_error(), Some(5));
        opened.sync_all().unwrap();
    }
    assert_eq!(world.session().status().events.len(), 2);
    // A connection that breaks is no restart.
    (&file).write_all(b" more").unwrap();
    drop(file.try_clone().unwrap());
    world.wire.cut(false);
    file.sync_all().unwrap();
}

#[test]
fn a_truncation_that_a_power_failure_undid_is_made_again() {
    const SIZE: u64 = 900_000;
    let world = World::new(
        |options| {
            back(options);
            options.slow_round_trip = std::time::Duration::from_secs(3600);
        },
        |server| fs::write(server.join("file"), vec![1; SIZE as usize]).unwrap(),
    );
    let restore = remembered(world.server().join("file"));
    fails_before_the_first_sync(&world, move |_| restore());
    let file = File::options().write(true).open(world.mount().join("file")).unwrap();
    file.set_len(0).unwrap();
    file.set_len(SIZE).unwrap();
    for at in [0, 500_000] {
        file.write_all_at(&[2; 100], at).unwrap();
    }
    world.session().flush().unwrap();
    let mut expected = vec![0; SIZE as usize];
    for at in [0, 500_000] {
        expected[at..at + 100].fill(2);
    }
    assert!(fs::read(world.server().join("file")).unwrap() == expected);
    assert_eq!(world.session().status().events, []);
}
