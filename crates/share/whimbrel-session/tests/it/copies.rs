//! Server copies: copies on a mount are made by the server, with the result of a copy through the client.

use crate::common::{Fate, World, back, pattern, until};
use rustix::{fs::copy_file_range, io::Errno};
use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};
use whimbrel_session::{
    client::Policy,
    proto::{CopyCall, code},
};
use whimbrel_wire::{Call, Code, Refusal, Request};

const MIB: usize = 1 << 20;
const SIZE: usize = 20 * MIB + 12_345;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Copies a file like `cp`.
fn copy(from: &Path, to: &Path) -> Result<(), Errno> {
    let (from, to) = (File::open(from).unwrap(), File::create(to).unwrap());
    while copy_file_range(&from, None, &to, None, 1 << 30)? > 0 {}
    Ok(())
}

fn asked(world: &World, kind: &str) -> u64 {
    world.session().status().requests.get(kind).copied().unwrap_or(0)
}

/// Sets the fate of later requests; while there is no connection, copies are made on this side.
fn decide(world: &World, decides: impl Fn(&Request) -> Fate + Send + Sync + 'static) {
    let broken = world.session().status().broken;
    world.wire.decide(decides);
    until("another connection", || {
        let status = world.session().status();
        status.connected && status.broken > broken
    });
}

/// An image with a hole in its middle and another at its end.
fn image(path: &Path) -> Vec<u8> {
    let (file, content) = (File::create(path).unwrap(), pattern(8 * MIB, 3));
    file.set_len(SIZE as u64).unwrap();
    file.write_all_at(&content[..4 * MIB], 0).unwrap();
    file.write_all_at(&content[4 * MIB..], 12 * MIB as u64).unwrap();
    fs::read(path).unwrap()
}

#[test]
fn a_copy_of_an_image_costs_no_content_on_the_line_and_keeps_its_holes() {
    for policy in [Policy::Through, Policy::Back] {
        let mut content = Vec::new();
        let world = World::new(
            |options| options.settings.policy = policy,
            |server| content = image(&server.join("image")),
        );
        copy(&world.mount().join("image"), &world.mount().join("copy")).unwrap();
        assert_eq!((asked(&world, "read"), asked(&world, "pages")), (0, 0), "{policy}");
        assert!(asked(&world, "copy") >= 1);
        let there = world.server().join("copy");
        assert!(fs::read(&there).unwrap() == content, "{policy}: on the server");
        assert!(fs::metadata(&there).unwrap().blocks() * 512 < 10 * MIB as u64, "{policy}: holes are kept");
        assert!(fs::read(world.mount().join("copy")).unwrap() == content, "{policy}: on the mount");
        assert_eq!(world.session().status().events, [], "{policy}");
    }
}

#[test]
fn what_was_written_here_before_a_copy_is_in_it_and_what_is_written_after_it_stays() {
    let mut content = Vec::new();
    let world = World::new(back, |server| content = image(&server.join("image")));
    let (from, to) = (world.mount().join("image"), world.mount().join("copy"));
    open(&from).write_all_at(&[9; 5000], 3_000).unwrap();
    content[3_000..8_000].fill(9);
    let target = open(&to);
    target.write_all_at(&[1; 100_000], 0).unwrap();
    let (mut at, mut place) = (0, 50_000);
    while copy_file_range(open(&from), Some(&mut at), &target, Some(&mut place), SIZE).unwrap() > 0 {}
    target.write_all_at(&[2; 10], 60_000).unwrap();
    let mut expected = [vec![1; 50_000], content].concat();
    expected[60_000..60_010].fill(2);
    assert!(fs::read(&to).unwrap() == expected, "on the mount");
    assert!(asked(&world, "copy") >= 1);
    world.session().flush().unwrap();
    assert!(fs::read(world.server().join("copy")).unwrap() == expected, "on the server");
    assert_eq!(world.session().status().events, []);
}

#[test]
fn a_part_of_a_file_is_copied_within_it_and_over_a_shorter_and_a_longer_one() {
    let world = World::new(back, |server| fs::write(server.join("file"), pattern(MIB, 7)).unwrap());
    let path = world.mount().join("file");
    let file = open(&path);
    let mut content = pattern(MIB, 7);
    assert_eq!(copy_file_range(&file, Some(&mut 1000), &file, Some(&mut 600_001), 300_000), Ok(300_000));
    content.copy_within(1000..301_000, 600_001);
    assert!(fs::read(&path).unwrap() == content);
    let over = copy_file_range(&file, Some(&mut 0), &file, Some(&mut 1000), 300_000);
    assert_eq!(over, Err(Errno::INVAL), "over itself");
    world.session().flush().unwrap();
    assert!(fs::read(world.server().join("file")).unwrap() == content, "on the server");
}

