//! Write-back: when the server has data, and what happens to files that change or fail meanwhile.

use crate::common::{Fate, World, back, pattern, until};
use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};
use whimbrel_session::{
    client::Policy,
    proto::{OpCall, SyncCall, WriteCall, code},
};
use whimbrel_wire::{Call, Code, Refusal};

#[test]
fn under_write_back_nothing_is_sent_before_it_is_told_and_what_was_removed_never() {
    let world = World::new(back, |_| {});
    let (mount, server) = (world.mount(), world.server());
    fs::create_dir(mount.join("out")).unwrap();
    let sent = world.session().status().sent;
    for number in 0..50 {
        fs::write(mount.join(format!("out/tmp-{number}")), pattern(100_000, number)).unwrap();
    }
    let kept = pattern(50_000, 99);
    fs::write(mount.join("out/kept"), &kept).unwrap();
    for number in 0..50 {
        fs::remove_file(mount.join(format!("out/tmp-{number}"))).unwrap();
    }
    assert!(world.session().status().sent - sent < 5_000, "{}", world.session().status().sent - sent);
    assert_eq!(fs::read_dir(&server).unwrap().count(), 0);
    world.session().flush().unwrap();
    assert!(world.session().status().sent - sent < 80_000, "{}", world.session().status().sent - sent);
    assert_eq!(fs::read(server.join("out/kept")).unwrap(), kept);
    assert_eq!(fs::read_dir(server.join("out")).unwrap().count(), 1);
}

#[test]
fn a_file_that_is_renamed_here_before_it_is_sent_again_is_no_conflict() {
    let world = World::new(back, |server| fs::write(server.join("old"), pattern(100_000, 1)).unwrap());
    let mount = world.mount();
    let (old, new, content) = (mount.join("old"), mount.join("new"), pattern(100_000, 2));
    let renamed = AtomicBool::new(false);
    world.wire.decide(move |request| {
        if request.kind != SyncCall::KIND || renamed.swap(true, Ordering::SeqCst) {
            return Fate::Answered;
        }
        // The lost answer makes the client send the content again, because the server may have restarted.
        fs::rename(&old, &new).unwrap();
        Fate::Lost
    });
    OpenOptions::new().write(true).open(mount.join("old")).unwrap().write_all_at(&content, 0).unwrap();
    world.session().flush().unwrap();
    assert_eq!(world.session().status().events, []);
    assert_eq!(fs::read(world.server().join("new")).unwrap(), content);
    assert!(!world.server().join("old").exists());
    assert_eq!(fs::read(mount.join("new")).unwrap(), content);
}

#[test]
fn what_was_synced_under_write_back_survives_the_death_of_the_client() {
    let mut world = World::new(back, |server| fs::write(server.join("disk"), pattern(500_000, 1)).unwrap());
    let mount = world.mount();
    let disk = OpenOptions::new().write(true).open(mount.join("disk")).unwrap();
    disk.write_all_at(b"durable here", 123_456).unwrap();
    disk.sync_all().unwrap();
    fs::create_dir(mount.join("made")).unwrap();
    let made = File::create(mount.join("made/file")).unwrap();
    (&made).write_all(b"and this").unwrap();
    made.sync_all().unwrap();
    fs::rename(mount.join("made"), mount.join("called")).unwrap();
    drop((disk, made));
    world.crash();
    assert!(!world.server().join("called").exists());
    world.begin();
    assert_eq!(fs::read(world.server().join("disk")).unwrap()[123_456..][..12], *b"durable here");
    assert_eq!(fs::read_to_string(world.server().join("called/file")).unwrap(), "and this");
    let status = world.session().status();
    assert_eq!((status.dirty, status.queued), (0, 0), "{status:?}");
    assert!(status.events.iter().any(|event| event.text.contains("written back now")));
    assert_eq!(fs::read_to_string(mount.join("called/file")).unwrap(), "and this");
    world.end();
}

#[test]
fn a_cache_smaller_than_what_is_written_writes_back_and_goes_on() {
    let world = World::new(
        |options| {
            back(options);
            options.capacity = 1 << 20;
        },
        |_| {},
    );
    let bytes = pattern(5 << 20, 17);
    fs::write(world.mount().join("large"), &bytes).unwrap();
    assert!(fs::read(world.mount().join("large")).unwrap() == bytes);
    world.session().flush().unwrap();
    assert!(fs::read(world.server().join("large")).unwrap() == bytes);
}

