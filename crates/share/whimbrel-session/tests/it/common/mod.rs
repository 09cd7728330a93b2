//! A server and a session in one process, with a wire between them that can be cut, and a mount.
#![allow(dead_code, unreachable_pub, reason = "each test file uses some of it")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::Semaphore};
use whimbrel_fuse::{MountOptions, Mounted};
use whimbrel_session::{
    client::{Connector, FuseOperations, IdMap, Policy, Session, SessionError, SessionOptions},
    server::{Export, Limits, Server},
};
use whimbrel_wire::{
    Answer, BoxFuture, ConnectError, ConnectStep, Connection, Endpoint, Peer, PeerIdentity, Refusal, Reply,
    Request, Rights, Service, connect_io,
};

/// What happens to a request.
pub enum Fate {
    Answered,
    /// The request is carried out, and the connection breaks before its answer.
    Lost,
    /// The request is carried out once there is a permit, even without a connection, and gets no answer.
    Late(Arc<Semaphore>),
    /// The request is carried out at once, and answered once there is a permit.
    Held(Arc<Semaphore>),
    Refused(Refusal),
    /// The answer is replaced by another.
    Changed(fn(Reply) -> Reply),
}

type Decides = dyn Fn(&Request) -> Fate + Send + Sync;

/// A server, and an interceptor of its answers.
struct Between {
    server: Server,
    decides: Arc<Decides>,
    living: Arc<Mutex<Vec<Connection>>>,
}

impl Service for Between {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        match (self.decides)(&request) {
            Fate::Answered => self.server.handle(peer, request),
            Fate::Refused(refusal) => Box::pin(async move { Err(refusal) }),
            Fate::Changed(change) => {
                Box::pin(async move { self.server.handle(peer, request).await.map(change) })
            }
            Fate::Late(permits) => {
                let (server, peer, permits) = (self.server.clone(), peer.clone(), permits.clone());
                tokio::spawn(async move {
                    let permit = permits.acquire().await.unwrap();
                    drop(server.handle(&peer, request).await);
                    drop(permit);
                });
                Box::pin(std::future::pending())
            }
            Fate::Held(permits) => Box::pin(async move {
                let answer = self.server.handle(peer, request).await;
                drop(permits.acquire().await);
                answer
            }),
            Fate::Lost => Box::pin(async move {
                drop(self.server.handle(peer, request).await);
                self.living.lock().unwrap().drain(..).for_each(|connection| connection.close());
                std::future::pending().await
            }),
        }
    }
}

/// Connects to a server in this process.
pub struct InProcess {
    server: Mutex<Server>,
    decides: Mutex<Arc<Decides>>,
    living: Arc<Mutex<Vec<Connection>>>,
    down: AtomicBool,
    /// Number of times that all connections were ended.
    cuts: AtomicU64,
}

impl InProcess {
    pub fn new(server: Server) -> Arc<Self> {
        let decides: Arc<Decides> = Arc::new(|_| Fate::Answered);
        let (server, decides) = (Mutex::new(server), Mutex::new(decides));
        Arc::new(Self {
            server,
            decides,
            living: Arc::default(),
            down: AtomicBool::new(false),
            cuts: AtomicU64::new(0),
        })
    }

    /// Sets the fate of requests for all later connections, and ends the current ones.
    pub fn decide(&self, decides: impl Fn(&Request) -> Fate + Send + Sync + 'static) {
        *self.decides.lock().unwrap() = Arc::new(decides);
        self.cut(false);
    }

    /// Ends every connection; while `down` there is no other.
    pub fn cut(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
        self.cuts.fetch_add(1, Ordering::SeqCst);
        for connection in self.living.lock().unwrap().drain(..) {
            connection.close();
        }
    }

    pub fn mend(&self) {
        self.down.store(false, Ordering::SeqCst);
    }

    /// Starts another server process, which knows nothing of the last.
    pub fn restart(&self, server: Server) {
        *self.server.lock().unwrap() = server;
        self.cut(false);
    }
}

fn endpoint(name: &str, service: impl whimbrel_wire::Service) -> Endpoint {
    Endpoint::new(name.parse().unwrap(), service)
}

/// A connection to a server in this process.
pub async fn connect(server: impl Service) -> Result<(Connection, Connection), ConnectError> {
    let (near, far) = tokio::io::duplex(4 << 20);
    let (near_read, near_write) = tokio::io::split(near);
    let (far_read, far_write) = tokio::io::split(far);
    let (client, server_end) = (endpoint("client", ()), endpoint("server", server));
    let serving = connect_io(far_read, far_write, PeerIdentity::Stdio, Rights::all(), &server_end);
    let calling = connect_io(near_read, near_write, PeerIdentity::Stdio, Rights::all(), &client);
    let (serving, calling) = tokio::join!(serving, calling);
    Ok((calling?, serving?))
}

impl Connector for InProcess {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, ConnectError>> {
        Box::pin(async move {
            if self.down.load(Ordering::SeqCst) {
                let source = std::io::ErrorKind::ConnectionRefused.into();
                return Err(ConnectError::Io { step: ConnectStep::Dial, source });
            }
            let cuts = self.cuts.load(Ordering::SeqCst);
            let server = Between {
                server: self.server.lock().unwrap().clone(),
                decides: self.decides.lock().unwrap().clone(),
                living: self.living.clone(),
            };
            let (calling, serving) = connect(server).await?;
            let mut living = self.living.lock().unwrap();
            living.push(serving);
            if self.cuts.load(Ordering::SeqCst) != cuts {
                // Whoever ended the connections did not see this one, which has the server and the fate of
                // before.
                living.drain(..).for_each(|connection| connection.close());
            }
            drop(living);
            Ok(calling)
        })
    }

