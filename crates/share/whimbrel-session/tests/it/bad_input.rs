//! Sessions under bad conditions: unreachable, restarted or lying servers, files that others change or
//! replace, expired keys, odd names, huge files, a full disk. (Busy mount points: `whimbrel-fuse`; an end
//! with dirty data: `e2e`; a million names: `large.rs`; wrong keys: `server.rs`.)

use crate::common::{self, Fate, World, back, pattern, until};
use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions, Permissions},
    io::Write,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};
use whimbrel_session::{
    client::{Policy, Session},
    proto::{ListCall, Listed},
    server::{Export, Limits, Server},
};
use whimbrel_wire::{Call, Reply};

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
fn what_somebody_else_wrote_before_our_change_of_a_file_is_read_and_never_merged() {
    for policy in [Policy::Through, Policy::Back] {
        let world = World::new(
            |options| {
                back(options);
                options.settings.policy = policy;
            },
            |server| {
                for name in ["mode", "time", "name", "link", "fought"] {
                    fs::write(server.join(name), "first").unwrap();
                }
            },
        );
        let (mount, server) = (world.mount(), world.server());
        for name in ["mode", "time", "name", "link"] {
            assert_eq!(fs::read_to_string(mount.join(name)).unwrap(), "first");
            fs::write(server.join(name), "other").unwrap();
        }
        fs::set_permissions(mount.join("mode"), Permissions::from_mode(0o600)).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        File::open(mount.join("time")).unwrap().set_modified(time).unwrap();
        fs::rename(mount.join("name"), mount.join("renamed")).unwrap();
        fs::hard_link(mount.join("link"), mount.join("linked")).unwrap();
        world.session().flush().unwrap();
        for name in ["mode", "time", "renamed", "link", "linked"] {
            assert_eq!(fs::read_to_string(mount.join(name)).unwrap(), "other", "{policy:?} {name}");
        }
        if policy == Policy::Back {
            let mut fought = OpenOptions::new().append(true).open(mount.join("fought")).unwrap();
            fought.write_all(b" and ours").unwrap();
            fs::write(server.join("fought"), "other").unwrap();
            fs::set_permissions(mount.join("fought"), Permissions::from_mode(0o600)).unwrap();
            world.session().flush().unwrap_err();
            assert_eq!(fs::read_to_string(server.join("fought")).unwrap(), "other", "never merged");
            assert_eq!(fs::read_dir(world.options.cache.join("kept")).unwrap().count(), 1);
        }
    }
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
fn a_name_may_be_any_bytes_on_either_side() {
    // All bytes except the slash, which separates names, and zero, which ends them. A dot is not a name by
    // itself.
    let names: Vec<Vec<u8>> = (1..=255u8)
        .filter(|byte| *byte != b'/')
        .flat_map(|byte| [vec![byte, b'x'], vec![b'x', byte, 0xff, byte]])
        .chain([vec![0xfe; 255]])
        .collect();
    let at = |dir: &Path, name: &Vec<u8>| dir.join(OsStr::from_bytes(name));
    for policy in [Policy::Through, Policy::Back] {
        let world = World::new(
            |options| options.settings.policy = policy,
            |server| {
                fs::create_dir(server.join("theirs")).unwrap();
                names.iter().for_each(|name| fs::write(at(&server.join("theirs"), name), name).unwrap());
            },
        );
        let (mount, server) = (world.mount(), world.server());
        fs::create_dir(mount.join("ours")).unwrap();
        for name in &names {
            assert_eq!(fs::read(at(&mount.join("theirs"), name)).unwrap(), *name);
            fs::write(at(&mount, &b"tmp".to_vec()), name).unwrap();
            fs::rename(mount.join("tmp"), at(&mount.join("ours"), name)).unwrap();
        }
        world.session().flush().unwrap();
        for dir in [server.join("ours"), mount.join("theirs"), mount.join("ours")] {
            let mut found: Vec<_> = fs::read_dir(&dir)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_encoded_bytes())
                .collect();
            found.sort();
            let mut expected = names.clone();
            expected.sort();
            assert_eq!(found, expected, "{policy}: {}", dir.display());
        }
        assert!(names.iter().all(|name| fs::read(at(&server.join("ours"), name)).unwrap() == *name));
        let long = at(&mount, &vec![b'n'; 256]);
        assert_eq!(fs::write(long, "x").unwrap_err().raw_os_error(), Some(36), "too long");
    }
}

