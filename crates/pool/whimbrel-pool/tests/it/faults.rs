//! Tests with members killed at random instants during writes and reads: committed files stay complete and
//! right.
//!
//! A round writes a file and meanwhile kills a benefactor, the manager, the writer, or two of them, which
//! then restart. Messages of failures contain the seed. `WHIMBREL_POOL_ROUNDS` sets the number of rounds.

use crate::common::{Cluster, noise, until};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use whimbrel_pool::{
    chunk::Chunking,
    client::WriteOptions,
    policy::{Policy, Safety},
};

#[derive(Debug, Clone, Copy)]
enum Fault {
    Benefactor(usize),
    Manager,
    Writer,
}

fn faults(random: &mut StdRng, benefactors: usize) -> Vec<Fault> {
    let one = |random: &mut StdRng| match random.random_range(0..4) {
        0 => Fault::Manager,
        1 => Fault::Writer,
        _ => Fault::Benefactor(random.random_range(0..benefactors)),
    };
    let first = one(random);
    // Two copies outlive one benefactor; the second fault is of another kind.
    match (first, random.random_bool(0.3)) {
        (Fault::Benefactor(_), true) => vec![first, Fault::Manager],
        (Fault::Manager, true) => vec![first, Fault::Benefactor(random.random_range(0..benefactors))],
        _ => vec![first],
    }
}

#[test]
fn no_committed_file_is_lost_or_wrong_whoever_is_killed() {
    let rounds = std::env::var("WHIMBREL_POOL_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(8_u64);
    let mut cluster = Cluster::new(4);
    let cutting = Chunking::Content { average: 32 << 10 };
    let policy = Policy { copies: 2, safety: Safety::Pessimistic, cutting, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
    let mut committed: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for seed in 0..rounds {
        let mut random = StdRng::seed_from_u64(seed);
        let (name, data) = (format!("f{}", seed % 5), noise(seed, random.random_range(1..3_000_000)));
        let file = Arc::new(cluster.open(&name, WriteOptions::default()));
        let (writer, bytes) = (file.clone(), data.clone());
        let writing = std::thread::spawn(move || {
            for (at, block) in bytes.chunks(200_000).enumerate() {
                writer.write_at(at as u64 * 200_000, block)?;
            }
            writer.commit()
        });
        std::thread::sleep(Duration::from_millis(random.random_range(0..120)));
        let faults = faults(&mut random, 4);
        for fault in &faults {
            match fault {
                Fault::Benefactor(number) => cluster.kill_benefactor(*number),
                Fault::Manager => cluster.kill_manager(),
                Fault::Writer => file.abandon(),
            }
        }
        std::thread::sleep(Duration::from_millis(random.random_range(0..100)));
        for fault in &faults {
            match fault {
                Fault::Benefactor(number) => cluster.start_benefactor(*number),
                Fault::Manager => cluster.start_manager(),
                Fault::Writer => {}
            }
        }
        let done = writing.join().unwrap();
        drop(file);
        if done.is_ok() {
            committed.insert(name.clone(), data.clone());
        }
        for (known, bytes) in &committed {
            let found = cluster.read(known);
            // A commit whose answer was lost may have happened: then it is the whole new file.
            let as_it_should = found == *bytes || (*known == name && found == data);
            assert!(as_it_should, "seed {seed}, {faults:?}: {known} is wrong, the write ended with {done:?}");
        }
        if done.is_err()
            && cluster.pool.block(cluster.pool.lookup(1, &name)).is_ok()
            && cluster.read(&name) == data
        {
            committed.insert(name, data);
        }
    }
    cluster.wait_online(4);
    let status = || cluster.pool.block(cluster.pool.status()).unwrap();
    until("repair has nothing left", || status().repair == 0);
    assert_eq!(status().lost, 0);
    for (name, bytes) in &committed {
        assert!(cluster.read(name) == *bytes, "{name} after repair");
    }
}
