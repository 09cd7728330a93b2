//! Growth: what a store holds open and in memory does not grow with the number of commits.

use crate::common::{commit, name};
use whimbrel_store::{Options, Store};

/// Resident bytes of this process that no file backs.
fn anonymous_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
#[ignore = "a measurement"]
fn measure() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::create()).unwrap();
    let mut base = None;
    for time in 0..400u64 {
        let pages: Vec<_> = (0..200).map(|n| (n * 37 % 20_000, time * 1_000 + n + 1)).collect();
        let id = commit(&store.writer().unwrap(), &store, base, 20_000, &pages, &[name("m")], time).unwrap();
        base = Some(id);
        let pin = store.pin(&id).unwrap();
        if time % 40 == 0 {
            let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
            println!("{time}: {} KiB anonymous, {fds} descriptors", anonymous_bytes() >> 10);
        }
        drop(pin);
    }
}
