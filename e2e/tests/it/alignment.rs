//! Disks whose files lie at odd places: a partition at sector 63, as was the habit for decades. Their images
//! are cut where the files' pages are, and no byte of them may get lost or lie elsewhere for it.

use serde_json::Value;
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
};
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, GuestOptions, Identity, TestAgent, assert_same_life};

const MIB: u64 = 1 << 20;
/// Where the partition begins: 3584 bytes into a page.
const START: u64 = 63 * 512;

fn path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn run(program: &str, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(program).args(arguments).output().expect("a program to run");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Bytes of which no page is another's.
fn noise(len: u64, seed: u64) -> Vec<u8> {
    let word =
        |n: u64| (n ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(n | 1);
    (0..len / 8).flat_map(|n| word(n + 1).to_le_bytes()).collect()
}

/// Writes an ext4 file system with one file, `known`, into `disk`, from byte `start` on.
fn make_file_system(disk: &Path, mib: u64, start: u64, known: &[u8]) {
    let content = tempfile::tempdir().expect("a directory");
    fs::write(content.path().join("known"), known).expect("a file");
    let file = File::create(disk).expect("a disk image");
    file.set_len(mib * MIB).expect("room for a disk image");
    let (offset, blocks) = (format!("offset={start}"), (mib * MIB - start).div_euclid(4096).to_string());
    let arguments = ["-q", "-F", "-t", "ext4", "-b", "4096", "-E", &offset, "-d", path(content.path())];
    run("mke2fs", &[&arguments[..], &[path(disk), &blocks]].concat());
}

/// A disk with one partition, at sector 63.
fn make_odd_disk(disk: &Path, mib: u64, known: &[u8]) {
    make_file_system(disk, mib, START, known);
    let mut entry = [0; 16];
    entry[4] = 0x83;
    entry[8..12].copy_from_slice(&63u32.to_le_bytes());
    entry[12..].copy_from_slice(&((mib * MIB - START) as u32 / 512).to_le_bytes());
    let file = File::options().write(true).open(disk).expect("a disk image");
    file.write_all_at(&entry, 446).expect("a partition");
    file.write_all_at(&[0x55, 0xaa], 510).expect("a partition table");
}

/// A small guest whose second disk is an odd one, on which its witness writes.
fn start(cluster: &Cluster, host: &HostProcess, name: &str, known: &[u8]) -> TestAgent {
    let odd = cluster.disk.path().join(format!("{name}-odd.img"));
    make_odd_disk(&odd, 64, known);
    start_with(cluster, host, name, &odd, "data=vdb1")
}

/// A small guest with an empty disk and this one.
fn start_with(cluster: &Cluster, host: &HostProcess, name: &str, second: &Path, option: &str) -> TestAgent {
    let first = cluster.disk.path().join(format!("{name}-empty.img"));
    File::create(&first).and_then(|file| file.set_len(4 * MIB)).expect("a disk image");
    let files = cluster.files();
    let append = GuestOptions { buffer_mib: 8, ..GuestOptions::default() };
    let append = format!("{append} {option}");
    let memory = format!("{}M", Guest::small(name).memory_mib);
    let disks = ["--disk", path(&first), "--disk", path(second), "--memory", &memory];
    let boot = ["--kernel", path(&files.kernel), "--initrd", path(&files.initrd), "--append", &append];
    host.run(&[&["run", name], &disks[..], &boot[..]].concat());
    let mut witness = console(host, name);
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    witness
}

fn assert_good(state: &Identity) {
    assert!(
        matches!(state.ram, CheckResult::Good(_)) && matches!(state.disk, CheckResult::Good(_)),
        "{state:?}"
    );
}

/// A disk of a machine as its guest sees it, read beside it.
fn seen(cluster: &Cluster, host: &HostProcess, machine: &str, disk: &str) -> Vec<u8> {
    let out = cluster.disk.path().join("seen.raw");
    let source = format!("nbd+unix:///?socket={}", host.slot(machine).join("qemu").join(disk).display());
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &source, path(&out)]);
    taken(&out)
}

/// A disk of a capsule.
fn stored(cluster: &Cluster, host: &HostProcess, capsule: &str, disk: &str) -> Vec<u8> {
    let out = cluster.disk.path().join("stored.raw");
    host.run(&["export", capsule, path(&out), "--format", "raw", "--image", disk]);
    taken(&out)
}

fn taken(file: &Path) -> Vec<u8> {
    let content = fs::read(file).expect("a disk");
    fs::remove_file(file).expect("a file to remove");
    content
}

