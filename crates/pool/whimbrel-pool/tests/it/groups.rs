//! Test of groups: the files of ranks on several hosts appear together, and old groups go whole.

use crate::common::{Cluster, noise};
use whimbrel_pool::{
    client::{Pool, WriteFile, WriteOptions},
    policy::{Policy, Retention},
    protocol::{NewGroup, NewNode, code},
};

fn open(pool: &Pool, folder: u64, rank: u32) -> WriteFile {
    let name = format!("rank{rank}");
    let make = NewNode { parent: folder, name, folder: false, mode: 0o644, uid: 0, gid: 0 };
    pool.block(WriteFile::open(pool, make, None, true, WriteOptions::default())).unwrap()
}

#[test]
fn the_files_of_ranks_appear_together_though_a_rank_dies_and_old_groups_go_whole() {
    const RANKS: u32 = 3;
    let cluster = Cluster::new(2);
    let hosts: Vec<Pool> = (0..RANKS).map(|_| cluster.fresh_pool()).collect();
    let (pool, data) = (&cluster.pool, noise(1, 300_000));
    let keep = Retention { last: Some(2), ..Retention::default() };
    pool.block(pool.set_policy(1, Some(Policy { keep, ..Policy::default() }))).unwrap();
    let begin = |step: u32| {
        let group = NewGroup { files: RANKS, job: "job".into(), mode: 0o755, uid: 0, gid: 0 };
        pool.block(pool.begin_group(1, &format!("step{step}"), group)).unwrap().id
    };
    let commit = |step: u32| pool.block(pool.commit_group(1, &format!("step{step}")));
    let names = || {
        let nodes = pool.block(pool.list(1)).unwrap();
        nodes.into_iter().map(|node| node.name).collect::<Vec<_>>()
    };
    // A rank writes all that it has and dies before it closes its file.
    let folder = begin(0);
    let files: Vec<WriteFile> = (0..RANKS).zip(&hosts).map(|(rank, host)| open(host, folder, rank)).collect();
    files.iter().for_each(|file| file.write_at(0, &data).unwrap());
    files[1..].iter().for_each(|file| drop(file.commit().unwrap()));
    drop(files);
    assert_eq!(commit(0).unwrap_err().code(), Some(code::INCOMPLETE));
    assert_eq!(names(), [".step0.group"]);
    for step in 1..=3 {
        let folder = begin(step);
        for (rank, host) in (0..RANKS).zip(&hosts) {
            let file = open(host, folder, rank);
            file.write_at(0, &data).unwrap();
            file.commit().unwrap();
        }
        assert!(!names().contains(&format!("step{step}")), "not before the commit");
        let group = commit(step).unwrap();
        assert_eq!(pool.block(pool.list(group.id)).unwrap().len(), RANKS as usize);
    }
    assert_eq!(names(), ["step2", "step3"], "the dead one and the oldest are gone");
    let node = hosts[0].block(hosts[0].find("/step3/rank2")).unwrap();
    assert!(cluster.read_version(node.version) == data);
    assert_eq!(pool.block(pool.end_job("job")).unwrap(), (2, 0));
    assert!(names().is_empty());
}
