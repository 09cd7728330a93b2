//! Tests of a push over the real wire: one host asks another to pull a capsule over the same TLS connection.

use crate::common::{Place, get, live, memory};
use bytes::Bytes;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::net::TcpListener;
use whimbrel_core::CapsuleId;
use whimbrel_transfer::{Holder, Holders, Link, LinkError, Server, WireLink, call, protocol::*};
use whimbrel_wire::{
    BoxFuture, Call, Connection, Endpoint, Identity, Peer, Refusal, Reply, Request, Rights, Service, Trust,
    TrustedPeer, connect_tls, serve_tls,
};

/// Host with a store: serves it, and pulls what it is asked to.
struct Host {
    store: whimbrel_store::Store,
    connections: Mutex<Vec<Connection>>,
}

struct Calls(Arc<Host>);

/// Peer of a call as a holder: the connection exists already.
struct Caller(Connection);

impl Holder for Caller {
    fn name(&self) -> &str {
        "caller"
    }

    fn connect(&self) -> Result<Arc<dyn Link>, LinkError> {
        match self.0.close_reason() {
            None => Ok(Arc::new(WireLink(self.0.clone()))),
            Some(reason) => Err(LinkError::lost(reason)),
        }
    }
}

impl Service for Calls {
    fn handle<'a>(&'a self, _: &'a Peer, request: Request) -> BoxFuture<'a, Result<Reply, Refusal>> {
        let host = self.0.clone();
        Box::pin(async move {
            let answer = move || match request.kind {
                RemotePull::KIND => host.take(&request.decode::<RemotePull>()?),
                _ => Server::new(host.store.clone()).answer(&|_: &CapsuleId| true, &request),
            };
            tokio::task::spawn_blocking(answer).await.unwrap()
        })
    }

    fn connected(&self, connection: Connection) {
        self.0.connections.lock().unwrap().push(connection);
    }
}

impl Host {
    fn take(&self, ask: &RemotePullRequest) -> Result<Reply, Refusal> {
        let connection = self.connections.lock().unwrap().last().cloned().unwrap();
        let sources = Holders::new(vec![Box::new(Caller(connection))]);
        let refused = |error: whimbrel_transfer::TransferError| {
            Refusal::new(whimbrel_wire::Code(300), format!("{error:?}"))
        };
        let report = get(&self.store, &sources, ask.capsule, &ask.bases).map_err(refused)?;
        let pages = report.pages.delta + report.pages.plain;
        Reply::of::<RemotePull>(
            &RemotePullReply { bytes: report.sent + report.received, pages },
            Bytes::new(),
        )
    }
}

fn host(place: &Place) -> Arc<Host> {
    Arc::new(Host { store: place.store.clone(), connections: Mutex::default() })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_is_a_pull_by_the_other_side_over_the_same_connection() {
    let (work, home) = (Place::new(), Place::new());
    let mut content = memory(1500, 1);
    let first = work.capsule(&content, &[7; 30_000], None);
    live(&mut content, 100, 2);
    let second = work.capsule(&content, &[8; 30_000], Some(first));
    let dir = tempfile::tempdir().unwrap();
    let identities =
        (Arc::new(Identity::load_or_create(dir.path()).unwrap()), Identity::ephemeral().unwrap());
    let trust = Arc::new(Trust::load(dir.path()).unwrap());
    let entry = TrustedPeer {
        name: "work".parse().unwrap(),
        key: Some(identities.1.public_key()),
        address: None,
        rights: Rights::all(),
        read: None,
        write: None,
    };
    trust.add(entry).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (endpoint, identity) =
        (Endpoint::new("home".parse().unwrap(), Calls(host(&home))), identities.0.clone());
    let served = tokio::spawn(async move { serve_tls(listener, &identity, trust, endpoint).await });
    let endpoint = Endpoint::new("work".parse().unwrap(), Calls(host(&work)));
    let connection =
        connect_tls(&address, identities.0.public_key(), &identities.1, &endpoint).await.unwrap();
    let link = WireLink(connection.clone());
    let (taken, sizes) = tokio::task::spawn_blocking(move || {
        let take = |capsule, bases| {
            let ask = RemotePullRequest { capsule, refs: vec!["it".parse().unwrap()], bases };
            call::<RemotePull>(&link, &ask, Bytes::new()).unwrap().0
        };
        let whole = take(first, vec![]);
        let (sent, received) = link.bytes();
        let delta = take(second, vec![first]);
        let (after_sent, after_received) = link.bytes();
        (delta.clone(), (whole.bytes, after_sent + after_received - sent - received, delta.bytes))
    })
    .await
    .unwrap();
    assert_eq!(home.memory(&second), content);
    assert!(taken.pages > 60, "{taken:?}");
    let (whole, wire, counted) = sizes;
    assert!(counted < whole / 4, "{counted} of {whole}");
    assert!(wire.abs_diff(counted) < 2000, "what is reported is what crossed: {counted} of {wire}");
    connection.close();
    served.abort();
    tokio::time::timeout(Duration::from_secs(10), connection.closed()).await.unwrap();
}
