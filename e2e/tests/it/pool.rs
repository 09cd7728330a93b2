//! A pool by its verbs: real processes, a real mount, one of them killed.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::{
    guest::{CheckResult, Identity, assert_same_life},
    lab::Process,
};

/// The program under test: in the target directory, above this test.
fn binary() -> PathBuf {
    let me = std::env::current_exe().unwrap();
    let found = me.ancestors().skip(1).take(2).map(|dir| dir.join("whimbrel")).find(|path| path.is_file());
    found.expect("the whimbrel binary: `cargo build -p whimbrel` makes it")
}

/// A process that is killed at the end of the test.
struct Member(Child);

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(args: &[&str]) -> String {
    let out = Command::new(binary()).args(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}

/// Starts a verb that stays, and returns it with the line it says when it is ready.
fn start(args: &[&str]) -> (Member, String) {
    let mut child = Command::new(binary()).args(args).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(!line.is_empty(), "{args:?} ended");
    (Member(child), line.trim().to_owned())
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn free_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn checkpoints_outlive_a_benefactor_that_is_killed_and_policies_prune_them() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (manager_dir, keys, mount) = (at("manager"), at("keys"), at("mnt"));
    fs::create_dir(&mount).unwrap();
    let key = run(&["pool", "key", "--data", text(&keys)]);
    run(&["pool", "key", "--data", text(&manager_dir)]);
    run(&["pool", "admit", "--data", text(&manager_dir), "me", &key]);
    let (_manager, manager) = start(&[
        "pool",
        "manager",
        "--data",
        text(&manager_dir),
        "--listen",
        &free_address(),
        "--lost-after",
        "20s",
    ]);
    let mut members = Vec::new();
    for number in 0..3 {
        let (name, data) = (format!("b{number}"), at(&format!("b{number}")));
        let key = run(&["pool", "key", "--data", text(&data)]);
        run(&["pool", "admit", "--data", text(&manager_dir), &name, &key]);
        let (listen, data) = (free_address(), text(&data).to_owned());
        let args =
            ["pool", "benefactor", "--name", &name, "--data", &data, "--capacity", "1G", "--keep-free", "0"];
        members.push(start(&[&args[..], &["--listen", &listen, "--manager", &manager]].concat()).0);
    }
    let as_me = ["--manager", &manager, "--keys-dir", text(&keys)];
    let ask = |args: &[&str]| {
        let json = run(&[&["--json", "pool"][..], args, &as_me[..]].concat());
        serde_json::from_str::<serde_json::Value>(&json).unwrap()
    };
    let online = || {
        let status = ask(&["status"]);
        let members = status["benefactors"].as_array().unwrap();
        members.iter().filter(|member| member["state"] == "online").count()
    };
    until("three benefactors are online", || online() == 3);
    let (_mounted, _) =
        start(&["mount", &format!("pool:{manager}"), text(&mount), "--keys-dir", text(&keys)]);
    fs::create_dir(mount.join("app")).unwrap();
    let data: Vec<u8> = (0..5_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for step in 0..3 {
        fs::write(mount.join(format!("app/sim.N1.T{step}")), &data[step * 1000..]).unwrap();
    }
    members[0].0.kill().unwrap();
    members[0].0.wait().unwrap();
    assert!(fs::read(mount.join("app/sim.N1.T1")).unwrap() == data[1000..], "with one benefactor less");
    fs::write(mount.join("app/sim.N1.T3"), &data[3000..]).unwrap();
    let policy = ask(&["policy", "/app", "--keep-last", "2"]);
    assert_eq!(policy["keep"]["last"], 2);
    assert_eq!(ask(&["prune", "--dry-run"]).as_array().unwrap().len(), 2);
    assert_eq!(ask(&["prune"]).as_array().unwrap().len(), 2);
    let mut left: Vec<_> = fs::read_dir(mount.join("app")).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["sim.N1.T2", "sim.N1.T3"]);
    assert!(fs::read(mount.join("app/sim.N1.T3")).unwrap() == data[3000..]);
    until("every chunk has two copies again", || ask(&["status"])["repair"] == 0);
    let status = ask(&["status"]);
    assert_eq!((&status["files"], &status["lost"]), (&2.into(), &0.into()));
    assert!(
        status["logical"].as_u64().unwrap() > status["unique"].as_u64().unwrap(),
        "versions share chunks"
    );
    drop(_mounted);
    let _ = Command::new("umount").arg("-l").arg(&mount).status();
}

/// A pool on a host of a cluster: its manager, and benefactors that can be killed.
struct PoolOn<'a> {
    host: &'a HostProcess,
    dir: PathBuf,
    manager: String,
    /// The manager's process, while it has one.
    managed: Option<Process>,
    benefactors: Vec<Process>,
}