fn image(host: &HostProcess, capsule: &str, disk: &str) -> Value {
    let shown = host.json(&["show", capsule]);
    let images = shown["images"].as_array().expect("a list of images");
    images
        .iter()
        .find(|image| image["name"] == disk)
        .unwrap_or_else(|| panic!("no {disk} in {shown}"))
        .clone()
}

fn root(host: &HostProcess, capsule: &str) -> Value {
    image(host, capsule, "disk1")["root"].clone()
}

/// The file that was on the disk from the beginning.
fn known(disk: &[u8]) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a directory");
    let (image, out) = (directory.path().join("disk"), directory.path().join("known"));
    fs::write(&image, &disk[START as usize..]).expect("a file");
    // A guest that has it mounted has a part of it in the journal only, as after a crash. Nothing else may be
    // amiss.
    let replay = Command::new("e2fsck").args(["-y", "-E", "journal_only", path(&image)]).output();
    let replay = replay.expect("e2fsck");
    assert!(replay.status.code().is_some_and(|code| code < 2), "{replay:?}");
    run("e2fsck", &["-f", "-n", path(&image)]);
    run("debugfs", &["-R", &format!("dump known {}", path(&out)), path(&image)]);
    fs::read(&out).expect("the file")
}

/// Both disks of a paused machine are in the capsule as its guest sees them.
fn assert_stored(cluster: &Cluster, host: &HostProcess, machine: &str, capsule: &str) {
    for disk in ["disk0", "disk1"] {
        let (seen, stored) = (seen(cluster, host, machine, disk), stored(cluster, host, capsule, disk));
        let differ = seen.iter().zip(&stored).position(|(a, b)| a != b);
        assert!(seen.len() == stored.len() && differ.is_none(), "{capsule}: {disk} from byte {differ:?} on");
    }
}

#[test]
fn a_disk_with_an_odd_partition_is_the_same_bytes_wherever_it_goes() {
    let mut cluster = Cluster::start(&["alpha"]);
    let content = noise(2 * MIB, 1);
    let born = start(&cluster, cluster.host("alpha"), "web", &content).write(100).expect("a first life");
    let alpha = cluster.host("alpha");

    // All of the disk, then what changed, then all of it again by a daemon that knows nothing.
    alpha.run(&["pause", "web"]);
    alpha.run(&["checkpoint", "web", "--tag", "one"]);
    assert_stored(&cluster, alpha, "web", "one");
    assert_eq!(image(alpha, "one", "disk1")["pages"], 64 * 256 + 1, "a border splits one page");
    assert_eq!(image(alpha, "one", "disk0")["pages"], 4 * 256);
    alpha.run(&["unpause", "web"]);
    console(alpha, "web").write(300).expect("a disk that takes writes");
    alpha.run(&["pause", "web"]);
    alpha.run(&["checkpoint", "web", "--tag", "two"]);
    assert_stored(&cluster, alpha, "web", "two");
    assert_ne!(root(alpha, "one"), root(alpha, "two"));
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    alpha.run(&["checkpoint", "web", "--tag", "again"]);
    assert_eq!(root(alpha, "two"), root(alpha, "again"));
    alpha.run(&["unpause", "web"]);

    // Over its own image.
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    let mut witness = console(alpha, "web");
    let after = witness.write(200).expect("a life that goes on");
    assert_same_life(&born, &after);
    assert_good(&witness.check().expect("an answer"));
    alpha.run(&["pause", "web"]);
    alpha.run(&["checkpoint", "web", "--tag", "three"]);
    assert_stored(&cluster, alpha, "web", "three");
    let changed = alpha.json(&["diff", "again", "three"]);
    let changed =
        changed["images"].as_array().expect("a list").iter().find(|i| i["name"] == "disk1").cloned();
    let changed = changed.expect("a disk that differs")["changed"].as_u64().expect("a number");
    // A block may be chosen twice.
    assert!((190..600).contains(&changed), "200 blocks were written, and {changed} pages differ");

    // Clones, and what is kept of machines that are off.
    alpha.run(&["clone", "three", "--count", "2", "--prefix", "kid", "--network", "isolated"]);
    for kid in ["kid-1", "kid-2"] {
        let mut witness = console(alpha, kid);
        assert_same_life(&after, &witness.write(50).expect("a clone that writes"));
        assert_good(&witness.check().expect("an answer"));
        alpha.run(&["pause", kid]);
        alpha.run(&["checkpoint", kid, "--disks-only", "--tag", &format!("{kid}-paused")]);
        assert_stored(&cluster, alpha, kid, &format!("{kid}-paused"));
        alpha.run(&["stop", kid, "--kill"]);
        alpha.run(&["checkpoint", kid, "--disks-only", "--tag", &format!("{kid}-off")]);
        assert_eq!(root(alpha, &format!("{kid}-paused")), root(alpha, &format!("{kid}-off")));
    }
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "off"]);
    assert_eq!(root(alpha, "three"), root(alpha, "off"));
    assert!(known(&stored(&cluster, alpha, "off", "disk1")) == content);
    let verified = alpha.json(&["verify"])["result"].clone();
    assert_eq!(verified["damaged"].as_array().map(Vec::len), Some(0), "{verified}");
}

