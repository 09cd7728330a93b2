//! A directory of beta mounted on alpha, by ssh and by TLS: files, a machine from a disk there, crashes of
//! either side.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, HostProcess, PATIENCE, Ssh};
use whimbrel_testkit::{
    guest::{CheckResult, GuestOptions, Work},
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
            "--write-back-delay",
            "never",
        ];
        arguments.extend([
            "--control-dir",
            text(&self.control),
            "--cache-dir",
            text(&self.cache),
            "--cache-size",
            "256M",
        ]);
        arguments.extend(more);
        // A socket that a killed mount left answers nobody.
        let _ = fs::remove_file(self.control.join("vms.sock"));
        let words: Vec<String> = arguments.iter().map(|word| format!("'{word}'")).collect();
        let log = self.control.join("log");
        let script = format!("exec '{}' {} 2>> {}", program.display(), words.join(" "), log.display());
        let process = host.start_program("sh", &["-c", &script]);
        let deadline = Instant::now() + PATIENCE;
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
            .args(["--json", "session", "--control-dir", text(&self.control)])
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
    let deadline = Instant::now() + PATIENCE;
    while cluster.lab.host("alpha").connect(address, Duration::from_secs(2)).is_err() {
        assert!(Instant::now() < deadline, "nobody listens on {address}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ended(process: &mut Process) {
    let deadline = Instant::now() + PATIENCE;
    while process.try_wait().expect("a child").is_none() {
        assert!(Instant::now() < deadline, "the mount does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The key of a folder of keys, made if there is none.
fn key(keys: &Path) -> String {
    let output = Command::new(program()).args(["session", "key", "--keys-dir", text(keys)]).output();
    String::from_utf8(output.expect("a key").stdout).expect("a key in letters").trim().to_owned()
}

/// The same address with another port.
fn at_port(host: &HostProcess, port: u16) -> String {
    host.address().rsplit_once(':').map(|(host, _)| format!("{host}:{port}")).expect("an address")
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
    let mut mounted = place.mount(alpha, &target, &["--remote-program", text(&remote)]);
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
    assert!(matches!(seen.disk, CheckResult::Good(_)), "{seen:?}");
    alpha.run(&["stop", "web", "--kill"]);
    // A monitor that prefers a block device finds the same bytes.
    let socket = place.control.join("web.nbd");
    place.session(&["nbd", "vms", "web.raw", text(&socket)]).expect("an export");
    let export = format!("nbd+unix:///?socket={}", socket.display());
    alpha.exec("qemu-img", &["compare", "-f", "raw", "-F", "raw", &export, text(&disk)]);

    // A new name may be told early, so that the server understands what it is asked; content is not.
    assert_eq!(read(&place.vms.join("out/file")), "", "nothing is sent before it is told");
    let shown = place.session(&["flush", "vms"]).expect("a flush");
    assert!(shown.contains("\"dirty\": 0"), "{shown}");
    assert_eq!(read(&place.vms.join("out/file")), "made\n");
    place.session(&["set", "vms", "write=none"]).expect("another policy");
    place.shell(alpha, "if echo no > note; then exit 1; fi");
    assert!(place.session(&["set", "vms", "write=sometimes"]).is_none());
    place.session(&["unmount", "vms"]).expect("an end");
    ended(&mut mounted);
}

#[test]
fn what_was_synced_on_a_mount_reaches_the_server_after_either_side_was_killed() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let place = Place::new(&cluster);
    let (remote, port) = (program(), at_port(beta, 7788));
    let server_keys = cluster.disk.path().join("server-keys");
    let (ours, theirs) = (key(&place.keys), key(&server_keys));
    let serve =
        ["serve", text(&place.vms), "--listen", &port, "--allow", &ours, "--keys-dir", text(&server_keys)];
    let mut server = beta.start_program(text(&remote), &serve);
    listening(&cluster, &port);
    let target = format!("{port}:{}", place.vms.display());
    let options = ["--key", &theirs, "--keys-dir", text(&place.keys)];
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
        place.session(&["unmount", "vms"]).expect("an end");
        ended(&mut again);
    }
    // Without its server a session that owes something does not end, unless it is told to leave it.
    let mounted = place.mount(alpha, &target, &[&options[..], &["--server-timeout", "1"]].concat());
    place.shell(alpha, "echo owed > owed");
    drop(server);
    assert!(place.session(&["unmount", "vms"]).is_none(), "it ended and owes a file");
    let numbers = place.session(&["metrics"]).expect("numbers");
    assert!(number(&numbers, "dirty_files", "") == 1.0 && number(&numbers, "queued_changes", "") == 1.0);
    place.shell(alpha, "test \"$(cat owed)\" = owed");
    place.session(&["unmount", "vms", "--keep-unsent"]).expect("an end without the server");
    drop(mounted);
    server = beta.start_program(text(&remote), &serve);
    listening(&cluster, &port);
    let mut mounted = place.mount(alpha, &target, &options);
    assert_eq!(read(&place.vms.join("owed")), "owed\n");
    place.session(&["unmount", "vms"]).expect("an end");
    ended(&mut mounted);
    drop(server);
    let noted = read(&server_keys.join("audit/sessions.jsonl"));
    let last = noted.lines().last().unwrap_or_default();
    assert!(noted.contains("\"outcome\":\"write\"") && last.contains("\"outcome\":\"ended\""), "{noted}");
    assert!(noted.lines().all(|line| line.contains(&ours)), "{noted}");
}

#[test]
fn a_line_of_fstab_mounts_with_its_options_and_umount_gives_what_is_owed() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let place = Place::new(&cluster);
    let (remote, port) = (program(), at_port(beta, 7788));
    let server_keys = cluster.disk.path().join("server-keys");
    let (ours, theirs) = (key(&place.keys), key(&server_keys));
    let serve =
        ["serve", text(&place.vms), "--listen", &port, "--allow", &ours, "--keys-dir", text(&server_keys)];
    let _server = beta.start_program(text(&remote), &serve);
    listening(&cluster, &port);
    let helper = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/mount.whimbrel");
    let mount = |more: &str| {
        let options = format!(
            "_netdev,x-systemd.automount,key={theirs},keys-dir={},control_dir={},cache-dir={},name=vms,{more}",
            place.keys.display(),
            place.control.display(),
            place.cache.display(),
        );
        let target = format!("{port}:{}", place.vms.display());
        let program = format!("WHIMBREL={}", remote.display());
        let arguments = [&program, text(&helper), &target, text(&place.mount), "-v", "-o", &options];
        ended(&mut alpha.start_program("env", &arguments));
        assert!(place.session(&["show", "vms"]).is_some(), "it is mounted when the helper returns");
    };
    let unmount = || {
        alpha.exec("umount", &[text(&place.mount)]);
        let deadline = Instant::now() + PATIENCE;
        while place.session(&["show", "vms"]).is_some() {
            assert!(Instant::now() < deadline, "the session does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    mount("rw,noatime,cache_size=64M,write=back,write-back-delay=never");
    place.shell(alpha, "echo new > file");
    assert!(!place.vms.join("file").exists());
    unmount();
    assert_eq!(read(&place.vms.join("file")), "new\n");
    mount("ro");
    place.shell(alpha, "test \"$(cat file)\" = new; ! echo other 2> /dev/null > file");
    let pinned = place.session(&["pin", "vms", "file"]).expect("a pin");
    assert!(pinned.contains("\"here\": 4") && pinned.contains("\"total\": 4"), "{pinned}");
    let shown = place.session(&["unpin", "vms", "."]).expect("an end of the pin");
    assert!(!shown.contains("\"pins\""), "{shown}");
    assert!(place.session(&["unpin", "vms", "."]).is_none(), "nothing was pinned");
    unmount();
    assert_eq!(read(&place.vms.join("file")), "new\n");
}

/// A number of the one session that `metrics` shows.
fn number(metrics: &str, name: &str, label: &str) -> f64 {
    let head = format!("whimbrel_session_{name}{{session=\"vms\"{label}}} ");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&head));
    line.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no {head} in {metrics}"))
}

#[test]
fn a_server_between_answers_from_its_cache_and_gives_what_it_owes_when_it_ends() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let place = Place::new(&cluster);
    let (remote, disk) = (program(), cluster.disk.path());
    let [between, between_keys, between_control, beta_keys] =
        ["between", "between-keys", "between-control", "beta-keys"].map(|name| disk.join(name));
    fs::create_dir(&between).expect("a directory");
    fs::create_dir(place.vms.join("deep")).expect("a directory");
    fs::write(place.vms.join("deep/golden"), "golden\n".repeat(40_000)).expect("a file");

    let (first, second) = (at_port(beta, 7788), at_port(alpha, 7789));
    let allowed = key(&between_keys);
    let serve = ["serve", text(&place.vms), "--listen", &first, "--allow", &allowed, "--keys-dir"];
    let _origin = beta.start_program(text(&remote), &[&serve[..], &[text(&beta_keys)]].concat());
    listening(&cluster, &first);
    let with = [
        format!("--key={}", key(&beta_keys)),
        format!("--keys-dir={}", between_keys.display()),
        format!("--control-dir={}", between_control.display()),
        format!("--cache-dir={}", disk.join("between-cache").display()),
        "--name=vms".to_owned(),
        "--write=back".to_owned(),
        "--write-back-delay=never".to_owned(),
        "--cache-size=64M".to_owned(),
    ];
    let script = format!(
        "echo $$ > {0}/pid; exec '{1}' serve '{2}' --listen {second} --allow {3} --keys-dir '{4}' --upstream '{first}:{5}' --mount-option={6} 2> {0}/between.log",
        place.control.display(),
        remote.display(),
        between.display(),
        key(&place.keys),
        between_keys.display(),
        place.vms.display(),
        with.join(" --mount-option="),
    );
    let mut server = alpha.start_program("sh", &["-c", &script]);
    listening(&cluster, &second);

    let target = format!("{second}:{}", between.display());
    let options =
        ["--key", &key(&between_keys), "--keys-dir", text(&place.keys), "--attr-timeout", "session"];
    let mut mounted = place.mount(alpha, &target, &options);
    place.shell(alpha, "test $(grep -c golden deep/golden) = 40000; echo new > deep/new");
    let numbers = place.session(&["metrics"]).expect("numbers");
    assert_eq!(number(&numbers, "connected", ""), 1.0);
    assert_eq!(number(&numbers, "dirty_bytes", ""), 4096.0);
    assert!(number(&numbers, "known_names", "") >= 3.0 && number(&numbers, "waits_total", "") >= 1.0);
    assert!(number(&numbers, "requests_total", ",kind=\"read\"") >= 1.0, "{numbers}");
    place.session(&["unmount", "vms"]).expect("an end");
    ended(&mut mounted);

    // It has reached the server between, which owes it to the first.
    let upstream = |verb: &[&str]| {
        let mut command = Command::new(&remote);
        command.args(["--json", "session", "--control-dir", text(&between_control)]).args(verb).output()
    };
    let numbers = upstream(&["metrics"]).expect("the whimbrel binary").stdout;
    let numbers = String::from_utf8(numbers).expect("letters");
    assert_eq!(number(&numbers, "dirty_files", ""), 1.0, "{numbers}");
    assert_eq!(read(&place.vms.join("deep/new")), "");
    alpha.exec("kill", &["-TERM", read(&place.control.join("pid")).trim()]);
    ended(&mut server);
    assert_eq!(read(&place.vms.join("deep/new")), "new\n");
}
