//! Tests of the metadata in a real PostgreSQL server with two managers. The server is the test's own, in its
//! own folder; `scripts/bootstrap` installs the programs.

use crate::common::{self, Cluster, noise, until};
use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
};
use whimbrel_pool::{
    client::{Pool, PoolOptions},
    connections::TlsDialer,
    manager::{Manager, ManagerOptions},
};
use whimbrel_wire::Identity;

static URL: OnceLock<String> = OnceLock::new();

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // SIGINT is its fast shutdown.
        let _ = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
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

fn start(dir: &Path) -> Server {
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
    let server = Server(server.spawn().unwrap());
    until("the database answers", || {
        let mut ask = Command::new(find("psql"));
        ask.args(["-h", "127.0.0.1", "-p", &port, "-U", "postgres", "-c", "SELECT 1"]);
        ask.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    });
    URL.set(format!("postgres://postgres@127.0.0.1:{port}/postgres")).unwrap();
    server
}

#[test]
fn a_pool_lives_in_postgresql_and_a_second_manager_takes_over() {
    let dir = tempfile::tempdir().unwrap();
    let _server = start(dir.path());
    let mut cluster = Cluster::with(2, |options| options.database = URL.get().cloned());
    let (first, second) = (noise(1, 2_000_000), noise(2, 1_000_000));
    let node = cluster.write("state", &first);
    cluster.write("state", &second);
    assert!(cluster.read("state") == second && cluster.read_version(node.version) == first);
    assert_eq!(cluster.pool.block(cluster.pool.versions(node.id)).unwrap().len(), 2);
    cluster.pool.block(cluster.pool.rename((1, "state"), (1, "moved"), true)).unwrap();
    // Another manager on the same database, with its own key and trust list.
    let other = dir.path().join("other");
    Identity::load_or_create(&other).unwrap();
    std::fs::copy(cluster.dir.path().join("manager/trust.toml"), other.join("trust.toml")).unwrap();
    let mut options = ManagerOptions::new(other, "127.0.0.1:0".parse().unwrap());
    options.database = URL.get().cloned();
    let manager = cluster.runtime.block_on(Manager::open(options)).unwrap();
    let address = manager.address();
    cluster.runtime.spawn(manager.run());
    cluster.kill_manager();
    let client = Identity::load_or_create(&cluster.dir.path().join("client")).unwrap();
    let dialer = TlsDialer::new(std::sync::Arc::new(client), "client".parse().unwrap(), ());
    let managers = vec![cluster.address.clone(), address];
    let handle = cluster.runtime.handle().clone();
    let pool = Pool::new(PoolOptions::new(managers), std::sync::Arc::new(dialer), handle);
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
