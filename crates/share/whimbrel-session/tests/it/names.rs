//! Many names: what nobody uses leaves memory, and is asked for again.

use crate::common::{World, back, until};
use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    path::Path,
    thread,
};

const DIRS: usize = 60;
const FILES: usize = 100;
const MOST: usize = 1000;

fn tree(server: &Path) {
    for dir in 0..DIRS {
        fs::create_dir(server.join(format!("{dir}"))).unwrap();
        (0..FILES).for_each(|file| {
            fs::write(server.join(format!("{dir}/{file}")), format!("{dir} {file}")).unwrap();
        });
    }
}

fn world() -> World {
    World::new(
        |options| {
            options.most_names = MOST;
            options.settings.fresh = None;
        },
        tree,
    )
}

/// Names and attributes of everything, as `ls -lR` reads them.
fn list(world: &World) {
    for dir in 0..DIRS {
        let path = world.mount().join(format!("{dir}"));
        let found: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(found.len(), FILES, "{dir}");
        for path in found {
            let expected = path.strip_prefix(world.mount()).unwrap().to_str().unwrap().len();
            assert_eq!(fs::metadata(&path).unwrap().len() as usize, expected, "{}", path.display());
        }
    }
}

#[test]
fn names_that_nobody_uses_leave_memory_and_come_back() {
    let world = world();
    for _ in 0..2 {
        list(&world);
        // What the latest uses named may stay beyond the limit, and what the kernel has yet to forget.
        let known = world.session().status().known as usize;
        assert!(known < DIRS * FILES / 2, "{known} of {} are known", DIRS * FILES);
    }
    for dir in [0, 7, DIRS - 1] {
        let read = fs::read_to_string(world.mount().join(format!("{dir}/9"))).unwrap();
        assert_eq!(read, format!("{dir} 9"));
    }
    assert!(fs::metadata(world.mount().join("0/none")).is_err());
}

#[test]
fn what_is_open_or_was_changed_stays_while_others_leave() {
    let world = world();
    let mount = world.mount();
    let mut open = File::open(mount.join("0/1")).unwrap();
    fs::write(mount.join("0/new"), "made here").unwrap();
    fs::rename(mount.join("1/1"), mount.join("1/renamed")).unwrap();
    list_others(&world);
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "0 1");
    assert_eq!(fs::read_to_string(mount.join("0/new")).unwrap(), "made here");
    assert_eq!(fs::read_to_string(mount.join("1/renamed")).unwrap(), "1 1");
    assert!(fs::metadata(mount.join("1/1")).is_err());
    world.session().flush().unwrap();
    assert_eq!(fs::read_to_string(world.server().join("0/new")).unwrap(), "made here");
    // Records of files without content leave with the names; that of the open file does not.
    until("the kernel has forgotten some", || {
        list_others(&world);
        (world.session().status().known as usize) < 3 * MOST
    });
}

fn list_others(world: &World) {
    for dir in 2..DIRS {
        let path = world.mount().join(format!("{dir}"));
        let found = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
        assert!(found.sum::<u64>() > 0);
    }
}

#[test]
fn a_list_is_whole_and_a_full_directory_is_known_to_be_full_while_names_leave_all_around() {
    const DIRS: usize = 6;
    let world = World::new(
        |options| {
            back(options);
            options.most_names = 8;
        },
        |server| {
            for dir in 0..DIRS {
                fs::create_dir(server.join(format!("{dir}"))).unwrap();
                (0..FILES).for_each(|file| fs::write(server.join(format!("{dir}/{file}")), "").unwrap());
            }
        },
    );
    thread::scope(|scope| {
        for dir in 0..DIRS {
            let path = world.mount().join(format!("{dir}"));
            scope.spawn(move || {
                for round in 0..100 {
                    assert_eq!(fs::read_dir(&path).unwrap().count(), FILES, "{dir} in round {round}");
                    let removed = fs::remove_dir(&path).unwrap_err();
                    assert_eq!(removed.kind(), ErrorKind::DirectoryNotEmpty, "{dir} in round {round}");
                }
            });
        }
    });
    assert_eq!(world.session().status().events, []);
}
