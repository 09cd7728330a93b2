//! Prefetched names and files: trees, small files near those that are read, absent names, and how long they
//! are cached.

use crate::common::{Fate, World, pattern, until};
use std::{
    fs,
    sync::atomic::{AtomicUsize, Ordering},
};
use whimbrel_session::{client::Policy, proto::WalkCall};
use whimbrel_wire::{Call, Reply};

#[test]
fn who_reads_the_small_files_of_a_directory_one_by_one_waits_for_few_of_them() {
    let world = World::new(
        |options| options.settings.patience = 1,
        |server| {
            (10..40).for_each(|number| {
                fs::write(server.join(format!("{number}.c")), pattern(9000, number)).unwrap()
            })
        },
    );
    let read = |number: u64| {
        fs::read(world.mount().join(format!("{number}.c"))).is_ok_and(|read| read == pattern(9000, number))
    };
    assert!(read(10) && read(11));
    // Two were requested, and sixteen more were prefetched.
    until("the next ones are here", || world.session().status().used >= 18 * 65536);
    world.wire.cut(true);
    assert!((10..28).all(read));
    assert!(!read(30), "nothing else was brought");
}

fn asked(world: &World, kind: &str) -> u64 {
    world.session().status().requests[kind]
}

/// Directories `0..dirs` with one file each.
fn tree(server: &std::path::Path, dirs: usize) {
    for number in 0..dirs {
        fs::create_dir(server.join(number.to_string())).unwrap();
        fs::write(server.join(format!("{number}/file")), "text").unwrap();
    }
}

#[test]
fn a_tree_is_known_before_anybody_looks_and_so_is_what_it_does_not_have() {
    let world = World::new(|options| options.settings.patience = 1, |server| tree(server, 300));
    until("the tree is known", || world.session().status().known == 601);
    world.wire.cut(true);
    for number in 0..300 {
        let dir = world.mount().join(number.to_string());
        let names: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["file"]);
        assert_eq!(fs::metadata(dir.join("file")).unwrap().len(), 4);
        assert_eq!(fs::metadata(dir.join("none")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    }
    assert_eq!(asked(&world, "list") + asked(&world, "lookup"), 0);
}

#[test]
fn what_grows_old_while_it_is_used_is_asked_for_again_together() {
    let world = World::new(|options| options.settings.fresh = Some(2), |server| tree(server, 50));
    let dir = |number: usize| world.mount().join(number.to_string());
    (0..50).for_each(|number| assert_eq!(fs::read_dir(dir(number)).unwrap().count(), 1));
    // The kernel caches it as absent, too.
    assert!(!dir(7).join("new").exists());
    fs::write(world.server().join("7/new"), "new").unwrap();
    until("the tree was asked for again", || {
        (0..50).all(|number| fs::metadata(dir(number).join("file")).is_ok()) && asked(&world, "walk") > 1
    });
    until("a new file is seen", || dir(7).join("new").exists());
}

static HELD: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(true);

#[test]
fn a_walk_that_comes_late_undoes_nothing() {
    /// Delays a reply, which has the state at its request.
    fn hold(reply: Reply) -> Reply {
        tokio::task::block_in_place(|| until("the answer may go", || !HELD.load(Ordering::SeqCst)));
        reply
    }
    for policy in [Policy::Through, Policy::Back] {
        HELD.store(true, Ordering::SeqCst);
        let mut world = World::new(|options| options.settings.policy = policy, |server| tree(server, 3));
        world.end();
        let walks = std::sync::Arc::new(AtomicUsize::new(0));
        let seen = walks.clone();
        world.wire.decide(move |request| {
            if request.kind != WalkCall::KIND {
                return Fate::Answered;
            }
            seen.fetch_add(1, Ordering::SeqCst);
            Fate::Changed(hold)
        });
        world.begin();
        until("a walk is under way", || walks.load(Ordering::SeqCst) == 1);
        let mount = world.mount();
        fs::remove_file(mount.join("0/file")).unwrap();
        fs::write(mount.join("0/new"), "new").unwrap();
        fs::rename(mount.join("1"), mount.join("moved")).unwrap();
        fs::create_dir(mount.join("1")).unwrap();
        HELD.store(false, Ordering::SeqCst);
        until("it has come", || world.session().status().known >= 8);
        let names = |dir: &str| {
            let mut names: Vec<_> =
                fs::read_dir(mount.join(dir)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        for _ in 0..2 {
            assert_eq!(names("0"), ["new"]);
            assert_eq!(names(""), ["0", "1", "2", "moved"]);
            assert!(names("1").is_empty());
            assert_eq!(names("moved"), ["file"]);
            assert_eq!(names("2"), ["file"]);
            world.session().flush().unwrap();
        }
        assert!(world.session().status().events.is_empty());
    }
}

#[test]
fn what_is_absent_is_so_until_it_is_made_here_or_asked_for_again() {
    for policy in [Policy::Through, Policy::Back] {
        let set = |options: &mut whimbrel_session::client::SessionOptions| {
            options.settings.policy = policy;
            options.settings.fresh = None;
        };
        let world = World::new(set, |server| tree(server, 3));
        until("the tree is known", || world.session().status().known == 7);
        let mount = world.mount();
        let names = ["0/made", "0/dir", "0/linked", "0/moved", "1/theirs"].map(|name| mount.join(name));
        let there = || names.each_ref().map(|name| name.exists());
        assert_eq!(there(), [false; 5]);
        fs::write(&names[0], "ours").unwrap();
        fs::create_dir(&names[1]).unwrap();
        fs::hard_link(mount.join("0/file"), &names[2]).unwrap();
        fs::rename(mount.join("2/file"), &names[3]).unwrap();
        fs::write(world.server().join("1/theirs"), "theirs").unwrap();
        assert_eq!(there(), [true, true, true, true, false], "the session believes what it began with");
        world.session().invalidate().unwrap();
        until("theirs is seen", || there() == [true; 5]);
        fs::remove_file(&names[0]).unwrap();
        fs::remove_dir(&names[1]).unwrap();
        assert_eq!(there(), [false, false, true, true, true]);
    }
}
