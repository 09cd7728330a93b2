//! Tests of connections to a benefactor on this host, which continue through its Unix socket.

use crate::common::{Cluster, noise};
use bytes::Bytes;
use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::net::{TcpListener, TcpStream};
use whimbrel_core::Digest;
use whimbrel_pool::{
    chunk::Chunking,
    connections::{Dialer, TlsDialer},
    policy::Policy,
    protocol::{GetChunk, GetStatus},
};
use whimbrel_wire::Identity;

const MIB: usize = 1 << 20;

fn dialer(cluster: &Cluster) -> TlsDialer {
    let identity = Arc::new(Identity::load_or_create(&cluster.dir.path().join("client")).unwrap());
    TlsDialer::new(identity, "client".parse().unwrap(), ())
}

/// An address that leads to `to`, and the bytes that came from there.
async fn counted(to: SocketAddr) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, passed) = (listener.local_addr().unwrap().to_string(), Arc::new(AtomicU64::new(0)));
    let count = passed.clone();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let (far, count) = (TcpStream::connect(to).await.unwrap(), count.clone());
            tokio::spawn(async move {
                let ((mut from_near, mut to_near), (mut from_far, mut to_far)) =
                    (near.into_split(), far.into_split());
                tokio::spawn(async move { tokio::io::copy(&mut from_near, &mut to_far).await });
                let mut piece = vec![0; 64 << 10];
                while let Ok(length @ 1..) = tokio::io::AsyncReadExt::read(&mut from_far, &mut piece).await {
                    count.fetch_add(length as u64, Ordering::Relaxed);
                    if tokio::io::AsyncWriteExt::write_all(&mut to_near, &piece[..length]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, passed)
}

#[test]
fn chunks_of_a_benefactor_on_this_host_do_not_pass_the_network() {
    let cluster = Cluster::new(1);
    let policy = Policy { copies: 1, cutting: Chunking::Fixed { size: MIB as u32 }, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
    let data = noise(1, MIB);
    cluster.write("state", &data);
    let (member, dialer) = (&cluster.benefactors[0], dialer(&cluster));
    let (address, passed) = cluster.pool.block(counted(member.listen));
    let digest = Digest::of(&data);
    let passes = |connection: whimbrel_wire::Connection| {
        let asked = connection.request::<GetChunk>(&digest, Bytes::new());
        let ((), frame) = cluster.pool.block(asked).unwrap();
        assert!(frame.len() > MIB);
        passed.swap(0, Ordering::Relaxed)
    };
    let near = cluster.pool.block(dialer.dial_benefactor(&address, member.key)).unwrap();
    let passed_near = passes(near);
    assert!(passed_near < 64 << 10, "{passed_near} bytes came over TCP");
    let passed_tls = passes(cluster.pool.block(dialer.dial(&address, member.key)).unwrap());
    assert!(passed_tls > MIB as u64, "{passed_tls} bytes came over TCP");
}

/// As a manager does: benefactors of earlier versions do not know the call.
#[test]
fn a_member_without_a_unix_socket_is_called_over_tls() {
    let cluster = Cluster::new(0);
    let (dialer, manager) = (dialer(&cluster), &cluster.address);
    let connection = cluster.pool.block(dialer.dial_benefactor(&manager.address, manager.key)).unwrap();
    cluster.pool.block(connection.request::<GetStatus>(&(), Bytes::new())).unwrap();
}
