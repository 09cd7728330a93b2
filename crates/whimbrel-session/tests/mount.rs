//! Programs on a mount: what they see, what the server has, and when.

mod common;

use common::{Fate, World, pattern, until};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink},
    },
};
use whimbrel_session::{
    client::{Control, Owners, Policy},
    proto::{ListCall, Listed, OpCall, WalkCall, WriteCall, code},
};
use whimbrel_wire::{Call, Code, Refusal, Reply};

#[test]
fn what_is_on_the_server_is_seen_and_read_once() {
    let bytes = pattern(3 << 20, 7);
    let world = World::new(
        |_| {},
        |server| {
            fs::create_dir(server.join("deep")).unwrap();
            fs::write(server.join("deep/file"), &bytes).unwrap();
            fs::write(server.join(OsStr::from_bytes(b"odd \xff\n\\name")), "x").unwrap();
            symlink("deep/file", server.join("link")).unwrap();
        },
    );
    let mount = world.mount();
    assert_eq!(fs::read(mount.join("deep/file")).unwrap(), bytes);
    assert_eq!(fs::read(mount.join("link")).unwrap(), bytes);
    let names: Vec<_> = fs::read_dir(&mount).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["deep".as_ref(), "link".as_ref(), OsStr::from_bytes(b"odd \xff\n\\name")]);
    assert_eq!(fs::metadata(mount.join("none")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    let received = world.session().status().received;
    let mut file = File::open(mount.join("deep/file")).unwrap();
    file.seek(SeekFrom::Start(1 << 20)).unwrap();
    let mut out = vec![0; 100_000];
    file.read_exact(&mut out).unwrap();
    assert_eq!(out, bytes[1 << 20..][..100_000]);
    assert!(world.session().status().received - received < 10_000, "it came from the cache");
}

fn writes_and_names(policy: Policy) {
    let world = World::new(
        |options| options.settings.policy = policy,
        |server| fs::write(server.join("old"), "old content").unwrap(),
    );
    let (mount, server) = (world.mount(), world.server());
    fs::create_dir(mount.join("dir")).unwrap();
    let bytes = pattern(300_001, 3);
    fs::write(mount.join("dir/new"), &bytes).unwrap();
    fs::rename(mount.join("dir/new"), mount.join("dir/renamed")).unwrap();
    fs::hard_link(mount.join("dir/renamed"), mount.join("second")).unwrap();
    symlink("dir", mount.join("to-dir")).unwrap();
    fs::set_permissions(mount.join("old"), fs::Permissions::from_mode(0o640)).unwrap();
    let old = OpenOptions::new().write(true).open(mount.join("old")).unwrap();
    old.write_all_at(b"OLD", 0).unwrap();
    old.set_len(7).unwrap();
    drop(old);
    fs::write(mount.join("temporary"), "never mind").unwrap();
    fs::remove_file(mount.join("temporary")).unwrap();
    fs::create_dir(mount.join("empty")).unwrap();
    fs::remove_dir(mount.join("empty")).unwrap();
    let refused = fs::remove_dir(mount.join("dir")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(39), "not empty");
    let taken = OpenOptions::new().write(true).create_new(true).open(mount.join("old")).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AlreadyExists);

    assert_eq!(fs::read(mount.join("to-dir/renamed")).unwrap(), bytes);
    assert_eq!(fs::read_to_string(mount.join("old")).unwrap(), "OLD con");
    world.session().flush().unwrap();
    assert_eq!(world.session().status().events, [], "{policy}");
    assert_eq!(fs::read(server.join("dir/renamed")).unwrap(), bytes);
    assert_eq!(fs::metadata(server.join("second")).unwrap().nlink(), 2);
    assert_eq!(fs::read_link(server.join("to-dir")).unwrap().to_str(), Some("dir"));
    assert_eq!(fs::read_to_string(server.join("old")).unwrap(), "OLD con");
    assert_eq!(fs::metadata(server.join("old")).unwrap().mode() & 0o777, 0o640);
    assert!(!server.join("temporary").exists() && !server.join("empty").exists());
    let status = world.session().status();
    assert_eq!((status.dirty, status.dirty_files, status.queued), (0, 0, 0));
    assert_eq!(fs::metadata(mount.join("second")).unwrap().size(), 300_001);
}

