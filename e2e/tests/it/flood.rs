//! A host under a flood: handshakes that nobody finishes, pulls whose source never answers, and answers that
//! nobody reads. The host that floods is a trusted one.

use crate::protect::{protection, wait_epochs};
use std::{
    collections::VecDeque,
    future::pending,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::guest::assert_same_life;
use whimbrel_transfer::protocol::{ListRefs, ListRefsRequest, PROTOCOL, RemotePull, RemotePullRequest};
use whimbrel_wire::{
    Answer, BoxFuture, Connection, Endpoint, Identity, Peer, PublicKey, Request, Service, connect_tls,
};

const HANDSHAKES: usize = 1000;
const PULLS: usize = 512;
/// Requests whose answers do not fit the buffers of a connection.
const UNREAD: usize = 20_000;

/// Service that never answers.
struct Mute;

impl Service for Mute {
    fn handle<'a>(&'a self, _: &'a Peer, _: Request) -> BoxFuture<'a, Answer> {
        Box::pin(pending())
    }
}

/// Whom a flood concerns, and how far it is.
struct Flood {
    host: SocketAddr,
    key: PublicKey,
    identity: PathBuf,
    handshakes: AtomicUsize,
    pulls: AtomicUsize,
    unread: AtomicUsize,
    /// Whether the relay does not read any more.
    slows: AtomicBool,
    ends: AtomicBool,
}

impl Flood {
    fn is_over(&self) -> bool {
        self.ends.load(Ordering::SeqCst)
    }

    /// Keeps the newest thousand connections open, which have sent the first bytes of a TLS record.
    fn stall_handshakes(&self) {
        let mut open = VecDeque::new();
        while !self.is_over() {
            if let Ok(mut stream) = TcpStream::connect_timeout(&self.host, Duration::from_secs(2)) {
                // It may have been closed at once.
                let _ = stream.write_all(&[0x16, 3, 1]);
                open.push_back(stream);
                self.handshakes.fetch_add(1, Ordering::SeqCst);
            }
            if open.len() > HANDSHAKES {
                open.pop_front();
                // From here on it only keeps what the host has ended full.
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    async fn connect(&self, address: SocketAddr) -> Connection {
        let identity = Identity::load_or_create(&self.identity).expect("a key");
        let endpoint = Endpoint::new("delta".parse().expect("a name"), Mute).with_protocols([PROTOCOL]);
        connect_tls(&address.to_string(), self.key, &identity, &endpoint).await.expect("a connection")
    }

    /// Has the host pull capsules from here, where nobody answers; and asks it for lists by a connection with
    /// a relay that stops reading.
    async fn ask(&self, connection: Connection, slow: Connection) {
        let mut never = Vec::new();
        for number in 0..PULLS {
            let capsule = CapsuleId(Digest::of(&number.to_le_bytes()));
            let refs = vec![format!("delta.{number}").parse().expect("a name")];
            let wanted = RemotePullRequest { capsule, refs, bases: Vec::new() };
            let request = Request::of::<RemotePull>(&wanted, Default::default()).expect("a request");
            never.push(connection.start(request).await.expect("a request that leaves"));
            self.pulls.fetch_add(1, Ordering::SeqCst);
        }
        let list = ListRefsRequest { pattern: "*".to_owned(), after: None };
        for _ in 0..UNREAD {
            let request = Request::of::<ListRefs>(&list, Default::default()).expect("a request");
            // The host may end a connection that does not read.
            let Ok(Ok(answer)) = tokio::time::timeout(Duration::from_secs(5), slow.start(request)).await
            else {
                break;
            };
            never.push(answer);
            self.unread.fetch_add(1, Ordering::SeqCst);
        }
        while !self.is_over() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Relays one connection, until it has to be slow: then it reads nothing more of the host.
    fn relay(&self, listener: &TcpListener) {
        let (mut client, _) = listener.accept().expect("a client");
        let mut host = TcpStream::connect(self.host).expect("the host");
        let (mut from, mut to) = (client.try_clone().expect("a handle"), host.try_clone().expect("a handle"));
        thread::spawn(move || std::io::copy(&mut from, &mut to));
        let mut room = [0; 4096];
        while let Ok(count @ 1..) = host.read(&mut room) {
            if client.write_all(&room[..count]).is_err() {
                return;
            }
            while self.slows.load(Ordering::SeqCst) && !self.is_over() {
                thread::sleep(Duration::from_millis(100));
            }
        }
    }

    fn run(self: Arc<Self>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a relay");
        let relay = listener.local_addr().expect("its address");
        let slow = self.clone();
        thread::spawn(move || slow.relay(&listener));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        // Before the handshakes, which would push out those of the same address.
        let (connection, slow) =
            runtime.block_on(async { (self.connect(self.host).await, self.connect(relay).await) });
        self.slows.store(true, Ordering::SeqCst);
        let handshakes = self.clone();
        let handshakes = thread::spawn(move || handshakes.stall_handshakes());
        runtime.block_on(self.ask(connection, slow));
        handshakes.join().expect("the handshakes end");
    }
}

/// Starts the flood of `alpha` by a host `delta` that it trusts, from the client's network.
fn flood(cluster: &Cluster, alpha: &HostProcess) -> (Arc<Flood>, JoinHandle<()>) {
    let identity = cluster.disk.path().join("delta");
    let key = Identity::load_or_create(&identity).expect("a key").public_key();
    alpha.run(&["trust", "add", "delta", &key.to_string(), "192.0.2.1:7400"]);
    let flood = Arc::new(Flood {
        host: alpha.address().parse().expect("an address"),
        key: alpha.key().parse().expect("a key"),
        identity,
        handshakes: AtomicUsize::new(0),
        pulls: AtomicUsize::new(0),
        unread: AtomicUsize::new(0),
        slows: AtomicBool::new(false),
        ends: AtomicBool::new(false),
    });
    let running = flood.clone();
    (flood, cluster.lab.host("client").spawn(move || running.run()))
}

#[test]
fn a_flood_takes_neither_the_lease_of_a_protected_machine_nor_the_answers_to_its_owner() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest::small("web").run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let before = witness.write(50).expect("a first life");
    alpha.run(&["checkpoint", "web", "--tag", "kept"]);
    alpha.json(&["protect", "web", "beta", "--witness", "gamma", "--lease", "2s"]);
    wait_epochs(alpha, 2);

    let (flood, running) = flood(&cluster, alpha);
    let deadline = Instant::now() + PATIENCE;
    while flood.handshakes.load(Ordering::SeqCst) < HANDSHAKES || flood.pulls.load(Ordering::SeqCst) < PULLS {
        assert!(!running.is_finished() && Instant::now() < deadline, "no flood:\n{}", alpha.log_text());
        thread::sleep(Duration::from_millis(20));
    }
    // Its lease lasts for many epochs, which go on; its owner and other hosts are served.
    let epoch = protection(alpha)["epoch"].as_u64().expect("an epoch");
    let mut answers = Vec::new();
    while protection(alpha)["epoch"].as_u64().unwrap_or(0) < epoch + 30 {
        let begun = Instant::now();
        let now = protection(alpha);
        answers.push(begun.elapsed());
        assert_eq!((&now["role"], &now["state"]["kind"]), (&"primary".into(), &"protected".into()), "{now}");
        assert!(Instant::now() < deadline + PATIENCE, "no epochs: {now}\n{}", alpha.log_text());
    }
    beta.run(&["pull", "alpha:kept"]);
    let after = witness.check().expect("an answer on the connection that was open all the time");
    assert_same_life(&before, &after);
    assert!(beta.machines().iter().all(|(_, state)| state != "running"), "{:?}", beta.machines());

    answers.sort();
    println!(
        "{} handshakes, {} pulls, {} answers unread; `ps` in {:?}, at most {:?}",
        flood.handshakes.load(Ordering::SeqCst),
        flood.pulls.load(Ordering::SeqCst),
        flood.unread.load(Ordering::SeqCst),
        answers[answers.len() / 2],
        answers[answers.len() - 1],
    );
    flood.ends.store(true, Ordering::SeqCst);
    running.join().expect("the flood ends");
}
