//! A pool on this host: manager and benefactors with real sockets and TLS, each in its own folder, to be
//! killed and restarted.

#![allow(dead_code, reason = "each test uses a part of it")]

use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    net::SocketAddr,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::{runtime::Runtime, sync::watch, task::JoinHandle};
use whimbrel_pool::{
    ManagerAddress,
    benefactor::{Benefactor, BenefactorError, BenefactorOptions, ChunkStore, ScrubOptions, TierOptions},
    client::{Pool, PoolOptions, Secret, WriteFile, WriteOptions},
    connections::TlsDialer,
    manager::{Manager, ManagerError, ManagerOptions, ManagerService},
    protocol::{NewNode, Node},
};
use whimbrel_wire::{Identity, PublicKey, Rights, Trust, TrustedPeer};

/// Far more than a test writes.
const CAPACITY: u64 = 4 << 30;

pub(crate) struct Cluster {
    pub(crate) runtime: Runtime,
    pub(crate) dir: TempDir,
    pub(crate) manager: Option<(JoinHandle<Result<(), ManagerError>>, ManagerService)>,
    pub(crate) address: ManagerAddress,
    pub(crate) benefactors: Vec<Member>,
    pub(crate) pool: Pool,
    pub(crate) tweak: Box<dyn Fn(&mut ManagerOptions)>,
    /// Pace of the scrubs of benefactors that are started.
    pub(crate) scrub: ScrubOptions,
    /// Managers that benefactors know beside the first.
    pub(crate) other_managers: Vec<ManagerAddress>,
}

pub(crate) struct Member {
    pub(crate) data: PathBuf,
    pub(crate) listen: SocketAddr,
    pub(crate) key: PublicKey,
    pub(crate) capacity: u64,
    pub(crate) tier: Option<TierOptions>,
    pub(crate) leave: watch::Sender<bool>,
    pub(crate) store: Option<Arc<ChunkStore>>,
    pub(crate) task: Option<JoinHandle<Result<(), BenefactorError>>>,
}

/// Polls until the condition is true.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    StdRng::seed_from_u64(seed).fill(&mut out[..]);
    out
}

pub(crate) fn admit(dir: &Path, name: &str, key: PublicKey) {
    let (name, rights) = (name.parse().unwrap(), Rights::all());
    let peer = TrustedPeer { name, key: Some(key), address: None, rights, read: None, write: None };
    Trust::load(dir).unwrap().add(peer).unwrap();
}

/// Whether this process has a file open whose path begins like that.
fn has_open(start: &Path) -> bool {
    let mut links =
        std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|fd| fd.path().read_link().ok());
    links.any(|link| link.as_os_str().as_bytes().starts_with(start.as_os_str().as_bytes()))
}

impl Cluster {
    pub(crate) fn new(benefactors: usize) -> Self {
        Self::with(benefactors, |_| {})
    }

    pub(crate) fn with(benefactors: usize, tweak: impl Fn(&mut ManagerOptions) + 'static) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("manager");
        let manager_key = Identity::load_or_create(&data).unwrap().public_key();
        let client = Arc::new(Identity::load_or_create(&dir.path().join("client")).unwrap());
        admit(&data, "client", client.public_key());
        let address = ManagerAddress { address: free_port(), key: manager_key };
        let dialer = Arc::new(TlsDialer::new(client, "client".parse().unwrap(), ()));
        let options = PoolOptions {
            manager_timeout: Duration::from_secs(10),
            benefactor_timeout: Duration::from_secs(3),
            ..PoolOptions::new(vec![address.clone()])
        };
        let pool = Pool::new(options, dialer, runtime.handle().clone());
        let (tweak, other_managers, benefactor_list) = (Box::new(tweak), Vec::new(), Vec::new());
        let scrub = ScrubOptions::default();
        let mut cluster = Self {
            runtime,
            dir,
            manager: None,
            address,
            benefactors: benefactor_list,
            pool,
            tweak,
            other_managers,
            scrub,
        };
        cluster.start_manager();
        for _ in 0..benefactors {
            cluster.add_benefactor(CAPACITY);
        }
        cluster.wait_online(benefactors);
        cluster
    }

    pub(crate) fn start_manager(&mut self) {
        let mut options =
            ManagerOptions::new(self.dir.path().join("manager"), self.address.address.parse().unwrap());
        options.interval = 1;
        options.repair_every = Duration::from_millis(50);
        (self.tweak)(&mut options);
        let mut manager = None;
        until("the manager's address is free", || {
            manager = self.runtime.block_on(Manager::open(options.clone())).ok();
            manager.is_some()
        });
        let manager = manager.unwrap();
        let service = manager.service().clone();
        self.manager = Some((self.runtime.spawn(manager.run()), service));
    }

    /// Stops like a killed process: whatever it was doing ends.
    pub(crate) fn kill_manager(&mut self) {
        let (task, service) = self.manager.take().unwrap();
        drop(service);
        task.abort();
        let _ = self.runtime.block_on(task);
        // Threads of the database outlive the task, and the last one removes the journal of whatever database
        // has that name by then.
        let database = self.dir.path().join("manager/pool.db");
        until("the files of its database are closed", || !has_open(&database));
    }

    pub(crate) fn add_benefactor(&mut self, capacity: u64) -> usize {
        self.add_benefactor_before(capacity, None)
    }

