//! Clones of one capsule on one host: they share the memory that none of them has written, and nothing else.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console, wait_reborn};
use whimbrel_testkit::guest::{CheckResult, Identity, assert_same_life};

const MIB: u64 = 1 << 20;
/// Memory that every clone reads through when it checks itself.
const BUFFER_MIB: u32 = 32;

#[test]
fn clones_share_the_memory_that_none_has_written_and_keep_their_writes_to_themselves() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let original = golden(&cluster, alpha);
    alpha.run(&["clone", "golden", "--count", "4", "--prefix", "kid"]);
    let kids = ["kid-1", "kid-2", "kid-3", "kid-4"];
    kids.iter().for_each(|kid| assert_is_copy(&check(alpha, kid), &original));

    let memories = memories(alpha);
    assert_eq!(memories.len(), kids.len(), "each clone maps a template: {memories:#?}");
    let files: BTreeSet<u64> = memories.iter().map(|memory| memory.inode).collect();
    assert_eq!(files.len(), 1, "and all the same one: {memories:#?}");
    let buffer = u64::from(BUFFER_MIB) * MIB;
    for memory in &memories {
        assert!(memory.rss - memory.anonymous >= buffer, "what is only read stays shared: {memory:?}");
    }
    let (rss, pss): (u64, u64) = (sum(&memories, |m| m.rss), sum(&memories, |m| m.pss));
    let saved = (kids.len() as u64 - 1) * buffer;
    assert!(rss - pss >= saved, "{rss} bytes are mapped and {pss} used, a difference under {saved}");

    let written = console(alpha, "kid-1").write(400).expect("a write of its own");
    for kid in &kids[1..] {
        let sibling = check(alpha, kid);
        assert_is_copy(&sibling, &original);
        assert!(sibling.counter < written.counter || sibling.genid != written.genid, "another machine");
    }
    let (template, before) = (blocks(&memories[0].path), self::memories(alpha));
    alpha.run(&["balloon", "kid-2", "96M"]);
    // The guest's kernel notes every page that it puts into the balloon in memory of its own.
    let squeezed = Instant::now() + PATIENCE;
    while changed(alpha, &before) < MIB / 4 {
        assert!(Instant::now() < squeezed, "the balloon does nothing");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(blocks(&memories[0].path) >= template, "a clone's balloon took pages out of the template");
    kids.iter().for_each(|kid| assert_is_copy(&check(alpha, kid), &original));
}

/// By how much the memory of one clone alone has grown or shrunk since then, at most.
fn changed(host: &HostProcess, since: &[Memory]) -> u64 {
    let now = memories(host);
    let changes = now.iter().zip(since).map(|(now, then)| now.anonymous.abs_diff(then.anonymous));
    changes.max().unwrap_or(0)
}

