//! Write-back of name changes: few of them are sent, and disconnections, crashes and restarts leave the tree
//! that a local disk would have.

use crate::common::{Fate, World, server_of, until};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::Semaphore;
use whimbrel_session::{
    client::{Policy, SessionOptions},
    proto::{OpCall, SyncCall, WriteCall, code},
    server::{Export, Limits, Server},
};
use whimbrel_wire::{Call, Code, Refusal};

fn back(options: &mut SessionOptions) {
    options.settings.policy = Policy::Back;
    options.settings.delay = None;
    options.settings.fresh = None;
    options.settings.patience = 20;
}

/// Everything below a directory: kind, mode, and content or target.
fn tree(dir: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(at) = dirs.pop() {
        for entry in fs::read_dir(&at).unwrap().map(Result::unwrap) {
            let (path, meta) = (entry.path(), entry.metadata().unwrap());
            let mode = meta.permissions().mode() & 0o777;
            let what = if meta.is_dir() {
                dirs.push(path.clone());
                "dir".to_owned()
            } else if meta.is_symlink() {
                format!("link to {}", fs::read_link(&path).unwrap().display())
            } else {
                format!("{mode:o} {}", fs::read_to_string(&path).unwrap())
            };
            found.insert(path.strip_prefix(dir).unwrap().display().to_string(), what);
        }
    }
    found
}

fn replace(dir: &Path, name: &str, content: &str) -> io::Result<()> {
    let temporary = dir.join("the.tmp");
    fs::write(&temporary, content)?;
    fs::File::open(&temporary)?.sync_all()?;
    fs::rename(temporary, dir.join(name))?;
    fs::File::open(dir)?.sync_all()
}

