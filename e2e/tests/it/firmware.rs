//! Machines without a BIOS: UEFI, whose variables outlive whatever happens to a machine, as a TPM does, and
//! micro machines.

use crate::protect::{end_qemu, wait_epochs};
use std::fs;
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console, wait_reborn};
use whimbrel_testkit::guest::{CheckResult, Identity, TpmContent, assert_same_life};

/// Name of the variable that UEFI changes at every boot: the upper half of a count that never goes back
/// (UEFI specification, GetNextHighMonotonicCount; `MTC` in EDK II).
const COUNT: &[u8] = b"M\0T\0C\0\0\0";

fn guest(arguments: &[&str]) -> Guest {
    let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
    Guest { address: None, arguments, ..Guest::small("web") }
}

/// Waits until no TPM of the host is left over; one that nobody has reaped has no command line.
const NO_SWTPM: &str =
    "for _ in $(seq 300); do grep -qsa 'swtp[m]' /proc/[0-9]*/cmdline || exit 0; sleep 0.1; done; exit 1";

/// What is in the TPM of a guest, which is up.
fn tpm_of(host: &HostProcess, name: &str) -> TpmContent {
    let mut guest = console(host, name);
    guest.wait_ready(PATIENCE).expect("a guest that is up");
    guest.tpm(None).expect("what the TPM has")
}

/// The value that outlives a boot, and a register that does not.
fn assert_stored_and_reset(host: &HostProcess, before: &TpmContent) {
    let now = tpm_of(host, "web");
    assert_eq!(now.stored, before.stored, "what is stored in a TPM outlives a boot");
    assert_ne!(now.register, before.register, "a register begins anew");
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
fn variables_of_uefi_and_a_tpm_go_wherever_the_machine_goes_and_outlive_its_stop() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    guest(&["--profile", "uefi", "--tpm"]).run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    console(alpha, "web").write(50).expect("a first life");
    let born = checked(alpha);
    let first = boots(alpha, &cluster);
    assert!(first > 0, "no firmware has counted its boot");
    let in_tpm = console(alpha, "web").tpm(Some(7)).expect("a TPM that takes a value");
    assert_eq!(in_tpm.stored, Some(7));

    // It moves, by copy and by capsule. There a reset of the guest finds what was here, and a new QEMU too.
    alpha.run(&["migrate", "web", "beta"]);
    assert_same_life(&born, &checked(beta));
    assert_eq!(tpm_of(beta, "web"), in_tpm, "the TPM has moved with the machine");
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web"]);
    assert_same_life(&born, &checked(beta));
    assert_eq!(tpm_of(beta, "web"), in_tpm, "the TPM was in the capsule");
    let mut witness = console(beta, "web");
    witness.reboot().expect("a request to reboot");
    wait_reborn(&mut witness, &born);
    drop(witness);
    let again = checked(beta);
    assert_stored_and_reset(beta, &in_tpm);
    assert_eq!(boots(beta, &cluster), first + 1, "after a reboot on the other host");
    let in_tpm = console(beta, "web").tpm(Some(8)).expect("a TPM that takes a value");
    beta.run(&["stop", "web", "--kill"]);
    beta.run(&["start", "web"]);
    assert_ne!(checked(beta).nonce, again.nonce);
    assert_stored_and_reset(beta, &in_tpm);
    assert_eq!(boots(beta, &cluster), first + 2, "after a stop");
}

#[test]
fn a_machine_with_uefi_and_a_tpm_is_rewound_cloned_derived_and_taken_over_like_any_other() {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    guest(&["--profile", "uefi", "--tpm"]).run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    console(alpha, "web").write(50).expect("a first life");
    let early = console(alpha, "web").tpm(Some(1)).expect("a TPM that takes a value");
    let born = checked(alpha);
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    let late = console(alpha, "web").tpm(Some(2)).expect("a TPM that takes a value");
    assert!(late.register != early.register && late.stored == Some(2), "{late:?}");

    // The TPM goes back too, and a copy of the machine has a copy of it.
    alpha.run(&["rewind", "web", "early"]);
    assert_same_life(&born, &checked(alpha));
    assert_eq!(tpm_of(alpha, "web"), early);
    alpha.run(&["clone", "early", "--count", "1", "--prefix", "kid"]);
    assert_eq!(tpm_of(alpha, "kid-1"), early);
    let kids = console(alpha, "kid-1").tpm(Some(3)).expect("a TPM that takes a value");
    assert_eq!(tpm_of(alpha, "web"), early, "a clone changes the TPM of its original");
    alpha.run(&["stop", "kid-1", "--kill"]);
    alpha.run(&["delete", "kid-1"]);
    assert_ne!(kids.register, early.register);

    // Its QEMU dies.
    let in_tpm = console(alpha, "web").tpm(Some(4)).expect("a TPM that takes a value");
    alpha.run(&["protect", "web", "beta", "--lease", "2s", "--witness", "gamma"]);
    wait_epochs(alpha, 3);
    let before = checked(alpha);
    end_qemu(alpha);
    beta.wait_state("web", &["running"]);
    assert_same_life(&before, &checked(beta));
    assert_eq!(tpm_of(beta, "web"), in_tpm, "the standby has the TPM");

    // The daemon there dies, and QEMU: a machine that is derived of the disks has what the TPM stored.
    console(beta, "web").tpm(Some(5)).expect("a TPM that takes a value");
    cluster.host_mut("beta").kill_daemon();
    let beta = cluster.host("beta");
    end_qemu(beta);
    beta.exec("sh", &["-c", NO_SWTPM]);
    cluster.host_mut("beta").start_daemon();
    let beta = cluster.host("beta");
    beta.wait_state("web", &["crashed"]);
    beta.run(&["checkpoint", "web", "--disks-only", "--tag", "dead"]);
    beta.run(&["derive", "dead", "kid"]);
    assert_eq!(tpm_of(beta, "kid").stored, Some(5), "a derived machine has what its parent stored");
}

#[test]
fn a_micro_machine_moves_and_comes_back_like_any_other() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    guest(&["--profile", "micro"]).run(&cluster, alpha);
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