#[test]
fn a_clone_is_captured_moved_and_rebooted_like_any_machine() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let original = golden(&cluster, alpha);
    alpha.run(&["clone", "golden", "--count", "3", "--prefix", "kid"]);

    let first = console(alpha, "kid-1").write(100).expect("a write of its own");
    alpha.run(&["checkpoint", "kid-1", "--tag", "grown", "--label", "os=debian", "--label", "release=12"]);
    console(alpha, "kid-1").write(5).expect("a write that is not in the checkpoint");
    alpha.run(&["stop", "kid-1", "--kill"]);
    alpha.run(&["resume", "grown", "--name", "again"]);
    let again = check(alpha, "again");
    assert_same_life(&first, &again);
    assert_whole(&again);

    let second = console(alpha, "kid-2").write(50).expect("a write of its own");
    alpha.run(&["migrate", "kid-2", "beta"]);
    let moved = check(beta, "kid-2");
    assert_same_life(&second, &moved);
    assert_whole(&moved);

    let mut third = console(alpha, "kid-3");
    let third_life = third.check().expect("an answer");
    assert_is_copy(&third_life, &original);
    let suspended = third.write(20).expect("a write of its own");
    drop(third);
    alpha.run(&["suspend", "kid-3"]);
    alpha.run(&["resume", "kid-3"]);
    assert_same_life(&suspended, &check(alpha, "kid-3"));

    reboot(beta, "kid-2");
    alpha.run(&["clone", "grown", "--count", "2", "--prefix", "grandchild"]);
    reboot(alpha, "grandchild-1");
    let grandchild = check(alpha, "grandchild-2");
    assert_same_life(&first, &grandchild);
    assert_whole(&grandchild);
    alpha.run(&["verify"]);

    // By what it is, from the other host; only what the clones touch has to travel.
    alpha.run(&["checkpoint", "again", "--tag", "older", "--label", "os=debian", "--label", "release=11"]);
    for terms in ["os=alpine", "os=debian,ram>1T", "os=debian,release>12"] {
        assert_eq!(beta.refuse(&["clone", "--match", terms, "--count", "1"]).code, 3, "{terms}");
    }
    let terms = "ram>=64M,os=debian,release>=12";
    beta.run(&["clone", "--match", terms, "--from", "alpha", "--count", "2", "--prefix", "far"]);
    for far in ["far-1", "far-2"] {
        let far = check(beta, far);
        assert_same_life(&first, &far);
        assert_whole(&far);
    }
    let grown = &alpha.json(&["show", "grown"])["id"];
    let there = beta.json(&["ls"]);
    let there = there.as_array().and_then(|all| all.iter().find(|capsule| capsule["id"] == *grown));
    assert_eq!(there.expect("it is known there")["whole"], false);
    beta.run(&["clone", "--match", "os=debian,cpus>=1", "--count", "1", "--prefix", "again"]);
    boot_clones(beta);
}

/// Clones that boot from the disks of a capsule whose pages are elsewhere, with settings of their own.
fn boot_clones(host: &HostProcess) {
    let golden = ["clone", "--match", "os=debian", "--count", "2"];
    let settings =
        ["--set", "hostname=own.lab", "--set", "address=10.1.2.10/24", "--set", "gateway=10.1.2.1"];
    let before = host.machines();
    let taken = [&golden[..], &["--prefix", "far"], &settings].concat();
    assert_eq!(host.refuse(&taken).code, 4, "far-1 is there");
    host.run(&["stop", "far-1", "--kill"]);
    host.run(&["delete", "far-1"]);
    assert_eq!(host.refuse(&taken).code, 4, "far-2 is there");
    let mut left = before;
    left.retain(|(name, _)| name != "far-1");
    assert_eq!(host.machines(), left, "the first clone is left");
    let refused = host.refuse(&[&golden[..], &["--full"], &settings].concat());
    assert_eq!(refused.code, 2, "{refused:?}");

    let made = host.json(&[&golden[..], &["--prefix", "own"], &settings].concat());
    assert_eq!(made.as_array().map(Vec::len), Some(2), "{made}");
    let seed = |name: &str, file: &str| {
        let image = host.data().join("machines").join(name).join("seed.img");
        let read =
            Command::new("mtype").arg("-i").arg(image).arg(format!("::{file}")).output().expect("mtools");
        String::from_utf8(read.stdout).expect("text")
    };
    for (name, own, address) in
        [("own-1", "own-1.lab", "10.1.2.10/24"), ("own-2", "own-2.lab", "10.1.2.11/24")]
    {
        assert!(seed(name, "meta-data").contains(&format!("\"local-hostname\":\"{own}\"")), "{name}");
        let network = seed(name, "network-config");
        assert!(network.contains(address) && network.contains("10.1.2.1\""), "{network}");
        let nic = &host.record(name).1["config"]["nics"][0]["mac"];
        assert!(network.contains(nic.as_str().expect("a hardware address")), "{nic}: {network}");
        let mut witness = console(host, name);
        witness.wait_ready(PATIENCE).expect("a guest that is up");
        witness.write(10).expect("a write of its own");
        assert_whole(&witness.check().expect("an answer"));
    }
}