#[test]
fn the_rebase_report_counts_the_pages_of_odd_disks() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let mut maintained = start(&cluster, alpha, "maintained", &noise(MIB, 5));
    maintained.write(300).expect("a system");
    alpha.run(&["checkpoint", "maintained", "--disks-only", "--tag", "golden"]);
    alpha.run(&["derive", "golden", "kid"]);
    let mut kid = console(alpha, "kid");
    kid.wait_ready(PATIENCE).expect("a child that is up");
    kid.write(150).expect("a life of its own");
    maintained.write(200).expect("an update");
    alpha.run(&["checkpoint", "maintained", "--disks-only", "--tag", "golden"]);
    let changed = |machine: bool| {
        let report = alpha.json(&["outdated", "golden"]);
        let standing = report["standing"].as_array().expect("a list");
        let kid = standing.iter().find(|entry| entry["machine"].is_string() == machine);
        let kid = kid.unwrap_or_else(|| panic!("no child in {report}"));
        let disks = kid["disks"].as_array().expect("a list");
        let disk = disks.iter().find(|disk| disk["name"] == "disk1");
        disk.unwrap_or_else(|| panic!("no disk1 in {report}"))["changed"].as_u64().expect("a number")
    };
    let written = changed(true);
    alpha.run(&["suspend", "kid"]);
    let differ = changed(false);
    // A written page of a file lies in two pages of the disk, which lie in three of the image.
    assert!(
        (150..=written).contains(&differ) && written < 4 * differ,
        "{differ} differ, {written} were written"
    );
    alpha.run(&["resume", "kid"]);
    assert_good(&console(alpha, "kid").check().expect("an answer"));
}

#[test]
fn a_machine_with_an_odd_disk_moves_live_and_lazily_and_is_cut_as_before() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let content = noise(2 * MIB, 2);
    let born = start(&cluster, alpha, "web", &content).write(100).expect("a first life");
    alpha.run(&["checkpoint", "web", "--tag", "one"]);
    // The store follows the disk in cut pages while the other host gets it in its own.
    alpha.run(&["migrate", "web", "beta"]);
    let mut witness = console(beta, "web");
    assert_same_life(&born, &witness.write(100).expect("a life that goes on"));
    assert_good(&witness.check().expect("an answer"));
    beta.run(&["pause", "web"]);
    beta.run(&["checkpoint", "web", "--tag", "moved"]);
    assert_stored(&cluster, beta, "web", "moved");
    assert_eq!(image(beta, "moved", "disk1")["pages"], 64 * 256 + 1);
    beta.run(&["unpause", "web"]);
    beta.run(&["suspend", "web"]);

    // From afar: what is read comes through the cuts, what is not read stays there.
    alpha.run(&["resume", "beta:web"]);
    let mut witness = console(alpha, "web");
    assert_same_life(&born, &witness.write(100).expect("a life that goes on"));
    assert_good(&witness.check().expect("an answer"));
    alpha.run(&["pause", "web"]);
    alpha.run(&["checkpoint", "web", "--tag", "home"]);
    assert_stored(&cluster, alpha, "web", "home");
    assert!(known(&stored(&cluster, alpha, "home", "disk1")) == content);
}

