//! Conflicts are kept with a map of what is whose, and resolved as people choose.

use crate::common::{World, back, pattern, until};
use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::fs::FileExt,
};
use whimbrel_session::client::{CacheDir, Keep, KeepError, KeptCopy, kept_copies, total};

fn cache(world: &World) -> CacheDir {
    CacheDir::open(&world.options.cache, world.options.cache_key.as_deref()).unwrap()
}

/// A session in which the server's file was changed under unsent writes, and the copy that was put aside.
fn conflict(content: &[u8], write: impl FnOnce(&mut File), theirs: &[u8]) -> (World, KeptCopy) {
    let world = World::new(
        |options| {
            back(options);
            options.settings.fresh = Some(0);
        },
        |server| fs::write(server.join("file"), content).unwrap(),
    );
    let path = world.mount().join("file");
    let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    write(&mut file);
    drop(file);
    fs::write(world.server().join("file"), theirs).unwrap();
    // The server reports that change, and what is unsent may be sent, and refused, before we ask for it. A
    // read before the copy is put aside would bring the rest of the file.
    until("there is a conflict", || {
        let _ = world.session().flush();
        !kept_copies(&cache(&world)).unwrap().is_empty()
    });
    // The version that it had while it was written may have been seen here.
    until("the change of the server is seen", || fs::read(&path).is_ok_and(|seen| seen == theirs));
    let mut kept = kept_copies(&cache(&world)).unwrap();
    assert_eq!(kept.len(), 1);
    (world, kept.remove(0))
}

fn resolve(world: &World, kept: &KeptCopy, keep: Keep) -> Result<(), KeepError> {
    kept.resolve(&cache(world), &world.mount(), keep)?;
    assert_eq!(kept_copies(&cache(world)).unwrap(), [], "it is resolved");
    assert!(!kept.file(&cache(world)).exists());
    world.session().flush().unwrap();
    Ok(())
}

#[test]
fn a_small_conflict_is_resolved_to_ours_theirs_or_both() {
    let answers = [
        (Keep::Ours, "ours, and longer", None),
        (Keep::Theirs, "theirs", None),
        (Keep::Both, "theirs", Some("ours, and longer")),
    ];
    for (keep, now, beside) in answers {
        let ours = |file: &mut File| file.write_all(b"ours, and longer").unwrap();
        let (world, kept) = conflict(b"first", ours, b"theirs");
        assert_eq!((kept.path.to_string().as_str(), total(&kept.absent)), ("file", 0));
        assert_eq!(kept.compare(&cache(&world), &world.mount()).unwrap(), vec![0..16; 1]);
        resolve(&world, &kept, keep).unwrap();
        assert_eq!(fs::read_to_string(world.server().join("file")).unwrap(), now, "{keep:?}");
        assert_eq!(fs::read_to_string(world.server().join("file.ours")).ok().as_deref(), beside);
    }
}

#[test]
fn a_disk_of_which_a_part_never_was_here_is_not_taken_for_a_whole_one() {
    const SIZE: usize = 8 << 20;
    let (first, theirs) = (pattern(SIZE, 1), pattern(SIZE, 2));
    let write = |file: &mut File| {
        file.read_exact_at(&mut [0; 4096], 0).unwrap();
        file.write_all_at(&[7; 8192], 4 << 20).unwrap();
    };
    let (world, kept) = conflict(&first, write, &theirs);
    assert_eq!(kept.ours, vec![4 << 20..(4 << 20) + 8192; 1]);
    assert!(total(&kept.absent) > 0);
    assert_eq!(total(&kept.ours) + total(&kept.base) + total(&kept.absent), SIZE as u64);
    assert!(world.session().status().events.iter().any(|event| event.text.contains("never were here")));
    for keep in [Keep::Ours, Keep::Both] {
        let refused = kept.resolve(&cache(&world), &world.mount(), keep);
        assert!(matches!(refused, Err(KeepError::Incomplete { .. })), "{keep:?}");
    }
    assert!(fs::read(world.server().join("file")).unwrap() == theirs, "nothing was written");
    resolve(&world, &kept, Keep::OurWrites).unwrap();
    let mut expected = theirs;
    expected[4 << 20..(4 << 20) + 8192].fill(7);
    assert!(fs::read(world.server().join("file")).unwrap() == expected);
}