#[test]
fn a_copy_is_durable_on_the_server_before_it_is_done_under_write_back() {
    let mut world = World::new(back, |server| drop(image(&server.join("image"))));
    let content = fs::read(world.server().join("image")).unwrap();
    copy(&world.mount().join("image"), &world.mount().join("copy")).unwrap();
    world.crash();
    assert!(fs::read(world.server().join("copy")).unwrap() == content);
    world.begin();
    assert!(fs::read(world.mount().join("copy")).unwrap() == content);
    assert_eq!(world.session().status().events, []);
}

#[test]
fn an_answer_that_is_lost_and_a_server_without_copies_change_nothing_of_the_outcome() {
    let mut content = Vec::new();
    let world = World::new(back, |server| content = image(&server.join("image")));
    let first = AtomicBool::new(true);
    decide(&world, move |request| match request.kind {
        CopyCall::KIND if first.swap(false, Ordering::SeqCst) => Fate::Lost,
        _ => Fate::Answered,
    });
    copy(&world.mount().join("image"), &world.mount().join("once")).unwrap();
    assert!(asked(&world, "copy") >= 2);
    decide(&world, |request| match request.kind {
        CopyCall::KIND => Fate::Refused(Refusal::new(Code::UNKNOWN_KIND, "an old server")),
        _ => Fate::Answered,
    });
    let before = asked(&world, "copy");
    for name in ["twice", "thrice"] {
        copy(&world.mount().join("image"), &world.mount().join(name)).unwrap();
    }
    assert_eq!(asked(&world, "copy"), before + 1, "an old server is asked once");
    world.session().flush().unwrap();
    for name in ["once", "twice", "thrice"] {
        assert!(fs::read(world.server().join(name)).unwrap() == content, "{name}");
    }
    assert_eq!(world.session().status().events, []);
}

#[test]
fn a_target_that_somebody_else_has_changed_is_not_copied_over() {
    let world = World::new(back, |server| {
        drop(image(&server.join("image")));
        fs::write(server.join("target"), "ours").unwrap();
    });
    let target = open(&world.mount().join("target"));
    assert_eq!(fs::read(world.mount().join("target")).unwrap(), b"ours");
    fs::write(world.server().join("target"), "theirs").unwrap();
    let from = File::open(world.mount().join("image")).unwrap();
    assert_eq!(copy_file_range(&from, None, &target, None, SIZE), Err(Errno::STALE));
    assert_eq!(fs::read(world.server().join("target")).unwrap(), b"theirs");
    assert_eq!(fs::read(world.mount().join("target")).unwrap(), b"theirs", "it is asked for again");
}

#[test]
fn a_refusal_in_the_middle_of_a_copy_is_told_and_the_file_can_be_written_on() {
    let world = World::new(back, |server| drop(image(&server.join("image"))));
    let no_room = || Refusal::new(Code(code::ERRNO + 28), "no room");
    decide(&world, move |request| match request.kind {
        CopyCall::KIND => Fate::Refused(no_room()),
        _ => Fate::Answered,
    });
    let (from, to) = (world.mount().join("image"), world.mount().join("copy"));
    assert_eq!(copy(&from, &to), Err(Errno::NOSPC));
    decide(&world, |_| Fate::Answered);
    open(&to).write_all_at(b"on", 0).unwrap();
    world.session().flush().unwrap();
    assert_eq!(fs::read(world.server().join("copy")).unwrap(), b"on");
    assert_eq!(world.session().status().events, []);
}

#[test]
fn a_source_that_somebody_else_has_changed_is_copied_as_it_is_now() {
    let world = World::new(back, |server| fs::write(server.join("source"), pattern(3 * MIB, 1)).unwrap());
    let (from, to) = (world.mount().join("source"), world.mount().join("copy"));
    let mut first = [0; 4096];
    File::open(&from).unwrap().read_at(&mut first, 0).unwrap();
    let theirs = pattern(3 * MIB, 2);
    fs::write(world.server().join("source"), &theirs).unwrap();
    copy(&from, &to).unwrap();
    world.session().flush().unwrap();
    // Content that was read ahead may be in the kernel's page cache, which never expires here.
    let copied = fs::read(world.server().join("copy")).unwrap();
    assert!(copied.len() == 3 * MIB && copied[2 * MIB..] == theirs[2 * MIB..]);
    assert_eq!(world.session().status().events, []);
}