#[test]
fn three_thousand_changes_made_while_the_line_was_cut_go_back_in_a_few_requests() {
    let mut world = World::new(back, |server| fs::write(server.join("kept-0"), "old").unwrap());
    let mount = world.mount();
    assert_eq!(fs::read_dir(&mount).unwrap().count(), 1);
    world.wire.cut(true);
    for number in 0..1500 {
        replace(&mount, &format!("kept-{}", number % 3), &format!("content {number}")).unwrap();
    }
    assert_eq!(world.session().status().queued, 3000);
    // A rotation of logs, where every name is used again each time.
    for number in 0..100 {
        let names = ["log", "log.1", "log.2"].map(|name| mount.join(name));
        for (from, to) in [(1, 2), (0, 1)] {
            if names[from].exists() {
                fs::rename(&names[from], &names[to]).unwrap();
            }
        }
        fs::write(&names[0], format!("{number}")).unwrap();
    }
    let expected = tree(&mount);
    assert_eq!(expected.len(), 6);
    world.crash();
    let (ops, writes, syncs) =
        (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counts =
        [(OpCall::KIND, ops.clone()), (WriteCall::KIND, writes.clone()), (SyncCall::KIND, syncs.clone())];
    world.wire.decide(move |request| {
        for (kind, count) in &counts {
            count.fetch_add(u64::from(request.kind == *kind), Ordering::SeqCst);
        }
        Fate::Answered
    });
    world.begin();
    // The tree exists before the mount.
    assert_eq!(tree(&world.server()), expected);
    let [ops, writes, syncs] = [ops, writes, syncs].map(|count| count.load(Ordering::SeqCst));
    assert!(ops <= 12 && writes <= 6, "{ops} changes of names and {writes} writes");
    assert!(syncs <= 16, "{syncs} requests to have something on the disk");
    assert_eq!(world.session().status().events.len(), 1, "{:?}", world.session().status().events);
    assert_eq!(tree(&mount), expected);
}

#[test]
fn a_file_that_lost_the_name_it_was_made_under_is_written_back_under_its_other_one() {
    let world = World::new(back, |_| {});
    let mount = world.mount();
    for (made, kept) in [("object.tmp", "object"), ("other.tmp", "other")] {
        fs::write(mount.join(made), kept).unwrap();
        fs::hard_link(mount.join(made), mount.join(kept)).unwrap();
    }
    fs::remove_file(mount.join("object.tmp")).unwrap();
    fs::write(mount.join("third"), "third").unwrap();
    fs::rename(mount.join("third"), mount.join("other.tmp")).unwrap();
    world.session().flush().unwrap();
    assert_eq!(world.session().status().events, []);
    assert_eq!(tree(&world.server()), tree(&mount));
}

#[test]
fn a_file_that_was_renamed_changed_and_removed_before_it_was_sent_never_comes_to_the_server() {
    let world = World::new(back, |_| {});
    let (made, renamed) = (world.mount().join("made"), world.mount().join("renamed"));
    fs::write(&made, "x").unwrap();
    fs::rename(&made, &renamed).unwrap();
    fs::set_permissions(&renamed, fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(&renamed).unwrap();
    world.session().flush().unwrap();
    assert_eq!(tree(&world.server()), BTreeMap::new());
}

#[test]
fn a_mode_that_the_server_has_yet_to_get_is_kept_when_its_directory_is_listed_again() {
    let world = World::new(
        |options| {
            back(options);
            options.settings.fresh = Some(0);
        },
        |server| ["a", "b"].into_iter().for_each(|name| fs::write(server.join(name), name).unwrap()),
    );
    let mount = world.mount();
    fs::set_permissions(mount.join("a"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::write(world.server().join("c"), "c").unwrap();
    let expected = BTreeMap::from([("a", "640 a"), ("b", "644 b"), ("c", "644 c")]);
    let expected = expected.into_iter().map(|(name, what)| (name.to_owned(), what.to_owned())).collect();
    assert_eq!(tree(&mount), expected);
    world.session().flush().unwrap();
    assert_eq!(tree(&mount), expected);
    assert_eq!(tree(&world.server()), expected);
}

#[test]
fn a_change_that_may_have_been_sent_is_not_folded_away() {
    let mut world = World::new(back, |_| {});
    let (mount, server) = (world.mount(), world.server());
    fs::write(mount.join("first"), "x").unwrap();
    world.wire.decide(|request| if request.kind == OpCall::KIND { Fate::Lost } else { Fate::Answered });
    let session = world.session().clone();
    // The thread ends with the session.
    let flushing = std::thread::spawn(move || _ = session.flush());
    until("the server has made it", || server.join("first").exists());
    world.wire.cut(true);
    fs::rename(mount.join("first"), mount.join("second")).unwrap();
    world.crash();
    flushing.join().unwrap();
    world.wire.decide(|_| Fate::Answered);
    world.begin();
    // The server had already created the first name.
    assert_eq!(tree(&server).into_keys().collect::<Vec<_>>(), ["second"]);
}

#[test]
fn a_change_that_the_server_gets_round_to_late_is_not_made_after_those_that_followed_it() {
    late_change(false);
}

#[test]
fn a_change_that_another_process_gets_round_to_late_is_not_made_after_those_that_followed_it() {
    late_change(true);
}

/// Tests a delayed change. With `processes` the server is a new process for every connection, as with ssh.
fn late_change(processes: bool) {
    let mut world = World::new(back, |_| {});
    let (mount, server) = (world.mount(), world.server());
    let turns = tempfile::tempdir().unwrap();
    let process = || {
        let limits = Limits { token_dir: Some(turns.path().to_owned()), ..Limits::default() };
        Server::new(vec![Export::new(&server).unwrap()], false, limits)
    };
    if processes {
        world.wire.restart(process());
    }
    let (permits, asked) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicU64::new(0)));
    let (late, counted) = (permits.clone(), asked.clone());
    world.wire.decide(move |request| {
        let change = request.kind == OpCall::KIND;
        counted.fetch_add(u64::from(change), Ordering::SeqCst);
        if change { Fate::Late(late.clone()) } else { Fate::Answered }
    });
    // Only now: on a busy host it is sent before somebody asks for that.
    fs::write(mount.join("first"), "x").unwrap();
    let session = world.session().clone();
    // The thread ends with the session.
    let flushing = std::thread::spawn(move || _ = session.flush());
    until("the server was asked", || asked.load(Ordering::SeqCst) > 0);
    world.wire.cut(true);
    fs::rename(mount.join("first"), mount.join("second")).unwrap();
    world.crash();
    flushing.join().unwrap();
    if processes {
        world.wire.restart(process());
    }
    world.wire.decide(|_| Fate::Answered);
    world.begin();
    assert_eq!(tree(&server).into_keys().collect::<Vec<_>>(), ["second"]);
    permits.add_permits(1);
    // The semaphore has no other owner once all requests are done.
    world.wire.decide(|_| Fate::Answered);
    until("the server got round to them", || Arc::strong_count(&permits) == 1);
    assert_eq!(tree(&server).into_keys().collect::<Vec<_>>(), ["second"]);
}

/// Makes one random change, on the mount and on a local directory; both must accept or refuse it.
fn change(random: &mut StdRng, dirs: [&Path; 2], number: u64) {
    const NAMES: [&str; 10] = ["a", "b", "c", "t", "d", "d/a", "d/b", "e", "e/a", "e/b"];
    let mut name = || NAMES[random.random_range(0..NAMES.len())];
    let (one, other, content) = (name(), name(), format!("{number}"));
    let kind = random.random_range(0..20);
    let make = |dir: &Path| -> io::Result<()> {
        let (one, other) = (dir.join(one), dir.join(other));
        match kind {
            0..4 if one.is_dir() => Ok(()),
            0..4 => fs::write(one, &content),
            4..10 => fs::rename(one, other),
            10..13 => {
                fs::write(dir.join("t"), &content)?;
                fs::set_permissions(dir.join("t"), fs::Permissions::from_mode(0o640))?;
                fs::rename(dir.join("t"), one)
            }
            13 => {
                // Like git creates its objects.
                fs::write(dir.join("t"), &content)?;
                fs::hard_link(dir.join("t"), one)?;
                fs::remove_file(dir.join("t"))
            }
            14 => fs::remove_file(one),
            15 => fs::create_dir(one),
            16 => fs::remove_dir(one),
            17 => std::os::unix::fs::symlink("a", one),
            18 => fs::set_permissions(one, fs::Permissions::from_mode(0o600)),
            _ => fs::File::open(one)?.sync_all(),
        }
    };
    let made = dirs.map(|dir| make(dir).map_err(|error| error.raw_os_error()));
    assert_eq!(made[0], made[1], "change {number}: {kind} of {one} and {other}");
}

fn run(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut world = World::new(
        |options| {
            back(options);
            options.settings.delay = seed.is_multiple_of(3).then_some(0);
        },
        |server| ["a", "b"].into_iter().for_each(|name| fs::write(server.join(name), name).unwrap()),
    );
    let (mount, local) = (world.mount(), world.dir.path().join("local"));
    fs::create_dir(&local).unwrap();
    ["a", "b"].into_iter().for_each(|name| fs::write(local.join(name), name).unwrap());
    for step in 0..12 {
        for number in 0..random.random_range(1..25) {
            change(&mut random, [&mount, &local], step * 100 + number);
        }
        let lost = random.random_range(1..20);
        match random.random_range(0..5) {
            // The answer to one of the next requests is lost after the server has carried it out.
            0 | 1 => {
                let count = AtomicU64::new(0);
                world.wire.decide(move |request| {
                    let counts = [OpCall::KIND, SyncCall::KIND, WriteCall::KIND].contains(&request.kind);
                    match counts && count.fetch_add(1, Ordering::SeqCst) == lost {
                        true => Fate::Lost,
                        false => Fate::Answered,
                    }
                });
                if lost % 2 == 0 {
                    world.session().flush().unwrap();
                }
            }
            2 => world.wire.restart(server_of(&world.server())),
            3 => {
                world.crash();
                world.begin();
            }
            _ => world.session().flush().unwrap(),
        }
        assert_eq!(tree(&mount), tree(&local), "seed {seed}, step {step}");
    }
    world.session().flush().unwrap();
    let events = world.session().status().events;
    assert_eq!(tree(&world.server()), tree(&local), "seed {seed}: {events:?}");
    assert!(!world.dir.path().join("cache/kept").exists(), "seed {seed}: {events:?}");
}

#[test]
fn random_changes_of_names_come_out_as_on_a_local_disk_whatever_breaks() {
    (0..8).for_each(run);
}

#[test]
fn names_that_the_server_cannot_take_for_a_while_are_sent_again() {
    // EIO, EBUSY, EROFS and a handler that failed.
    for refused in [Code(code::ERRNO + 5), Code(code::ERRNO + 16), Code(code::ERRNO + 30), Code::INTERNAL] {
        let world = World::new(back, |_| {});
        fs::create_dir(world.mount().join("dir")).unwrap();
        fs::write(world.mount().join("dir/file"), "text").unwrap();
        world.wire.decide(move |request| match request.kind {
            OpCall::KIND => Fate::Refused(Refusal::new(refused, "not now".to_owned())),
            _ => Fate::Answered,
        });
        world.session().flush().unwrap_err();
        world.wire.decide(|_| Fate::Answered);
        world.session().flush().unwrap();
        assert_eq!(fs::read_to_string(world.server().join("dir/file")).unwrap(), "text", "{refused:?}");
    }
}
