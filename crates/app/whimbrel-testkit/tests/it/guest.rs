//! Tests of the guest and its test agent, on a real QEMU.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};
use whimbrel_testkit::{
    guest::{CheckResult, DebianGuest, GuestFiles, GuestOptions, TestAgent, Work, assert_same_life, image},
    lab::{Namespace, Process},
};

fn start(options: &GuestOptions, disk: Option<&Path>) -> (Process, TestAgent) {
    let files = GuestFiles::get();
    start_with(&files.kernel, &files.initrd, &["-m", "128"], options, disk)
}

fn start_with(
    kernel: &Path,
    initrd: &Path,
    more: &[&str],
    options: &GuestOptions,
    disk: Option<&Path>,
) -> (Process, TestAgent) {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg", "-machine", "q35", "-cpu", "max", "-nodefaults"]).args(more);
    qemu.args(["-display", "none", "-vga", "none", "-serial", "stdio"]);
    qemu.args(["-device", "vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87"]);
    qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd).arg("-append").arg(options.to_string());
    if let Some(disk) = disk {
        qemu.arg("-drive").arg(format!("file={},format=raw,if=virtio", disk.display()));
    }
    qemu.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut qemu = Namespace::new().unwrap().start(qemu).unwrap();
    let mut witness = TestAgent::over(qemu.stdout.take().unwrap(), qemu.stdin.take().unwrap());
    witness.wait_ready(Duration::from_secs(120)).unwrap();
    (qemu, witness)
}

#[test]
fn a_reboot_is_never_taken_for_an_unbroken_life() {
    let place = tempfile::tempdir().unwrap();
    let disk = place.path().join("disk");
    image::empty(&disk, 8).unwrap();
    let options = GuestOptions { buffer_mib: 16, ..GuestOptions::default() };
    let (_qemu, mut witness) = start(&options, Some(&disk));

    let first = witness.check().unwrap();
    assert!(matches!(first.ram, CheckResult::Good(_)), "{first:?}");
    assert_eq!(first.genid.map(|id| id & 0xffff), Some(0xfb87), "{first:?}");
    witness.write(50).unwrap();
    witness.dirty(8, 0, 64).unwrap();
    let second = witness.check().unwrap();
    assert!(matches!(second.disk, CheckResult::Good(_)), "{second:?}");
    assert_same_life(&first, &second);
    assert!(second.counter > first.counter);
    witness.calm().unwrap();

    // The test agent must notice a disk that lost a write: damage every block without its knowledge.
    fs::write(&disk, vec![0; 8 << 20]).unwrap();
    assert_eq!(witness.check().unwrap().disk, CheckResult::Bad);

    witness.reboot().unwrap();
    witness.wait_ready(Duration::from_secs(120)).unwrap();
    let third = witness.state().unwrap();
    assert_ne!(third.nonce, first.nonce);
    assert_ne!(third.boot, first.boot);
}

#[test]
fn a_guest_with_a_file_system_leaves_the_file_system_whole() {
    let place = tempfile::tempdir().unwrap();
    let disk = place.path().join("disk");
    fs::create_dir(place.path().join("content")).unwrap();
    fs::write(place.path().join("content/file"), "kept").unwrap();
    image::ext4(&disk, 64, Some(&place.path().join("content"))).unwrap();
    let (mut qemu, mut witness) =
        start(&GuestOptions { buffer_mib: 1, ..GuestOptions::default() }, Some(&disk));
    witness.write(20).unwrap();
    assert!(matches!(witness.check().unwrap().disk, CheckResult::Good(_)));
    witness.power_off().unwrap();
    qemu.wait().unwrap();
    let check = Command::new("e2fsck").args(["-f", "-y"]).arg(&disk).output().unwrap();
    assert!(check.status.code().is_some_and(|code| code <= 1), "{check:?}");
    let content = Command::new("debugfs").args(["-R", "cat /file"]).arg(&disk).output().unwrap();
    assert_eq!(content.stdout, b"kept");
}

/// Builds the Debian guest if it does not exist (minutes), so only on demand.
#[test]
#[ignore = "takes minutes on its first run"]
fn a_debian_guest_boots_and_compiles() {
    let files = DebianGuest::get().unwrap();
    let options = GuestOptions { buffer_mib: 16, work: Work::Compile, ..GuestOptions::default() };
    let (_qemu, mut witness) =
        start_with(&files.kernel, &files.initrd, &["-m", "512", "-snapshot"], &options, Some(&files.disk));
    let before = witness.check().unwrap();
    assert!(matches!(before.ram, CheckResult::Good(_)), "{before:?}");
    let after = witness.check().unwrap();
    assert_same_life(&before, &after);
}