/// The fears: a clone that ran although the command failed, and a machine or a folder of somebody else that
/// goes with the clones.
#[test]
fn clones_run_when_all_are_ready_and_a_command_that_fails_leaves_none() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let original = golden(&cluster, alpha);
    let folder = |name: &str| alpha.data().join("machines").join(name);
    let nothing_left = || {
        assert!(memories(alpha).is_empty(), "no QEMU of a clone is left");
        for kid in ["kid-1", "kid-2", "kid-4"] {
            assert!(!folder(kid).exists(), "{kid} is left");
        }
    };

    // A folder that is no clone's: one of them cannot be made.
    fs::create_dir(folder("kid-3")).expect("a folder");
    fs::write(folder("kid-3").join("precious"), "kept").expect("a file");
    alpha.refuse(&["clone", "golden", "--count", "4", "--prefix", "kid"]);
    nothing_left();
    assert_eq!(fs::read_to_string(folder("kid-3").join("precious")).expect("a file"), "kept");
    fs::remove_dir_all(folder("kid-3")).expect("a folder");

    alpha.run(&["clone", "golden", "--count", "1", "--prefix", "kid"]);
    let first = console(alpha, "kid-1").write(20).expect("a write of its own");
    alpha.refuse(&["clone", "golden", "--count", "4", "--prefix", "kid"]);
    assert_same_life(&first, &check(alpha, "kid-1"));
    alpha.run(&["stop", "kid-1", "--kill"]);
    alpha.run(&["delete", "kid-1"]);
    nothing_left();

    alpha.run(&["clone", "golden", "--count", "4", "--prefix", "kid"]);
    for kid in ["kid-1", "kid-2", "kid-3", "kid-4"] {
        assert_is_copy(&check(alpha, kid), &original);
    }
}

#[test]
fn clones_outlive_their_daemon_and_the_next_one_still_shares_and_saves_them() {
    let mut cluster = Cluster::start(&["alpha"]);
    cluster.host_mut("alpha").restart_with("machine_processes = false\n");
    clones_outlive(cluster, HostProcess::kill_daemon);
}

#[test]
fn clones_that_processes_had_without_a_daemon_are_shared_and_saved_by_the_next_one() {
    let cluster = clones_outlive(Cluster::start(&["alpha"]), HostProcess::stop_daemon);
    let log = cluster.host("alpha").log_text();
    // Machines at rest pass to their processes, and come back, too.
    assert!(log.matches("took it from its own process").count() >= 2, "{log}");
    assert!(!log.contains("adopting it"), "{log}");
}

/// Clones live on when their daemon ends in this way.
fn clones_outlive(mut cluster: Cluster, end: fn(&mut HostProcess)) -> Cluster {
    let original = golden(&cluster, cluster.host("alpha"));
    cluster.host("alpha").run(&["clone", "golden", "--count", "2", "--prefix", "kid"]);
    let written = console(cluster.host("alpha"), "kid-1").write(80).expect("a write of its own");
    end(cluster.host_mut("alpha"));
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");

    // What the guests had not touched before still comes, and to both.
    for kid in ["kid-1", "kid-2"] {
        alpha.wait_state(kid, &["running", "loading"]);
    }
    let taken_up = check(alpha, "kid-1");
    assert_same_life(&written, &taken_up);
    assert_whole(&taken_up);
    assert_is_copy(&check(alpha, "kid-2"), &original);

    alpha.run(&["clone", "golden", "--count", "1", "--prefix", "late"]);
    assert_is_copy(&check(alpha, "late-1"), &original);
    let files: BTreeSet<u64> = memories(alpha).iter().map(|memory| memory.inode).collect();
    assert_eq!(files.len(), 1, "a clone made later shares with those made before");

    alpha.run(&["checkpoint", "kid-1", "--tag", "later"]);
    alpha.run(&["resume", "later", "--name", "copy"]);
    let copy = check(alpha, "copy");
    assert_same_life(&taken_up, &copy);
    assert_whole(&copy);
    reboot(alpha, "kid-1");
    for machine in ["kid-1", "kid-2", "late-1"] {
        alpha.run(&["stop", machine, "--kill"]);
    }
    assert!(memories(alpha).is_empty(), "a template ends with its last clone");
    cluster
}