#[test]
fn a_file_with_another_name_keeps_what_was_written_under_the_first() {
    let world = World::new(back, |server| {
        fs::write(server.join("one"), "old").unwrap();
        fs::hard_link(server.join("one"), server.join("two")).unwrap();
    });
    fs::write(world.mount().join("one"), "new").unwrap();
    fs::remove_file(world.mount().join("one")).unwrap();
    world.session().flush().unwrap();
    assert_eq!(fs::read_to_string(world.server().join("two")).unwrap(), "new");
    assert!(!world.server().join("one").exists());
    assert_eq!(fs::read_to_string(world.mount().join("two")).unwrap(), "new");
}

#[test]
fn a_write_back_that_failed_in_the_middle_cuts_nothing_off_that_it_has_sent() {
    for policy in [Policy::Through, Policy::Back] {
        let world = World::new(
            |options| {
                options.settings.policy = policy;
                options.settings.delay = None;
            },
            |server| fs::write(server.join("file"), pattern(900_000, 1)).unwrap(),
        );
        let full = Refusal::new(Code(code::ERRNO + 28), "no room");
        let writes = AtomicUsize::new(0);
        world.wire.decide(move |request| match request.kind {
            WriteCall::KIND if writes.fetch_add(1, Ordering::SeqCst) >= 4 => Fate::Refused(full.clone()),
            _ => Fate::Answered,
        });
        let bytes = pattern(800_000, 2);
        // Under write-through the close fails, and `fs::write` ignores that.
        let _ = fs::write(world.mount().join("file"), &bytes);
        world.session().flush().unwrap_err();
        world.wire.decide(|_| Fate::Answered);
        world.session().flush().unwrap();
        assert!(fs::read(world.server().join("file")).unwrap() == bytes, "{policy}");
        assert!(fs::read(world.mount().join("file")).unwrap() == bytes, "{policy}");
    }
}

#[test]
fn changes_of_names_whose_answers_are_lost_are_made_once() {
    let world = World::new(back, |server| fs::write(server.join("log"), "first").unwrap());
    let mount = world.mount();
    for round in 1..4 {
        fs::rename(mount.join("log"), mount.join(format!("log.{round}"))).unwrap();
        fs::write(mount.join("log"), format!("round {round}")).unwrap();
        fs::create_dir(mount.join(format!("dir-{round}"))).unwrap();
        fs::write(mount.join("tmp"), format!("file {round}")).unwrap();
        fs::rename(mount.join("tmp"), mount.join("file")).unwrap();
    }
    let ops = AtomicUsize::new(0);
    // Each change is sent until every other answer arrives.
    world.wire.decide(move |request| match request.kind {
        OpCall::KIND if ops.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) => Fate::Lost,
        _ => Fate::Answered,
    });
    world.session().flush().unwrap();
    assert_eq!(world.session().status().events, []);
    let server = world.server();
    let names = ["log.1", "log.2", "log.3", "log", "file"];
    let found = names.map(|name| fs::read_to_string(server.join(name)).unwrap());
    assert_eq!(found, ["first", "round 1", "round 2", "round 3", "file 3"]);
    assert_eq!(fs::read_dir(&server).unwrap().count(), 8);
}

#[test]
fn what_a_file_grows_by_while_it_is_written_back_is_not_cut_off() {
    const BLOCK: usize = 64 << 10;
    // Ends within a block, and within a page of it; then it grows to the end of the block, and by two more.
    for begun in [2 * BLOCK + BLOCK / 2, 2 * BLOCK + 1000, 1000] {
        let bytes = pattern(5 * BLOCK, begun as u64);
        let mut world = World::new(back, |server| fs::write(server.join("file"), "").unwrap());
        let [sending, grown] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let held = [sending.clone(), grown.clone()];
        world.end();
        world.wire.decide(move |request| {
            if request.kind == WriteCall::KIND {
                held[0].store(true, Ordering::SeqCst);
                tokio::task::block_in_place(|| until("it has grown", || held[1].load(Ordering::SeqCst)));
            }
            Fate::Answered
        });
        world.begin();
        let file = File::options().read(true).write(true).open(world.mount().join("file")).unwrap();
        file.write_all_at(&bytes[..begun], 0).unwrap();
        let session = world.session().clone();
        let flushing = std::thread::spawn(move || session.flush());
        until("it is being sent", || sending.load(Ordering::SeqCst));
        file.write_all_at(&bytes[begun..], begun as u64).unwrap();
        grown.store(true, Ordering::SeqCst);
        flushing.join().unwrap().unwrap();
        world.session().flush().unwrap();
        assert_eq!(world.session().status().dirty, 0);
        let served = fs::read(world.server().join("file")).unwrap();
        assert!(
            served == bytes,
            "{begun}: {:?}",
            served.iter().zip(&bytes).position(|(one, other)| one != other)
        );
        assert!(fs::read(world.mount().join("file")).unwrap() == bytes);
    }
}

