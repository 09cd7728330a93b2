//! Stores in a bucket of an S3 server, which is a process of its own.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::{
    guest::{CheckResult, Identity, assert_same_life},
    lab::Process,
};

const PORT: u16 = 9000;

/// A server with the bucket `vault`, and where its folder is.
pub(crate) struct S3 {
    server: Option<Process>,
    address: String,
}

impl S3 {
    pub(crate) fn start(cluster: &Cluster) -> Self {
        fs::create_dir_all(Self::folder(cluster)).expect("a bucket");
        let address = format!("{}:{PORT}", cluster.lab.host("client").address());
        let mut s3 = Self { server: None, address };
        s3.serve(cluster);
        s3
    }

    fn folder(cluster: &Cluster) -> std::path::PathBuf {
        cluster.disk.path().join("s3/vault")
    }

    fn serve(&mut self, cluster: &Cluster) {
        let program = whimbrel_e2e::command_line().with_file_name("examples").join("s3_server");
        let mut command = Command::new(program);
        command.arg(cluster.disk.path().join("s3")).arg(&self.address);
        let client = cluster.lab.host("client");
        self.server = Some(client.command(command).expect("a server"));
        let address = self.address.parse().expect("an address");
        let deadline = Instant::now() + PATIENCE;
        while client.connect(address, PATIENCE).is_err() {
            assert!(Instant::now() < deadline, "the server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn stop(&mut self) {
        let mut server = self.server.take().expect("a server");
        server.kill().expect("a server to end");
        server.wait().expect("its end");
    }

    fn place(&self) -> String {
        format!("s3://vault/vms?endpoint=http://{}", self.address)
    }
}

fn result(host: &HostProcess, arguments: &[&str]) -> serde_json::Value {
    host.json(arguments)["result"].clone()
}

fn check(cluster: &Cluster, before: &Identity) {
    let after = cluster.witness(GUEST_ADDRESS).check().expect("an answer");
    assert_same_life(before, &after);
    let is_good = matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_));
    assert!(is_good, "{after:?}");
}

/// Bytes of all files below a folder.
fn bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
    let one = |entry: fs::DirEntry| match entry.file_type().expect("a type").is_dir() {
        true => bytes(&entry.path()),
        false => entry.metadata().expect("a size").len(),
    };
    entries.map(one).sum()
}

#[test]
fn a_machine_outlives_its_host_in_a_bucket_and_runs_from_there_while_garbage_is_collected() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let mut s3 = S3::start(&cluster);
    let bucket = s3.place();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest::small("web").run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    witness.write(50).expect("a first life");
    alpha.run(&["checkpoint", "web"]);
    let first = result(alpha, &["push", "web", &bucket]);
    let written = witness.write(10).expect("a disk that takes writes");
    let capsule = result(alpha, &["suspend", "web"])["capsule"].as_str().expect("an id").to_owned();
    let second = result(alpha, &["push", "web", &bucket]);
    let (first, second) = (first["wire_bytes"].as_u64().unwrap(), second["wire_bytes"].as_u64().unwrap());
    assert!(second * 3 < first, "{first} bytes at first, {second} for what had changed");
    let listed = result(beta, &["ls", "--from", &bucket]);
    assert_eq!(
        (&listed["capsules"][0]["name"], &listed["capsules"][0]["id"]),
        (&"web".into(), &capsule.as_str().into())
    );

    // The machine runs on a host that has nothing of it, and the daemon there begins anew.
    beta.run(&["resume", &format!("{bucket}/web")]);
    cluster.host_mut("beta").kill_daemon();
    cluster.host_mut("beta").start_daemon();
    // Its capsule has no name in the bucket any more, but beta needs it.
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    assert_eq!(result(alpha, &["verify", &bucket])["damaged"].as_array().map(Vec::len), Some(0));
    alpha.run(&["untag", &format!("{bucket}/web")]);
    for _ in 0..2 {
        alpha.run(&["gc", &bucket]);
    }
    // A server that is away holds the guest up, and does not harm it.
    s3.stop();
    std::thread::scope(|scope| {
        let checked = scope.spawn(|| check(&cluster, &written));
        std::thread::sleep(Duration::from_secs(2));
        s3.serve(&cluster);
        checked.join().expect("a guest that goes on");
    });
    // Without a name, garbage collection may have passed it already when somebody says that he needs it.
    let place = format!("{bucket}/{}", &capsule[..12]);
    let refusal = beta.refuse(&["resume", &place, "--name", "again"]);
    assert!(refusal.code == 2 && refusal.text.contains("has no name in"), "{refusal:?}");
    beta.run(&["pull", &place, "--tag", "whole"]);
    beta.run(&["verify"]);
    // Now nobody needs it.
    let before = bytes(&S3::folder(&cluster));
    for _ in 0..2 {
        alpha.run(&["gc", &bucket]);
    }
    let after = bytes(&S3::folder(&cluster));
    assert!(after * 10 < before, "{before} bytes, {after} after nobody needed them");
    s3.stop();
    check(&cluster, &written);
    let refusal = beta.refuse(&["push", "whole", &bucket]);
    assert_eq!(refusal.code, 5, "{refusal:?}");
    s3.serve(&cluster);
    let typo = bucket.replace("vms", "vmz");
    let refusal = beta.refuse(&["gc", &typo]);
    assert!(refusal.code == 3 && !S3::folder(&cluster).join("vmz/whimbrel-store").exists(), "{refusal:?}");
}

