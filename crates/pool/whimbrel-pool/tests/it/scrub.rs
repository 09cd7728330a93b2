//! Test of scrubs: a copy that rots on the disk of a benefactor is found without a reader, and replaced.

use crate::common::{Cluster, noise, until};
use std::{fs::File, os::unix::fs::FileExt, time::Duration};
use whimbrel_pool::{benefactor::ScrubOptions, policy::Policy};

#[test]
fn a_flipped_byte_in_a_segment_is_found_by_the_scrub_and_the_copy_replaced() {
    let mut cluster = Cluster::new(2);
    // Each round takes a second.
    cluster.scrub = ScrubOptions { every: Duration::from_secs(1), rate: 1 << 30 };
    for number in 0..2 {
        cluster.kill_benefactor(number);
        cluster.start_benefactor(number);
    }
    cluster.pool.block(cluster.pool.set_policy(1, Some(Policy { copies: 2, ..Policy::default() }))).unwrap();
    let data = noise(1, 2_000_000);
    let node = cluster.write("state", &data);
    let chunks = cluster.copies();
    let scrubs = |cluster: &Cluster| cluster.pool.block(cluster.pool.scrubs()).unwrap();
    until("a round has read it", || scrubs(&cluster).iter().any(|(_, scrub)| scrub.bytes > 2_000_000));
    assert!(scrubs(&cluster).iter().all(|(_, scrub)| scrub.damaged + scrub.last_damaged == 0));
    // Behind the head of a record and of its frame.
    let path = cluster.benefactors[0].data.join("chunks/00000001.seg");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 5000).unwrap();
    let status = |cluster: &Cluster| cluster.pool.block(cluster.pool.status()).unwrap();
    until("the scrub has found it", || {
        let found = scrubs(&cluster);
        found.iter().any(|(name, scrub)| name == "b0" && scrub.damaged.max(scrub.last_damaged) == 1)
    });
    until("the copy is replaced", || status(&cluster).repair == 0 && cluster.copies() == chunks);
    until("a round finds all intact", || {
        scrubs(&cluster).iter().all(|(_, scrub)| scrub.ended.is_some() && scrub.last_damaged == 0)
    });
    let store = cluster.benefactors[0].store.clone().unwrap();
    assert_eq!(store.verify().1, []);
    cluster.kill_benefactor(1);
    assert!(cluster.read_version(node.version) == data, "from the benefactor with the damaged disk alone");
}
