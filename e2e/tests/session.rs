//! A directory of beta mounted on alpha, by ssh and by TLS: files, a machine from a disk there, crashes of either side.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, HostProcess, Ssh};
use whimbrel_testkit::{
    guest::{GuestOptions, Verdict, Work},
    lab::Process,
};

fn program() -> PathBuf {
    let me = std::env::current_exe().expect("the path of this program");
    let beside = me.ancestors().skip(1).take(2).map(|dir| dir.join("whimbrel"));
    beside.into_iter().find(|path| path.is_file()).expect("the whimbrel binary in the target directory")
}

/// Folders of one case.
struct Place {
    vms: PathBuf,
    mount: PathBuf,
    control: PathBuf,
    cache: PathBuf,
    keys: PathBuf,
}

impl Place {
    fn new(cluster: &Cluster) -> Self {
        let make = |name: &str| {
            let path = cluster.disk.path().join(name);
            fs::create_dir(&path).expect("a directory");
            path
        };
        Self {
            vms: make("vms"),
            mount: make("mnt"),
            control: make("control"),
            cache: cluster.disk.path().join("cache"),
            keys: cluster.disk.path().join("keys"),
        }
    }

    /// Runs a mount on `host` until it is ended.
    fn mount(&self, host: &HostProcess, target: &str, more: &[&str]) -> Process {
        let program = program();
        let mut arguments = vec![
            "mount",
            target,
            text(&self.mount),
            "--foreground",
            "--name",
            "vms",
            "--write",
            "back",
            "--delay",
            "never",
        ];
        arguments.extend([
            "--control",
            text(&self.control),
            "--cache",
            text(&self.cache),
            "--capacity",
            "256M",
        ]);
        arguments.extend(more);
        // A socket that a killed mount left answers nobody.
        let _ = fs::remove_file(self.control.join("vms.sock"));
        let words: Vec<String> = arguments.iter().map(|word| format!("'{word}'")).collect();
        let log = self.control.join("log");
        let script = format!("exec '{}' {} 2>> {}", program.display(), words.join(" "), log.display());
        let process = host.start_program("sh", &["-c", &script]);
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.session(&["show", "vms"]).is_none() {
            assert!(Instant::now() < deadline, "the mount does not answer: {}", read(&log));
            std::thread::sleep(Duration::from_millis(20));
        }
        process
    }

