//! Tests of members that are expelled, forgotten, labelled, or away at night.

use crate::common::{Cluster, noise, until};
use std::{collections::BTreeSet, time::Duration};
use whimbrel_pool::{
    chunk::Chunking,
    policy::{Policy, Safety},
    protocol::{MemberLabels, code},
};
use whimbrel_wire::{Code, Identity};

fn set(cluster: &Cluster, copies: u8) {
    let cutting = Chunking::Content { average: 16 << 10 };
    let policy = Policy { copies, safety: Safety::Pessimistic, cutting, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
}

fn label(cluster: &Cluster, name: &str, rack: &str) {
    let labels = MemberLabels { rack: rack.into(), ..MemberLabels::default() };
    cluster.pool.block(cluster.pool.label(name, labels)).unwrap();
}

fn chunks_of(cluster: &Cluster, number: usize) -> u64 {
    cluster.benefactors[number].store.as_ref().map_or(0, |store| store.usage().chunks)
}

#[test]
fn an_expelled_benefactor_has_no_rights_and_its_copies_are_made_elsewhere() {
    let cluster = Cluster::new(3);
    set(&cluster, 2);
    let data = noise(1, 2 << 20);
    let node = cluster.write("state", &data);
    let chunks = cluster.pool.block(cluster.pool.status()).unwrap().chunks;
    let had = chunks_of(&cluster, 2);
    let removed = cluster.pool.block(cluster.pool.expel("b2", false)).unwrap();
    assert_eq!((removed.copies, removed.lost), (had, 0));
    until("the others have all copies", || chunks_of(&cluster, 0) + chunks_of(&cluster, 1) == 2 * chunks);
    assert!(cluster.read_version(node.version) == data);
    let key = Identity::load_or_create(&cluster.benefactors[2].data).unwrap();
    let stranger = cluster.pool_as(Identity::load_or_create(&cluster.benefactors[2].data).unwrap(), None);
    assert!(stranger.block(stranger.status()).is_err(), "the manager does not let it in");
    // Somebody admits the key again.
    crate::common::admit(&cluster.dir.path().join("manager"), "again", key.public_key());
    let back = cluster.pool_as(key, None);
    assert_eq!(back.block(back.status()).unwrap_err().code(), Some(Code::FORBIDDEN));
    let left = cluster.pool.block(cluster.pool.status()).unwrap().benefactors.into_iter().map(|b| b.name);
    assert_eq!(left.collect::<BTreeSet<String>>(), BTreeSet::from(["b0".to_owned(), "b1".to_owned()]));
}

#[test]
fn an_expelled_client_reads_no_more_chunks_of_any_benefactor() {
    let cluster = Cluster::new(1);
    set(&cluster, 1);
    let data = noise(1, 4 << 20);
    let node = cluster.write("state", &data);
    let guest = cluster.newcomer("guest");
    let file = guest.block(guest.open(node.version)).unwrap();
    // It learns where all chunks are, and has a connection to the benefactor.
    guest.block(file.read_at(1, 1000)).unwrap();
    cluster.pool.block(cluster.pool.expel("guest", false)).unwrap();
    // Each time another chunk, from the end: what it has read stays in its cache, and so does what is ahead.
    let mut at = data.len() as u64;
    until("the benefactor refuses it", || {
        at = at.saturating_sub(40_000);
        guest.block(file.read_at(at, 1000)).is_err()
    });
    assert_eq!(
        cluster.pool.block(cluster.pool.expel("nobody", false)).unwrap_err().code(),
        Some(code::NOT_FOUND)
    );
}

#[test]
fn the_last_copy_is_not_lost_by_an_expulsion_or_by_forgetting_unless_it_is_forced() {
    let mut cluster = Cluster::new(2);
    set(&cluster, 1);
    cluster.write("state", &noise(1, 1 << 20));
    // A few chunks may all go to the faster of both.
    let mut more = 0;
    until("the first has chunks", || {
        more += 1;
        cluster.write(&format!("more-{more}"), &noise(more, 1 << 20));
        chunks_of(&cluster, 0) > 0
    });
    let had = chunks_of(&cluster, 0);
    let refused = cluster.pool.block(cluster.pool.expel("b0", false)).unwrap_err();
    assert_eq!(refused.code(), Some(code::LAST_COPY), "{refused}");
    let there = cluster.pool.block(cluster.pool.forget("b0", true)).unwrap_err();
    assert_eq!(there.code(), Some(code::INVALID), "it is online");
    assert!(cluster.online() == 2, "nothing has changed");
    cluster.kill_benefactor(0);
    until("it is silent for long enough to be forgotten", || {
        let refused = cluster.pool.block(cluster.pool.forget("b0", false)).unwrap_err();
        refused.code() == Some(code::LAST_COPY)
    });
    let removed = cluster.pool.block(cluster.pool.forget("b0", true)).unwrap();
    assert_eq!((removed.lost, removed.copies), (had, had));
    assert_eq!(cluster.pool.block(cluster.pool.status()).unwrap().benefactors.len(), 1);
    // It was not dead: what it has is found again.
    cluster.start_benefactor(0);
    until("nothing lacks a copy", || cluster.pool.block(cluster.pool.status()).unwrap().repair == 0);
    assert!(cluster.read("state") == noise(1, 1 << 20));
}

#[test]
fn copies_lie_in_different_racks_from_the_start_and_after_labels() {
    let cluster = Cluster::new(4);
    set(&cluster, 2);
    let data = noise(1, 2 << 20);
    cluster.write("before", &data);
    for (name, rack) in [("b0", "a"), ("b1", "a"), ("b2", "a"), ("b3", "b")] {
        label(&cluster, name, rack);
    }
    let chunks = || cluster.pool.block(cluster.pool.status()).unwrap().chunks;
    until("each chunk has a copy in the other rack", || chunks_of(&cluster, 3) == chunks());
    until("none is told to be too near", || cluster.pool.block(cluster.pool.members()).unwrap().crowded == 0);
    let fresh = cluster.fresh_pool();
    let file = fresh.block(whimbrel_pool::client::WriteFile::open(
        &fresh,
        Cluster::make("after"),
        None,
        true,
        Default::default(),
    ));
    let file = file.unwrap();
    file.write_at(0, &noise(2, 2 << 20)).unwrap();
    file.commit().unwrap().unwrap();
    assert_eq!(chunks_of(&cluster, 3), chunks(), "a write keeps the racks apart at once");
    assert!(cluster.read("before") == data);
}

#[test]
fn a_member_that_is_expected_to_be_away_is_not_copied_again_and_has_no_only_copy() {
    // The one that stays must not count as lost, also if this host has no time for it for a while.
    let mut cluster = Cluster::with(3, |options| options.lost_after = Duration::from_secs(5));
    let away = MemberLabels { away: 3600, ..MemberLabels::default() };
    for name in ["b1", "b2"] {
        cluster.pool.block(cluster.pool.label(name, away.clone())).unwrap();
    }
    set(&cluster, 2);
    let data = noise(1, 2 << 20);
    let node = cluster.write("state", &data);
    let chunks = cluster.pool.block(cluster.pool.status()).unwrap().chunks;
    assert_eq!(chunks_of(&cluster, 0), chunks, "the one that stays has a copy of each");
    let copies = cluster.copies();
    cluster.kill_benefactor(1);
    cluster.kill_benefactor(2);
    until("they are offline", || {
        let status = cluster.pool.block(cluster.pool.status()).unwrap();
        status.benefactors.iter().filter(|b| b.state == "offline").count() == 2
    });
    // Longer than the time after which others are lost.
    let status = cluster.pool.block(cluster.pool.status()).unwrap();
    assert_eq!((status.repair, status.repaired), (0, 0));
    assert!(cluster.read_version(node.version) == data, "at night too");
    cluster.start_benefactor(1);
    cluster.start_benefactor(2);
    cluster.wait_online(3);
    assert_eq!(cluster.copies(), copies);
}
