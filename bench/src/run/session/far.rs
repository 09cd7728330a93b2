//! A server behind a link, and a mount of it: each in a network namespace of its own, TLS with pinned keys,
//! as `whimbrel mount --key` does it.

use crate::harness::scratch;
use anyhow::{Result, anyhow, ensure};
use std::{
    fmt, fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use whimbrel_fuse::{MountOptions, Mounted};
use whimbrel_session::{
    client::{Connector, FuseOperations, IdMap, Policy, Session, SessionError, SessionOptions},
    server::{Export, Limits, Server},
};
use whimbrel_testkit::lab::{LinkConfig, LinkEmulator, Namespace};
use whimbrel_wire::{
    BoxFuture, ConnectError, Connection, Endpoint, Identity, PublicKey, Rights, Trust, TrustedPeer,
    connect_tls, serve_tls,
};

pub(super) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
/// Half of the paper's 32 ms.
pub(super) const ONE_WAY: Duration = Duration::from_millis(16);

/// A link's rate and half of its round trip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) mbit: u64,
    one_way: Duration,
}

const LAN: Duration = Duration::from_micros(100);
pub(super) const LAN_100: Line = Line { mbit: 100, one_way: LAN };
pub(super) const LAN_1000: Line = Line { mbit: 1000, one_way: LAN };
/// As fast as the test kit's link is.
pub(super) const FAST: Line = Line { mbit: 10_000, one_way: Duration::ZERO };
pub(super) const WAN_30: Line = Line { mbit: 30, one_way: ONE_WAY };
pub(super) const WAN_100: Line = Line { mbit: 100, one_way: ONE_WAY };

impl Line {
    /// Whether it is a long one.
    pub(super) fn is_wan(self) -> bool {
        self.one_way == ONE_WAY
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms, {} Mbit/s", 2e3 * self.one_way.as_secs_f64(), self.mbit)
    }
}

struct Tls {
    address: String,
    key: PublicKey,
    identity: Identity,
    endpoint: Endpoint,
    /// The latest connection, to be cut.
    latest: Mutex<Option<Connection>>,
}

impl Connector for Tls {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, ConnectError>> {
        Box::pin(async {
            let made = connect_tls(&self.address, self.key, &self.identity, &self.endpoint).await?;
            *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(made.clone());
            Ok(made)
        })
    }

    fn destination(&self) -> String {
        self.address.clone()
    }
}

/// A server behind a link.
pub(super) struct Far {
    pub(super) dir: TempDir,
    connector: Arc<Tls>,
    near: Runtime,
    // Dropped in this order: the server before its namespace, the link before both ends.
    _far: Runtime,
    link: LinkEmulator,
    pub(super) namespaces: [Namespace; 2],
}

fn runtime_in(namespace: &Namespace) -> Result<Runtime> {
    // The runtime's threads are where the thread was that made it.
    let made =
        namespace.run(|| tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build());
    Ok(made?)
}

impl Far {
    pub(super) fn new(mbit: u64, fill: impl FnOnce(&Path) -> Result<()>) -> Result<Self> {
        Self::with(Limits::default(), mbit, fill)
    }

    /// A server within these limits.
    pub(super) fn with(limits: Limits, mbit: u64, fill: impl FnOnce(&Path) -> Result<()>) -> Result<Self> {
        let dir = scratch("session")?;
        for name in ["server", "mount", "second", "keys"] {
            fs::create_dir(dir.path().join(name))?;
        }
        fill(&dir.path().join("server"))?;
        let namespaces = [Namespace::new()?, Namespace::new()?];
        let ends = ((&namespaces[0], CLIENT), (&namespaces[1], SERVER));
        let link = LinkEmulator::between(ends.0, ends.1, LinkConfig::new(mbit, ONE_WAY), 1)?;
        let (near, far) = (runtime_in(&namespaces[0])?, runtime_in(&namespaces[1])?);
        let (ours, theirs) = (Identity::ephemeral()?, Identity::ephemeral()?);
        let trust = Trust::load(&dir.path().join("keys"))?;
        let name = "mount".parse()?;
        let key = Some(ours.public_key());
        trust.add(TrustedPeer {
            name,
            key,
            address: None,
            rights: Rights::all(),
            read: None,
            write: None,
        })?;
        let server = Server::new(vec![Export::new(&dir.path().join("server"))?], false, limits);
        let endpoint = Endpoint::new("state".parse()?, server);
        let key = theirs.public_key();
        let listener = far.block_on(far.spawn(tokio::net::TcpListener::bind((SERVER, 0))))??;
        let address = listener.local_addr()?.to_string();
        far.spawn(async move { serve_tls(listener, &theirs, Arc::new(trust), endpoint).await });
        let endpoint = Endpoint::new("mount".parse()?, ());
        let connector = Arc::new(Tls { address, key, identity: ours, endpoint, latest: Mutex::default() });
        Ok(Self { dir, connector, near, _far: far, link, namespaces })
    }

