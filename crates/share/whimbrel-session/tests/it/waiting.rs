//! Requests that wait for the server do not hold up those that need it not.

use crate::common::{World, pattern, until};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    process::Command,
    sync::mpsc::channel,
    thread,
    time::Duration,
};

/// More than the threads that read requests from the kernel.
const READERS: usize = 48;

#[test]
fn many_reads_that_wait_for_a_lost_server_do_not_freeze_cached_files_and_names() {
    let world = World::new(
        |options| {
            options.settings.patience = 30;
            options.settings.fresh = None;
        },
        |server| {
            fs::write(server.join("cached"), pattern(1 << 16, 3)).unwrap();
            for number in 0..READERS {
                fs::write(server.join(format!("far-{number}")), pattern(4 << 20, number as u64)).unwrap();
            }
        },
    );
    let mount = world.mount();
    // Direct reads, because the kernel's own cache answers without asking.
    world.session().set("direct", "*").unwrap();
    let cached = File::open(mount.join("cached")).unwrap();
    cached.read_exact_at(&mut [0; 1 << 16], 0).unwrap();
    let files: Vec<File> =
        (0..READERS).map(|number| File::open(mount.join(format!("far-{number}"))).unwrap()).collect();
    assert_eq!(fs::read_dir(&mount).unwrap().count(), READERS + 1);
    world.wire.cut(true);
    let before = world.session().status().waits;
    let readers: Vec<_> = files
        .into_iter()
        .map(|file| thread::spawn(move || file.read_exact_at(&mut [0; 4096], 3 << 20).is_ok()))
        .collect();
    until("all readers wait", || world.session().waiting() >= READERS as u64);
    let (told, answers) = channel();
    let looker = thread::spawn(move || {
        let mut content = vec![0; 1 << 16];
        fs::File::open(mount.join("cached")).unwrap().read_exact_at(&mut content, 0).unwrap();
        let listed = Command::new("ls").arg("-l").arg(&mount).output().unwrap();
        told.send((content, listed.status.success())).unwrap();
    });
    let (content, listed) = answers.recv_timeout(Duration::from_secs(20)).expect("the mount is frozen");
    assert!(content == pattern(1 << 16, 3) && listed);
    assert_eq!(world.session().status().waits, before, "nobody has stopped waiting");
    world.wire.mend();
    assert!(readers.into_iter().all(|reader| reader.join().unwrap()));
    looker.join().unwrap();
}
