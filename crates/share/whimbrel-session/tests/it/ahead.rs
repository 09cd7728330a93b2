//! Prefetch before a file is read: hint files, and the read history of an earlier session.

use crate::common::{World, pattern, until};
use std::{
    fs,
    os::unix::fs::{FileExt, chown},
    path::Path,
};
use whimbrel_session::{
    client::{Policy, SessionOptions},
    hint_file::Hint,
    proto::Time,
};

const BLOCK: usize = 65_536;
const BLOCKS: usize = 64;

/// A file in which three of four blocks are zeros.
fn sparse() -> Vec<u8> {
    let mut bytes = vec![0; BLOCKS * BLOCK];
    for number in (0..BLOCKS).step_by(4) {
        bytes[number * BLOCK..(number + 1) * BLOCK].copy_from_slice(&pattern(BLOCK, number as u64 + 1));
    }
    bytes
}

fn note(server: &Path, name: &str, text: &str) {
    fs::write(server.join(format!(".{name}.whimbrel")), text).unwrap();
}

fn options(options: &mut SessionOptions) {
    options.settings.policy = Policy::Back;
    options.settings.patience = 1;
}

fn describe(server: &Path, name: &str) -> Hint {
    let said = Hint::of_file(&server.join(name), None).unwrap();
    note(server, name, &said.to_text());
    said
}

#[test]
fn zeros_that_a_note_tells_of_are_never_asked_for() {
    let world = World::new(options, |server| {
        fs::write(server.join("disk.raw"), sparse()).unwrap();
        assert_eq!(describe(server, "disk.raw").zeros.len(), BLOCKS / 4);
    });
    let file = fs::File::open(world.mount().join("disk.raw")).unwrap();
    world.wire.cut(true);
    let mut out = vec![1; 3 * BLOCK];
    file.read_exact_at(&mut out, 9 * BLOCK as u64).unwrap();
    assert!(out.iter().all(|byte| *byte == 0));
    file.read_exact_at(&mut out, 8 * BLOCK as u64).unwrap_err();
    world.wire.mend();
    assert!(fs::read(world.mount().join("disk.raw")).unwrap() == sparse());
    assert_eq!(world.session().status().zero_blocks, BLOCKS as u64 / 4 * 3);
    // After a write-back it is another version, to which the hint does not apply.
    let ours = fs::OpenOptions::new().write(true).open(world.mount().join("disk.raw")).unwrap();
    ours.write_all_at(&[9; 5000], 9 * BLOCK as u64).unwrap();
    world.session().flush().unwrap();
    world.session().invalidate().unwrap();
    let mut expected = sparse();
    expected[9 * BLOCK..9 * BLOCK + 5000].fill(9);
    assert!(fs::read(world.mount().join("disk.raw")).unwrap() == expected);
    assert!(fs::read(world.server().join("disk.raw")).unwrap() == expected);
}

#[test]
fn a_note_of_another_version_or_owner_or_of_nothing_is_not_believed() {
    let ones = vec![1; 2 << 20];
    let wrong = |size: u64| Hint {
        fetch_whole: None,
        version: Some((size, Time { seconds: 5, nanos: 0 })),
        zeros: std::iter::once(0..size).collect(),
    };
    let world = World::new(options, |server| {
        for name in ["old", "foreign", "garbage", "dir"] {
            fs::write(server.join(name), &ones).unwrap();
        }
        note(server, "old", &wrong(ones.len() as u64).to_text());
        let mut foreign = describe(server, "foreign");
        foreign.zeros = std::iter::once(0..ones.len() as u64).collect();
        note(server, "foreign", &foreign.to_text());
        chown(server.join(".foreign.whimbrel"), Some(12_345), None).unwrap();
        note(server, "garbage", "whimbrel note 1\nzeros everywhere\n");
        fs::create_dir(server.join(".dir.whimbrel")).unwrap();
    });
    for name in ["old", "foreign", "garbage", "dir"] {
        assert!(fs::read(world.mount().join(name)).unwrap() == ones, "{name}");
    }
    let status = world.session().status();
    assert_eq!((status.zero_blocks, status.events.len()), (0, 1), "{:?}", status.events);
    assert!(status.events[0].text.starts_with("garbage: its hint file is invalid"));
}

#[test]
fn a_note_says_whether_a_file_is_brought_whole() {
    let world = World::new(options, |server| {
        for name in ["memory", "state.mem"] {
            fs::write(server.join(name), pattern(BLOCKS * BLOCK, 1)).unwrap();
        }
        note(server, "memory", "whimbrel note 1\nwhole\n");
        note(server, "state.mem", "whimbrel note 1\nblocks\n");
    });
    let used = || world.session().status().used;
    let blocks = fs::File::open(world.mount().join("state.mem")).unwrap();
    blocks.read_exact_at(&mut [0; 10], 20 * BLOCK as u64).unwrap();
    assert!(used() < 20 * BLOCK as u64, "its name says whole, its note says blocks");
    let _whole = fs::File::open(world.mount().join("memory")).unwrap();
    until("all of it has come", || used() >= (BLOCKS * BLOCK) as u64);
    assert!(used() < ((BLOCKS + 20) * BLOCK) as u64, "and no more of the first");
}

#[test]
fn what_a_session_read_is_brought_to_the_next_before_anybody_asks() {
    let bytes = pattern(BLOCKS * BLOCK, 3);
    let mut world = World::new(options, |server| {
        fs::create_dir(server.join("vms")).unwrap();
        fs::write(server.join("vms/disk.raw"), &bytes).unwrap();
    });
    let read = |world: &World, block: usize| {
        let file = fs::File::open(world.mount().join("vms/disk.raw")).unwrap();
        let mut out = vec![0; 4096];
        file.read_at(&mut out, (block * BLOCK) as u64).is_ok_and(|_| out == bytes[block * BLOCK..][..4096])
    };
    let blocks = [40, 13, 14, 57, 2];
    assert!(blocks.iter().all(|block| read(&world, *block)));
    assert_eq!(world.session().status().ahead_blocks, 0, "nothing was known");
    world.end();
    // The cache is lost, but not the read history.
    for part in ["frames", "journal.0", "journal.1"] {
        let _ = fs::remove_file(world.dir.path().join("cache").join(part));
    }
    world.begin();
    until("it is here", || world.session().status().ahead_blocks == blocks.len() as u64);
    world.wire.cut(true);
    assert!(blocks.iter().all(|block| read(&world, *block)));
    assert!(!read(&world, 30), "nothing else came");
    world.wire.mend();
}
