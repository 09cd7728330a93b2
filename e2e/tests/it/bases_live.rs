//! A running machine moves to a host that has something of it already: an older capsule, or the file under
//! its disk.
//!
//! The fears: a page of the older version that stays where it changed, or a zero that was something before; a
//! disk that lies over a capsule nobody keeps; another file taken for the shared one.

use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, Identity, Work, assert_same_life, image};

const MIB: u64 = 1 << 20;

/// Moves the one machine; bytes that it took.
fn migrate(from: &HostProcess, to: &HostProcess) -> u64 {
    let moved = from.json(&["migrate", "web", to.name()]);
    moved["result"]["wire_bytes"].as_u64().unwrap_or_else(|| panic!("no bytes in {moved}"))
}

/// The guest is the same one, and what it has in memory and on its disk is what it wrote there.
fn assert_intact(cluster: &Cluster, before: &Identity) -> Identity {
    let after = cluster.witness(GUEST_ADDRESS).check().expect("an answer of the guest");
    assert_same_life(before, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
    after
}

fn write(cluster: &Cluster, blocks: u64) -> Identity {
    cluster.witness(GUEST_ADDRESS).write(blocks).expect("a guest that writes")
}

/// What a host has noted about the base of the machine's one disk.
fn disk_base(host: &HostProcess) -> Value {
    let (_, record) = host.record("web");
    record["bases"][0].clone()
}

#[test]
fn to_a_host_with_an_older_capsule_travels_what_changed() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let work = Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 64 };
    Guest { work, ..Guest::small("web") }.run(&cluster, cluster.host("alpha"));
    write(&cluster, 200);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    alpha.run(&["checkpoint", "web", "--tag", "older"]);
    alpha.run(&["push", "older", "beta"]);
    let before = write(&cluster, 100);
    let wire = migrate(alpha, beta);
    println!("{wire} bytes to a host with an older capsule");
    assert!(wire < 12 * MIB, "{wire} bytes");
    assert_eq!(disk_base(beta)["kind"], "image", "its disk lies over the capsule's");
    let after = assert_intact(&cluster, &before);

    // What the disk lies over is found again, and is not collected as long as it does.
    cluster.host_mut("beta").kill_daemon();
    cluster.host_mut("beta").start_daemon();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    beta.run(&["gc"]);
    let before = assert_intact(&cluster, &after);

    // Back to where the capsule was made; the machine has a newer one by now, which only beta has.
    beta.run(&["checkpoint", "web"]);
    write(&cluster, 50);
    let wire = migrate(beta, alpha);
    println!("{wire} bytes back");
    assert!(wire < 12 * MIB, "{wire} bytes");
    let after = assert_intact(&cluster, &before);
    // Lazily: beta begins as the capsule, and has to give up what it has there of every page that follows.
    let moved = alpha.json(&["migrate", "web", "beta", "--mode", "postcopy"]);
    println!("lazily to a host with a capsule: {moved}");
    let postcopy = &moved["result"]["postcopy"];
    assert!(
        postcopy["initial_missing_pages"].as_u64() > Some(0) && postcopy["missing_pages"] == 0,
        "{moved}"
    );
    beta.wait_state("web", &["running"]);
    let before = assert_intact(&cluster, &after);
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web"]);
    assert_intact(&cluster, &before);
}

#[test]
fn over_a_slow_link_pages_that_another_machine_of_the_target_has_are_not_sent() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    // Both have read a disk with the same on it. What they booted from does not travel in any case.
    let same = |disk: &Path| image::patterned(disk, 32, 7).expect("a disk");
    Guest { address: None, ..Guest::small("twin") }.run_on(&cluster, beta, same);
    Guest::small("web").run_on(&cluster, alpha, same);
    let mut twin = console(beta, "twin");
    twin.wait_ready(PATIENCE).expect("a guest that is up");
    twin.fill_cache().expect("a disk to read");
    drop(twin);
    cluster.witness(GUEST_ADDRESS).fill_cache().expect("a disk to read");
    let before = write(&cluster, 100);
    beta.run(&["pause", "twin"]);
    beta.run(&["cache", "add", "--machine", "twin"]);
    let moved = alpha.json(&["migrate", "web", "beta", "--rate-max", "25M"]);
    let bytes = moved["result"]["wire_bytes"].as_u64().expect("bytes");
    let after = assert_intact(&cluster, &before);
    beta.run(&["cache", "rm", beta.slot("twin").join("ram").to_str().expect("a path in UTF-8")]);
    let back = beta.json(&["migrate", "web", "alpha", "--rate-max", "25M"]);
    let without = back["result"]["wire_bytes"].as_u64().expect("bytes");
    println!("{bytes} bytes where another machine has pages, {without} without");
    assert!(bytes < without / 10 * 8, "{bytes} bytes where another machine has pages, {without} without");
    assert_intact(&cluster, &after);
}

