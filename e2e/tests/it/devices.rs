//! CD-ROM drives, Secure Boot, and machines with the devices of real computers.

use crate::{
    network::{ask, ask_for},
    protect::{end_qemu, wait_epochs},
};
use std::{
    fs::{self, File},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, HostProcess, PATIENCE, console, wait_reborn};
use whimbrel_testkit::guest::{
    CheckResult, GuestFiles, GuestOptions, Identity, Work, assert_same_life, image, signed_medium,
};

/// Words of a kernel that was started by UEFI with Secure Boot (Linux, `drivers/firmware/efi/libstub`).
const SECURE: &str = "EFI stub: UEFI Secure Boot is enabled.";
/// Words of the firmware about a program that is not signed (edk2, `BdsDxe`).
const REFUSED: [&str; 2] = ["Security Violation", "Access Denied"];

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Waits until words have been on the console of `web` so often.
fn wait_words(host: &HostProcess, words: &[&str], count: usize) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let log = host.run(&["logs", "web"]);
        if words.iter().map(|words| log.matches(words).count()).sum::<usize>() >= count {
            return;
        }
        assert!(Instant::now() < deadline, "not {count} of {words:?}: {log}");
        thread::sleep(Duration::from_millis(300));
    }
}

fn checked(host: &HostProcess) -> Identity {
    let mut guest = console(host, "web");
    guest.wait_ready(PATIENCE).expect("a guest that is up");
    let found = guest.check().expect("an answer");
    let disk = matches!(found.disk, CheckResult::Good(_) | CheckResult::None);
    assert!(
        disk && matches!(found.ram, CheckResult::Good(_)),
        "memory or disk is not of one moment: {found:?}"
    );
    found
}

fn reboot(host: &HostProcess) -> Identity {
    let before = checked(host);
    let mut guest = console(host, "web");
    guest.reboot().expect("a request to reboot");
    wait_reborn(&mut guest, &before);
    drop(guest);
    checked(host)
}

/// Sizes of the disks of `web`, and whether each is a medium.
fn disks(host: &HostProcess) -> Vec<bool> {
    let info = host.json(&["inspect", "web"]);
    let disks = info["disks"].as_array().expect("disks").clone();
    disks.iter().map(|disk| disk["cdrom"].as_bool() == Some(true)).collect()
}

#[test]
fn a_desktop_boots_a_signed_cdrom_with_secure_boot_and_nothing_that_is_not_signed() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta, gamma) = (cluster.host("alpha"), cluster.host("beta"), cluster.host("gamma"));
    let medium = signed_medium().expect("a CD-ROM");
    // Without a CD-ROM only the firmware's own shell is there, which nobody has signed.
    alpha.run(&["run", "web", "--profile", "desktop", "--memory", "512M", "--new-disk", "32M"]);
    wait_words(alpha, &REFUSED, 1);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["set", "web", "--cdrom", text(&medium), "--boot", "cdrom"]);
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    wait_words(alpha, &[SECURE], 1);
    // Its own disk, the variables of UEFI, the state of the TPM, the CD-ROM.
    assert_eq!(disks(alpha), [false, false, false, true]);
    console(alpha, "web").write(50).expect("a first life");
    let born = checked(alpha);
    alpha.run(&["checkpoint", "web", "--tag", "early"]);

    // It moves, boots again there, and is taken over.
    alpha.run(&["migrate", "web", "beta"]);
    assert_same_life(&born, &checked(beta));
    let again = reboot(beta);
    wait_words(beta, &[SECURE], 1);
    beta.run(&["protect", "web", "gamma", "--lease", "2s", "--witness", "alpha"]);
    wait_epochs(beta, 3);
    end_qemu(beta);
    gamma.wait_state("web", &["running"]);
    assert_same_life(&again, &checked(gamma));
    gamma.run(&["migrate", "web", "alpha"]);
    assert_same_life(&again, &checked(alpha));
    alpha.run(&["rewind", "web", "early"]);
    assert_same_life(&born, &checked(alpha));
    alpha.run(&["clone", "early", "--count", "1", "--prefix", "kid"]);
    alpha.run(&["stop", "kid-1", "--kill"]);
    alpha.run(&["delete", "kid-1"]);

    alpha.run(&["stop", "web", "--kill"]);
    let refusal = alpha.refuse(&["set", "web", "--add-disk", "10M"]);
    assert!(refusal.text.contains("--eject"), "{refusal:?}");
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "off"]);
    alpha.run(&["derive", "off", "kid", "--memory", "64M"]);
    let kid = alpha.json(&["inspect", "kid"]);
    let media = kid["disks"].as_array().expect("disks").iter().filter(|disk| disk["cdrom"] == true);
    assert_eq!(media.count(), 0, "a machine that is made of disks has the CD-ROM of its parent: {kid}");
    alpha.run(&["set", "web", "--eject", "--add-disk", "10M"]);
    assert_eq!(disks(alpha), [false; 4]);
}

