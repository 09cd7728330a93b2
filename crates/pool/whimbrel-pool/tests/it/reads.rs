//! Tests of reads: several chunks with one request, and what a reader does if an answer lacks some.

use crate::common::{Cluster, noise};
use bytes::Bytes;
use std::sync::Arc;
use whimbrel_core::Digest;
use whimbrel_pool::{
    chunk::Chunking,
    connections::{Dialer, TlsDialer},
    policy::Policy,
    protocol::{GetChunks, code, put_digests},
};
use whimbrel_wire::{CallError, Connection, Identity};

const MIB: usize = 1 << 20;

fn connect(cluster: &Cluster, number: usize) -> Connection {
    let identity = Arc::new(Identity::load_or_create(&cluster.dir.path().join("client")).unwrap());
    let (dialer, member) =
        (TlsDialer::new(identity, "client".parse().unwrap(), ()), &cluster.benefactors[number]);
    cluster.pool.block(dialer.dial(&member.listen.to_string(), member.key)).unwrap()
}

#[test]
fn an_answer_of_several_chunks_is_bounded_and_ends_before_one_that_cannot_be_read() {
    let cluster = Cluster::new(1);
    let policy = Policy { copies: 1, cutting: Chunking::Fixed { size: MIB as u32 }, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
    let data = noise(1, 7 * MIB);
    let node = cluster.write("state", &data);
    assert!(cluster.read_version(node.version) == data);
    let (connection, missing) = (connect(&cluster, 0), Digest::of(b"missing"));
    let chunks: Vec<Digest> = data.chunks(MIB).map(Digest::of).collect();
    let ask = |digests: &[Digest]| {
        let asked = connection.request::<GetChunks>(&(), put_digests(digests));
        cluster.pool.block(asked).map(|(lengths, frames): (Vec<u32>, Bytes)| {
            assert_eq!(lengths.iter().sum::<u32>() as usize, frames.len());
            lengths.len()
        })
    };
    let all = ask(&chunks).unwrap();
    assert!((1..=4).contains(&all), "{all} chunks in an answer of 4 MiB");
    assert_eq!(ask(&[chunks[5], missing, chunks[6]]).unwrap(), 1);
    let refused = ask(&[missing, chunks[5]]);
    assert!(
        matches!(&refused, Err(CallError::Refused { source }) if source.code == code::NOT_FOUND),
        "{refused:?}"
    );
    let many = vec![chunks[0]; 1001];
    assert!(matches!(ask(&many), Err(CallError::Refused { .. })), "too many for one request");
}