#[test]
fn a_guest_that_gave_memory_back_since_the_capsule_does_not_find_it_full_again() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let work = Work::Dirty { region_mib: 32, pages_per_second: 400, bytes_per_page: 64 };
    Guest { work, ..Guest::small("web") }.run(&cluster, alpha);
    write(&cluster, 100);
    alpha.run(&["checkpoint", "web", "--tag", "full"]);
    alpha.run(&["push", "full", "beta"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    witness.calm().expect("a guest that frees what it dirtied");
    drop(witness);
    let before = write(&cluster, 20);
    // From here on its pages are followed from a newer capsule, which beta has not: all of them are compared.
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    migrate(alpha, beta);
    assert_intact(&cluster, &before);
}

#[test]
fn a_machine_that_writes_to_its_disk_faster_than_it_is_copied_moves_all_the_same() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest { disk_mib: 64, ..Guest::small("web") }.run(&cluster, alpha);
    let born = write(&cluster, 500);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let stop = AtomicBool::new(false);
    // It writes 4 MB/s, half of that where others want the processors too, and all of it noise; half of what
    // travels is 1.
    let (moved, before) = std::thread::scope(|scope| {
        let writes = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                witness.write(300).expect("a guest that writes on both hosts");
            }
            witness.write(1).expect("a last block")
        });
        let moved = alpha.try_run(&["--json", "-q", "migrate", "web", "beta", "--rate-max", "2M"]);
        stop.store(true, Ordering::Relaxed);
        (moved, writes.join().expect("a guest that answers"))
    });
    let moved: Value = serde_json::from_str(&moved.expect("a machine that moves")).expect("JSON");
    let rounds = moved["result"]["rounds"].as_array().expect("rounds").clone();
    let last = rounds.last().and_then(|round| round["pages"].as_u64()).expect("a last round");
    println!("{} rounds, {last} pages in the pause, {} ms", rounds.len(), moved["result"]["downtime_ms"]);
    rounds.iter().for_each(|round| println!("{} left after {} ms", round["left"], round["ms"]));
    let mirrored = &moved["result"]["slowed"]["mirrored"];
    assert!(mirrored["writes"].is_u64(), "writes were not to go to both hosts: {moved}");
    println!("on both hosts: {mirrored}");
    assert!(last < 300, "{last} pages in the pause: {rounds:?}");
    assert_same_life(&born, &before);
    beta.wait_state("web", &["running"]);
    assert_intact(&cluster, &before);
}

#[test]
fn a_disk_over_a_file_that_both_hosts_reach_is_not_copied_and_another_file_is_not_taken_for_it() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest { disk_mib: 64, ..Guest::small("web") }.run_on(&cluster, alpha, fill_with_noise);
    let before = write(&cluster, 100);
    migrate(alpha, beta);
    // The noise stays where both reach it.
    let kept = kept_in(&beta.data().join("machines"));
    assert!(kept < NOISE * 3 / 4, "{kept} bytes on beta");
    assert_eq!(disk_base(beta)["kind"], "file", "{}", disk_base(beta));
    let before = {
        assert_intact(&cluster, &before);
        write(&cluster, 50)
    };
    let marks = std::fs::read_dir(cluster.disk.path()).expect("the folder of the disk").flatten();
    let marks: Vec<_> =
        marks.filter(|entry| entry.path().extension().is_some_and(|end| end == "mark")).collect();
    assert!(marks.is_empty(), "{marks:?}");

    let path = cluster.disk.path().join("web.raw");
    alpha.exec("mount", &["--bind", "/proc/version", path.to_str().expect("a path in UTF-8")]);
    migrate(beta, alpha);
    assert_eq!(disk_base(alpha)["kind"], "blank");
    let kept = kept_in(&alpha.data().join("machines"));
    assert!(kept > NOISE, "{kept} bytes on alpha");
    assert_intact(&cluster, &before);
}

/// Bytes that files below a folder take; memory of machines lies elsewhere.
fn kept_in(folder: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => kept_in(&entry.path()),
        _ => entry.metadata().map_or(0, |meta| meta.blocks() * 512),
    });
    bytes.sum()
}

/// What does not shrink on the disk of [`fill_with_noise`].
const NOISE: u64 = 48 << 20;

/// A disk of which the later three quarters are what does not shrink.
fn fill_with_noise(path: &std::path::Path) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(path).expect("the disk image");
    let mut state = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    })
    .take(NOISE as usize)
    .collect();
    file.write_all_at(&noise, 16 << 20).expect("room for a disk image");
}
