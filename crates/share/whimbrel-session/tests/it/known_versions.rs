//! Changes of names over files that somebody else has changed: the newer file stays, and so does ours.

use crate::common::{Fate, World, back, pattern, until};
use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};
use whimbrel_session::{
    client::{Policy, SessionOptions},
    proto::{OpenCall, code},
};
use whimbrel_wire::{Call, Refusal};

/// The usual way to save a file.
fn save(dir: &Path, name: &str, content: &str) -> std::io::Result<()> {
    let temporary = dir.join(format!("{name}.tmp"));
    fs::write(&temporary, content)?;
    fs::rename(temporary, dir.join(name))
}

/// Somebody else writes the server's file, with a time of its own.
fn write_elsewhere(world: &World, name: &str, content: &str) {
    let path = world.server().join(name);
    fs::write(&path, content).unwrap();
    let later = SystemTime::now() + Duration::from_secs(7);
    fs::File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
}

fn filled(options: fn(&mut SessionOptions)) -> World {
    let world = World::new(options, |server| {
        for name in ["saved", "saved twice", "removed", "moved over", "touched", "free"] {
            fs::write(server.join(name), "first").unwrap();
        }
    });
    for entry in fs::read_dir(world.mount()).unwrap() {
        fs::read(entry.unwrap().path()).unwrap();
    }
    world
}

/// Waits until the kernel has forgotten what it knew of a name.
fn is_seen(world: &World, name: &str, content: &str) {
    until(name, || fs::read_to_string(world.mount().join(name)).is_ok_and(|found| found == content));
}

fn kept(world: &World) -> Vec<String> {
    let Ok(kept) = fs::read_dir(world.options.cache.join("kept")) else { return Vec::new() };
    let mut found: Vec<_> = kept.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect();
    found.sort();
    found
}

#[test]
fn a_save_that_was_queued_does_not_replace_a_newer_file_of_the_server() {
    let world = filled(back);
    let (mount, server) = (world.mount(), world.server());
    save(&mount, "saved", "ours").unwrap();
    save(&mount, "saved twice", "ours before").unwrap();
    save(&mount, "saved twice", "ours twice").unwrap();
    save(&mount, "made", "ours made").unwrap();
    save(&mount, "free", "second").unwrap();
    fs::remove_file(mount.join("removed")).unwrap();
    fs::rename(mount.join("touched"), mount.join("moved over")).unwrap();
    for name in ["saved", "saved twice", "removed", "moved over", "made"] {
        write_elsewhere(&world, name, "theirs");
    }
    world.session().flush().unwrap();
    for name in ["saved", "saved twice", "removed", "moved over", "made"] {
        assert_eq!(fs::read_to_string(server.join(name)).unwrap(), "theirs", "{name}");
        is_seen(&world, name, "theirs");
    }
    for (name, content) in [("free", "second"), ("touched", "first")] {
        assert_eq!(fs::read_to_string(server.join(name)).unwrap(), content, "{name}");
        is_seen(&world, name, content);
    }
    assert_eq!(kept(&world), ["ours", "ours made", "ours twice"]);
    let events = world.session().status().events;
    for name in ["saved", "saved twice", "removed", "moved over", "made"] {
        assert!(events.iter().any(|event| event.text.contains(&format!(" {name} "))), "{name}: {events:?}");
    }
    assert_eq!(world.session().status().queued, 0);
}

#[test]
fn a_time_that_was_queued_does_not_hide_that_somebody_else_wrote_the_file() {
    let world = filled(back);
    let set = |name: &str| {
        let file = fs::File::options().write(true).open(world.mount().join(name)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1000)).unwrap();
    };
    set("touched");
    set("free");
    write_elsewhere(&world, "touched", "their");
    let time = |name: &str| fs::metadata(world.server().join(name)).unwrap().modified().unwrap();
    let theirs = time("touched");
    world.session().flush().unwrap();
    assert_eq!(time("touched"), theirs);
    assert_eq!(time("free"), SystemTime::UNIX_EPOCH + Duration::from_secs(1000));
    assert_eq!(fs::read_to_string(world.mount().join("touched")).unwrap(), "their");
}

#[test]
fn under_write_through_a_save_over_a_newer_file_fails_once_and_then_sees_it() {
    for name in ["saved", "made"] {
        let world = filled(|options| {
            options.settings.policy = Policy::Through;
            options.settings.fresh = None;
        });
        let (mount, server) = (world.mount(), world.server());
        write_elsewhere(&world, name, "theirs");
        let refused = save(&mount, name, "ours").expect_err(name);
        assert_eq!(refused.raw_os_error(), Some(16), "{name}: {refused}");
        assert_eq!(fs::read_to_string(server.join(name)).unwrap(), "theirs");
        assert_eq!(fs::read_to_string(server.join(format!("{name}.tmp"))).unwrap(), "ours");
        is_seen(&world, name, "theirs");
        assert_eq!(world.session().status().events.len(), 1);
        save(&mount, name, "ours").unwrap();
        assert_eq!(fs::read_to_string(server.join(name)).unwrap(), "ours");
    }
}

#[test]
fn saves_of_a_file_that_is_written_back_in_between_are_no_conflicts() {
    for policy in [Policy::Through, Policy::Back] {
        let world = World::new(back, |_| {});
        world.session().set("write", &policy.to_string()).unwrap();
        let path = world.mount().join("file");
        for round in 0..6 {
            save(&world.mount(), "file", &format!("round {round}")).unwrap();
            if round % 2 == 0 {
                world.session().flush().unwrap();
            }
            fs::write(&path, pattern(300_000, round)).unwrap();
            if round % 3 == 0 {
                world.session().flush().unwrap();
            }
            fs::File::options().write(true).open(&path).unwrap().set_modified(SystemTime::now()).unwrap();
        }
        fs::remove_file(&path).unwrap();
        save(&world.mount(), "file", "last").unwrap();
        world.session().flush().unwrap();
        assert_eq!(world.session().status().events, []);
        assert_eq!(fs::read_to_string(world.server().join("file")).unwrap(), "last");
    }
}

#[test]
fn an_older_server_is_spoken_to_in_its_version() {
    let mut world = filled(back);
    world.end();
    world.wire.decide(|request| match request.kind {
        OpenCall::KIND if request.decode::<OpenCall>().unwrap().protocol > 2 => {
            Fate::Refused(Refusal::new(code::VERSION, "the server speaks session versions 1 to 2"))
        }
        _ => Fate::Answered,
    });
    world.begin();
    save(&world.mount(), "saved", "ours").unwrap();
    fs::remove_file(world.mount().join("removed")).unwrap();
    world.session().flush().unwrap();
    assert_eq!(fs::read_to_string(world.server().join("saved")).unwrap(), "ours");
    assert!(!world.server().join("removed").exists());
}