    fn destination(&self) -> String {
        "here".to_owned()
    }
}

/// A server's directory, a session on it, and its mount.
pub struct World {
    pub session: Option<Session>,
    pub mounted: Option<Mounted>,
    pub wire: Arc<InProcess>,
    pub options: SessionOptions,
    pub runtime: Arc<Runtime>,
    pub dir: TempDir,
    /// Whether the server holds the locks of programs.
    locks: bool,
}

/// A server of a directory. A second one acts as another process: what the first still has to do is not done
/// after requests to the second.
pub fn server_of(dir: &Path) -> Server {
    server_with(dir, Limits { watch: false, ..Limits::default() })
}

/// A server of a directory within these limits.
pub fn server_with(dir: &Path, limits: Limits) -> Server {
    let turns = dir.parent().unwrap().join("turns");
    fs::create_dir_all(&turns).unwrap();
    Server::new(
        vec![Export::new(dir).unwrap()],
        false,
        Limits { token_dir: Some(turns), ownership: true, ..limits },
    )
}

impl World {
    /// `change` may alter the options of the session; `fill` creates the server's files.
    pub fn new(change: impl FnOnce(&mut SessionOptions), fill: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = dir.path().join("server");
        fs::create_dir(&server).unwrap();
        fill(&server);
        let served = server_of(&server);
        Self::on(dir, &server, (served, false), change)
    }

    /// A server that notices what other processes change, and a session that never asks again by itself.
    pub fn leased(
        limits: Limits,
        change: impl FnOnce(&mut SessionOptions),
        fill: impl FnOnce(&Path),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = dir.path().join("server");
        fs::create_dir(&server).unwrap();
        fill(&server);
        let served = server_with(&server, limits);
        Self::on(dir, &server, (served, true), |options| {
            options.settings.fresh = None;
            change(options);
        })
    }

    /// Another session of the same server.
    pub fn beside(world: &World, change: impl FnOnce(&mut SessionOptions)) -> Self {
        let served = world.wire.server.lock().unwrap().clone();
        Self::on(tempfile::tempdir().unwrap(), &world.server(), (served, true), |options| {
            options.settings.fresh = None;
            change(options);
        })
    }

    /// A session on the mount of another.
    pub fn over(world: &World, change: impl FnOnce(&mut SessionOptions)) -> Self {
        Self::on(tempfile::tempdir().unwrap(), &world.mount(), (server_of(&world.mount()), false), change)
    }

    pub fn on(
        dir: TempDir,
        served: &Path,
        (server, locks): (Server, bool),
        change: impl FnOnce(&mut SessionOptions),
    ) -> Self {
        fs::create_dir(dir.path().join("mount")).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let wire = InProcess::new(server);
        let exported = served.canonicalize().unwrap().into_os_string().into_encoded_bytes();
        let mut options = SessionOptions::new(exported, dir.path().join("cache"));
        options.capacity = 64 << 20;
        options.settings.patience = 5;
        change(&mut options);
        let runtime = Arc::new(runtime.unwrap());
        let mut world = Self { session: None, mounted: None, wire, options, runtime, dir, locks };
        world.begin();
        world
    }

    pub fn begin(&mut self) {
        // The last session's threads lock the cache until they have ended.
        let deadline = Instant::now() + Duration::from_secs(20);
        let session = loop {
            match self.runtime.block_on(Session::start(self.wire.clone(), self.options.clone())) {
                Err(SessionError::Directory { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                begun => break begun.unwrap(),
            }
        };
        let mut options = MountOptions::new("test", "whimbrel");
        // A session with the numbers of the server is root's, for all users of the host.
        options.locks = self.locks;
        options.allow_others = self.options.id_map == IdMap::Same;
        (options.access_lists, options.devices) = (self.options.xattrs && options.allow_others, true);
        let mounted = Mounted::new(FuseOperations::new(&session), &self.mount(), &options).unwrap();
        session.mounted(mounted.notifier().unwrap());
        self.session = Some(session);
        self.mounted = Some(mounted);
    }

    /// Ends in order.
    pub fn end(&mut self) {
        let session = self.session.take().unwrap();
        session.end().unwrap();
        self.mounted.take();
        drop(session);
    }

    /// Ends like a killed process: everything in memory is lost.
    pub fn crash(&mut self) {
        self.wire.cut(true);
        self.session.take().unwrap().abandon();
        self.mounted.take();
        self.wire.mend();
    }

    pub fn session(&self) -> &Session {
        self.session.as_ref().unwrap()
    }

    pub fn server(&self) -> PathBuf {
        self.dir.path().join("server")
    }

    pub fn mount(&self) -> PathBuf {
        self.dir.path().join("mount")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.mounted.take();
        self.session.take();
    }
}

/// Write-back on request only, and names that never expire.
pub fn back(options: &mut SessionOptions) {
    options.settings.policy = Policy::Back;
    options.settings.delay = None;
    options.settings.fresh = None;
}

/// A session of root that shows every owner, and extended attributes.
pub fn root(options: &mut SessionOptions) {
    options.id_map = IdMap::Same;
    options.xattrs = true;
}

/// Waits until a condition holds.
pub fn until(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Pseudo-random bytes of a seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| step()).collect()
}