    /// Starts a benefactor that may have an object tier.
    pub(crate) fn add_benefactor_before(&mut self, capacity: u64, tier: Option<TierOptions>) -> usize {
        let number = self.benefactors.len();
        let data = self.dir.path().join(format!("b{number}"));
        let key = Identity::load_or_create(&data).unwrap().public_key();
        admit(&self.dir.path().join("manager"), &format!("b{number}"), key);
        let listen = free_port().parse().unwrap();
        let (leave, _) = watch::channel(false);
        self.benefactors.push(Member { data, listen, key, capacity, tier, leave, store: None, task: None });
        self.start_benefactor(number);
        number
    }

    pub(crate) fn start_benefactor(&mut self, number: usize) {
        let member = &mut self.benefactors[number];
        let options = BenefactorOptions {
            name: format!("b{number}").parse().unwrap(),
            data: member.data.clone(),
            capacity: member.capacity,
            keep_free: 0,
            listen: member.listen,
            advertise: None,
            managers: std::iter::once(&self.address).chain(&self.other_managers).cloned().collect(),
            inventory_every: Duration::from_millis(300),
            scrub: self.scrub,
            tier: member.tier.clone(),
        };
        let mut opened = None;
        until("the benefactor's address and folder are free", || {
            opened = self.runtime.block_on(Benefactor::open(options.clone())).ok();
            opened.is_some()
        });
        let opened = opened.unwrap();
        member.store = Some(opened.store().clone());
        member.task = Some(self.runtime.spawn(opened.run(member.leave.subscribe())));
    }

    pub(crate) fn kill_benefactor(&mut self, number: usize) {
        let member = &mut self.benefactors[number];
        member.store = None;
        let task = member.task.take().unwrap();
        task.abort();
        let _ = self.runtime.block_on(task);
    }

    pub(crate) fn online(&self) -> usize {
        let status = self.pool.block(self.pool.status());
        status.map_or(0, |status| status.benefactors.iter().filter(|b| b.state == "online").count())
    }

    pub(crate) fn wait_online(&self, count: usize) {
        until("all benefactors are online", || self.online() >= count);
    }

    pub(crate) fn make(name: &str) -> NewNode {
        NewNode { parent: 1, name: name.into(), folder: false, mode: 0o644, uid: 0, gid: 0 }
    }

    pub(crate) fn open(&self, name: &str, options: WriteOptions) -> WriteFile {
        let node = self.pool.block(self.pool.lookup(1, name)).ok();
        self.pool.block(WriteFile::open(&self.pool, Self::make(name), node, true, options)).unwrap()
    }

    pub(crate) fn write(&self, name: &str, data: &[u8]) -> Node {
        let file = self.open(name, WriteOptions::default());
        for (at, block) in data.chunks(100_000).enumerate() {
            file.write_at(at as u64 * 100_000, block).unwrap();
        }
        file.commit().unwrap().unwrap()
    }

    /// Reads through a handle without cached data.
    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        let node = self.pool.block(self.pool.lookup(1, name)).unwrap();
        self.read_version(node.version)
    }

    pub(crate) fn read_version(&self, version: u64) -> Vec<u8> {
        self.try_read(version).unwrap()
    }

    pub(crate) fn try_read(&self, version: u64) -> whimbrel_pool::client::Result<Vec<u8>> {
        let fresh = self.fresh_pool();
        fresh.block(async {
            let file = fresh.read(version).await?;
            Ok(file.read_at(0, file.size() as usize).await?.to_vec())
        })
    }

    pub(crate) fn fresh_pool(&self) -> Pool {
        self.pool_with(None)
    }

    /// A handle without cached data, with a secret.
    pub(crate) fn pool_with(&self, secret: Option<Arc<Secret>>) -> Pool {
        let client = Identity::load_or_create(&self.dir.path().join("client")).unwrap();
        self.pool_as(client, secret)
    }

    /// A handle that waits a second for the manager.
    pub(crate) fn impatient_pool(&self) -> Pool {
        let client = Identity::load_or_create(&self.dir.path().join("client")).unwrap();
        self.pool_waiting(Duration::from_secs(1), client, None)
    }

    /// A handle of a client that the manager admits now.
    pub(crate) fn newcomer(&self, name: &str) -> Pool {
        let identity = Identity::ephemeral().unwrap();
        admit(&self.dir.path().join("manager"), name, identity.public_key());
        self.pool_as(identity, None)
    }

    pub(crate) fn pool_as(&self, client: Identity, secret: Option<Arc<Secret>>) -> Pool {
        self.pool_waiting(Duration::from_secs(10), client, secret)
    }

    fn pool_waiting(&self, manager_timeout: Duration, client: Identity, secret: Option<Arc<Secret>>) -> Pool {
        let dialer = Arc::new(TlsDialer::new(Arc::new(client), "client".parse().unwrap(), ()));
        let options = PoolOptions {
            manager_timeout,
            benefactor_timeout: Duration::from_secs(3),
            secret,
            ..PoolOptions::new(vec![self.address.clone()])
        };
        Pool::new(options, dialer, self.runtime.handle().clone())
    }

    /// Number of chunks of all benefactors together.
    pub(crate) fn copies(&self) -> u64 {
        self.benefactors.iter().filter_map(|member| Some(member.store.as_ref()?.usage().chunks)).sum()
    }
}

/// A port that nobody listens on. If another process takes it, the test fails at once.
pub(crate) fn free_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}
