//! A pool of processes as people start them: `whimbrel pool manager`, `whimbrel pool benefactor`, `whimbrel
//! mount pool:`. Each can be killed and started again, and may be a host in a network namespace of its own.

use super::{admit, claims::Confirms, s3};
use crate::hosts::program;
use anyhow::{Context as _, Result, ensure};
use std::{
    io::{BufRead as _, BufReader},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use whimbrel_pool::{
    ManagerAddress,
    client::{Pool, PoolOptions},
    connections::TlsDialer,
    protocol::PoolStatus,
};
use whimbrel_testkit::lab::{Namespace, Process};
use whimbrel_wire::{Identity, PublicKey};

const PATIENCE: Duration = Duration::from_secs(60);

/// Where a process runs and listens.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) namespace: Namespace,
    pub(super) address: String,
}

/// One that runs, or was killed.
struct Member {
    place: Place,
    args: Vec<String>,
    env: &'static [(&'static str, &'static str)],
    process: Option<Process>,
}

impl Member {
    fn start(&mut self) -> Result<String> {
        let mut command = Command::new(program()?);
        command
            .args(&self.args)
            .envs(self.env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = self.place.namespace.start(command)?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().context("no output")?).read_line(&mut line)?;
        ensure!(!line.is_empty(), "{:?} ended", self.args);
        self.process = Some(process);
        Ok(line.trim().to_owned())
    }
}

/// An object store behind benefactors.
pub(super) struct Before<'a> {
    /// How the benefactor of a name calls its part of it.
    pub(super) url: &'a dyn Fn(&str) -> String,
    /// Bytes that stay here.
    pub(super) keep_here: u64,
}

/// Where managers run, and the database that they share.
struct Managers {
    places: Vec<Place>,
    /// A URL; none for a file, which one manager has.
    database: Option<String>,
}

impl Managers {
    fn one(place: Place) -> Self {
        Self { places: vec![place], database: None }
    }

    /// Starts them, each with a folder and a key of its own, and has the client admitted by each.
    fn start(self, dir: &Path, client: PublicKey) -> Result<Vec<Manager>> {
        let mut all = Vec::new();
        for (number, place) in self.places.into_iter().enumerate() {
            let data = dir.join(if number == 0 { "manager".to_owned() } else { format!("manager{number}") });
            let args = [
                "pool",
                "manager",
                "--data",
                &text(&data),
                "--listen",
                &place.address,
                "--lost-after",
                "30s",
            ];
            let mut args = args.map(str::to_owned).to_vec();
            args.extend(self.database.iter().flat_map(|url| ["--database".to_owned(), url.clone()]));
            let mut member = Member { place, args, env: &[], process: None };
            Identity::load_or_create(&data)?;
            admit(&data, "client", client)?;
            let address = member.start()?.parse()?;
            all.push(Manager { member, data, address });
        }
        Ok(all)
    }
}

/// A manager that runs, or was killed.
struct Manager {
    member: Member,
    data: PathBuf,
    address: ManagerAddress,
}

/// A pool of processes.
pub(super) struct Processes {
    pub(super) dir: TempDir,
    /// The first is the one that members use while it runs.
    managers: Vec<Manager>,
    benefactors: Vec<Member>,
    runtime: Runtime,
    client: Place,
}

/// Addresses on the loopback device of this machine that nobody listens on; all are held until all are
/// chosen.
fn free_addresses(count: usize) -> Result<Vec<String>> {
    let held: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
    Ok(held.iter().map(|one| Ok(one.local_addr()?.to_string())).collect::<std::io::Result<_>>()?)
}

fn places_in(namespace: &Namespace, count: usize) -> Result<Vec<Place>> {
    let place = |address| Place { namespace: namespace.clone(), address };
    Ok(free_addresses(count)?.into_iter().map(place).collect())
}

pub(super) fn text(path: &Path) -> String {
    path.display().to_string()
}

impl Processes {
    /// All on the loopback device of one namespace, their data below `dir`.
    pub(super) fn start(benefactors: usize, dir: TempDir) -> Result<Self> {
        Self::on_loopback(&Namespace::new()?, benefactors, dir, None)
    }

