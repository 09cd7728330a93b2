//! Growth: memory and descriptors of a daemon do not grow with what it has done.

use std::time::{Duration, Instant};
use whimbrel_e2e::{Cluster, Guest, PATIENCE, console};
use whimbrel_testkit::guest::Work;

/// A daemon that gives free memory back has 130 to 170 MiB here when the machine is its own, and more while
/// others work beside it; one that does not has 300 MiB or more.
const MEMORY_MAX: u64 = 272 << 20;
/// The store has 64 packs open.
const OPEN_MAX: usize = 128;

#[test]
fn a_daemon_does_not_grow_with_every_checkpoint() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let work = Work::Dirty { region_mib: 16, pages_per_second: 4000, bytes_per_page: 512 };
    Guest { address: None, work, ..Guest::small("web") }.run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    for _ in 0..15 {
        alpha.run(&["checkpoint", "web"]);
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (memory, open) = alpha.daemon_usage();
        assert!(open < OPEN_MAX, "{open} open descriptors");
        if memory < MEMORY_MAX {
            return;
        }
        assert!(Instant::now() < deadline, "{} MiB of memory after 15 checkpoints", memory >> 20);
        std::thread::sleep(Duration::from_millis(200));
    }
}
