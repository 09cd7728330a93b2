//! Hosts on loopback for these tests: a service that can echo, hold, record and panic.

use bytes::Bytes;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinHandle};
use whimbrel_wire::{
    Answer, BoxFuture, Code, ConnectError, Connection, Endpoint, Identity, Peer, Refusal, Reply, Request,
    RequestOrder, Rights, Service, Trust, TrustedPeer, connect_tls, serve_tls,
};

pub(crate) const ECHO: u16 = 0x0701;
pub(crate) const HOLD: u16 = 0x0702;
pub(crate) const RECORD: u16 = 0x0703;
pub(crate) const PANIC: u16 = 0x0704;
pub(crate) const CALL_BACK: u16 = 0x0705;
pub(crate) const FILL: u16 = 0x0706;

/// What the service has seen, and the gate behind which held requests wait.
pub(crate) struct Bench {
    pub(crate) gate: Semaphore,
    pub(crate) seen: Mutex<Vec<(RequestOrder, Bytes)>>,
    pub(crate) connections: Mutex<Vec<Connection>>,
    pub(crate) keep: bool,
}

impl Default for Bench {
    fn default() -> Self {
        Self { gate: Semaphore::new(0), seen: Mutex::default(), connections: Mutex::default(), keep: false }
    }
}

#[derive(Clone, Default)]
pub(crate) struct TestService(pub(crate) Arc<Bench>);

impl Service for TestService {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            match request.kind {
                ECHO => {}
                HOLD => self.0.gate.acquire().await.unwrap().forget(),
                RECORD => {
                    // A yield gives a wrong order every chance to show.
                    tokio::task::yield_now().await;
                    self.0.seen.lock().unwrap().push((request.order, request.header.clone()));
                }
                PANIC => panic!("as asked"),
                CALL_BACK => {
                    let connection = self.0.connections.lock().unwrap().last().cloned().unwrap();
                    assert_eq!(connection.peer().name, peer.name);
                    let back = Request::new(ECHO, request.header, request.payload);
                    let failed = |error| Refusal::new(Code::INTERNAL, format!("{error}"));
                    return connection.call(back).await.map_err(failed);
                }
                FILL => return Ok(Reply { header: Bytes::new(), payload: vec![7; 4 << 20].into() }),
                kind => return Err(Refusal::unknown_kind(kind)),
            }
            Ok(Reply { header: request.header, payload: request.payload })
        })
    }

    fn connected(&self, connection: Connection) {
        if self.0.keep {
            self.0.connections.lock().unwrap().push(connection);
        }
    }
}

/// A listening host; it stops when dropped.
pub(crate) struct Host {
    pub(crate) address: String,
    pub(crate) identity: Arc<Identity>,
    pub(crate) trust: Arc<Trust>,
    pub(crate) bench: Arc<Bench>,
    /// Shared, so that a test can keep the trust list of a host that it ends: its
    /// last requests are judged by that list.
    pub(crate) dir: Arc<tempfile::TempDir>,
    task: JoinHandle<Result<(), ConnectError>>,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn endpoint(name: &str) -> Endpoint {
    Endpoint::new(name.parse().unwrap(), TestService::default())
}

pub(crate) async fn host_with(change: impl FnOnce(&mut Endpoint), keep: bool) -> Host {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let identity = Arc::new(Identity::load_or_create(dir.path()).unwrap());
    let trust = Arc::new(Trust::load(dir.path()).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let bench = Arc::new(Bench { keep, ..Bench::default() });
    let mut endpoint = Endpoint::new("server".parse().unwrap(), TestService(bench.clone()));
    change(&mut endpoint);
    let (served, trusted) = (identity.clone(), trust.clone());
    let task = tokio::spawn(async move { serve_tls(listener, &served, trusted, endpoint).await });
    Host { address, identity, trust, bench, dir, task }
}

pub(crate) async fn host() -> Host {
    host_with(|_| (), false).await
}

impl Host {
    pub(crate) fn admit(&self, name: &str, identity: &Identity, rights: Rights) {
        let entry = TrustedPeer {
            name: name.parse().unwrap(),
            key: Some(identity.public_key()),
            address: None,
            rights,
            read: None,
            write: None,
        };
        self.trust.add(entry).unwrap();
    }

    pub(crate) async fn connect_as(
        &self,
        identity: &Identity,
        endpoint: &Endpoint,
    ) -> Result<Connection, ConnectError> {
        connect_tls(&self.address, self.identity.public_key(), identity, endpoint).await
    }

    /// The host's own handle on its newest connection, where it keeps them.
    pub(crate) async fn far_side(&self) -> Connection {
        until("the host has the connection", || !self.bench.connections.lock().unwrap().is_empty()).await;
        self.bench.connections.lock().unwrap().pop().unwrap()
    }

    /// A new trusted client.
    pub(crate) async fn client(&self) -> Connection {
        let identity = Identity::ephemeral().unwrap();
        let name = format!("client-{}", self.trust.list().unwrap().len());
        self.admit(&name, &identity, Rights::all());
        self.connect_as(&identity, &endpoint(&name)).await.unwrap()
    }
}

pub(crate) fn request(kind: u16, header: impl AsRef<[u8]>, payload: impl Into<Bytes>) -> Request {
    Request::new(kind, Bytes::copy_from_slice(header.as_ref()), payload.into())
}

/// Waits until `done`, which must come true within a minute.
pub(crate) async fn until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..12_000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never happened: {what}");
}

/// A future that must end within a minute: a hang is a failure, not a stuck test run.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("ends within a minute")
}
