//! Machines without a BIOS: UEFI, whose variables outlive whatever happens to a machine, and micro machines.

use std::fs;
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console, wait_reborn};
use whimbrel_testkit::guest::{CheckResult, Identity, assert_same_life};

/// Name of the variable that UEFI changes at every boot: the upper half of a count that never goes back
/// (UEFI specification, GetNextHighMonotonicCount; `MTC` in EDK II).
const COUNT: &[u8] = b"M\0T\0C\0\0\0";

fn guest(profile: &str) -> Guest {
    let arguments = vec!["--profile".to_owned(), profile.to_owned()];
    Guest { address: None, arguments, ..Guest::small("web") }
}

fn checked(host: &HostProcess) -> Identity {
    let mut guest = console(host, "web");
    guest.wait_ready(PATIENCE).expect("a guest that is up");
    let found = guest.check().expect("an answer");
    // Nothing is known of the disk after a boot in which nothing was written.
    let disk = matches!(found.disk, CheckResult::Good(_) | CheckResult::None);
    let whole = disk && matches!(found.ram, CheckResult::Good(_));
    assert!(whole, "memory or disk is not of one moment: {found:?}");
    found
}

/// How often the firmware has booted the machine, by the variables of its newest capsule.
fn boots(host: &HostProcess, cluster: &Cluster) -> u32 {
    let file = cluster.disk.path().join(format!("{}.variables.raw", host.name()));
    host.run(&["checkpoint", "web"]);
    host.run(&["export", "web", file.to_str().expect("a path in UTF-8"), "--image", "disk1"]);
    let flash = fs::read(&file).expect("the variables");
    fs::remove_file(&file).expect("to make room for the next");
    let values = flash.windows(COUNT.len() + 4).filter_map(|bytes| bytes.strip_prefix(COUNT));
    values.map(|value| u32::from_le_bytes(value.try_into().expect("four bytes"))).max().unwrap_or(0)
}

#[test]
fn variables_of_uefi_go_wherever_the_machine_goes_and_outlive_its_stop() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    guest("uefi").run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    console(alpha, "web").write(50).expect("a first life");
    let born = checked(alpha);
    let first = boots(alpha, &cluster);
    assert!(first > 0, "no firmware has counted its boot");

    // A reset of the guest, and one of QEMU: both find what was there.
    let mut witness = console(alpha, "web");
    witness.reboot().expect("a request to reboot");
    wait_reborn(&mut witness, &born);
    drop(witness);
    let again = checked(alpha);
    assert_eq!(boots(alpha, &cluster), first + 1, "after a reboot");
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["start", "web"]);
    let started = checked(alpha);
    assert_ne!(started.nonce, again.nonce);
    assert_eq!(boots(alpha, &cluster), first + 2, "after a stop");

    // It moves, by copy and by capsule, and the next boot there goes on counting.
    alpha.run(&["migrate", "web", "beta"]);
    let moved = checked(beta);
    assert_same_life(&started, &moved);
    let mut witness = console(beta, "web");
    witness.reboot().expect("a request to reboot");
    wait_reborn(&mut witness, &moved);
    drop(witness);
    checked(beta);
    assert_eq!(boots(beta, &cluster), first + 3, "on the other host");
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web"]);
    beta.run(&["stop", "web", "--kill"]);
    beta.run(&["start", "web"]);
    checked(beta);
    assert_eq!(boots(beta, &cluster), first + 4, "after a resume");
}

#[test]
fn a_micro_machine_moves_and_comes_back_like_any_other() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    guest("micro").run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    console(alpha, "web").write(50).expect("a first life");
    let born = checked(alpha);
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    alpha.run(&["migrate", "web", "beta"]);
    assert_same_life(&born, &checked(beta));
    beta.run(&["migrate", "web", "alpha"]);
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    let back = checked(alpha);
    assert_same_life(&born, &back);
    let mut witness = console(alpha, "web");
    witness.reboot().expect("a request to reboot");
    wait_reborn(&mut witness, &back);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["delete", "web"]);
    alpha.run(&["resume", "early", "--name", "web"]);
    assert_same_life(&born, &checked(alpha));
}

#[test]
fn a_profile_that_cannot_boot_what_there_is_names_the_way_out() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let disk = cluster.disk.path().join("web.raw");
    fs::write(&disk, vec![0; 1 << 20]).expect("a disk");
    let run = ["run", "web", "--memory", "64M", "--disk", disk.to_str().expect("a path in UTF-8")];
    let refusal = alpha.refuse(&[&run[..], &["--profile", "micro"]].concat());
    assert!(refusal.text.contains("--kernel"), "{refusal:?}");
    assert_eq!(alpha.machines(), []);
}
