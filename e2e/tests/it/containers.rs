//! Container images of foreign tools as machines: a folder, an archive and a registry; what their programs
//! see, and what is refused.

use serde_json::{Value, json};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_e2e::{Cluster, HostProcess, PATIENCE};
use whimbrel_testkit::{
    guest::ContainerKernel,
    lab::{Namespace, Process},
};

/// Port of the registry on the client's host.
const PORT: u16 = 5000;
/// Who may use the registry.
const LOGIN: &str = "lena:secret word";
/// The same, as htpasswd(1) writes it: the password by bcrypt.
const USERS: &str = "lena:$2b$04$xSGvbKX.F5.ZSsFc237FY.KyTcYhzQcWagVxny1kNLsqZEoqXmgEG\n";
/// User of the program, who is in no list of users.
const USER: &str = "1234:1235";

/// A layout with one image of two layers, made by umoci.
struct Layout {
    dir: TempDir,
}

fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("a program of the host");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn write(root: &Path, name: &str, mode: u32, content: &str) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
    fs::write(&path, content).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
}

impl Layout {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let layout = Self { dir };
        layout.umoci(&["init", "--layout", &layout.folder()]);
        layout.umoci(&["new", "--image", &layout.image()]);
        // A root of busybox, as small images have it.
        let lower = layout.dir.path().join("lower");
        for folder in ["bin", "etc", "data", "usr/lib"] {
            fs::create_dir_all(lower.join(folder)).expect("folders");
        }
        fs::copy("/bin/busybox", lower.join("bin/busybox")).expect("busybox");
        for name in ["sh", "cat", "id", "stat", "httpd", "env", "ls", "hostname", "nslookup"] {
            std::os::unix::fs::symlink("busybox", lower.join("bin").join(name)).expect("a link");
        }
        std::os::unix::fs::symlink("/usr/lib", lower.join("lib")).expect("a link");
        write(&lower, "etc/passwd", 0o644, "root:x:0:0::/root:/bin/sh\n");
        write(&lower, "data/old", 0o644, "old");
        write(&lower, "data/kept", 0o4750, "kept");
        layout.add(&lower, &["--owner=7", "--group=8"]);
        let upper = layout.dir.path().join("upper");
        write(&upper, "data/.wh.old", 0o600, "");
        write(&upper, "lib/later", 0o644, "by the link");
        write(&upper, "app/index.html", 0o644, "served");
        let serve = "#!/bin/sh\necho \"$GREETING $EXTRA from $(id -u):$(id -g) at $HOME in $PWD, $1\"\nexec httpd -f -p 8000\n";
        write(&upper, "app/serve", 0o755, serve);
        // Without the folder `lib`, which would take the place of the link.
        layout.add_of(&upper, &["--owner=0", "--group=0"], &["data/.wh.old", "lib/later", "app"]);
        layout.configure(&[
            "--config.env",
            "GREETING=it's",
            "--config.user",
            USER,
            "--config.workingdir",
            "/app",
        ]);
        layout.configure(&["--config.entrypoint", "/app/serve", "--config.cmd", "a word"]);
        layout
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("a path in UTF-8").to_owned()
    }

    fn folder(&self) -> String {
        self.path("layout")
    }

    fn image(&self) -> String {
        format!("{}:app", self.folder())
    }

    fn umoci(&self, arguments: &[&str]) {
        run(Command::new("umoci").args(arguments));
    }

    fn configure(&self, arguments: &[&str]) {
        self.umoci(&[&["config", "--image", &self.image()], arguments].concat());
    }

    /// Adds a folder as a layer.
    fn add(&self, root: &Path, owner: &[&str]) {
        self.add_of(root, owner, &["."]);
    }

    /// Adds what these names in a folder lead to as a layer.
    fn add_of(&self, root: &Path, owner: &[&str], names: &[&str]) {
        let layer = self.path("layer.tar");
        run(Command::new("tar").arg("-C").arg(root).args(owner).args(["-cf", &layer]).args(names));
        self.umoci(&["raw", "add-layer", "--image", &self.image(), &layer]);
    }

    /// Copies the image with skopeo; `place` is where the registry is.
    fn copy(&self, place: &Namespace, to: &str) {
        let from = format!("oci:{}", self.image());
        let copy =
            ["--insecure-policy", "copy", "-q", "--dest-tls-verify=false", "--dest-creds", LOGIN, &from, to];
        place.output("skopeo", &copy).expect("a copy");
    }
}