#[test]
fn a_transfer_of_content_delays_neither_reads_nor_names() {
    let world = World::new(
        |options| {
            back(options);
            options.settings.fresh = Some(0);
        },
        |server| {
            fs::create_dir(server.join("dir")).unwrap();
            for name in ["large", "other", "dir/old", "dir/file"] {
                fs::write(server.join(name), "as it was").unwrap();
            }
        },
    );
    let mount = world.mount();
    let [sending, over] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let held = [sending.clone(), over.clone()];
    world.wire.decide(move |request| {
        if request.kind == WriteCall::KIND {
            held[0].store(true, Ordering::SeqCst);
            tokio::task::block_in_place(|| until("the transfer may end", || held[1].load(Ordering::SeqCst)));
        }
        Fate::Answered
    });
    fs::write(mount.join("large"), pattern(100_000, 3)).unwrap();
    let session = world.session().clone();
    let flushing = std::thread::spawn(move || session.flush());
    until("it is being sent", || sending.load(Ordering::SeqCst));
    // The renamed directory and what is in it need the name that the server knows.
    fs::rename(mount.join("dir"), mount.join("renamed")).unwrap();
    fs::rename(mount.join("renamed/old"), mount.join("renamed/new")).unwrap();
    assert_eq!(fs::read_to_string(mount.join("other")).unwrap(), "as it was");
    for name in ["renamed/file", "renamed/new"] {
        assert_eq!(fs::read_to_string(mount.join(name)).unwrap(), "as it was");
    }
    assert!(!flushing.is_finished());
    over.store(true, Ordering::SeqCst);
    flushing.join().unwrap().unwrap();
    world.session().flush().unwrap();
    assert_eq!(world.session().status().events, []);
    assert_eq!(fs::read(world.server().join("large")).unwrap(), pattern(100_000, 3));
    assert_eq!(fs::read_to_string(world.server().join("renamed/new")).unwrap(), "as it was");
}

#[test]
fn names_that_wait_to_be_sent_hide_no_changes_of_the_server_elsewhere() {
    let world = World::new(
        |options| {
            back(options);
            options.settings.fresh = Some(0);
        },
        |server| {
            for dir in ["busy", "quiet"] {
                fs::create_dir(server.join(dir)).unwrap();
                fs::write(server.join(dir).join("file"), "first").unwrap();
            }
        },
    );
    let (mount, server) = (world.mount(), world.server());
    for dir in ["busy", "quiet"] {
        assert_eq!(fs::read_to_string(mount.join(dir).join("file")).unwrap(), "first");
    }
    fs::write(mount.join("busy/made"), "here").unwrap();
    fs::rename(mount.join("busy/file"), mount.join("busy/moved")).unwrap();
    fs::write(server.join("quiet/file"), "second, and longer").unwrap();
    fs::write(server.join("quiet/more"), "more").unwrap();
    assert_eq!(fs::read_to_string(mount.join("quiet/file")).unwrap(), "second, and longer");
    assert_eq!(fs::read_to_string(mount.join("quiet/more")).unwrap(), "more");
    assert_eq!(fs::read_to_string(mount.join("busy/moved")).unwrap(), "first");
    let mut names: Vec<_> =
        fs::read_dir(mount.join("busy")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["made", "moved"]);
    assert!(!server.join("busy/made").exists(), "nothing was sent because of a read");
}

#[test]
fn a_cache_that_removed_files_fill_is_full_at_once_and_until_they_are_closed() {
    let world = World::new(
        |options| {
            back(options);
            options.capacity = 1 << 20;
            // A write that waits for room waits for longer than any test runs.
            options.settings.patience = 100_000;
        },
        |_| {},
    );
    let path = world.mount().join("removed");
    let mut removed = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let refused = removed.write_all(&pattern(2 << 20, 5)).and_then(|()| removed.sync_all());
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(28));
    drop(removed);
    let bytes = pattern(2 << 20, 6);
    until("the file is closed", || fs::write(world.mount().join("next"), &bytes).is_ok());
    assert!(fs::read(world.mount().join("next")).unwrap() == bytes);
}
