//! The quota of an export: what is refused, what is still possible, and how it ends.

use crate::common::{World, back, pattern, until};
use rustix::io::Errno;
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};
use whimbrel_session::server::{Export, Limits, Server};

const KIB: usize = 1 << 10;
const QUOTA: u64 = 1 << 20;

fn write(path: &Path, kib: usize) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&pattern(kib * KIB, 1))?;
    file.sync_all()
}

fn is_refused(written: io::Result<()>) -> bool {
    written.is_err_and(|error| error.raw_os_error() == Some(Errno::DQUOT.raw_os_error()))
}

#[test]
fn an_export_takes_no_more_than_its_quota_and_what_it_has_can_be_changed() {
    let dir = tempfile::tempdir().unwrap();
    let server = dir.path().join("server");
    fs::create_dir(&server).unwrap();
    fs::write(server.join("there"), pattern(256 * KIB, 2)).unwrap();
    let export = Export::new(&server).unwrap().with_quota(QUOTA).unwrap();
    let served = Server::new(vec![export], false, Limits { ownership: true, ..Limits::default() });
    let world = World::on(dir, &server, (served, false), |_| {});
    let mount = world.mount();
    until("what is there is counted", || {
        let space = rustix::fs::statvfs(&mount).unwrap();
        let left = space.f_bavail * space.f_frsize;
        space.f_blocks * space.f_frsize == QUOTA && left < QUOTA - (250 << 10)
    });

    write(&mount.join("first"), 512).unwrap();
    assert!(is_refused(write(&mount.join("second"), 512)), "more than the quota was taken");
    let taken: u64 = ["there", "first", "second"]
        .map(|name| fs::metadata(server.join(name)).unwrap().blocks() * 512)
        .iter()
        .sum();
    assert!(taken <= QUOTA, "{taken} bytes are there");
    fs::remove_file(mount.join("second")).unwrap();
    // Over its own blocks a file can be written, and what is removed is free.
    let first = File::options().write(true).open(mount.join("first")).unwrap();
    first.write_all_at(&pattern(512 * KIB, 3), 0).and_then(|()| first.sync_all()).unwrap();
    assert_eq!(fs::read(server.join("first")).unwrap(), pattern(512 * KIB, 3));
    fs::remove_file(mount.join("there")).unwrap();
    write(&mount.join("third"), 400).unwrap();
    assert!(is_refused(write(&mount.join("fourth"), 400)));

    // Files that somebody removes on the server are noticed.
    fs::remove_file(server.join("first")).unwrap();
    until("there is room again", || write(&mount.join("fourth"), 400).is_ok());
    assert_eq!(fs::read(server.join("fourth")).unwrap(), pattern(400 * KIB, 1));
}

#[test]
fn what_a_cache_has_for_a_full_export_waits_until_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let server = dir.path().join("server");
    fs::create_dir(&server).unwrap();
    fs::write(server.join("there"), pattern(700 * KIB, 2)).unwrap();
    let export = Export::new(&server).unwrap().with_quota(QUOTA).unwrap();
    let served = Server::new(vec![export], false, Limits { ownership: true, ..Limits::default() });
    let world = World::on(dir, &server, (served, false), back);
    let mount = world.mount();
    until("what is there is counted", || {
        let space = rustix::fs::statvfs(&mount).unwrap();
        space.f_bavail * space.f_frsize < QUOTA - (690 << 10)
    });
    fs::write(mount.join("new"), pattern(600 * KIB, 5)).unwrap();
    assert!(world.session().flush().is_err(), "more than the quota was taken");
    assert_eq!(fs::read(mount.join("new")).unwrap(), pattern(600 * KIB, 5));
    fs::remove_file(server.join("there")).unwrap();
    until("it is sent", || world.session().flush().is_ok());
    assert_eq!(fs::read(server.join("new")).unwrap(), pattern(600 * KIB, 5));
    // Its user is told why it waited.
    let events = world.session().status().events;
    assert!(!events.is_empty() && events.iter().all(|event| event.text.contains("quota")), "{events:?}");
}