/// Logs in at the registry as people do.
fn log_in(cluster: &Cluster, file: &str) {
    let (user, password) = LOGIN.split_once(':').expect("a login");
    let client = cluster.lab.host("client");
    let place = format!("{}:{PORT}", client.address());
    let words = ["login", "--tls-verify=false", "--authfile", file, "-u", user, "-p", password, &place];
    client.output("skopeo", &words).expect("a login");
}

/// A registry on the client's host, for those who log in.
struct Registry {
    _storage: TempDir,
    _process: Process,
}

impl Registry {
    fn start(cluster: &Cluster) -> Self {
        let storage = tempfile::tempdir().expect("a directory");
        let settings = storage.path().join("settings.yml");
        let users = storage.path().join("users");
        fs::write(&users, USERS).expect("a file of users");
        let text = json!({"version": 0.1, "log": {"level": "error"}, "http": {"addr": format!(":{PORT}")},
            "storage": {"filesystem": {"rootdirectory": storage.path()}},
            "auth": {"htpasswd": {"realm": "lab", "path": users}}});
        fs::write(&settings, text.to_string()).expect("settings");
        let mut registry = Command::new("docker-registry");
        registry.arg("serve").arg(&settings).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let client = cluster.lab.host("client");
        let process = client.start(registry).expect("a registry");
        let deadline = Instant::now() + PATIENCE;
        while client.connect(SocketAddr::from(([127, 0, 0, 1], PORT)), Duration::from_secs(1)).is_err() {
            assert!(Instant::now() < deadline, "the registry does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        Self { _storage: storage, _process: process }
    }
}

/// Settings with the tests' kernel.
pub(crate) fn kernel_settings() -> String {
    let ContainerKernel { image, modules } = ContainerKernel::get().expect("a kernel");
    format!("[containers]\nkernel = {image:?}\nmodules = {modules:?}\ndisk_size = \"256M\"\n")
}

/// Settings of a host with the tests' kernel, and with the registry as a source.
fn settings(cluster: &Cluster) -> String {
    let address = cluster.lab.host("client").address();
    kernel_settings()
        + &format!(
            "[[image_sources]]\nname = \"lab\"\nkind = \"registry\"\nurl = \"http://{address}:{PORT}/\"\n\
         files = {{ \"named\" = \"team/app:1.0\" }}\n"
        )
}

/// What the program of a machine serves at this port of the host, once it does.
fn served(place: &Namespace, port: u16) -> String {
    let deadline = Instant::now() + PATIENCE;
    let address = format!("http://{}:{port}/index.html", Ipv4Addr::LOCALHOST);
    loop {
        match place.output("curl", &["-sf", "--max-time", "5", &address]) {
            Ok(text) => return text,
            Err(error) => assert!(Instant::now() < deadline, "nothing is served: {error}"),
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn leftovers(host: &HostProcess) -> usize {
    let count = |dir: PathBuf| fs::read_dir(dir).map_or(0, Iterator::count);
    let files = fs::read_dir(host.data()).expect("a directory").flatten();
    let files = files.filter(|entry| entry.file_name().to_string_lossy().contains("import-")).count();
    count(host.data().join("imports")) + count(host.run_dir().join("slots")) + files
}

#[test]
fn a_container_image_becomes_a_machine_that_runs_its_program() {
    let mut cluster = Cluster::start(&["alpha"]);
    let layout = Layout::new();
    let settings = settings(&cluster);
    cluster.host_mut("alpha").restart_with(&settings);
    let (alpha, place) = (cluster.host("alpha"), cluster.lab.host("alpha"));
    alpha.run(&["image", "import", &layout.folder(), "mine/app"]);
    assert_eq!(leftovers(alpha), 0);
    let images = alpha.json(&["image", "ls"]);
    assert_eq!((&images[0]["name"], &images[0]["size"]), (&json!("mine.app"), &json!(256 << 20)), "{images}");

    let script = layout.path("extra.sh");
    fs::write(&script, "#!/bin/sh\nexport EXTRA='more words'\n").expect("a script");
    let line = ["launch", "mine/app", "box", "--memory", "192M", "-p", "8080:8000", "--user-data", &script];
    let refused = alpha.refuse(&[&line[..], &["--env", "NO NAME=x"]].concat());
    assert_eq!(refused.code, 2, "{refused:?}");
    let said = alpha.run(&[&line[..], &["--env", "GREETING=it's set,"]].concat());
    assert!(said.contains("whimbrel exec box"), "{said}");
    assert_eq!(served(place, 8080), "served");
    let log = alpha.run(&["logs", "box"]);
    assert!(log.contains("it's set, more words from 1234:1235 at / in /app, a word"), "{log}");

    let sh = |script: &str| alpha.run(&["exec", "box", "--", "sh", "-c", script]);
    let seen = sh("hostname; cat /etc/hostname; ls /data; cat /usr/lib/later; echo; id -u; cat /proc/1/comm");
    assert_eq!(
        seen.lines().collect::<Vec<_>>(),
        ["box", "box", "kept", "by the link", "0", "init"],
        "{seen}"
    );
    let owners = sh("stat -c '%u:%g %a' / /data /data/kept /app/serve /bin /.whimbrel/program /lost+found");
    let expected = ["0:0 755", "7:8 755", "7:8 4750", "0:0 755", "7:8 755", "0:0 600", "0:0 700"];
    assert_eq!(owners.lines().collect::<Vec<_>>()[1..], expected[1..], "{owners}");
    // Its name is known to the network, and the network's to it.
    assert!(sh("cat /etc/resolv.conf").contains("nameserver"));

    // A machine like any other: its state comes back, and what it wrote with it.
    sh("echo written > /data/new");
    alpha.run(&["suspend", "box", "--tag", "asleep"]);
    alpha.run(&["resume", "box"]);
    assert_eq!(served(place, 8080), "served");
    assert_eq!(sh("cat /data/new"), "written\n");
    alpha.run(&["stop", "box"]);
    let log = alpha.run(&["logs", "box"]);
    assert!(log.contains("the program ended with status"), "{log}");
    assert_eq!(alpha.machines(), [("box".to_owned(), "stopped".to_owned())]);
}

#[test]
fn archives_and_a_registry_have_the_same_image_and_a_second_pull_fetches_nothing() {
    let mut cluster = Cluster::start(&["alpha"]);
    let layout = Layout::new();
    let _registry = Registry::start(&cluster);
    let login = layout.path("login.json");
    let settings = settings(&cluster) + &format!("login = {login:?}\n");
    cluster.host_mut("alpha").restart_with(&settings);
    let (alpha, client) = (cluster.host("alpha"), cluster.lab.host("client"));
    log_in(&cluster, &login);
    layout.copy(client, &format!("docker://127.0.0.1:{PORT}/team/app:1.0"));
    layout.copy(client, &format!("oci-archive:{}:app", layout.path("oci.tar")));
    layout.copy(client, &format!("docker-archive:{}:app:1", layout.path("docker.tar")));

    let added = |answer: &Value| answer["result"]["added"].as_u64().expect("bytes");
    let first = added(&alpha.json(&["image", "import", &layout.path("oci.tar"), "mine/oci"]));
    assert!(first > 1 << 20, "{first}");
    // The same files on another file system: what differs are its tables.
    let second = added(&alpha.json(&["image", "import", &layout.path("docker.tar"), "mine/docker"]));
    assert!(second < first / 4, "{second} of {first}");

    let offered = alpha.json(&["image", "ls", "--available"]);
    assert_eq!(offered["images"][0]["name"], "lab/named", "{offered}");
    alpha.json(&["image", "pull", "lab/team/app/1.0"]);
    assert_eq!(added(&alpha.json(&["image", "pull", "lab/team/app/1.0"])), 0);
    alpha.json(&["image", "pull", "lab/named"]);
    let place = cluster.lab.host("alpha");
    let line = ["launch", "lab/named", "box", "--memory", "192M", "--profile", "micro", "-p", "8080:8000"];
    alpha.run(&[&line[..], &["--disk-size", "1G"]].concat());
    assert_eq!(served(place, 8080), "served");
    // The file system is as large as the disk, now and when the disk becomes larger still.
    let room = || {
        let said = alpha.run(&["exec", "box", "--", "/.whimbrel/busybox", "df", "-m", "/"]);
        said.split_whitespace().filter_map(|word| word.parse::<u64>().ok()).next().expect("a number of MiB")
    };
    let before = room();
    assert!((900..1024).contains(&before), "{before} MiB");
    alpha.run(&["stop", "box"]);
    alpha.run(&["set", "box", "--disk-size", "2G"]);
    alpha.run(&["start", "box"]);
    assert_eq!(served(place, 8080), "served");
    let after = room();
    assert!((1900..2048).contains(&after), "{after} MiB");
    alpha.run(&["stop", "box", "--kill"]);
    for absent in ["lab/team/app/2.0", "lab/team/other/1.0", "lab/nothing"] {
        let refused = alpha.refuse(&["image", "pull", absent]);
        assert!(refused.code == 3 && refused.text.contains("no image"), "{absent}: {refused:?}");
    }
    fs::set_permissions(&login, fs::Permissions::from_mode(0o644)).expect("a mode");
    let refused = alpha.refuse(&["image", "pull", "lab/named"]);
    assert!(refused.text.contains("chmod 600"), "{refused:?}");
    fs::write(&login, "{}").expect("a file");
    fs::set_permissions(&login, fs::Permissions::from_mode(0o600)).expect("a mode");
    let refused = alpha.refuse(&["image", "pull", "lab/named"]);
    assert!(refused.text.contains("not by this login"), "{refused:?}");
    assert_eq!(leftovers(alpha), 0);
}

#[test]
fn an_image_is_built_by_a_recipe_and_the_next_build_goes_on_after_what_is_the_same() {
    let mut cluster = Cluster::start(&["alpha"]);
    let layout = Layout::new();
    cluster.host_mut("alpha").restart_with(&kernel_settings());
    let (alpha, place) = (cluster.host("alpha"), cluster.lab.host("alpha"));
    alpha.run(&["image", "import", &layout.folder(), "mine/app"]);
    let folder = layout.dir.path().join("recipe");
    write(&folder, "site/index.html", 0o644, "first");
    write(&folder, "site/deep/run.sh", 0o755, "#!/bin/sh\necho ran\n");
    write(&folder, "note", 0o640, "copied");
    let recipe = |end: &str| {
        let text = "FROM mine/app\nENV GREETING=\"it's built\"\nRUN echo \"$GREETING\" >/data/greeting\n\
                    COPY site /app\nCOPY note /data/notes/\nWORKDIR /app\nRUN deep/run.sh >/data/ran && \\\n\
                    \x20   pwd >>/data/ran\nLABEL purpose=test\n";
        write(&folder, "Imagefile", 0o644, &format!("{text}{end}"));
    };
    let cmd = "CMD [\"/bin/sh\", \"-c\", \"echo \\\"$GREETING in $PWD\\\"; exec httpd -f -p 8000\"]\n";
    recipe(cmd);
    let build = ["image", "build", "mine/site", folder.to_str().expect("a path"), "--memory", "192M"];
    let built = alpha.json(&build);
    assert_eq!((&built["steps"], &built["cached"]), (&json!(8), &json!(0)), "{built}");
    assert!(alpha.machines().is_empty(), "the machine of the build is left");

    let launch = ["launch", "mine/site", "box", "--memory", "192M", "-p", "8080:8000"];
    alpha.run(&launch);
    assert_eq!(served(place, 8080), "first");
    let log = alpha.run(&["logs", "box"]);
    assert!(log.contains("it's built in /app"), "{log}");
    let script =
        "cat /data/greeting /data/ran; stat -c '%u:%g %a' /data/notes/note /app/deep/run.sh; ls /.whimbrel*";
    let seen = alpha.run(&["exec", "box", "--", "sh", "-c", script]);
    let expected = ["it's built", "ran", "/app", "0:0 640", "0:0 755"];
    assert_eq!(seen.lines().take(5).collect::<Vec<_>>(), expected, "{seen}");
    assert!(!seen.contains("copy"), "{seen}");
    alpha.run(&["stop", "box", "--kill"]);
    alpha.run(&["delete", "box"]);

    // With other content from the third step on.
    write(&folder, "site/index.html", 0o644, "second");
    assert_eq!(alpha.json(&build)["cached"], 2);
    alpha.run(&launch);
    assert_eq!(served(place, 8080), "second");

    // A step that fails leaves the image, and the states of the steps before it.
    recipe("RUN echo lost; exit 3\n");
    let refused = alpha.refuse(&build);
    assert!(refused.text.contains("line 10") && refused.text.contains("ended with 3"), "{refused:?}");
    assert_eq!(refused.text.matches(", as before").count(), 6, "{refused:?}");
    assert_eq!(alpha.machines().len(), 1, "the machine of the build is left");
    assert_eq!(alpha.json(&["image", "ls"]).as_array().map(Vec::len), Some(2));
    let refused = alpha.refuse(&["image", "build", "mine/site", "/nowhere"]);
    assert!(refused.text.contains("/nowhere/Imagefile"), "{refused:?}");
    write(&folder, "Imagefile", 0o644, "FROM mine/app\nEXPOSE 80\n");
    assert!(alpha.refuse(&build).text.contains("line 2: EXPOSE is not known here"));
    alpha.run(&["image", "rm", "mine/site"]);
    let left = alpha.run(&["ls"]);
    assert!(!left.contains("build-"), "states of a build are left: {left}");
}

#[test]
fn container_images_that_cannot_be_machines_are_refused_and_leave_nothing() {
    let mut cluster = Cluster::start(&["alpha"]);
    let layout = Layout::new();
    let settings = settings(&cluster);
    cluster.host_mut("alpha").restart_with(&settings);
    let (alpha, client) = (cluster.host("alpha"), cluster.lab.host("client"));
    let refused = |path: &str, reason: &str| {
        let refused = alpha.refuse(&["image", "import", path, "mine/bad"]);
        assert!(refused.text.contains(reason), "{path}: {refused:?}");
        assert_eq!(leftovers(alpha), 0, "{path}");
    };
    let archive = layout.path("oci.tar");
    layout.copy(client, &format!("oci-archive:{archive}:app"));
    run(Command::new("gzip").args(["-k", &archive]));
    refused(&format!("{archive}.gz"), "gzip -d");
    refused(&layout.path("upper"), "is a directory");
    refused(&layout.path("layer.tar"), "tar -tf");

    // One byte of the upper layer: it is unpacked, and then found to be another one.
    let blobs = Path::new(&layout.folder()).join("blobs/sha256");
    let largest = fs::read_dir(&blobs).expect("blobs").flatten();
    let largest = largest.max_by_key(|blob| blob.metadata().map_or(0, |about| about.len())).expect("a blob");
    let bytes = fs::read(largest.path()).expect("a layer");
    let mut damaged = bytes.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x10;
    fs::write(largest.path(), &damaged).expect("a layer");
    refused(&layout.folder(), "cannot be read as a disk image");
    fs::write(largest.path(), &bytes).expect("a layer");

    // A layer that leads out of the tree, and one that is larger than the disk.
    let outside = layout.dir.path().join("outside");
    fs::create_dir(&outside).expect("a folder");
    std::os::unix::fs::symlink("/etc", outside.join("out")).expect("a link");
    layout.add(&outside, &[]);
    let through = layout.path("through.tar");
    fs::write(layout.path("shadow"), "stolen").expect("a file");
    run(Command::new("tar").args([
        "-C",
        &layout.path(""),
        "--transform",
        "s,^,out/../../../etc/,",
        "-cf",
        &through,
        "shadow",
    ]));
    layout.umoci(&["raw", "add-layer", "--image", &layout.image(), &through]);
    refused(&layout.folder(), "leads out of the layer");

    let large = Layout::new();
    let folder = large.dir.path().join("large");
    fs::create_dir(&folder).expect("a folder");
    fs::File::create(folder.join("zeros")).and_then(|file| file.set_len(300 << 20)).expect("a file");
    large.add(&folder, &[]);
    refused(&large.folder(), "more than 268435456 bytes");
    large.configure(&["--architecture", "arm64"]);
    refused(&large.folder(), "arm64");
    assert_eq!(alpha.json(&["image", "ls"]), json!([]));
}
