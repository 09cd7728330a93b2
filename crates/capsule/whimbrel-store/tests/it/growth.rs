//! Growth: what a store holds open and in memory does not grow with the number of commits.

use crate::common::{commit, content, crash_disk::CrashDisk, name};
use std::sync::Arc;
use whimbrel_store::{Options, Store};

const PAGES: u64 = 2000;

#[test]
fn hundreds_of_commits_leave_few_packs_open_and_each_index_mapped_once() {
    let disk = CrashDisk::new();
    let options = Options { workers: 1, cache: 1 << 20, ..Options::create() };
    let store = Store::open_on(Arc::new(disk.clone()), options).unwrap();
    let mut base = None;
    for time in 0..300u64 {
        let pages: Vec<_> = (0..10).map(|n| ((n * 197 + time) % PAGES, time * 100 + n + 1)).collect();
        let id = commit(&store.writer().unwrap(), &store, base, PAGES, &pages, &[name("m")], time).unwrap();
        base = Some(id);
        assert!(disk.open_files() <= 72, "{} files are open after {time} commits", disk.open_files());
        let indexes: usize = disk.paths("index").into_iter().map(|(_, len)| len).sum();
        assert_eq!(disk.mapped_bytes(), indexes, "after {time} commits");
        assert!(disk.paths("index").len() <= 12, "{:?}", disk.paths("index"));
    }
    // Its pages are in all of these packs.
    assert!(disk.paths("packs").len() >= 300);
    content(&store, &base.unwrap()).unwrap();
    assert!(disk.open_files() <= 72, "{} files are open", disk.open_files());
}
