//! Images: from a server of files to a machine that answers, in one line; what is refused, and what is left.

use serde_json::{Value, json};
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_e2e::{Cluster, HostProcess, PATIENCE, command_line};
use whimbrel_testkit::{
    guest::{PublishedImage, TestAgent},
    lab::{Namespace, Process},
};

/// Port of the server of images.
const PORT: u16 = 8000;

/// A server of files on the client's host, and its folder.
pub(crate) struct Server {
    folder: TempDir,
    _process: Process,
}

impl Server {
    pub(crate) fn start(cluster: &Cluster) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let mut httpd = Command::new("busybox");
        httpd.args(["httpd", "-f", "-p", &PORT.to_string(), "-h"]).arg(folder.path());
        httpd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let client = cluster.lab.host("client");
        let process = client.start(httpd).expect("a server");
        let address = SocketAddr::from(([127, 0, 0, 1], PORT));
        let deadline = Instant::now() + PATIENCE;
        while client.connect(address, Duration::from_secs(1)).is_err() {
            assert!(Instant::now() < deadline, "the server of images does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { folder, _process: process }
    }

    /// Publishes an image and its list below `name`.
    pub(crate) fn publish(&self, name: &str, image: &PublishedImage) -> PathBuf {
        let folder = self.folder.path().join(name);
        fs::create_dir(&folder).expect("a folder");
        for file in ["SHA512SUMS", &image.file] {
            fs::copy(image.folder.join(file), folder.join(file)).expect("a copy");
        }
        folder
    }
}

/// Settings with these sources on the client's host.
pub(crate) fn sources(cluster: &Cluster, all: &[(&str, &str, &str)]) -> String {
    let address = cluster.lab.host("client").address();
    let source = |(name, kind, more): &(&str, &str, &str)| {
        format!(
            "[[image_sources]]\nname = \"{name}\"\nkind = \"{kind}\"\nurl = \"http://{address}:{PORT}/{name}/\"\n{more}\n"
        )
    };
    all.iter().map(source).collect()
}

fn small() -> PublishedImage {
    PublishedImage::small().expect("an image of the small guest")
}

/// The guest's agent for tests at `address`, once it is up.
fn agent(place: &Namespace, address: SocketAddr) -> TestAgent {
    let deadline = Instant::now() + PATIENCE;
    let stream = loop {
        match place.connect(address, Duration::from_secs(2)) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "{address} does not answer: {error}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let mut agent = TestAgent::connected(stream).expect("a connection");
    agent.wait_ready(PATIENCE).expect("a guest that is up");
    agent
}

/// What a program of the host prints.
fn said(place: &Namespace, arguments: &[&str]) -> String {
    place.output(arguments[0], &arguments[1..]).expect("a program that succeeds")
}

/// What a line prints in the shell of the guest behind this port of the host.
fn ask_at(place: &Namespace, port: u16, line: &str) -> String {
    said(place, &["sh", "-c", &format!("echo '{line}' | busybox nc 127.0.0.1 {port}")])
}

fn names(images: &Value) -> Vec<String> {
    let images = images.as_array().expect("a list");
    images.iter().map(|image| image["name"].as_str().expect("a name").to_owned()).collect()
}

/// Bytes that the daemon has not given back: files without names, and directories of conversions.
fn leftovers(host: &HostProcess) -> usize {
    let count = |dir: &Path| fs::read_dir(dir).expect("a directory").count();
    let stray = fs::read_dir(host.data()).expect("a directory").flatten();
    let stray = stray.filter(|entry| entry.file_name().to_string_lossy().contains("import")).count();
    count(&host.run_dir().join("slots")) + stray
}

#[test]
fn an_image_becomes_a_machine_in_one_line_with_network_disk_and_port() {
    let mut cluster = Cluster::start(&["alpha"]);
    let server = Server::start(&cluster);
    let image = small();
    server.publish("lab", &image);
    let settings = sources(&cluster, &[("lab", "folder", "user = \"me\"")]);
    cluster.host_mut("alpha").restart_with(&settings);
    let (alpha, place) = (cluster.host("alpha"), cluster.lab.host("alpha"));
    let offered = alpha.json(&["image", "ls", "--available"]);
    assert_eq!(names(&offered["images"]), ["lab/small"], "{offered}");

    let key = cluster.disk.path().join("id.pub");
    fs::write(&key, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0i0xV0sZ0nq3o0r6JbqgqQ0d8kq2wV8m2s3sZb1e2F me\n")
        .expect("a key");
    let key = key.to_str().expect("a path in UTF-8");
    let line = ["launch", "lab/small", "web", "-p", "2222:7000", "-p", "7071:7070", "--ssh-key", key];
    alpha.run(&[&line[..], &["--memory", "192M", "--disk-size", "300M"]].concat());
    agent(place, (Ipv4Addr::LOCALHOST, 2222).into());
    let ask = |line: &str| ask_at(place, 7071, line);
    // 300 MiB in sectors, more than the image has, with its partition; and the seed on a disk of its own.
    assert!(ask("cat /sys/block/vda/size").starts_with("614400\n"), "{}", ask("cat /sys/block/vda/size"));
    let seed =
        ask("grep -c CIDATA /dev/vdb; ls /sys/block | grep -c vd; grep -q vda1 /proc/partitions; echo $?");
    assert_eq!(seed.lines().collect::<Vec<_>>()[1..3], ["2", "0"], "{seed}");
    assert_eq!(alpha.json(&["network", "ls"])[0]["name"], "lan0");

    // The next one takes what is here: the server may be gone. Both share the pages of the image.
    fs::remove_dir_all(server.folder.path().join("lab")).expect("a folder to remove");
    alpha.run(&["-q", "launch", "lab/small", "db", "--memory", "192M", "--net", "none"]);
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "image.mine.web"]);
    let images = alpha.json(&["image", "ls"]);
    assert_eq!(names(&images), ["mine.web", "lab/small"], "{images}");
    // A machine of that image has a seed of its own instead of web's, and so another host name.
    alpha.run(&["-q", "launch", "mine/web", "kid", "--memory", "192M", "-p", "2223:7000", "-p", "7072:7070"]);
    agent(place, (Ipv4Addr::LOCALHOST, 2223).into());
    let kid = ask_at(
        place,
        7072,
        "ls /sys/block | grep -c vd; grep -q :.kid /dev/vdb && echo own; grep -q :.web /dev/vdb && echo web",
    );
    assert_eq!(kid.lines().collect::<Vec<_>>()[..2], ["2", "own"], "{kid}");
    assert!(!kid.contains("web"), "{kid}");
    alpha.run(&["stop", "kid", "--kill"]);
    assert_eq!(images[1]["user"], "me");

    let log = alpha.json(&["log", "image.mine.web"]);
    assert_eq!(log.as_array().map(Vec::len), Some(3), "web, the larger disk, the image: {log}");
    alpha.run(&["image", "rm", "lab/small"]);
    assert_eq!(names(&alpha.json(&["image", "ls"])), ["mine.web"]);
    alpha.run(&["gc"]);
    // Its image has no name any more, and the machine that was made of it starts again.
    alpha.run(&["stop", "db", "--kill"]);
    alpha.run(&["start", "db"]);
    let refused = alpha.refuse(&["launch", "lab/small", "third"]);
    assert!(refused.text.contains("SHA512SUMS"), "{refused:?}");
}

#[test]
fn an_image_that_is_not_what_its_list_says_is_refused_and_leaves_nothing() {
    let mut cluster = Cluster::start(&["alpha"]);
    let server = Server::start(&cluster);
    let image = small();
    let bad = server.publish("bad", &image);
    let mut bytes = fs::read(bad.join(&image.file)).expect("an image");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(bad.join(&image.file), bytes).expect("a damaged image");
    let missing = server.publish("missing", &image);
    fs::remove_file(missing.join(&image.file)).expect("a file to remove");
    server.publish("unsigned", &image);
    let keyring = "keyring = \"/usr/share/keyrings/debian-archive-keyring.gpg\"";
    let all = [
        ("bad", "folder", ""),
        ("missing", "folder", ""),
        ("unsigned", "folder", keyring),
        ("gone", "folder", ""),
    ];
    let settings = sources(&cluster, &all);
    cluster.host_mut("alpha").restart_with(&settings);
    let alpha = cluster.host("alpha");
    let cases = [
        ("bad/small", 5, "the source lists sha512:"),
        ("missing/small", 3, "404"),
        ("unsigned/small", 5, "no valid signature"),
        ("gone/small", 2, "no SHA512SUMS"),
        ("bad/other", 3, "no image bad/other"),
        ("nowhere/small", 3, "no image nowhere/small"),
    ];
    let before = leftovers(alpha);
    for (name, code, reason) in cases {
        let refused = alpha.refuse(&["launch", name, "web"]);
        assert!(refused.code == code && refused.text.contains(reason), "{name}: {refused:?}");
    }
    let offered = alpha.json(&["image", "ls", "--available"]);
    assert_eq!(names(&offered["images"]), ["bad/small", "missing/small"]);
    assert_eq!(offered["problems"].as_array().map(Vec::len), Some(2), "{offered}");
    assert_eq!(alpha.json(&["image", "ls"]), json!([]));
    assert_eq!(alpha.json(&["network", "ls"]), json!([]), "a network for a machine that is not made");
    assert!(alpha.machines().is_empty());
    assert_eq!(leftovers(alpha), before);
}

/// Signed lists, in both forms, checked by gpgv with keys that gpg made.
#[test]
fn signed_lists_are_taken_from_their_owner_only() {
    let mut cluster = Cluster::start(&["alpha"]);
    let server = Server::start(&cluster);
    let image = small();
    let (folder, streams) = (server.publish("signed", &image), server.publish("streams", &image));
    let home = tempfile::tempdir().expect("a directory");
    let gpg = |arguments: &[&str]| {
        let mut command = Command::new("gpg");
        command.arg("--homedir").arg(home.path()).args(["--batch", "--yes", "--quiet", "--passphrase", ""]);
        let output = command.args(arguments).output().expect("the program gpg");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let path = |path: PathBuf| path.to_str().expect("a path in UTF-8").to_owned();
    gpg(&["--quick-generate-key", "owner@images.test", "default", "default", "never"]);
    let keyring = path(home.path().join("owner.gpg"));
    gpg(&["--output", &keyring, "--export", "owner@images.test"]);
    gpg(&[
        "--detach-sign",
        "--output",
        &path(folder.join("SHA512SUMS.sign")),
        &path(folder.join("SHA512SUMS")),
    ]);
    // Those that the host's own server of images signs.
    let own = server.publish("own", &image);
    let alpha = cluster.host("alpha");
    alpha.run(&["image", "import", &path(image.folder.join(&image.file)), "mine/web"]);
    let (program, socket) = (path(command_line().to_owned()), path(alpha.socket().to_owned()));
    let (keys, folder_of_own) = (format!("GNUPGHOME={}", home.path().display()), path(own.clone()));
    let serve =
        ["env", &keys, &program, "--socket", &socket, "image", "serve", &folder_of_own, "--write-only"];
    said(cluster.lab.host("alpha"), &[&serve[..], &["--sign-with", "owner@images.test"]].concat());
    for list in ["index", "images"] {
        fs::remove_file(own.join(format!("streams/v1/{list}.json"))).expect("a list to remove");
    }

    simplestreams(&streams, &image);
    for list in ["index", "images"] {
        let signed = path(streams.join(format!("streams/v1/{list}.sjson")));
        gpg(&["--clearsign", "--output", &signed, &path(streams.join(format!("streams/v1/{list}.json")))]);
    }
    // Only the signed forms are read where there is a keyring.
    let index = fs::read(streams.join("streams/v1/index.json")).expect("an index");
    fs::remove_file(streams.join("streams/v1/index.json")).expect("a file to remove");
    let keyring = format!("keyring = \"{keyring}\"");
    let all = [
        ("own", "simplestreams", &*keyring),
        ("signed", "folder", &*keyring),
        ("streams", "simplestreams", &*keyring),
    ];
    let settings = sources(&cluster, &all);
    cluster.host_mut("alpha").restart_with(&settings);
    let alpha = cluster.host("alpha");
    let offered = alpha.json(&["image", "ls", "--available"]);
    assert_eq!(names(&offered["images"]), ["own/mine.web", "signed/small", "streams/tiny/1"], "{offered}");
    alpha.run(&["image", "pull", "own/mine.web"]);
    // By another of its names; the second time nothing is fetched.
    alpha.run(&["image", "pull", "streams/tiny"]);
    fs::remove_file(streams.join(&image.file)).expect("a file to remove");
    let again = alpha.json(&["image", "pull", "streams/tiny"]);
    assert_eq!(again["result"]["added"], 0, "{again}");

    let list = folder.join("SHA512SUMS");
    let forged = fs::read_to_string(&list).expect("a list").replace("small", "other");
    fs::write(&list, forged).expect("a forged list");
    fs::write(streams.join("streams/v1/index.sjson"), index).expect("a list without a signature");
    for name in ["signed/other", "streams/tiny"] {
        let refused = alpha.refuse(&["image", "pull", name]);
        assert!(refused.text.contains("no valid signature"), "{name}: {refused:?}");
    }
}

/// Lists of a server of simplestreams for the image in `folder`, as Incus writes them.
fn simplestreams(folder: &Path, image: &PublishedImage) {
    let lists = folder.join("streams/v1");
    fs::create_dir_all(&lists).expect("folders");
    let sum =
        Command::new("sha256sum").arg(folder.join(&image.file)).output().expect("the program sha256sum");
    let sum = String::from_utf8_lossy(&sum.stdout)[..64].to_owned();
    let size = fs::metadata(folder.join(&image.file)).expect("an image").len();
    let disk = json!({"ftype": "disk-kvm.img", "path": image.file, "sha256": sum, "size": size});
    let product = json!({"aliases": "tiny/1,tiny", "arch": "amd64", "os": "Tiny", "release": "1", "variant": "default",
        "versions": {"20261101": {"items": {"disk.qcow2": disk}}}});
    let products = json!({"content_id": "images", "datatype": "image-downloads", "format": "products:1.0",
        "products": {"tiny:1:amd64:default": product}});
    let index = json!({"format": "index:1.0", "index": {"images": {"datatype": "image-downloads",
        "path": "streams/v1/images.json", "format": "products:1.0", "products": ["tiny:1:amd64:default"]}}});
    for (name, list) in [("index.json", index), ("images.json", products)] {
        fs::write(lists.join(name), list.to_string()).expect("a list");
    }
}

/// Port of a host's own server of images.
const OWN_PORT: u16 = 8480;

/// Waits until a host takes connections at its own server of images.
fn wait_served(cluster: &Cluster, host: &str) -> String {
    let from = cluster.lab.host("client");
    let address = cluster.lab.host(host).address();
    let deadline = Instant::now() + PATIENCE;
    while from.connect(SocketAddr::from((address, OWN_PORT)), Duration::from_secs(1)).is_err() {
        assert!(Instant::now() < deadline, "the server of images does not answer");
        std::thread::sleep(Duration::from_millis(50));
    }
    format!("http://{address}:{OWN_PORT}/")
}

/// A program that came with Python's own packages, in the environment of the clients.
fn python_program(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the workspace");
    let program = root.join("target/clients-venv/bin").join(name);
    assert!(program.exists(), "{name} is not installed: `cargo xtask clients` does that");
    program.to_str().expect("a path in UTF-8").to_owned()
}

#[test]
fn images_of_a_host_are_fetched_by_others_and_by_a_foreign_client_and_lists_follow_what_changes() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let image = small();
    let path = |path: PathBuf| path.to_str().expect("a path in UTF-8").to_owned();
    let file = path(image.folder.join(&image.file));
    let folder = cluster.disk.path().join("served");
    let served = path(folder.clone());
    let alpha = cluster.host("alpha");
    alpha.run(&["image", "import", &file, "mine/web"]);
    alpha.run(&["image", "import", &file, "mine/db"]);
    let refused = alpha.refuse(&["image", "serve", &served, "mine/other", "--write-only"]);
    assert!(refused.text.contains("no complete image mine/other"), "{refused:?}");
    let written = alpha.json(&["image", "serve", &served, "mine.web", "--write-only"]);
    assert_eq!(names(&written["images"]), ["mine.web"], "{written}");
    fs::write(folder.join("disks/notes.txt"), "of somebody").expect("a file of another");
    let disks = || {
        let entries = fs::read_dir(folder.join("disks")).expect("a folder").flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    };
    let capsule = written["images"][0]["capsule"].as_str().expect("a capsule").to_owned();
    let expected = [format!("{capsule}.qcow2"), format!("{capsule}.sha256"), "notes.txt".to_owned()];
    assert_eq!(disks(), expected);
    let made = fs::metadata(folder.join("disks").join(&expected[0])).and_then(|file| file.modified());
    let (program, socket) = (path(command_line().to_owned()), path(alpha.socket().to_owned()));
    let serving = alpha.start_program(&program, &["--socket", &socket, "image", "serve", &served]);
    let address = wait_served(&cluster, "alpha");

    let settings = format!("[[image_sources]]\nkind = \"simplestreams\"\nurl = \"{address}\"\n");
    cluster.host_mut("beta").restart_with(&settings);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let offered = beta.json(&["image", "ls", "--available"]);
    assert_eq!(names(&offered["images"]), ["mine.db", "mine.web"], "{offered}");
    beta.run(&["image", "pull", "mine/web"]);
    let content = |host: &HostProcess| {
        let file = cluster.disk.path().join(format!("{}.raw", host.name()));
        host.run(&["export", "image.mine.web", file.to_str().expect("a path in UTF-8")]);
        fs::read(file).expect("a disk")
    };
    assert!(content(alpha) == content(beta), "the image is another one on beta");
    assert_eq!(disks().len(), 5, "the other image has a file too");
    // A file that is there is not made again.
    let still = fs::metadata(folder.join("disks").join(&expected[0])).and_then(|file| file.modified());
    assert_eq!(made.expect("a file"), still.expect("a file"));

    let (client, mirror) = (cluster.lab.host("client"), cluster.disk.path().join("mirror"));
    let program = python_program("sstream-mirror");
    let index = format!("{address}streams/v1/index.json");
    said(client, &[&program, "--no-verify", &index, mirror.to_str().expect("a path in UTF-8")]);
    let mirrored = fs::read(mirror.join("disks").join(&expected[0])).expect("a mirrored disk");
    assert!(mirrored == fs::read(folder.join("disks").join(&expected[0])).expect("a disk"));
    for (path, status) in [("../disk.raw", "404"), ("disks/", "404"), ("streams/v1/index.json", "200")] {
        let curl = ["curl", "-s", "--path-as-is", "-o", "/dev/null", "-w", "%{http_code}"];
        let got = said(client, &[&curl[..], &[&format!("{address}{path}")]].concat());
        assert_eq!(got, status, "{path}");
    }
    drop(serving);

    alpha.run(&["image", "rm", "mine/web"]);
    alpha.run(&["image", "rm", "mine/db"]);
    let written = alpha.json(&["image", "serve", &served, "--write-only"]);
    assert_eq!(written["images"], json!([]));
    assert_eq!(disks(), ["notes.txt"]);
}

/// A real Debian with cloud-init and sshd (CONTRIBUTING.md says how to run it).
#[test]
#[ignore = "builds a Debian image first, which takes minutes"]
fn a_debian_image_is_launched_configured_and_logged_in_to() {
    let mut cluster = Cluster::start(&["alpha"]);
    let server = Server::start(&cluster);
    let image = PublishedImage::debian_with("agent", &["qemu-guest-agent"]).expect("an image of Debian");
    server.publish("debian", &image);
    let files = format!("files = {{ \"12\" = \"{}\" }}\nuser = \"debian\"", image.file);
    let settings = sources(&cluster, &[("debian", "folder", &files)]);
    cluster.host_mut("alpha").restart_with(&settings);
    let (alpha, place) = (cluster.host("alpha"), cluster.lab.host("alpha"));
    let key = cluster.disk.path().join("id_ed25519").to_str().expect("a path in UTF-8").to_owned();
    said(place, &["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", &key]);
    let begun = Instant::now();
    let line = ["launch", "debian/12", "web", "-p", "2222:22", "--disk-size", "4G", "--ssh-key"];
    alpha.run(&[&line[..], &[&format!("{key}.pub")]].concat());
    println!("launched after {:.1} s", begun.elapsed().as_secs_f64());

    // As a user of this host, and through the published port from another one.
    let known = format!("-oUserKnownHostsFile={key}.known");
    let whimbrel = command_line();
    let whimbrel = whimbrel.to_str().expect("a path in UTF-8");
    let socket = alpha.socket().to_str().expect("a path in UTF-8");
    let mut ssh =
        vec![whimbrel, "--socket", socket, "ssh", "web", "--timeout", "600", "--", "-i", &key, &known];
    ssh.push("cloud-init status --wait --long; hostname; df --output=size -BM / | tail -1; whoami");
    let answer = said(place, &ssh);
    println!("configured after {:.1} s:\n{answer}", begun.elapsed().as_secs_f64());
    let lines: Vec<_> = answer.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(lines.iter().any(|line| line.contains("status: done")), "{answer}");
    assert!(lines.contains(&"web") && lines.ends_with(&["debian"]), "{answer}");
    let size = lines.iter().find_map(|line| line.strip_suffix('M')?.parse::<u64>().ok());
    assert!(size.is_some_and(|mib| mib > 3500), "the file system has not grown: {answer}");
    let (client, port) = (cluster.lab.host("client"), format!("debian@{}", place.address()));
    let outside =
        ["ssh", "-p", "2222", "-i", &key, "-oUserKnownHostsFile=/dev/null", "-oStrictHostKeyChecking=no"];
    let uptime = said(client, &[&outside[..], &[&port, "cat /proc/uptime /etc/debian_version"]].concat());
    println!("through the published port: {uptime}");
    assert!(uptime.contains("\n12."), "{uptime}");

    // A copy with a name and an address of its own, which no DHCP gave it.
    let own_key = "cat /etc/ssh/ssh_host_ed25519_key.pub";
    let first_key = said(client, &[&outside[..], &[&port, own_key]].concat());
    alpha.run(&["checkpoint", "web", "--tag", "golden"]);
    alpha.run(&["stop", "web"]);
    let network = alpha.json(&["network", "ls"]);
    let gateway = network[0]["gateway"].as_str().expect("a gateway");
    let address = format!("{}.77", gateway.rsplit_once('.').expect("an address").0);
    let taken = network[0]["machines"][0]["address"].as_str().expect("an address of web");
    let settings = ["hostname=copy.lab", &format!("address={address}/24"), &format!("gateway={gateway}")];
    let settings: Vec<_> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let copy = ["clone", "golden", "--count", "1", "--prefix", "copy", "--ssh-key"];
    let (own_key_file, taken) = (format!("{key}.pub"), format!("address={taken}/24"));
    let refused = alpha.refuse(&[&copy[..], &[&own_key_file, "--set", &taken]].concat());
    assert!(refused.text.contains("web has the address"), "{refused:?}");
    alpha.run(&[&copy[..], &[&format!("{key}.pub"), "--set", &format!("dns={gateway}")], &settings].concat());
    assert!(alpha.run(&["ps"]).contains(&address), "the network gives it another one");
    let copied = ["ssh", "-i", &key, "-oUserKnownHostsFile=/dev/null", "-oStrictHostKeyChecking=no"];
    let (there, deadline) = (format!("debian@{address}"), Instant::now() + 2 * PATIENCE);
    let asked = format!("cloud-init status --wait; hostname -f; ip -4 -br addr; ip route; {own_key}");
    let answer = loop {
        match place.output(copied[0], &[&copied[1..], &[&there, &asked]].concat()) {
            Ok(answer) => break answer,
            Err(error) => assert!(Instant::now() < deadline, "the copy does not answer: {error}"),
        }
        std::thread::sleep(Duration::from_secs(2));
    };
    println!("the copy:\n{answer}");
    for part in ["status: done", "copy.lab", &format!("{address}/24"), &format!("default via {gateway}")] {
        assert!(answer.contains(part), "no {part}: {answer}");
    }
    assert!(!answer.contains(first_key.trim()), "the copy has the host key of the original");
    alpha.run(&["stop", "copy-1", "--kill"]);

    // An image by a recipe, of which a machine is made that is configured as if it were the first.
    let folder = cluster.disk.path().join("recipe");
    fs::create_dir(&folder).expect("a folder");
    fs::write(folder.join("note"), "copied").expect("a file");
    let recipe = "FROM debian/12\nRUN echo built >/etc/built && id -u >>/etc/built\nCOPY note /etc/note\n";
    fs::write(folder.join("Imagefile"), recipe).expect("a recipe");
    alpha.run(&["image", "build", "mine/deb", folder.to_str().expect("a path in UTF-8")]);
    alpha.run(&["launch", "mine/deb", "box", "--ssh-key", &format!("{key}.pub")]);
    let known = format!("-oUserKnownHostsFile={key}.box");
    let mut ssh =
        vec![whimbrel, "--socket", socket, "ssh", "box", "--timeout", "600", "--", "-i", &key, &known];
    let asked = format!("cloud-init status --wait; hostname; cat /etc/built /etc/note; {own_key}");
    ssh.push(&asked);
    let answer = said(place, &ssh);
    println!("built:\n{answer}");
    let lines: Vec<_> = answer.lines().map(str::trim).collect();
    assert!(
        answer.contains("status: done") && lines.contains(&"box") && lines.contains(&"built"),
        "{answer}"
    );
    assert!(
        lines.contains(&"0") && answer.contains("copied") && !answer.contains(first_key.trim()),
        "{answer}"
    );
}
