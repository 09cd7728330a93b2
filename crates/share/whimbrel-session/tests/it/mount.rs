//! Programs on a mount: what they see and change, ownership, and settings that change while it is mounted.

use crate::common::{self, World, pattern, until};
use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink},
    },
};
use whimbrel_session::client::{Control, IdMap, Policy};

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
    let world = World::new(common::back, |server| fs::write(server.join("file"), "x").unwrap());
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
fn a_session_does_not_take_the_name_of_one_that_answers() {
    let world = World::new(|_| {}, |_| {});
    let socket = world.dir.path().join("vms.sock");
    let start = || {
        let (ended, _) = std::sync::mpsc::channel();
        Control::start(&socket, world.session().clone(), world.mount(), ended)
    };
    let first = start().unwrap();
    assert!(start().is_err());
    assert!(
        whimbrel_session::client::send_request(&socket, &whimbrel_session::client::ControlRequest::Show)
            .is_ok()
    );
    drop(first);
    start().unwrap();
}

#[test]
fn owners_are_seen_and_set_as_they_are_paired() {
    for policy in [Policy::Through, Policy::Back] {
        let set = |options: &mut whimbrel_session::client::SessionOptions| {
            let pairs = ["user:4242=777", "group:4343=778"].map(|pair| pair.parse().unwrap());
            options.id_map = IdMap::with_pairs(pairs.to_vec()).unwrap();
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
