//! A capsule is written against the one before it. What the machine went through between the two must not
//! make the wrong one of them its base: these cases compare every page, zeros included, with what the machine
//! really had.

use std::{fs, time::Duration};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, Work, assert_same_life};

const MIB: usize = 1 << 20;
/// Pages that must have become zero for a case to show something: a quarter of what the guest dirties.
const RETURNED: usize = 2048;

/// An image of a capsule as a file, read whole.
fn image(cluster: &Cluster, host: &HostProcess, capsule: &str, image: &str) -> Vec<u8> {
    let path = cluster.disk.path().join(format!("{capsule}-{image}.raw"));
    let file = path.to_str().expect("a path in UTF-8");
    host.run(&["export", capsule, file, "--format", "raw", "--image", image]);
    fs::read(&path).expect("an exported image")
}

/// Memory of the one machine of a host, which is paused.
fn memory(host: &HostProcess) -> Vec<u8> {
    fs::read(host.slot("web").join("ram")).expect("a RAM file")
}

/// Whether both are the same, page by page; the first that is not.
fn assert_same_pages(kept: &[u8], real: &[u8], what: &str) {
    assert_eq!(kept.len(), real.len(), "{what} has another size");
    let differs = kept.chunks(4096).zip(real.chunks(4096)).position(|(kept, real)| kept != real);
    assert_eq!(differs, None, "the first page of {what} that differs");
}

#[test]
fn a_machine_that_gave_memory_back_on_another_host_is_kept_as_it_is_when_it_returns() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let work = Work::Dirty { region_mib: 32, pages_per_second: 200, bytes_per_page: 64 };
    Guest { work, ..Guest::small("web") }.run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(100).expect("a first life");
    alpha.run(&["checkpoint", "web", "--tag", "full"]);

    alpha.run(&["migrate", "web", "beta"]);
    let zeros = |pages: &[u8]| pages.chunks(4096).filter(|page| **page == [0; 4096]).count();
    let before = zeros(&image(&cluster, alpha, "full", "memory"));
    witness.calm().expect("a guest that frees what it dirtied");
    // The guest reports free pages to its host some seconds later, and uses a few of them again.
    let deadline = std::time::Instant::now() + PATIENCE;
    while zeros(&memory(beta)) < before + RETURNED + RETURNED / 2 {
        assert!(std::time::Instant::now() < deadline, "the guest gives nothing back");
        std::thread::sleep(Duration::from_millis(200));
    }
    beta.run(&["migrate", "web", "alpha"]);

    alpha.run(&["pause", "web"]);
    alpha.run(&["checkpoint", "web", "--tag", "back"]);
    let kept = image(&cluster, alpha, "back", "memory");
    assert_same_pages(&kept, &memory(alpha), "memory");
    assert!(
        zeros(&kept) > before + RETURNED,
        "the pages that were given back are not zero: the case shows nothing"
    );
    alpha.run(&["verify"]);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "back", "--name", "again", "--full"]);
    let again = cluster.witness(GUEST_ADDRESS).check().expect("a life that goes on");
    assert_same_life(&born, &again);
    assert!(
        matches!(again.ram, CheckResult::Good(_)) && matches!(again.disk, CheckResult::Good(_)),
        "{again:?}"
    );
}

#[test]
fn a_disk_range_that_was_zeroed_under_another_daemon_is_zero_in_the_next_capsule() {
    let mut cluster = Cluster::start(&["alpha"]);
    let guest = Guest { address: None, ..Guest::small("web") };
    guest.run_on(&cluster, cluster.host("alpha"), |disk| {
        fs::write(disk, vec![0x5a; 32 * MIB]).expect("a disk full of something");
    });
    console(cluster.host("alpha"), "web").wait_ready(PATIENCE).expect("a guest that is up");
    cluster.host("alpha").run(&["checkpoint", "web", "--tag", "full"]);
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    // The disk as the guest's QEMU has it, on a connection beside QEMU's.
    let slot = alpha.slot("web");
    let nbd = format!("nbd+unix:///?socket={}", slot.join("qemu/disk0").display());
    alpha
        .exec("qemu-io", &["-f", "raw", &nbd, "-c", "write -z 8M 8M", "-c", "discard 24M 4M", "-c", "flush"]);

    let mut witness = console(alpha, "web");
    witness.wait_ready(PATIENCE).expect("a guest that lives on");
    let written = witness.write(200).expect("a disk that takes writes");
    alpha.run(&["pause", "web"]);
    let real = cluster.disk.path().join("real.raw");
    let path = real.to_str().expect("a path in UTF-8");
    alpha.exec("qemu-img", &["convert", "-f", "raw", "-O", "raw", &nbd, path]);
    let real = fs::read(&real).expect("the disk of the machine");
    assert!(
        real[8 * MIB..16 * MIB].iter().filter(|byte| **byte == 0).count() > 7 * MIB,
        "nothing was zeroed"
    );
    alpha.run(&["checkpoint", "web", "--tag", "zeroed"]);
    assert_same_pages(&image(&cluster, alpha, "zeroed", "disk0"), &real, "the disk");
    alpha.run(&["verify"]);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "zeroed", "--name", "again", "--full"]);
    let mut witness = console(alpha, "again");
    witness.wait_ready(PATIENCE).expect("a guest that goes on");
    let again = witness.check().expect("an answer");
    assert_same_life(&written, &again);
    assert!(
        matches!(again.ram, CheckResult::Good(_)) && matches!(again.disk, CheckResult::Good(_)),
        "{again:?}"
    );
}