impl<'a> PoolOn<'a> {
    /// Starts one that `users` may use, and waits until all members are online.
    fn start(cluster: &Cluster, host: &'a HostProcess, users: &[&HostProcess], benefactors: usize) -> Self {
        let dir = cluster.disk.path().join("pool");
        let address = host.address().rsplit_once(':').unwrap().0.to_owned();
        let at = |name: &str| text(&dir.join(name)).to_owned();
        let key = run(&["pool", "key", "--data", &at("manager")]);
        let manager = format!("{address}:7500/{key}");
        let admit = |name: &str, key: &str| run(&["pool", "admit", "--data", &at("manager"), name, key]);
        admit("me", &run(&["pool", "key", "--data", &at("keys")]));
        users.iter().for_each(|user| drop(admit(user.name(), &user.key())));
        let start = |args: &[&str]| host.start_program(text(&binary()), args);
        let mut members = Vec::new();
        for number in 0..benefactors {
            let (name, listen) = (format!("b{number}"), format!("{address}:{}", 7501 + number));
            admit(&name, &run(&["pool", "key", "--data", &at(&name)]));
            let data = at(&name);
            let args = ["pool", "benefactor", "--name", &name, "--data", &data, "--capacity", "2G"];
            members.push(start(
                &[&args[..], &["--keep-free", "0", "--listen", &listen, "--manager", &manager]].concat(),
            ));
        }
        let mut pool = Self { host, dir, manager, managed: None, benefactors: members };
        pool.manage();
        until("all benefactors are online", || pool.online() == benefactors);
        pool
    }

    /// Starts the manager.
    fn manage(&mut self) {
        let (listen, _) = self.manager.split_once('/').unwrap();
        let data = self.dir.join("manager");
        let args = ["pool", "manager", "--data", text(&data), "--listen", listen];
        self.managed = Some(self.host.start_program(text(&binary()), &args));
    }

    /// What the manager answers to `whimbrel pool …`, asked from the network of the host; nothing if it does
    /// not.
    fn ask(&self, args: &[&str]) -> serde_json::Value {
        let (out, keys) = (self.dir.join("answer"), self.dir.join("keys"));
        let command = format!(
            "{} --json pool {} --manager {} --keys-dir {} >{}",
            text(&binary()),
            args.join(" "),
            self.manager,
            text(&keys),
            text(&out)
        );
        let asked = self.host.start_program("sh", &["-c", &command]).wait().unwrap();
        let answer = fs::read(&out).ok().filter(|_| asked.success()).unwrap_or_default();
        serde_json::from_slice(&answer).unwrap_or_default()
    }

    /// Benefactors that the manager hears of.
    fn online(&self) -> usize {
        let members = self.ask(&["status"])["benefactors"].as_array().cloned().unwrap_or_default();
        members.iter().filter(|member| member["state"] == "online").count()
    }

    /// How a command names it.
    fn name(&self, path: &str) -> String {
        format!("pool:{}/{path}", self.manager)
    }
}