    /// The same in a namespace where an object store is.
    pub(super) fn before(
        namespace: &Namespace,
        benefactors: usize,
        dir: TempDir,
        before: &Before<'_>,
    ) -> Result<Self> {
        Self::on_loopback(namespace, benefactors, dir, Some(before))
    }

    fn on_loopback(
        namespace: &Namespace,
        benefactors: usize,
        dir: TempDir,
        before: Option<&Before<'_>>,
    ) -> Result<Self> {
        let mut places = places_in(namespace, benefactors + 1)?;
        let manager = places.remove(0);
        Self::with(Managers::one(manager.clone()), places, manager, dir, before)
    }

    /// Several managers on one database.
    pub(super) fn with_managers(
        namespace: &Namespace,
        managers: usize,
        benefactors: usize,
        database: &str,
        dir: TempDir,
    ) -> Result<Self> {
        let mut places = places_in(namespace, managers + benefactors)?;
        let (members, client) = (places.split_off(managers), places[0].clone());
        Self::with(Managers { places, database: Some(database.to_owned()) }, members, client, dir, None)
    }

    /// Manager, benefactors and clients where they are told to be; clients listen nowhere.
    pub(super) fn at(manager: Place, benefactors: Vec<Place>, client: Place, dir: TempDir) -> Result<Self> {
        Self::with(Managers::one(manager), benefactors, client, dir, None)
    }

    fn with(
        managers: Managers,
        benefactors: Vec<Place>,
        client: Place,
        dir: TempDir,
        before: Option<&Before<'_>>,
    ) -> Result<Self> {
        let key = Identity::load_or_create(&dir.path().join("client"))?.public_key();
        let managers = managers.start(dir.path(), key)?;
        // The threads of a runtime are where the thread was that made it.
        let runtime = client
            .namespace
            .run(|| tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build())?;
        let mut pool = Self { dir, managers, benefactors: Vec::new(), runtime, client };
        let count = benefactors.len();
        benefactors.into_iter().try_for_each(|place| pool.add(place, before))?;
        pool.wait_online(count)?;
        Ok(pool)
    }

    fn add(&mut self, place: Place, before: Option<&Before<'_>>) -> Result<()> {
        let name = format!("b{}", self.benefactors.len());
        let data = self.dir.path().join(&name);
        let key = Identity::load_or_create(&data)?.public_key();
        self.managers.iter().try_for_each(|manager| admit(&manager.data, &name, key))?;
        let data = text(&data);
        let args =
            ["pool", "benefactor", "--name", &name, "--data", &data, "--capacity", "16G", "--keep-free", "0"];
        let more = ["--listen", &place.address, "--inventory-interval", "20s"];
        let mut args: Vec<String> = args.into_iter().chain(more).map(str::to_owned).collect();
        args.extend(self.addresses().flat_map(|manager| ["--manager".to_owned(), manager.to_string()]));
        let mut env: &[_] = &[];
        if let Some(before) = before {
            let keep = before.keep_here.to_string();
            args.extend(["--tier".to_owned(), (before.url)(&name), "--tier-local".to_owned(), keep]);
            env = &s3::SETTINGS;
        }
        let mut member = Member { place, args, env, process: None };
        member.start()?;
        self.benefactors.push(member);
        Ok(())
    }

    /// What clients call the manager.
    pub(super) fn address(&self) -> &ManagerAddress {
        &self.managers[0].address
    }

    fn addresses(&self) -> impl Iterator<Item = &ManagerAddress> {
        self.managers.iter().map(|manager| &manager.address)
    }

    /// How many benefactors there are.
    pub(super) fn width(&self) -> usize {
        self.benefactors.len()
    }

    /// A client of this process. Its calls must run on the runtime of the clients' namespace.
    fn pool(&self) -> Result<Pool> {
        let identity = Arc::new(Identity::load_or_create(&self.dir.path().join("client"))?);
        let dialer = TlsDialer::new(identity, "client".parse()?, Confirms);
        let options = PoolOptions::new(self.addresses().cloned().collect());
        Ok(Pool::new(options, Arc::new(dialer), self.runtime.handle().clone()))
    }