    pub(super) fn served(&self) -> PathBuf {
        self.dir.path().join("server")
    }

    /// From here on the link is this one.
    pub(super) fn change(&self, line: Line) {
        self.link.change(LinkConfig::new(line.mbit, line.one_way));
    }

    /// Breaks the connection there is; the session makes another one.
    pub(super) fn cut(&self) {
        if let Some(connection) = &*self.connector.latest.lock().unwrap_or_else(PoisonError::into_inner) {
            connection.close();
        }
    }

    pub(super) fn mount(&self, cache: &str, policy: Policy) -> Result<Near> {
        self.mount_with(cache, "mount", |options| options.settings.policy = policy)
    }

    /// Another mount at the same time.
    pub(super) fn mount_second(&self, cache: &str, policy: Policy) -> Result<Near> {
        self.mount_with(cache, "second", |options| options.settings.policy = policy)
    }

    /// A mount of root, for all users of this host and with all that POSIX has.
    pub(super) fn mount_for_root(&self, cache: &str) -> Result<Near> {
        self.mount_with(cache, "mount", |options| {
            (options.id_map, options.xattrs) = (IdMap::Same, true);
            // Otherwise a size that the server refuses is no error of the call.
            options.settings.policy = Policy::Through;
        })
    }

    /// A mount that keeps nothing on this side, as `whimbrel mount --cache-size 0`.
    pub(super) fn mount_without_cache(&self) -> Result<Near> {
        self.mount_with("no-cache", "mount", |options| options.capacity = 0)
    }

    fn mount_with(&self, cache: &str, place: &str, change: impl FnOnce(&mut SessionOptions)) -> Result<Near> {
        let directory = self.dir.path().join("server").canonicalize()?.into_os_string().into_encoded_bytes();
        let mut options = SessionOptions::new(directory, self.dir.path().join(cache));
        options.capacity = 2 << 30;
        options.settings.fresh = None;
        change(&mut options);
        // The last session's threads hold the cache until they have noticed that it is over.
        let deadline = Instant::now() + Duration::from_secs(30);
        let session = loop {
            let begin = Session::start(self.connector.clone(), options.clone());
            match self.near.block_on(self.near.spawn(begin))? {
                Err(SessionError::Directory { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                begun => break begun?,
            }
        };
        let path = self.dir.path().join(place);
        let mut kernel = MountOptions::new("bench", "whimbrel");
        kernel.allow_others = options.id_map == IdMap::Same;
        (kernel.access_lists, kernel.devices) = (options.xattrs, options.xattrs);
        kernel.locks = session.has_locks();
        let mounted = Mounted::new(FuseOperations::new(&session), &path, &kernel)?;
        if let Some(notifier) = mounted.notifier() {
            session.mounted(notifier);
        }
        Ok(Near { session, mounted: Some(mounted), path })
    }
}

/// A mount.
pub(super) struct Near {
    pub(super) session: Session,
    mounted: Option<Mounted>,
    pub(super) path: PathBuf,
}

impl Near {
    /// Writes everything back.
    pub(super) fn flush(&self) -> Result<()> {
        self.session.flush().map_err(|errno| anyhow!("not everything was written back: {errno}"))
    }

    pub(super) fn end(mut self) -> Result<()> {
        let ended = self.session.end();
        self.mounted.take();
        ended.map_err(|errno| anyhow!("not everything was written back: {errno}"))?;
        let events = self.session.status().events;
        ensure!(events.is_empty(), "{events:?}");
        Ok(())
    }
}

pub(super) fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed().as_secs_f64())
}
