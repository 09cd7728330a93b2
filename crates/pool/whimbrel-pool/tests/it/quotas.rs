//! Tests of quotas by folder and by member: what does not fit is refused with one sentence, and what was
//! removed fits again at once.

use crate::common::{Cluster, noise};
use whimbrel_pool::{
    client::{Pool, PoolError, WriteFile, WriteOptions},
    manager::{PoolRole, PoolRoles},
    protocol::{NewNode, Node, QuotaInfo, QuotaSubject, code},
};
use whimbrel_wire::{Code, Identity};

const KB: u64 = 1000;

fn folder(cluster: &Cluster, parent: u64, name: &str) -> u64 {
    let make = NewNode { parent, folder: true, ..Cluster::make(name) };
    cluster.pool.block(cluster.pool.make(&make)).unwrap().id
}

fn write(pool: &Pool, parent: u64, name: &str, kb: u64) -> Result<Node, PoolError> {
    let node = pool.block(pool.lookup(parent, name)).ok();
    let make = NewNode { parent, ..Cluster::make(name) };
    let file = pool.block(WriteFile::open(pool, make, node, true, WriteOptions::default()))?;
    file.write_at(0, &noise(kb, (kb * KB) as usize))?;
    Ok(file.commit()?.unwrap())
}

fn said(error: &PoolError) -> String {
    assert_eq!(error.code(), Some(code::QUOTA), "{error:?}");
    std::error::Error::source(error).unwrap().to_string()
}

fn limit(cluster: &Cluster, of: QuotaSubject, kb: u64) {
    cluster.pool.block(cluster.pool.set_quota(of, Some(kb * KB))).unwrap();
}

fn used(cluster: &Cluster) -> Vec<u64> {
    let quotas = cluster.pool.block(cluster.pool.quotas()).unwrap();
    quotas.iter().map(|quota| quota.used / KB).collect()
}

#[test]
fn a_folder_takes_as_much_as_its_quota_in_all_versions_and_more_when_some_are_removed() {
    let cluster = Cluster::new(1);
    let blast = folder(&cluster, 1, "blast");
    let below = folder(&cluster, blast, "run");
    limit(&cluster, QuotaSubject::Folder(blast), 1000);
    let pool = &cluster.pool;
    let file = write(pool, below, "a", 400).unwrap();
    write(pool, below, "a", 401).unwrap();
    let refused = said(&write(pool, blast, "b", 200).unwrap_err());
    assert!(refused.starts_with("the folder /blast has "), "{refused}");
    assert!(refused.contains(" of its quota, so ") && refused.contains(" more do not fit"), "{refused}");
    assert_eq!(pool.block(pool.lookup(blast, "b")).unwrap_err().code(), Some(code::NOT_FOUND));
    write(pool, 1, "elsewhere", 900).unwrap();
    let moved = pool.block(pool.rename((1, "elsewhere"), (below, "b"), true)).unwrap_err();
    assert!(said(&moved).starts_with("the folder /blast "));
    pool.block(pool.drop_version(file.id, 1)).unwrap();
    write(pool, blast, "b", 200).unwrap();
    pool.block(pool.rename((blast, "b"), (below, "c"), true)).unwrap();
    assert_eq!(used(&cluster), [601]);
    limit(&cluster, QuotaSubject::Folder(blast), 2000);
    pool.block(pool.rename((1, "elsewhere"), (below, "b"), true)).unwrap();
    assert_eq!(used(&cluster), [1501]);
    pool.block(pool.set_quota(QuotaSubject::Folder(blast), None)).unwrap();
    write(pool, blast, "d", 3000).unwrap();
    assert_eq!(pool.block(pool.quotas()).unwrap(), []);
}

#[test]
fn a_member_has_a_quota_for_what_it_writes_and_only_admins_set_one() {
    let cluster = Cluster::new(1);
    let ada = cluster.newcomer("ada");
    limit(&cluster, QuotaSubject::Member("ada".into()), 500);
    write(&ada, 1, "a", 300).unwrap();
    write(&cluster.pool, 1, "b", 900).unwrap();
    let refused = said(&write(&ada, 1, "b", 300).unwrap_err());
    assert!(refused.starts_with("the member ada has "), "{refused}");
    let quotas = ada.block(ada.quotas()).unwrap();
    let member = Some("ada".to_owned());
    assert_eq!(quotas, [QuotaInfo { folder: None, member, bytes: 500 * KB, used: 300 * KB }]);
    cluster.pool.block(cluster.pool.remove(1, "a", false)).unwrap();
    write(&ada, 1, "b", 300).unwrap();
    let nobody = QuotaSubject::Member("nobody".into());
    let unknown = cluster.pool.block(cluster.pool.set_quota(nobody, Some(1))).unwrap_err();
    assert_eq!(unknown.code(), Some(code::NOT_FOUND));
    let client = Identity::ephemeral().unwrap();
    let data = cluster.dir.path().join("manager");
    PoolRoles::new(&data).set(client.public_key(), PoolRole::Client).unwrap();
    crate::common::admit(&data, "bob", client.public_key());
    let bob = cluster.pool_as(client, None);
    let set = bob.block(bob.set_quota(QuotaSubject::Member("bob".into()), None)).unwrap_err();
    assert_eq!(set.code(), Some(Code::FORBIDDEN));
}

#[test]
fn many_writers_at_once_do_not_exceed_a_quota() {
    let cluster = Cluster::new(1);
    let blast = folder(&cluster, 1, "blast");
    limit(&cluster, QuotaSubject::Folder(blast), 1000);
    let pool = &cluster.pool;
    let written = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..12)
            .map(|number| scope.spawn(move || write(pool, blast, &format!("f{number}"), 150).is_ok()))
            .collect();
        writers.into_iter().map(|writer| u64::from(writer.join().unwrap())).sum::<u64>()
    });
    assert!((1..=6).contains(&written), "{written}");
    assert_eq!(used(&cluster), [written * 150]);
    // What was refused is not counted.
    while write(pool, blast, &format!("g{}", used(&cluster)[0]), 150).is_ok() {}
    assert_eq!(used(&cluster), [900]);
}