#[test]
fn a_push_that_is_killed_leaves_the_bucket_as_it_was_and_the_next_one_ends_it() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let s3 = S3::start(&cluster);
    let bucket = s3.place();
    let keys = tempfile::tempdir().expect("a folder for keys");
    let key = keys.path().join("key");
    fs::write(&key, "cd".repeat(32)).expect("a key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("a key of its owner");
    cluster.host_mut("alpha").restart_with(&format!("encrypt = true\nkey_file = {key:?}\n"));
    let alpha = cluster.host("alpha");
    Guest::small("web").run(&cluster, alpha);
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    alpha.run(&["suspend", "web"]);
    let mut push = alpha.start_command(&["push", "web", &bucket]);
    let locked = S3::folder(&cluster).join("vms/lock");
    let deadline = Instant::now() + PATIENCE;
    while fs::read_dir(&locked).map_or(0, |entries| entries.count()) == 0 {
        assert!(Instant::now() < deadline, "nobody changes the bucket");
        std::thread::sleep(Duration::from_millis(5));
    }
    cluster.host_mut("alpha").kill_daemon();
    push.wait().expect("the end of the command");
    // The lock of a daemon that was killed expires by the clock of the server, which is that of its files.
    let old = Command::new("find")
        .arg(&locked)
        .args(["-type", "f", "-exec", "touch", "-d", "10 minutes ago", "{}", "+"])
        .status();
    assert!(old.expect("find").success());
    cluster.host_mut("alpha").start_daemon();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    alpha.run(&["push", "web", &bucket]);
    assert_eq!(
        fs::read_dir(&locked).expect("the folder of locks").count(),
        1,
        "only what the killed daemon left"
    );
    for (name, work) in [
        ("vault", "push web --to BUCKET --every 1d --last 2"),
        ("tidy", "gc BUCKET --every 7d"),
        ("check", "verify BUCKET --every 7d"),
    ] {
        let work = work.replace("BUCKET", &bucket);
        alpha.run(&["schedule", "create", name].into_iter().chain(work.split(' ')).collect::<Vec<_>>());
        alpha.run(&["schedule", "run", name]);
    }
    let listed = result(alpha, &["ls", "--from", &bucket]);
    let names: Vec<&str> = listed["capsules"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|one| one["name"].as_str())
        .collect();
    assert!(names.len() == 2 && names[0].starts_with("pushed.vault.") && names[1] == "web", "{names:?}");
    // Who has not the key reads nothing.
    let refusal = beta.refuse(&["resume", &format!("{bucket}/web")]);
    assert!(refusal.text.contains("key"), "{refusal:?}");
    cluster.host_mut("beta").restart_with(&format!("encrypt = true\nkey_file = {key:?}\n"));
    cluster.host("beta").run(&["resume", &format!("{bucket}/web"), "--full"]);
    check(&cluster, &born);
}
