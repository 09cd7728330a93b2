//! Files of terabytes and directories of a million names.

use crate::common::{World, pattern};
use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileExt, MetadataExt},
};
use whimbrel_session::client::Policy;

const TIB: u64 = 1 << 40;

#[test]
fn a_sparse_file_of_terabytes_is_read_and_written_for_what_is_in_it() {
    let (first, middle, last) = (pattern(4096, 1), pattern(8192, 2), pattern(4096, 3));
    let world = World::new(
        |options| {
            options.settings.policy = Policy::Back;
            options.settings.delay = None;
        },
        |server| {
            let file = File::create(server.join("disk")).unwrap();
            file.write_all_at(&first, 0).unwrap();
            file.write_all_at(&middle, TIB + 12 * 4096).unwrap();
            file.write_all_at(&last, 4 * TIB - 4096).unwrap();
        },
    );
    let file = OpenOptions::new().read(true).write(true).open(world.mount().join("disk")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4 * TIB);
    let read = |at: u64, len: usize| {
        let mut out = vec![7; len];
        file.read_exact_at(&mut out, at).unwrap();
        out
    };
    let before = world.session().status().received;
    assert_eq!(read(0, 4096), first);
    assert_eq!(read(TIB + 12 * 4096, 8192), middle);
    assert_eq!(read(4 * TIB - 4096, 4096), last);
    for at in [5 << 20, TIB / 2, 2 * TIB + 777, 3 * TIB] {
        assert_eq!(read(at, 1 << 20), vec![0; 1 << 20], "at {at}");
    }
    let received = world.session().status().received - before;
    assert!(received < 100_000, "{received} bytes came for holes");
    file.write_all_at(&middle, 3 * TIB).unwrap();
    file.set_len(5 * TIB).unwrap();
    file.write_all_at(&first, 5 * TIB - 4096).unwrap();
    assert_eq!(read(4 * TIB + 5, 4096), vec![0; 4096]);
    world.session().flush().unwrap();
    assert_eq!(world.session().status().events, []);
    let served = File::open(world.server().join("disk")).unwrap();
    let meta = served.metadata().unwrap();
    assert_eq!(meta.len(), 5 * TIB);
    assert!(meta.blocks() * 512 < 1 << 20, "{} bytes are stored there", meta.blocks() * 512);
    for (at, content) in [(0, &first), (3 * TIB, &middle), (4 * TIB - 4096, &last), (5 * TIB - 4096, &first)]
    {
        let mut found = vec![0; content.len()];
        served.read_exact_at(&mut found, at).unwrap();
        assert_eq!(&found, content, "at {at}");
    }
}

/// A value of this process in KiB, by its name in `/proc/self/status`.
fn memory(what: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)).unwrap();
    line.trim_matches([':', '\t', ' ']).split(' ').next().unwrap().parse().unwrap()
}

#[test]
#[ignore = "makes a million files, which takes minutes"]
fn a_directory_of_a_million_names_is_listed_in_bounded_memory() {
    const FILES: usize = 1_000_000;
    let world = World::new(
        |_| {},
        |server| {
            fs::create_dir(server.join("many")).unwrap();
            (0..FILES).for_each(|number| {
                drop(File::create(server.join(format!("many/file-{number:07}"))).unwrap())
            });
        },
    );
    let before = memory("VmRSS");
    let began = std::time::Instant::now();
    assert_eq!(fs::read_dir(world.mount().join("many")).unwrap().count(), FILES);
    println!("listed in {:.1} s", began.elapsed().as_secs_f64());
    assert_eq!(fs::metadata(world.mount().join("many/file-0777777")).unwrap().len(), 0);
    assert!(!world.mount().join("many/file-1000000").exists());
    // Both sides are in this process.
    let grown = memory("VmHWM").saturating_sub(before) >> 10;
    println!("{grown} MiB more at most");
    assert!(grown < 3072, "{grown} MiB");
}