#[test]
fn writes_and_names_reach_the_server_under_write_through() {
    writes_and_names(Policy::Through);
}

#[test]
fn writes_and_names_reach_the_server_under_write_back() {
    writes_and_names(Policy::Back);
}

fn back(options: &mut whimbrel_session::client::SessionOptions) {
    options.settings.policy = Policy::Back;
    options.settings.delay = None;
    options.settings.fresh = None;
}

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
fn a_removed_file_stays_readable_for_who_has_it_open() {
    for policy in [Policy::Through, Policy::Back] {
        let bytes = pattern(2 << 20, 5);
        let world = World::new(
            |options| options.settings.policy = policy,
            |server| fs::write(server.join("file"), &bytes).unwrap(),
        );
        let mut open = OpenOptions::new().read(true).write(true).open(world.mount().join("file")).unwrap();
        fs::remove_file(world.mount().join("file")).unwrap();
        world.session().flush().unwrap();
        assert!(!world.server().join("file").exists());
        open.write_all_at(b"still", 10).unwrap();
        let mut out = Vec::new();
        open.read_to_end(&mut out).unwrap();
        let mut expected = bytes.clone();
        expected[10..15].copy_from_slice(b"still");
        assert!(out == expected, "{policy}");
        drop(open);
        until("nothing of it is left to be sent", || world.session().status().dirty == 0);
    }
}

#[test]
fn a_change_on_the_server_is_seen_at_the_next_open_and_a_conflict_keeps_both() {
    let world = World::new(
        |options| {
            back(options);
            options.settings.fresh = Some(0);
        },
        |server| {
            fs::write(server.join("shared"), "first").unwrap();
            fs::write(server.join("fought"), "first").unwrap();
        },
    );
    let (mount, server) = (world.mount(), world.server());
    assert_eq!(fs::read_to_string(mount.join("shared")).unwrap(), "first");
    fs::write(server.join("shared"), "second, and longer").unwrap();
    assert_eq!(fs::read_to_string(mount.join("shared")).unwrap(), "second, and longer");

    OpenOptions::new().append(true).open(mount.join("fought")).unwrap().write_all(b" and ours").unwrap();
    fs::write(server.join("fought"), "theirs").unwrap();
    world.session().flush().unwrap_err();
    assert_eq!(fs::read_to_string(server.join("fought")).unwrap(), "theirs", "never merged");
    let kept: Vec<_> =
        fs::read_dir(world.options.cache.join("kept")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(kept.len(), 1);
    assert_eq!(fs::read_to_string(&kept[0]).unwrap(), "first and ours");
    let events = world.session().status().events;
    assert!(
        events.iter().any(|event| event.text.contains("fought") && event.text.contains("kept")),
        "{events:?}"
    );
    until("theirs is seen", || fs::read_to_string(mount.join("fought")).is_ok_and(|text| text == "theirs"));
    world.session().flush().unwrap();
}

#[test]
fn without_a_server_what_is_cached_is_read_and_the_rest_fails_after_the_chosen_time() {
    let bytes = pattern(200_000, 5);
    let world = World::new(
        |options| options.settings.patience = 1,
        |server| {
            fs::write(server.join("seen"), &bytes).unwrap();
            fs::write(server.join("unseen"), &bytes).unwrap();
        },
    );
    assert_eq!(fs::read(world.mount().join("seen")).unwrap(), bytes);
    world.wire.cut(true);
    until("the link is down", || !world.session().status().connected);
    assert_eq!(fs::read(world.mount().join("seen")).unwrap(), bytes);
    let failed = fs::read(world.mount().join("unseen")).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(5));
    world.wire.mend();
    until("it is read once the server is there", || {
        fs::read(world.mount().join("unseen")).is_ok_and(|read| read == bytes)
    });
    assert_eq!(world.session().status().broken, 1);
}

