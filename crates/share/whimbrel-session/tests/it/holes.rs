//! Holes of the server's files: no read waits for them, and written data is never mistaken for one.

use crate::common::{Fate, World, back, pattern, until};
use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use whimbrel_session::proto::{HolesCall, MAX_HOLES};
use whimbrel_wire::{Call, Refusal};

const SIZE: u64 = 8 << 20;
/// Offset of the only data in the file.
const ISLAND: u64 = 3 << 20;

fn sparse(server: &Path) {
    let file = File::create(server.join("disk.raw")).unwrap();
    file.set_len(SIZE).unwrap();
    file.write_all_at(&pattern(4096, 1), ISLAND).unwrap();
}

fn opened(world: &World) -> File {
    OpenOptions::new().read(true).write(true).open(world.mount().join("disk.raw")).unwrap()
}

/// Opens the disk, and waits until its holes are known.
fn known(world: &World) -> File {
    let disk = opened(world);
    until("the holes are known", || world.session().status().holes > 0);
    disk
}

fn read(disk: &File, at: u64) -> [u8; 5000] {
    let mut out = [1; 5000];
    disk.read_exact_at(&mut out, at).unwrap();
    out
}

#[test]
fn a_part_of_a_page_is_written_into_a_hole_while_the_server_is_away() {
    let mut world = World::new(back, sparse);
    let disk = known(&world);
    assert_eq!(world.session().status().holes, SIZE - 4096);
    world.wire.cut(true);
    let waits = world.session().status().waits;
    assert_eq!(read(&disk, 100), [0; 5000]);
    disk.write_all_at(&[7; 1000], 5_000_000).unwrap();
    let mut expected = [0; 5000];
    expected[1000..2000].fill(7);
    assert_eq!(read(&disk, 4_999_000), expected);
    assert_eq!(world.session().status().waits, waits);
    world.wire.mend();
    drop(disk);
    world.end();
    let there = std::fs::read(world.server().join("disk.raw")).unwrap();
    assert!(
        there[5_000_000..5_001_000] == [7; 1000] && there.iter().filter(|byte| **byte == 7).count() < 1100
    );
    assert!(there[ISLAND as usize..][..4096] == pattern(4096, 1));
}

#[test]
fn what_was_written_into_a_hole_and_left_comes_back_from_the_server() {
    // Too small for any block to stay.
    let world = World::new(
        |options| {
            back(options);
            options.capacity = 4 * options.block;
        },
        sparse,
    );
    let disk = known(&world);
    let written: Vec<(u64, Vec<u8>)> =
        (0..40u64).map(|number| (number * 200_000 + 77, pattern(3000, number + 2))).collect();
    for (at, content) in &written {
        disk.write_all_at(content, *at).unwrap();
        world.session().flush().unwrap();
    }
    for (at, content) in &written {
        let mut out = vec![0; content.len()];
        disk.read_exact_at(&mut out, *at).unwrap();
        assert!(&out == content, "at {at}");
    }
}

#[test]
fn a_hole_that_somebody_else_fills_is_none_from_the_next_look_on() {
    let world = World::new(
        |options| {
            back(options);
            options.settings.fresh = Some(0);
        },
        sparse,
    );
    assert_eq!(read(&known(&world), 1 << 20), [0; 5000]);
    let theirs = OpenOptions::new().write(true).open(world.server().join("disk.raw")).unwrap();
    theirs.write_all_at(&[9; 5000], 1 << 20).unwrap();
    drop(theirs);
    until("the other content is seen", || read(&opened(&world), 1 << 20) == [9; 5000]);
}

#[test]
fn a_server_that_knows_no_holes_or_tells_nonsense_costs_nothing_but_time() {
    for nonsense in [false, true] {
        let mut world = World::new(back, sparse);
        let asked = Arc::new(AtomicU64::new(0));
        let count = asked.clone();
        world.wire.decide(move |request| {
            if request.kind != HolesCall::KIND {
                return Fate::Answered;
            }
            count.fetch_add(1, Ordering::Relaxed);
            if !nonsense {
                return Fate::Refused(Refusal::unknown_kind(HolesCall::KIND));
            }
            Fate::Changed(|mut reply| {
                reply.payload = vec![0xff; 16 * MAX_HOLES].into();
                reply
            })
        });
        let disk = opened(&world);
        until("it was asked", || asked.load(Ordering::Relaxed) == 1);
        disk.write_all_at(&[7; 1000], 5_000_000).unwrap();
        assert!(read(&disk, ISLAND)[..4096] == pattern(4096, 1));
        assert_eq!(world.session().status().holes, 0);
        drop(disk);
        world.end();
        assert!(std::fs::read(world.server().join("disk.raw")).unwrap()[5_000_000..5_001_000] == [7; 1000]);
    }
}
