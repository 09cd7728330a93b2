//! Warming and pins: files are fetched before they are read, and stay.

use crate::common::{World, pattern};
use std::{fs, path::Path, sync::mpsc};
use whimbrel_session::{
    client::{
        Control, ControlRequest, SessionOptions, WarmError, WarmProgress, send_request,
        send_request_with_progress,
    },
    proto::RelPath,
};

const BLOCK: usize = 65_536;
const FILES: [&str; 2] = ["images/a.img", "images/deep/b.img"];
/// Bytes of each of them, with an incomplete last page.
const SIZE: usize = (1 << 20) + 100;
const ALL: WarmProgress = WarmProgress { files: 2, total: 2 * SIZE as u64, here: 2 * SIZE as u64 };

fn options(options: &mut SessionOptions) {
    options.capacity = (64 * BLOCK) as u64;
    options.settings.fresh = None;
    options.settings.patience = 1;
}

fn fill(server: &Path) {
    fs::create_dir_all(server.join("images/deep")).unwrap();
    FILES.iter().zip(1..).for_each(|(name, seed)| fs::write(server.join(name), pattern(SIZE, seed)).unwrap());
    std::os::unix::fs::symlink("deep/b.img", server.join("images/link")).unwrap();
    fs::write(server.join("large.img"), pattern(128 * BLOCK, 9)).unwrap();
}

fn path(text: &str) -> RelPath {
    RelPath::new(text.as_bytes()).unwrap()
}

/// Reads more than the cache has room for.
fn read_large(world: &World) {
    (0..3).for_each(|_| {
        assert!(fs::read(world.mount().join("large.img")).unwrap() == pattern(128 * BLOCK, 9));
    });
}

/// Whether the files can be read without the server.
fn are_here(world: &World) -> bool {
    // The names are not part of the content.
    FILES
        .iter()
        .for_each(|name| assert_eq!(fs::metadata(world.mount().join(name)).unwrap().len(), SIZE as u64));
    world.wire.cut(true);
    let here = FILES.iter().zip(1..).all(|(name, seed)| {
        fs::read(world.mount().join(name)).is_ok_and(|content| content == pattern(SIZE, seed))
    });
    world.wire.mend();
    here
}

#[test]
fn what_was_warmed_is_here_and_what_is_pinned_stays_whatever_else_is_read() {
    let mut world = World::new(options, fill);
    assert_eq!(world.session().warm(&path("images"), &mut |_| true).unwrap(), ALL);
    assert!(are_here(&world));
    read_large(&world);
    assert!(!are_here(&world), "it is not pinned");
    world.session().pin(&path("images")).unwrap();
    assert_eq!(world.session().warm(&path("images"), &mut |_| true).unwrap(), ALL);
    read_large(&world);
    assert!(are_here(&world));
    world.end();
    world.begin();
    assert_eq!(world.session().status().pins, ["images"]);
    read_large(&world);
    assert!(are_here(&world), "another session forgot it");
    let asked = world.session().status().requests["read"];
    assert_eq!(world.session().warm(&path("images"), &mut |_| true).unwrap(), ALL);
    assert_eq!(world.session().status().requests["read"], asked, "it was fetched again");
    world.session().unpin(&RelPath::root()).unwrap();
    read_large(&world);
    assert!(!are_here(&world), "it is not pinned any more");
}

#[test]
fn what_has_no_room_or_is_not_there_is_refused_and_changes_nothing() {
    let world = World::new(options, fill);
    let session = world.session();
    assert!(matches!(session.warm(&RelPath::root(), &mut |_| true), Err(WarmError::TooLarge { .. })));
    assert!(matches!(session.pin(&path("large.img")), Err(WarmError::TooLarge { .. })));
    assert!(matches!(session.pin(&path("none")), Err(WarmError::Failed { .. })));
    assert!(matches!(session.unpin(&path("images")), Err(WarmError::NotPinned { .. })));
    assert_eq!(session.status().pins, [""; 0]);
    session.pin(&path("images/deep")).unwrap();
    session.pin(&path("images")).unwrap();
    session.pin(&path("images/a.img")).unwrap();
    assert_eq!(session.status().pins, ["images"], "one covers the others");
    let mut told = 0;
    let cancelled = session.warm(&path("images"), &mut |_| {
        told += 1;
        false
    });
    assert!(matches!(cancelled, Err(WarmError::Cancelled)) && told == 1);
    let uncached = World::new(|options| options.capacity = 0, fill);
    assert!(matches!(uncached.session().pin(&path("images")), Err(WarmError::NoCache)));
}

#[test]
fn a_list_of_pins_that_cannot_be_read_is_reported_and_pins_nothing() {
    let mut world = World::new(options, fill);
    world.session().pin(&path("images")).unwrap();
    world.end();
    fs::write(world.dir.path().join("cache/pins"), [0xff; 100]).unwrap();
    world.begin();
    let status = world.session().status();
    assert_eq!((status.pins.len(), status.events.len()), (0, 1), "{:?}", status.events);
    world.session().pin(&path("images")).unwrap();
}

#[test]
fn the_control_socket_warms_pins_and_says_why_not() {
    let world = World::new(options, fill);
    let socket = world.dir.path().join("control/vms.sock");
    let (ended, _end) = mpsc::channel();
    let _control = Control::start(&socket, world.session().clone(), world.mount(), ended).unwrap();
    let ask = |request: ControlRequest| {
        let mut last = WarmProgress::default();
        let response = send_request_with_progress(&socket, &request, &mut |now| {
            assert!(now.here >= last.here && now.total == ALL.total);
            last = now;
        });
        response.unwrap()
    };
    let warmed = ask(ControlRequest::Warm { path: "images/".to_owned() });
    assert_eq!((warmed.error, warmed.warmed, warmed.status.pins.len()), (None, Some(ALL), 0));
    let pinned = ask(ControlRequest::Pin { path: "/images".to_owned() });
    assert_eq!((pinned.error, pinned.warmed), (None, Some(ALL)));
    assert_eq!(pinned.status.pins, ["images"]);
    let refused = ask(ControlRequest::Pin { path: ".".to_owned() });
    let why = refused.error.unwrap();
    assert!(why.contains("may be used for this") && refused.status.pins == ["images"], "{why}");
    let unpinned = send_request(&socket, &ControlRequest::Unpin { path: "images".to_owned() }).unwrap();
    assert_eq!((unpinned.error, unpinned.status.pins.len()), (None, 0));
    let outside = ask(ControlRequest::Warm { path: "../images".to_owned() });
    assert!(outside.error.unwrap().contains("not a name"));
}