#[test]
fn a_machine_with_the_devices_of_real_computers_goes_wherever_machines_go() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta, gamma) = (cluster.host("alpha"), cluster.host("beta"), cluster.host("gamma"));
    let files = GuestFiles::generic();
    let disk = cluster.disk.path().join("web.raw");
    image::ext4(&disk, 32, None).expect("a disk");
    let address = Some(format!("{GUEST_ADDRESS}/24"));
    let options = GuestOptions { address, buffer_mib: 16, ..GuestOptions::default() };
    let append = format!("{options} data=sda");
    let run = ["run", "web", "--profile", "foreign", "--memory", "256M", "--net", "br0"];
    let boot = ["--kernel", text(&files.kernel), "--initrd", text(&files.initrd), "--append", &append];
    alpha.run(&[&run[..], &boot, &["--disk", text(&disk)]].concat());
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    let mut probe = cluster.witness(GUEST_ADDRESS);
    probe.write(50).expect("a first life, over its network port");
    drop(probe);
    let born = checked(alpha);
    assert!(matches!(born.disk, CheckResult::Good(_)), "{born:?}");
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    alpha.run(&["migrate", "web", "beta"]);
    assert_same_life(&born, &checked(beta));
    cluster.witness(GUEST_ADDRESS).write(50).expect("writes after the move, over its network port");
    let later = checked(beta);
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web"]);
    assert_same_life(&later, &checked(beta));
    beta.run(&["protect", "web", "gamma", "--lease", "2s", "--witness", "alpha"]);
    wait_epochs(beta, 3);
    end_qemu(beta);
    gamma.wait_state("web", &["running"]);
    assert_same_life(&later, &checked(gamma));
    cluster.witness(GUEST_ADDRESS).check().expect("an answer after the takeover, over its network port");

    // A system that has learned virtio gets it.
    gamma.run(&["stop", "web", "--kill"]);
    gamma.run(&["set", "web", "--devices", "virtio", "--display", "no"]);
    gamma.run(&["start", "web"]);
    console(gamma, "web").wait_ready(PATIENCE).expect("a guest that is up");
    alpha.run(&["resume", "early", "--name", "web"]);
    assert_same_life(&born, &checked(alpha));
}

/// A file that a drive reads, with `word` at its beginning. Each has another size.
fn medium(cluster: &Cluster, word: &str) -> PathBuf {
    let path = cluster.disk.path().join(format!("{word}.iso"));
    fs::write(&path, word.repeat(100_000)).expect("a medium");
    path
}

/// Lines for the shell of the guest. An open drive is locked.
const WORD: &str = "head -c 5 /dev/sr0";
const OPEN: &str = "sleep 1000 </dev/sr0 >/dev/null 2>&1 & echo opened";
const CLOSE: &str = "killall sleep && echo closed";