#[test]
fn a_server_that_was_started_anew_goes_on_where_the_last_one_was() {
    let bytes = pattern(2_000_000, 5);
    let world = World::new(|_| {}, |server| fs::write(server.join("file"), &bytes).unwrap());
    let open = OpenOptions::new().read(true).write(true).open(world.mount().join("file")).unwrap();
    let mut out = vec![0; 1000];
    open.read_exact_at(&mut out, 0).unwrap();
    world.wire.restart(common::server_of(&world.server()));
    open.write_all_at(b"after", 1_500_000).unwrap();
    open.sync_all().unwrap();
    assert_eq!(fs::read(world.server().join("file")).unwrap()[1_500_000..][..5], *b"after");
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
fn the_second_session_finds_the_cache_of_the_first() {
    let bytes = pattern(3 << 20, 11);
    let mut world = World::new(|_| {}, |server| fs::write(server.join("golden.raw"), &bytes).unwrap());
    assert_eq!(fs::read(world.mount().join("golden.raw")).unwrap(), bytes);
    world.end();
    world.begin();
    assert_eq!(fs::read(world.mount().join("golden.raw")).unwrap(), bytes);
    assert!(world.session().status().received < 20_000);
}

#[test]
fn policies_change_while_it_is_mounted() {
    let world = World::new(back, |server| fs::write(server.join("file"), "x").unwrap());
    let file = world.mount().join("file");
    world.session().set("write", "none").unwrap();
    assert_eq!(fs::write(&file, "no").unwrap_err().raw_os_error(), Some(30));
    world.session().set("*.log", "through").unwrap();
    fs::write(world.mount().join("a.log"), "at once").unwrap();
    assert_eq!(fs::read_to_string(world.server().join("a.log")).unwrap(), "at once");
    world.session().set("write", "back").unwrap();
    fs::write(&file, "later").unwrap();
    assert_eq!(fs::read_to_string(world.server().join("file")).unwrap(), "x");
    world.session().set("delay", "0").unwrap();
    until("it is written back", || fs::read_to_string(world.server().join("file")).unwrap() == "later");
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
fn a_large_directory_is_listed_whole_and_a_sparse_file_costs_nothing() {
    let world = World::new(
        |_| {},
        |server| {
            fs::create_dir(server.join("many")).unwrap();
            for number in 0..20_000 {
                File::create(server.join(format!("many/{number:06}"))).unwrap();
            }
            let sparse = File::create(server.join("sparse")).unwrap();
            sparse.set_len(1 << 40).unwrap();
            sparse.write_all_at(b"end", (1 << 40) - 3).unwrap();
        },
    );
    assert!(fs::metadata(world.mount().join("many/012345")).unwrap().is_file());
    assert_eq!(fs::read_dir(world.mount().join("many")).unwrap().count(), 20_000);
    let received = world.session().status().received;
    let sparse = File::open(world.mount().join("sparse")).unwrap();
    let mut out = vec![1; 4 << 20];
    sparse.read_exact_at(&mut out, 1 << 38).unwrap();
    assert!(out.iter().all(|byte| *byte == 0));
    sparse.read_exact_at(&mut out[..3], (1 << 40) - 3).unwrap();
    assert_eq!(out[..3], *b"end");
    assert!(world.session().status().received - received < 20_000);
    assert!(world.session().status().used < 1 << 20, "zeros take no room in the cache");
}

#[test]
fn a_mount_that_is_served_again_is_a_cache_between() {
    let bytes = pattern(700_000, 23);
    let far = World::new(|_| {}, |server| fs::write(server.join("golden.raw"), &bytes).unwrap());
    let near = World::over(&far, |_| {});
    let other = World::over(&far, |_| {});
    assert_eq!(fs::read(near.mount().join("golden.raw")).unwrap(), bytes);
    let received = far.session().status().received;
    assert_eq!(fs::read(other.mount().join("golden.raw")).unwrap(), bytes);
    assert!(far.session().status().received - received < 20_000, "the second comes from the cache between");
    let new = File::create(near.mount().join("new")).unwrap();
    new.write_all_at(&bytes[..5000], 0).unwrap();
    new.sync_all().unwrap();
    assert_eq!(fs::read(far.server().join("new")).unwrap(), bytes[..5000]);
    drop((near, other));
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
        // Under write-through it is the close that fails, and nobody hears of that here.
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
    // Each change is sent until every other answer comes through.
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
fn a_program_hears_at_its_sync_that_what_it_wrote_was_put_aside_and_a_huge_file_is_kept_at_once() {
    let world =
        World::new(back, |server| File::create(server.join("huge")).unwrap().set_len(1 << 42).unwrap());
    let huge = OpenOptions::new().write(true).open(world.mount().join("huge")).unwrap();
    huge.write_all_at(&pattern(5000, 3), 1 << 41).unwrap();
    fs::write(world.server().join("huge"), "theirs").unwrap();
    world.session().flush().unwrap_err();
    assert_eq!(huge.sync_all().unwrap_err().raw_os_error(), Some(116), "stale");
    let kept = fs::read_dir(world.options.cache.join("kept")).unwrap().next().unwrap().unwrap().path();
    let mut out = vec![0; 5000];
    File::open(kept).unwrap().read_exact_at(&mut out, 1 << 41).unwrap();
    assert_eq!(out, pattern(5000, 3));
}

#[test]
fn a_server_that_claims_more_names_than_there_can_be_is_not_believed() {
    let world = World::new(
        |_| {},
        |server| (0..3000).for_each(|number| drop(File::create(server.join(number.to_string())).unwrap())),
    );
    fn more(reply: Reply) -> Reply {
        let listed = reply.decode::<ListCall>().unwrap();
        Reply::of::<ListCall>(&Listed { total: u64::MAX, ..listed }, reply.payload).unwrap()
    }
    world.wire.decide(|request| match request.kind {
        ListCall::KIND => Fate::Changed(more),
        _ => Fate::Answered,
    });
    assert_eq!(fs::read_dir(world.mount()).unwrap_err().raw_os_error(), Some(5));
}

#[test]
fn a_session_does_not_take_the_name_of_one_that_answers() {
    let world = World::new(|_| {}, |_| {});
    let socket = world.dir.path().join("vms.sock");
    let start = || {
        let (ended, _) = std::sync::mpsc::channel();
        Control::start(&socket, world.session().clone(), world.mount(), ended)
    };
    let first = start().unwrap();
    assert!(start().is_err());
    assert!(whimbrel_session::client::ask(&socket, &whimbrel_session::client::ControlRequest::Show).is_ok());
    drop(first);
    start().unwrap();
}

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
    // Two that were asked for, and sixteen after them.
    until("the next ones are here", || world.session().status().used >= 18 * 65536);
    world.wire.cut(true);
    assert!((10..28).all(read));
    assert!(!read(30), "nothing else was brought");
}

fn asked(world: &World, kind: &str) -> u64 {
    world.session().status().requests[kind]
}

/// Directories `0..dirs` of a file each.
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
    // The kernel believes it absent as well.
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
    /// The answer is what was so when it was asked for, and comes when it is told to.
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

#[test]
fn owners_are_seen_and_set_as_they_are_paired() {
    for policy in [Policy::Through, Policy::Back] {
        let set = |options: &mut whimbrel_session::client::SessionOptions| {
            let pairs = ["user:4242=777", "group:4343=778"].map(|pair| pair.parse().unwrap());
            options.owners = Owners::mine(pairs.to_vec()).unwrap();
            options.settings.policy = policy;
        };
        let world = World::new(set, |server| {
            for (name, owner) in [("paired", (4242, 4343)), ("other", (4243, 4242)), ("mine", (0, 0))] {
                fs::write(server.join(name), name).unwrap();
                chown(server.join(name), Some(owner.0), Some(owner.1)).unwrap();
            }
        });
        let owner = |path: std::path::PathBuf| {
            let meta = fs::metadata(path).unwrap();
            (meta.uid(), meta.gid())
        };
        let here = |name: &str| world.mount().join(name);
        assert_eq!(
            ["paired", "other", "mine"].map(|name| owner(here(name))),
            [(777, 778), (65534, 65534), (0, 0)]
        );
        chown(here("mine"), Some(777), None).unwrap();
        assert_eq!(chown(here("paired"), Some(4242), None).unwrap_err().raw_os_error(), Some(1));
        world.session().flush().unwrap();
        assert_eq!(owner(world.server().join("mine")), (4242, 0), "{policy}");
        world.session().invalidate().unwrap();
        assert_eq!(owner(here("mine")), (777, 0));
    }
}