/// A guest that has lived a little, as the capsule `golden`; it is not running any more.
fn golden(cluster: &Cluster, host: &HostProcess) -> Identity {
    // A port that leads nowhere: the address in the guest is that of all clones.
    let arguments = ["--net", "none"].map(str::to_owned).to_vec();
    Guest { address: None, buffer_mib: BUFFER_MIB, arguments, ..Guest::small("seed") }.run(cluster, host);
    let mut seed = console(host, "seed");
    seed.wait_ready(PATIENCE).expect("a guest that is up");
    let original = seed.write(100).expect("an answer");
    host.run(&["checkpoint", "seed", "--tag", "golden"]);
    host.run(&["stop", "seed", "--kill"]);
    original
}

fn check(host: &HostProcess, machine: &str) -> Identity {
    let mut witness = console(host, machine);
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    witness.check().expect("an answer")
}

fn reboot(host: &HostProcess, machine: &str) {
    let mut witness = console(host, machine);
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    let before = witness.check().expect("an answer");
    witness.reboot().expect("a request to reboot");
    wait_reborn(&mut witness, &before);
}

fn assert_whole(identity: &Identity) {
    let whole = matches!((identity.ram, identity.disk), (CheckResult::Good(_), CheckResult::Good(_)));
    assert!(whole, "memory or disk is damaged: {identity:?}");
}

fn assert_is_copy(copy: &Identity, original: &Identity) {
    assert_eq!(copy.nonce, original.nonce, "a clone has the original's memory");
    assert_ne!(copy.genid, original.genid, "and an identity of its own");
    assert_whole(copy);
}

/// A private mapping of a RAM file, in bytes.
#[derive(Debug)]
struct Memory {
    path: PathBuf,
    inode: u64,
    rss: u64,
    pss: u64,
    /// Written by its guest, and so its own.
    anonymous: u64,
}

fn sum(memories: &[Memory], field: impl Fn(&Memory) -> u64) -> u64 {
    memories.iter().map(field).sum()
}

fn blocks(path: &Path) -> u64 {
    fs::metadata(path).expect("a template").blocks()
}

/// The memory of every clone on this host, as the kernel accounts for it.
fn memories(host: &HostProcess) -> Vec<Memory> {
    let slots = host.socket().with_extension("").join("slots");
    let processes = fs::read_dir("/proc").expect("the processes").flatten();
    let qemus = processes.filter(|process| {
        fs::read_to_string(process.path().join("comm")).is_ok_and(|name| name.starts_with("qemu-system"))
    });
    // One that ends meanwhile has no memory.
    let smaps = qemus.filter_map(|qemu| fs::read_to_string(qemu.path().join("smaps")).ok());
    smaps.filter_map(|smaps| memory(&smaps, &slots)).collect()
}

/// The private mapping of a file under `slots`, from `/proc/PID/smaps` (proc_pid_smaps(5)).
fn memory(smaps: &str, slots: &Path) -> Option<Memory> {
    let slots = slots.to_str().expect("a path in UTF-8");
    let mut lines = smaps.lines().skip_while(|line| !(line.contains(" rw-p ") && line.contains(slots)));
    let path = PathBuf::from(lines.next()?.split_whitespace().nth(5)?);
    let fields: Vec<(&str, &str)> = lines
        .take_while(|line| !line.starts_with("VmFlags"))
        .filter_map(|line| line.split_once(':'))
        .collect();
    let bytes = |name| {
        let (_, value) = fields.iter().find(|(field, _)| *field == name).expect("a field of smaps");
        value.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
    };
    let inode = fs::metadata(&path).expect("a template").ino();
    Some(Memory { path, inode, rss: bytes("Rss"), pss: bytes("Pss"), anonymous: bytes("Anonymous") })
}
