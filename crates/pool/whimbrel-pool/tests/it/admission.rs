//! Tests of admission while the pool runs: benefactors admit new members in time, and refuse others with a
//! reason.

use crate::common::{Cluster, noise};
use std::{error::Error, fs};
use whimbrel_pool::{
    client::{Pool, PoolError, WriteFile, WriteOptions},
    protocol::Node,
};

/// Far from the next heartbeat of any benefactor, but often enough that none counts as dead.
fn reports_are_rare() -> Cluster {
    Cluster::with(2, |options| options.interval = 12)
}

fn open(pool: &Pool, name: &str) -> WriteFile {
    pool.block(WriteFile::open(pool, Cluster::make(name), None, true, WriteOptions::default())).unwrap()
}

fn write(pool: &Pool, name: &str, data: &[u8]) -> Result<Option<Node>, PoolError> {
    let file = open(pool, name);
    file.write_at(0, data)?;
    file.commit()
}

fn read(pool: &Pool, version: u64) -> Result<Vec<u8>, PoolError> {
    pool.block(async {
        let file = pool.read(version).await?;
        Ok(file.read_at(0, file.size() as usize).await?.to_vec())
    })
}

#[test]
fn whoever_is_admitted_now_writes_and_reads_now() {
    let cluster = reports_are_rare();
    let data = noise(1, 3 << 20);
    let node = cluster.write("before", &data);
    assert!(read(&cluster.newcomer("reader"), node.version).unwrap() == data);
    let all: Vec<_> = (0..4)
        .map(|number| {
            let (pool, data) = (cluster.newcomer(&format!("writer{number}")), noise(number, 1 << 20));
            std::thread::spawn(move || write(&pool, &format!("f{number}"), &data).unwrap().unwrap())
        })
        .collect();
    for (number, written) in all.into_iter().enumerate() {
        let node = written.join().unwrap();
        assert!(cluster.read_version(node.version) == noise(number as u64, 1 << 20));
    }
}

#[test]
fn a_member_that_benefactors_refuse_hears_of_that_and_not_that_the_pool_is_full() {
    let cluster = Cluster::new(2);
    let version = cluster.write("before", b"something").version;
    // A benefactor without a readable trust list refuses everybody, also after its next heartbeat.
    let trust = cluster.benefactors.iter().map(|member| member.data.join("trust.toml"));
    trust.for_each(|file| fs::write(file, "damaged").unwrap());
    let pool = cluster.fresh_pool();
    let said = |error: &PoolError| error.source().map(ToString::to_string).unwrap_or_default();
    for error in [write(&pool, "state", &noise(1, 1 << 20)).unwrap_err(), read(&pool, version).unwrap_err()] {
        assert!(!error.is_full(), "{error:?}");
        assert!(said(&error).contains("does not know our key whk1-"), "{error}: {}", said(&error));
        assert!(said(&error).contains("whimbrel pool admit"), "{}", said(&error));
    }
}

#[test]
fn a_pool_whose_benefactors_are_gone_is_not_called_full() {
    let mut cluster = Cluster::new(2);
    let file = open(&cluster.pool, "state");
    cluster.kill_benefactor(0);
    cluster.kill_benefactor(1);
    let error = file.write_at(0, &noise(1, 1 << 20)).and_then(|()| file.commit()).unwrap_err();
    assert!(!error.is_full(), "{error:?}");
    let because = error.source().map(ToString::to_string).unwrap_or_default();
    assert!(because.contains("cannot be reached"), "{because}");
}
