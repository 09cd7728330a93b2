//! A guest full of caches is squeezed before its state is kept, and has all of its memory back afterwards.

use std::time::{Duration, Instant};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::guest::{CheckResult, GuestMemory, TestAgent, assert_same_life, image};

const MIB: u64 = 1 << 20;
const DISK_MIB: u64 = 128;

/// A guest whose caches hold a disk of noise.
fn start(cluster: &Cluster) -> TestAgent {
    let guest = Guest { memory_mib: 256, disk_mib: DISK_MIB, ..Guest::small("web") };
    guest.run_on(cluster, cluster.host("alpha"), |path| {
        image::patterned(path, DISK_MIB, 7).expect("a disk of noise");
    });
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let memory = witness.fill_cache().expect("a disk that can be read");
    assert!(memory.cached > (DISK_MIB - 16) * MIB, "the caches are not full: {memory:?}");
    witness
}

/// Bytes of the pages of a capsule's memory that are not zero.
fn bytes_of_memory(cluster: &Cluster, host: &HostProcess, capsule: &str) -> u64 {
    let path = cluster.disk.path().join(format!("{capsule}.ram"));
    let text: &str = path.to_str().expect("a path in UTF-8");
    host.run(&["export", capsule, text, "--format", "raw", "--image", "memory"]);
    let memory = std::fs::read(&path).expect("the exported memory");
    std::fs::remove_file(&path).expect("an exported file");
    let pages = memory.chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0));
    pages.map(|page| page.len() as u64).sum()
}

/// Waits until the guest has as much memory as it had `before`: it takes it back in its own time.
fn wait_whole(witness: &mut TestAgent, before: &GuestMemory) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = witness.memory().expect("an answer");
        if now.total == before.total {
            return;
        }
        assert!(Instant::now() < deadline, "the guest stays squeezed: {before:?} {now:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_squeezed_machine_is_small_in_the_store_and_whole_when_it_runs_on() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let mut witness = start(&cluster);
    let (born, before) = (witness.check().expect("a first life"), witness.memory().expect("its memory"));
    alpha.run(&["checkpoint", "web", "--tag", "full"]);
    let full = bytes_of_memory(&cluster, alpha, "full");
    assert!(full > DISK_MIB * MIB, "the caches are not in the capsule: {full}");

    let taken = alpha.json(&["checkpoint", "web", "--tag", "squeezed", "--balloon", "auto"]);
    assert!(taken["result"]["balloon_freed"].as_u64() > Some(100 * MIB), "{taken}");
    let squeezed = bytes_of_memory(&cluster, alpha, "squeezed");
    assert!(squeezed * 2 < full, "squeezed to {} MiB of {}", squeezed / MIB, full / MIB);
    // Again while it is still taking its memory back: what it had is not what it has at the moment. With much
    // less than this the guest's kernel, which needs 40 MiB for itself, may end a program.
    alpha.json(&["checkpoint", "web", "--balloon", "96M"]);
    alpha.json(&["checkpoint", "web", "--balloon", "auto"]);
    wait_whole(&mut witness, &before);
    let lived_on = witness.check().expect("a guest that runs on");
    assert_same_life(&born, &lived_on);
    assert!(matches!(lived_on.ram, CheckResult::Good(_)), "{lived_on:?}");

    witness.fill_cache().expect("a disk that can be read");
    drop(witness);
    let taken = alpha.json(&["suspend", "web", "--tag", "asleep", "--balloon", "96M"]);
    assert!(taken["result"]["balloon_freed"].as_u64() >= Some((256 - 96) * MIB), "{taken}");
    let asleep = bytes_of_memory(&cluster, alpha, "asleep");
    println!("non-zero memory: {full} full, {squeezed} auto, {asleep} left with 96 MiB");
    assert!(asleep <= 96 * MIB, "{} MiB are left", asleep / MIB);

    alpha.run(&["resume", "web"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    wait_whole(&mut witness, &before);
    let again = witness.check().expect("a guest that goes on");
    assert_same_life(&lived_on, &again);
    assert!(matches!(again.ram, CheckResult::Good(_)), "{again:?}");
    let memory = witness.fill_cache().expect("a disk that can be read");
    assert!(memory.cached > (DISK_MIB - 16) * MIB, "it has room for its caches again: {memory:?}");
    drop(witness);
    alpha.run(&["stop", "web", "--kill"]);

    // What a capsule of a squeezed machine is made into is whole too.
    alpha.run(&["resume", "squeezed", "--name", "copy", "--full"]);
    wait_whole(&mut cluster.witness(GUEST_ADDRESS), &before);
}

#[test]
fn a_suspend_that_fails_or_is_cancelled_leaves_the_guest_whole() {
    let mut cluster = Cluster::start(&["alpha"]);
    let mut witness = start(&cluster);
    let before = witness.memory().expect("its memory");
    let alpha = cluster.host("alpha");
    let refusal = alpha.refuse(&["suspend", "web", "--balloon", "512M"]);
    assert_eq!(refusal.code, 2, "{refusal:?}");
    alpha.run(&["pause", "web"]);
    let refusal = alpha.refuse(&["suspend", "web", "--balloon", "96M"]);
    assert_eq!(refusal.code, 4, "{refusal:?}");
    alpha.run(&["unpause", "web"]);

    // The daemon is killed while the guest is squeezed: the next one gives it its memory back.
    std::thread::scope(|scope| {
        let suspend = scope.spawn(|| alpha.try_run(&["suspend", "web", "--balloon", "64M"]));
        let deadline = Instant::now() + PATIENCE;
        while witness.memory().expect("an answer").total == before.total {
            assert!(Instant::now() < deadline, "the guest is not squeezed");
        }
        alpha.signal_daemon(nix::sys::signal::Signal::SIGKILL);
        suspend.join().expect("the command ends").expect_err("its daemon is gone");
    });
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    wait_whole(&mut cluster.witness(GUEST_ADDRESS), &before);
}