#[test]
fn a_file_is_known_by_its_pages_on_a_disk_where_it_lies_elsewhere() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let content = noise(8 * MIB, 3);
    let [odd, even, qcow2, out] =
        ["odd.img", "even.img", "odd.qcow2", "out.img"].map(|name| cluster.disk.path().join(name));
    make_odd_disk(&odd, 32, &content);
    make_file_system(&even, 32, 0, &content);
    let original = fs::read(&odd).expect("a disk");

    alpha.run(&["import", path(&odd), "odd"]);
    assert_eq!(image(alpha, "odd", "disk0")["pages"], 32 * 256 + 1);
    assert!(stored(&cluster, alpha, "odd", "disk0") == original);
    alpha.run(&["export", "odd", path(&qcow2), "--format", "qcow2"]);
    run("qemu-img", &["convert", "-O", "raw", path(&qcow2), path(&out)]);
    assert!(taken(&out) == original);
    alpha.run(&["import", path(&qcow2), "converted", "--format", "qcow2"]);
    assert_eq!(image(alpha, "converted", "disk0"), image(alpha, "odd", "disk0"));
    let vmdk = cluster.disk.path().join("b.vmdk");
    run("qemu-img", &["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", path(&odd), path(&vmdk)]);
    let (folder, ova) = (path(cluster.disk.path()).to_owned(), cluster.disk.path().join("app.ova"));
    fs::write(cluster.disk.path().join("app.ovf"), "<Envelope/>").expect("a description");
    run("tar", &["-C", &folder, "-cf", path(&ova), "app.ovf", "b.vmdk", "odd.qcow2"]);
    alpha.run(&["import", path(&ova), "appliance"]);
    for disk in ["disk0", "disk1"] {
        assert_eq!(image(alpha, "appliance", disk)["pages"], image(alpha, "odd", "disk0")["pages"]);
        assert!(stored(&cluster, alpha, "appliance", disk) == original, "{disk} of the appliance");
    }
    run("xz", &["-1", path(&qcow2)]);
    run("zstd", &["-q", path(&odd)]);
    for (number, file) in [qcow2.with_extension("qcow2.xz"), odd.with_extension("img.zst")].iter().enumerate()
    {
        let name = format!("compressed{number}");
        alpha.run(&["import", path(file), &name]);
        assert_eq!(image(alpha, &name, "disk0"), image(alpha, "odd", "disk0"), "{name}");
        fs::write(file, &fs::read(file).expect("an image")[..100_000]).expect("a part of an image");
        let refused = alpha.refuse(&["import", path(file), "cut"]);
        assert!(refused.text.contains("the unpacking process rejects"), "{refused:?}");
    }

    beta.run(&["cache", "add", path(&even)]);
    let pulled = beta.json(&["pull", "odd"])["result"].clone();
    assert!(pulled["wire_bytes"].as_u64().expect("bytes") < 400_000, "{pulled}: 8 MiB of it lie there");
    assert!(stored(&cluster, beta, "odd", "disk0") == original);

    // The other way round, and the file lies in the store, as a part of the image with the odd partition.
    beta.run(&["import", path(&even), "even"]);
    let pulled = alpha.json(&["pull", "even"])["result"].clone();
    assert!(pulled["wire_bytes"].as_u64().expect("bytes") < 400_000, "{pulled}: 8 MiB of it lie there");
    assert!(stored(&cluster, alpha, "even", "disk0") == fs::read(&even).expect("a disk"));
}

/// Writes all of a disk of a paused machine, beside its guest.
fn overwrite(host: &HostProcess, machine: &str, disk: &str, content: &Path) {
    let target = format!("nbd+unix:///?socket={}", host.slot(machine).join("qemu").join(disk).display());
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", path(content), &target]);
}

#[test]
fn a_disk_of_zeros_is_cut_once_there_is_something_on_it() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let [odd, zeros] = ["odd.img", "zeros.img"].map(|name| cluster.disk.path().join(name));
    make_odd_disk(&odd, 16, &noise(MIB, 4));
    File::create(&zeros).and_then(|file| file.set_len(16 * MIB)).expect("a disk image");
    start_with(&cluster, alpha, "web", &zeros, "");
    let checkpoint = |tag: &str, pages: u64| {
        alpha.run(&["pause", "web"]);
        alpha.run(&["checkpoint", "web", "--tag", tag]);
        assert_stored(&cluster, alpha, "web", tag);
        assert_eq!(image(alpha, tag, "disk1")["pages"], pages, "{tag}");
    };
    let resume = || {
        alpha.run(&["suspend", "web"]);
        alpha.run(&["resume", "web"]);
        alpha.run(&["pause", "web"]);
    };
    let (plain, cut) = (16 * 256, 16 * 256 + 1);
    checkpoint("empty", plain);
    overwrite(alpha, "web", "disk1", &odd);
    checkpoint("full", cut);
    resume();
    // Zeros over an image that was cut are cut like it; what comes after them is a first image.
    overwrite(alpha, "web", "disk1", &zeros);
    checkpoint("wiped", cut);
    resume();
    checkpoint("still-wiped", plain);
    overwrite(alpha, "web", "disk1", &odd);
    checkpoint("full-again", cut);
    assert_eq!(root(alpha, "full"), root(alpha, "full-again"));
}