#[test]
fn a_machine_that_runs_gets_another_cdrom_once_it_lets_go_of_the_one_that_it_reads() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let [first, second, third] = ["first", "other", "third-one"].map(|word| medium(&cluster, word));
    let alpha = cluster.host("alpha");
    let guest: Ipv4Addr = GUEST_ADDRESS.parse().expect("an address");
    let files = GuestFiles::generic();
    let address = Some(format!("{GUEST_ADDRESS}/24"));
    let options = GuestOptions { address, work: Work::GuestAgent, ..GuestOptions::default() }.to_string();
    let disk = cluster.disk.path().join("web.raw");
    image::ext4(&disk, 32, None).expect("a disk");
    let media = ["--disk", text(&disk), "--cdrom", text(&first)];
    let run = [&["run", "web", "--memory", "256M", "--net", "br0"][..], &media].concat();
    let boot = ["--kernel", text(&files.kernel), "--initrd", text(&files.initrd), "--append", &options];
    alpha.run(&[&run[..], &boot].concat());
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    console(alpha, "web").write(50).expect("a first life");
    let born = checked(alpha);
    let client = cluster.lab.host("client");
    ask_for(client, guest, WORD, "first");
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    for (change, way) in [
        (&["--eject"][..], "each gets another medium"),
        (&["--cdrom", text(&second)], "add --eject"),
        (&["--eject", "--cdrom", text(&second), "--cdrom", text(&second)], "it has 1, and 2"),
        (&["--eject", "--cdrom", text(&second), "--add-disk", "8M"], "must be stopped"),
        (&["--eject", "--cdrom", "/nowhere.iso"], "/nowhere.iso"),
    ] {
        let refusal = alpha.refuse(&[&["set", "web"][..], change].concat());
        assert!(refusal.text.contains(way), "{refusal:?}");
    }

    ask_for(client, guest, OPEN, "opened");
    let change = ["set", "web", "--eject", "--cdrom", text(&second)];
    let refusal = alpha.refuse(&change);
    assert!(refusal.text.contains("let go"), "{refusal:?}");
    assert!(ask(client, guest, WORD).contains("first"), "the medium of before is gone");
    ask_for(client, guest, CLOSE, "closed");
    alpha.run(&change);
    ask_for(client, guest, WORD, "other");
    assert_eq!(disks(alpha), [false, true]);
    alpha.run(&["migrate", "web", "beta"]);
    ask_for(client, guest, WORD, "other");
    assert_same_life(&born, &checked(cluster.host("beta")));

    // A daemon that dies meanwhile leaves the change to the next one.
    let beta = cluster.host("beta");
    beta.hold_at("device");
    let mut changing = beta.begin(&["set", "web", "--eject", "--cdrom", text(&third)]);
    beta.wait_held("device");
    cluster.host_mut("beta").kill_daemon();
    assert!(!changing.wait().expect("an end").success());
    cluster.host("beta").release("device");
    cluster.host_mut("beta").start_daemon();
    let [alpha, beta] = ["alpha", "beta"].map(|name| cluster.host(name));
    let client = cluster.lab.host("client");
    ask_for(client, guest, WORD, "third");
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web"]);
    ask_for(client, guest, WORD, "third");
    assert_same_life(&born, &checked(beta));
    beta.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "early", "--name", "web"]);
    ask_for(client, guest, WORD, "first");
    assert_same_life(&born, &checked(alpha));
}

#[test]
fn hardware_that_cannot_be_is_refused_with_the_way_out_and_nothing_is_left() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let medium = cluster.disk.path().join("medium.iso");
    File::create(&medium).and_then(|file| file.set_len(2 << 20)).expect("a medium");
    let kernel = text(&cluster.files().kernel);
    let run = ["run", "web", "--memory", "64M"];
    let cases: [(&[&str], &str); 5] = [
        (&["--new-disk", "1M", "--secure-boot", "yes"], "--profile uefi"),
        (&["--kernel", kernel, "--profile", "uefi", "--secure-boot", "yes"], "leave out --kernel"),
        (&["--kernel", kernel, "--profile", "micro", "--cdrom", text(&medium)], "another profile"),
        (&["--new-disk", "0", "--cdrom", text(&medium)], "a disk has up to"),
        (&["--cdrom", "/nowhere.iso"], "/nowhere.iso"),
    ];
    for (arguments, way) in cases {
        let refusal = alpha.refuse(&[&run[..], arguments].concat());
        assert!(refusal.text.contains(way), "{refusal:?}");
    }
    let drives = ["--cdrom", text(&medium)].repeat(7);
    let refusal = alpha.refuse(&[&run[..], &drives].concat());
    assert!(refusal.text.contains("up to 6"), "{refusal:?}");
    assert_eq!(alpha.machines(), []);
    assert!(!alpha.data().join("machines/web").exists(), "a machine was half made");
}