    /// `whimbrel session`; what it printed, if it succeeded.
    fn session(&self, arguments: &[&str]) -> Option<String> {
        let mut command = Command::new(program());
        command
            .args(["--json", "session", "--control", text(&self.control)])
            .args(arguments)
            .stderr(Stdio::null());
        let output = command.output().expect("the whimbrel binary");
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn shell(&self, host: &HostProcess, script: &str) {
        host.exec("sh", &["-e", "-c", &format!("cd {}; {script}", self.mount.display())]);
    }
}

fn listening(cluster: &Cluster, address: &str) {
    let address = address.parse().expect("an address");
    let deadline = Instant::now() + Duration::from_secs(60);
    while cluster.lab.host("alpha").connect(address, Duration::from_secs(2)).is_err() {
        assert!(Instant::now() < deadline, "nobody listens on {address}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ended(process: &mut Process) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while process.try_wait().expect("a child").is_none() {
        assert!(Instant::now() < deadline, "the mount does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[test]
fn a_machine_boots_from_a_disk_that_another_host_has_and_files_go_there_when_told() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let Some(_ssh) = Ssh::start(&cluster, alpha, beta) else { return };
    let place = Place::new(&cluster);
    fs::File::create(place.vms.join("web.raw")).expect("a disk").set_len(32 << 20).expect("room");
    fs::write(place.vms.join("note"), "from beta").expect("a file");
    let target = format!("open:{}", place.vms.display());
    let remote = program();
    let mut mounted = place.mount(alpha, &target, &["--remote", text(&remote)]);
    place.shell(
        alpha,
        "test \"$(cat note)\" = 'from beta'; mkdir out; echo made > out/new; mv out/new out/file",
    );

    let files = cluster.files();
    let options =
        GuestOptions { address: Some(format!("{GUEST_ADDRESS}/24")), buffer_mib: 16, work: Work::Idle };
    let (disk, append) = (place.mount.join("web.raw"), options.to_string());
    let mut run =
        vec!["run", "web", "--disk", text(&disk), "--memory", "192M", "--net", "br0", "--append", &append];
    run.extend(["--kernel", text(&files.kernel), "--initrd", text(&files.initrd)]);
    alpha.run(&run);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    witness.write(100).expect("a disk that takes writes");
    let seen = witness.check().expect("an answer");
    assert!(matches!(seen.disk, Verdict::Good(_)), "{seen:?}");
    alpha.run(&["stop", "web", "--kill"]);

    // A new name may be told early, so that the server understands what it is asked; content is not.
    assert_eq!(read(&place.vms.join("out/file")), "", "nothing is sent before it is told");
    let shown = place.session(&["flush", "vms"]).expect("a flush");
    assert!(shown.contains("\"dirty\": 0"), "{shown}");
    assert_eq!(read(&place.vms.join("out/file")), "made\n");
    place.session(&["set", "vms", "write=none"]).expect("another policy");
    place.shell(alpha, "if echo no > note; then exit 1; fi");
    assert!(place.session(&["set", "vms", "write=sometimes"]).is_none());
    place.session(&["end", "vms"]).expect("an end");
    ended(&mut mounted);
}

#[test]
fn what_was_synced_on_a_mount_reaches_the_server_after_either_side_was_killed() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let place = Place::new(&cluster);
    let remote = program();
    let key =
        Command::new(&remote).args(["session", "key", "--keys", text(&place.keys)]).output().expect("a key");
    let key = String::from_utf8(key.stdout).expect("a key in letters").trim().to_owned();
    let port = beta.address().rsplit_once(':').map(|(host, _)| format!("{host}:7788")).expect("an address");
    let server_keys = cluster.disk.path().join("server-keys");
    let serve = ["serve", text(&place.vms), "--listen", &port, "--allow", &key, "--keys", text(&server_keys)];
    let mut server = beta.start_program(text(&remote), &serve);
    let theirs = || Command::new(&remote).args(["session", "key", "--keys", text(&server_keys)]).output();
    listening(&cluster, &port);
    let theirs = String::from_utf8(theirs().expect("a key").stdout).expect("letters").trim().to_owned();
    let target = format!("{port}:{}", place.vms.display());
    let options = ["--key", &theirs, "--keys", text(&place.keys)];
    for round in 0..3 {
        let mounted = place.mount(alpha, &target, &options);
        place.shell(alpha, &format!("echo {round} > file-{round}; sync file-{round}; dd if=/dev/urandom of=noise-{round} bs=64k count=20 conv=fsync status=none; sha256sum noise-{round} > {}", place.control.join("sum").display()));
        // The server goes first every other time, so what is owed is owed across its death as well.
        if round == 1 {
            drop(server);
            server = beta.start_program(text(&remote), &serve);
            listening(&cluster, &port);
        }
        drop(mounted);
        alpha.exec("umount", &["-l", text(&place.mount)]);
        assert!(!place.vms.join(format!("file-{round}")).exists());
        let mut again = place.mount(alpha, &target, &options);
        assert_eq!(read(&place.vms.join(format!("file-{round}"))), format!("{round}\n"));
        let sums = Command::new("sha256sum")
            .arg("-c")
            .arg(place.control.join("sum"))
            .current_dir(&place.vms)
            .output();
        assert!(sums.expect("sha256sum").status.success(), "round {round}");
        place.session(&["end", "vms"]).expect("an end");
        ended(&mut again);
    }
    drop(server);
}