fn check(cluster: &Cluster, before: &Identity) -> Identity {
    let after = cluster.witness(GUEST_ADDRESS).check().expect("an answer");
    assert_same_life(before, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
    after
}

/// What alpha takes of web goes to the pool by itself, and so does what gamma keeps of it while it is
/// protected, though the pool is away for a while and a daemon is killed. So many bytes travelled for the
/// first version.
fn capsules_come_by_themselves(alpha: &HostProcess, gamma: &mut HostProcess, pool: &mut PoolOn, first: u64) {
    let web = |host: &HostProcess| host.json(&["ps"])[0].clone();
    alpha.json(&["push", "web", &pool.name("vms"), "--continuous"]);
    pool.managed = None;
    alpha.run(&["checkpoint", "web"]);
    alpha.json(&["protect", "web", "gamma", "--lease", "2s", "--snapshots", "1/s,3"]);
    gamma.json(&["push", "web", &pool.name("kept"), "--continuous"]);
    let stalled = |host: &HostProcess| web(host)["uploads"]["stalled"].is_string();
    until("both say that the pool is away", || stalled(alpha) && stalled(gamma));
    assert_eq!(web(alpha)["protection"]["state"]["kind"], "protected");
    alpha.run(&["unprotect", "web"]);
    gamma.wait_empty();
    gamma.kill_daemon();
    pool.manage();
    gamma.start_daemon();
    let versions = |path: &str| pool.ask(&["versions", path]).as_array().cloned().unwrap_or_default();
    until("the pool has what was taken meanwhile", || versions("/vms/web").len() == 2);
    until("it has what was kept, each once", || versions("/kept/web").len() == 3);
    until("nothing is left to do", || web(alpha)["uploads"].is_object() && !stalled(alpha));
    let (taken, kept) = (versions("/vms/web"), versions("/kept/web"));
    let sent = |version: &serde_json::Value| version["sent"].as_u64().unwrap();
    assert!(sent(&taken[0]) * 3 < first && sent(&kept[0]) * 3 < first, "{taken:?} {kept:?}");
    let made: Vec<i64> = kept.iter().map(|version| version["modified"].as_i64().unwrap()).collect();
    assert!(made.is_sorted_by(|newer, older| newer > older), "the newest first: {made:?}");
    let newest = gamma.json(&["pull", &pool.name("kept/web@-0s"), "--tag", "newest"]);
    assert_eq!(newest["result"]["whole"], true, "{newest}");
    alpha.run(&["push", "web", "--stop-continuous"]);
}

#[test]
fn a_machine_lives_from_a_pool_that_loses_a_benefactor_and_a_later_version_costs_what_changed() {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    // Away while the cluster's hosts are borrowed; the pool's members live on alpha.
    let mut gamma = cluster.hosts.pop().expect("gamma");
    let mut beta = cluster.hosts.pop().expect("beta");
    let (cluster, beta) = (&cluster, &mut beta);
    let alpha = cluster.host("alpha");
    let mut pool = PoolOn::start(cluster, alpha, &[alpha, beta, &gamma], 3);
    Guest::small("web").run(cluster, alpha);
    cluster.witness(GUEST_ADDRESS).write(200).expect("a first life");
    let result = |host: &HostProcess, args: &[&str]| host.json(args)["result"].clone();
    let wire =
        |report: serde_json::Value| report["wire_bytes"].as_u64().unwrap_or_else(|| panic!("{report}"));
    let vms = pool.name("vms");
    let push = || wire(result(alpha, &["push", "web", &vms]));
    alpha.run(&["checkpoint", "web"]);
    let first = push();
    capsules_come_by_themselves(alpha, &mut gamma, &mut pool, first);
    let born = cluster.witness(GUEST_ADDRESS).write(40).expect("a disk that takes writes");
    alpha.run(&["suspend", "web"]);
    let second = push();
    assert!(second > 0 && second * 3 < first, "{first} bytes first, {second} bytes for the next version");
    assert_eq!(push(), 0, "the same once more");
    let refusal = beta.refuse(&["resume", &pool.name("vms/nothing")]);
    assert_eq!(refusal.code, 3, "{refusal:?}");
    // Nobody but the pool has it for beta.
    beta.run(&["trust", "rm", "alpha"]);
    beta.run(&["resume", &pool.name("vms/web")]);
    let pins = |pool: &PoolOn| -> Vec<String> {
        let pins = pool.ask(&["pins"]);
        let holder = |pin: &serde_json::Value| pin["held"]["holder"].as_str().unwrap().to_owned();
        pins.as_array().unwrap().iter().map(holder).collect()
    };
    assert_eq!(pins(&pool), ["beta/web"]);
    pool.ask(&["policy", "/vms", "--keep-for", "1s"]);
    let stays = |one: &serde_json::Value| one["pinned_by"] == serde_json::json!(["beta/web"]);
    until("a policy would drop it", || {
        pool.ask(&["prune"]).as_array().is_some_and(|all| all.iter().any(stays))
    });
    pool.benefactors.remove(0);
    let there = check(cluster, &born);
    beta.wait_state("web", &["loading"]);
    // The next daemon knows where the rest is.
    beta.kill_daemon();
    beta.start_daemon();
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web", "--fetch-rest"]);
    beta.wait_state("web", &["running"]);
    // It looks every ten minutes by itself, and when garbage is collected.
    beta.run(&["gc"]);
    until("nothing here needs the pool", || pins(&pool).is_empty());
    (pool.managed, pool.benefactors) = (None, Vec::new());
    check(cluster, &there);
    let verified = result(beta, &["verify"]);
    assert_eq!(verified["damaged"].as_array().map(Vec::len), Some(0), "{verified}");
}
