//! Tests of the metadata in a real PostgreSQL server with two managers. The server is the test's own, in its
//! own folder; `scripts/bootstrap` installs the programs.

use crate::common::{self, Cluster, noise, until};
use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};
use whimbrel_pool::{
    ManagerAddress,
    client::{Pool, PoolOptions},
    connections::TlsDialer,
    manager::{Manager, ManagerOptions, ManagerService},
    policy::Policy,
};
use whimbrel_wire::Identity;

pub(crate) struct Server {
    process: Child,
    pub(crate) url: String,
}

impl Server {
    /// Result of a statement.
    pub(crate) fn ask(&self, text: &str) -> String {
        let asked = Command::new(find("psql")).args(["-At", &self.url, "-c", text]).output().unwrap();
        String::from_utf8(asked.stdout).unwrap().trim().to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGINT is its fast shutdown.
        let _ = Command::new("kill").args(["-INT", &self.process.id().to_string()]).status();
        let _ = self.process.wait();
    }
}

/// A program of PostgreSQL: on the PATH, or where Debian puts those of a server, the newest version.
fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut debian: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    debian.sort();
    places.extend(debian.into_iter().rev());
    let found = places.iter().map(|place| place.join(program)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("no `{program}`: `scripts/bootstrap` installs the package postgresql"))
}

/// PostgreSQL refuses to run as root.
fn as_postgres(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups"]).arg(find(program));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

pub(crate) fn start(dir: &Path) -> Server {
    let data = dir.join("db");
    std::fs::create_dir(&data).unwrap();
    for path in [dir, data.as_path()] {
        assert!(Command::new("chown").arg("postgres").arg(path).status().unwrap().success());
    }
    let made =
        as_postgres("initdb").args(["-A", "trust", "-U", "postgres", "-D"]).arg(&data).status().unwrap();
    assert!(made.success());
    let port = common::free_port().rsplit_once(':').unwrap().1.to_owned();
    let mut server = as_postgres("postgres");
    server.arg("-D").arg(&data).args(["-p", &port, "-h", "127.0.0.1", "-k"]).arg(dir);
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let server = Server { process: server.spawn().unwrap(), url };
    until("the database answers", || {
        let mut ask = Command::new(find("psql"));
        ask.args(["-h", "127.0.0.1", "-p", &port, "-U", "postgres", "-c", "SELECT 1"]);
        ask.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    });
    server
}

/// Starts another manager on the same database, with its own key and trust list.
fn second_manager(cluster: &Cluster, server: &Server, dir: &Path) -> (ManagerAddress, ManagerService) {
    let data = dir.join("other");
    Identity::load_or_create(&data).unwrap();
    std::fs::copy(cluster.dir.path().join("manager/trust.toml"), data.join("trust.toml")).unwrap();
    let mut options = ManagerOptions::new(data, "127.0.0.1:0".parse().unwrap());
    options.database = Some(server.url.clone());
    (options.interval, options.repair_every) = (1, Duration::from_millis(50));
    let manager = cluster.runtime.block_on(Manager::open(options)).unwrap();
    let (address, service) = (manager.address(), manager.service().clone());
    cluster.runtime.spawn(manager.run());
    (address, service)
}

/// A handle of the client that knows several managers.
fn pool_of(cluster: &Cluster, managers: Vec<ManagerAddress>) -> Pool {
    let client = Identity::load_or_create(&cluster.dir.path().join("client")).unwrap();
    let dialer = TlsDialer::new(Arc::new(client), "client".parse().unwrap(), ());
    Pool::new(PoolOptions::new(managers), Arc::new(dialer), cluster.runtime.handle().clone())
}

#[test]
fn one_of_two_managers_does_the_chores_and_the_other_when_it_is_killed_or_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let url = server.url.clone();
    let mut cluster = Cluster::with(3, move |options| options.database = Some(url.clone()));
    let first = cluster.manager.as_ref().unwrap().1.clone();
    until("the only manager does the chores", || first.leads());
    let (address, second) = second_manager(&cluster, &server, dir.path());
    cluster.other_managers.push(address.clone());
    for number in 0..3 {
        cluster.kill_benefactor(number);
        cluster.start_benefactor(number);
    }
    cluster.wait_online(3);
    // A session other than that of the lock has asked for it in vain.
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_try_advisory_lock%' AND state = 'idle' \
                 AND pid NOT IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = 7751013)";
    until("the second waits for the lock", || server.ask(waits) == "1");
    // A manager that waited three seconds for an answer of the database leaves the lock to the other.
    let both = || first.leads() && second.leads();
    assert!(!both());
    let policy = |copies| Some(Policy { copies, ..Policy::default() });
    cluster.pool.block(cluster.pool.set_policy(1, policy(1))).unwrap();
    let data = noise(3, 2_000_000);
    let node = cluster.write("state", &data);
    let chunks = cluster.copies();
    cluster.pool.block(cluster.pool.set_policy(node.id, policy(2))).unwrap();
    until("one of them makes second copies", || {
        assert!(!both(), "only one at a time");
        cluster.copies() == 2 * chunks
    });
    drop(first);
    cluster.kill_manager();
    until("the second does the chores", || second.leads());
    let pool = pool_of(&cluster, vec![address]);
    pool.block(pool.set_policy(node.id, policy(3))).unwrap();
    until("the second makes third copies", || cluster.copies() == 3 * chunks);
    cluster.start_manager();
    let first = cluster.manager.as_ref().unwrap().1.clone();
    // The session that holds the lock ends, as if the host of its manager were gone.
    let cut =
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7751013";
    assert_eq!(server.ask(cut), "t");
    until("one of them does the chores again", || first.leads() != second.leads());
    assert!(cluster.read("state") == data);
}

#[test]
fn a_pool_lives_in_postgresql_and_a_second_manager_takes_over() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let url = server.url.clone();
    let mut cluster = Cluster::with(2, move |options| options.database = Some(url.clone()));
    let (first, second) = (noise(1, 2_000_000), noise(2, 1_000_000));
    let node = cluster.write("state", &first);
    cluster.write("state", &second);
    assert!(cluster.read("state") == second && cluster.read_version(node.version) == first);
    assert_eq!(cluster.pool.block(cluster.pool.versions(node.id)).unwrap().len(), 2);
    cluster.pool.block(cluster.pool.rename((1, "state"), (1, "moved"), true)).unwrap();
    let address = second_manager(&cluster, &server, dir.path()).0;
    cluster.kill_manager();
    let pool = pool_of(&cluster, vec![cluster.address.clone(), address]);
    let node = pool.block(pool.lookup(1, "moved")).unwrap();
    let read = pool.block(async { pool.read(node.version).await?.read_at(0, 1_000_000).await }).unwrap();
    assert!(read == second, "through the other manager");
    pool.block(pool.hold(node.version, "alpha/web")).unwrap();
    assert_eq!(pool.block(pool.pins(true)).unwrap().len(), 1);
    let refused = pool.block(pool.remove(1, "moved", false)).unwrap_err();
    assert_eq!(refused.code(), Some(whimbrel_pool::protocol::code::PINNED));
    pool.block(pool.release_pin(node.version, "alpha/web", false)).unwrap();
    pool.block(pool.remove(1, "moved", false)).unwrap();
    let made = pool.block(pool.make(&Cluster::make("new"))).unwrap();
    assert_eq!(made.name, "new");
    cluster.start_manager();
    until("its chunks are collected", || cluster.copies() == 0);
}