#[test]
fn a_session_whose_key_the_server_has_given_up_goes_on_with_another() {
    let world = World::new(
        |_| {},
        |server| ["one", "two"].iter().for_each(|name| fs::write(server.join(name), name).unwrap()),
    );
    let limits = Limits { sessions: 1, ..Limits::default() };
    world.wire.restart(Server::new(vec![Export::new(&world.server()).unwrap()], false, limits));
    assert_eq!(fs::read_to_string(world.mount().join("one")).unwrap(), "one");
    // The server allows one session: the next one replaces this one.
    let mut options = world.options.clone();
    options.cache = world.dir.path().join("other");
    let _other = world.runtime.block_on(Session::start(world.wire.clone(), options)).unwrap();
    assert_eq!(fs::read_to_string(world.mount().join("two")).unwrap(), "two");
    fs::write(world.mount().join("one"), "changed").unwrap();
    assert_eq!(fs::read_to_string(world.server().join("one")).unwrap(), "changed");
}

#[test]
fn a_file_that_was_replaced_on_the_server_is_another_at_the_next_open_and_never_a_mixture() {
    let [old, new] = [1, 2].map(|seed| pattern(400_000, seed));
    let world = World::new(
        |options| options.settings.fresh = Some(0),
        |server| fs::write(server.join("file"), &old).unwrap(),
    );
    let (mount, server) = (world.mount(), world.server());
    let open = File::open(mount.join("file")).unwrap();
    let mut first = vec![0; 100_000];
    open.read_exact_at(&mut first, 0).unwrap();
    assert!(first == old[..100_000]);
    fs::write(server.join("new"), &new).unwrap();
    fs::rename(server.join("new"), server.join("file")).unwrap();
    until("it is the new one", || fs::read(mount.join("file")).unwrap() == new);
    // A program with the old file open gets its bytes as far as they are here, or an error, but nothing of
    // the new one.
    let mut rest = vec![0; 300_000];
    if open.read_exact_at(&mut rest, 100_000).is_ok() {
        assert!(rest == old[100_000..]);
    }
}

/// A file system of some MiB, unmounted on drop.
struct Small(PathBuf);

impl Small {
    fn new(dir: PathBuf) -> Self {
        fs::create_dir(&dir).unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "small"]).arg(&dir).status();
        assert!(mounted.unwrap().success());
        Self(dir)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_cache_whose_disk_is_full_serves_what_it_cannot_keep_and_takes_nothing_that_it_cannot() {
    let bytes = pattern(12 << 20, 7);
    let place = tempfile::tempdir().unwrap();
    let small = Small::new(place.path().join("small"));
    let world = World::new(
        |options| {
            back(options);
            options.cache = small.0.join("cache");
        },
        |server| fs::write(server.join("large"), &bytes).unwrap(),
    );
    assert!(fs::read(world.mount().join("large")).unwrap() == bytes, "more than there is room for");
    let file = File::create(world.mount().join("written")).unwrap();
    let put = |mib: &usize| file.write_all_at(&bytes[mib << 20..][..1 << 20], (*mib as u64) << 20).is_ok();
    let written = (0..12).take_while(put).count();
    let synced = file.sync_all();
    drop(file);
    assert!(written < 12, "there is no room for that");
    // Accepted data is not lost: it is on the server, or a call has failed.
    let flushed = world.session().flush();
    let served = fs::read(world.server().join("written")).unwrap_or_default();
    let same = served.len() >= written << 20 && served[..written << 20] == bytes[..written << 20];
    assert!(same || synced.is_err() || flushed.is_err(), "{written} MiB were taken, and nobody was told");
    assert!(fs::read(world.mount().join("large")).unwrap() == bytes);
    drop((world, small));
}