    /// Runs calls of a client where clients are.
    pub(super) fn ask<T: Send + 'static, F: Future<Output = Result<T>> + Send + 'static>(
        &self,
        call: impl FnOnce(Pool) -> F + Send + 'static,
    ) -> Result<T> {
        let pool = self.pool()?;
        self.runtime.block_on(self.runtime.spawn(async move { call(pool).await }))?
    }

    /// The state of the pool.
    pub(super) fn status(&self) -> Result<PoolStatus> {
        self.ask(async move |pool: Pool| Ok(pool.status().await?))
    }

    /// Waits until the manager has so many benefactors online.
    pub(super) fn wait_online(&self, count: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let online = |status: &PoolStatus| status.benefactors.iter().filter(|b| b.state == "online").count();
        while online(&self.status()?) < count {
            ensure!(Instant::now() < deadline, "the benefactors did not come");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Kills the first manager as `kill -9` does.
    pub(super) fn kill_manager(&mut self) {
        self.managers[0].member.process = None;
    }

    /// Starts it again, if it does not run.
    pub(super) fn start_manager(&mut self) -> Result<()> {
        let manager = &mut self.managers[0].member;
        if manager.process.is_none() { manager.start().map(drop) } else { Ok(()) }
    }

    /// Kills a benefactor as `kill -9` does.
    pub(super) fn kill_benefactor(&mut self, number: usize) {
        self.benefactors[number].process = None;
    }

    /// Starts it again, if it does not run.
    pub(super) fn start_benefactor(&mut self, number: usize) -> Result<()> {
        let member = &mut self.benefactors[number];
        if member.process.is_none() { member.start().map(drop) } else { Ok(()) }
    }

    /// Most memory the manager had so far, in MiB: `VmHWM` of proc_pid_status(5).
    pub(super) fn manager_memory(&self) -> Result<f64> {
        let process = self.managers[0].member.process.as_ref().context("the manager does not run")?;
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
        let kib: f64 = line.split_ascii_whitespace().next().context("no number")?.parse()?;
        Ok(kib / 1024.0)
    }

    /// Runs a program where clients are, and returns what it prints.
    pub(super) fn output(&self, program: &str, arguments: &[String]) -> Result<String> {
        Ok(self.client.namespace.output(program, arguments)?)
    }

    /// Mounts the pool on a folder of this name, by a process that has nothing cached.
    pub(super) fn mount(&self, name: &str) -> Result<Mount> {
        self.mount_with(name, &[])
    }

    /// The same with more arguments.
    pub(super) fn mount_with(&self, name: &str, more: &[&str]) -> Result<Mount> {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(&path)?;
        let managers: Vec<String> = self.addresses().map(ToString::to_string).collect();
        let target = format!("pool:{}", managers.join(","));
        let keys = text(&self.dir.path().join("client"));
        let args = ["mount", &target, &text(&path), "--keys-dir", &keys];
        let args = args.iter().chain(more).map(|&word| word.to_owned()).collect();
        let mut member = Member { place: self.client.clone(), args, env: &[], process: None };
        member.start()?;
        Ok(Mount { path, member })
    }
}

/// A mounted pool. Dropping it kills the process and clears the mount away.
pub(super) struct Mount {
    pub(super) path: PathBuf,
    member: Member,
}

impl Mount {
    /// Kills the process as `kill -9` does.
    pub(super) fn kill(&mut self) {
        self.member.process = None;
    }

    /// Mounts again, by a process that has nothing cached, if there is none.
    pub(super) fn start(&mut self) -> Result<()> {
        if self.member.process.is_none() {
            detach(&self.path);
            self.member.start()?;
        }
        Ok(())
    }
}

pub(super) fn detach(path: &Path) {
    // That nothing is mounted there any more is no failure.
    let _ = Command::new("umount").arg("-l").arg(path).stderr(Stdio::null()).status();
}

impl Drop for Mount {
    fn drop(&mut self) {
        detach(&self.path);
        self.member.process = None;
    }
}
