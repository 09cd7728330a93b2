//! One guest through everything that happens to a machine on one host.

use std::{
    fs,
    io::{Read, Write},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixStream,
        process::CommandExt,
    },
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};
use whimbrel_e2e::{
    Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console, control_group, wait_reborn,
};
use whimbrel_testkit::guest::{CheckResult, assert_same_life};

/// Below every group of a machine's QEMU (docs/security.md).
const FIRST_MACHINE_GROUP: u32 = 0x5fff_ffff;

#[test]
fn a_machine_stays_itself_through_checkpoint_suspend_resume_and_still_reboots() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest::small("web").run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(500).expect("a first life");
    assert!(matches!(born.disk, CheckResult::Good(_) | CheckResult::None), "{born:?}");

    alpha.run(&["checkpoint", "web", "--tag", "first"]);
    let after_checkpoint = witness.check().expect("an answer on the same connection");
    assert_same_life(&born, &after_checkpoint);
    assert!(matches!(after_checkpoint.ram, CheckResult::Good(_)), "{after_checkpoint:?}");
    assert!(matches!(after_checkpoint.disk, CheckResult::Good(_)), "{after_checkpoint:?}");
    drop(witness);
    assert_closed_to_other_users(alpha);
    assert_confined(alpha);
    let user = qemu_user(alpha, "web");
    assert_in_group(user);

    let suspended = alpha.json(&["suspend", "web"]);
    assert_eq!(suspended["kind"], "suspend", "{suspended}");
    assert_eq!(control_group(user), None, "the group of a QEMU that has ended");
    assert_eq!(alpha.machines(), [("web".to_owned(), "suspended".to_owned())]);
    let log = alpha.data().join("machines/web/console.log");
    let logged = fs::metadata(&log).expect("a console log").len();
    alpha.run(&["resume", "web"]);
    assert_confined(alpha);
    assert_in_group(qemu_user(alpha, "web"));
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let resumed = witness.check().expect("a life that goes on");
    assert_same_life(&after_checkpoint, &resumed);
    assert_eq!((resumed.ram, resumed.disk), (after_checkpoint.ram, after_checkpoint.disk));

    witness.reboot().expect("a request to reboot");
    drop(witness);
    let mut console = console(alpha, "web");
    wait_reborn(&mut console, &resumed);
    assert!(fs::metadata(&log).expect("a console log").len() > logged, "it ends with the suspend");

    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "first", "--name", "past", "--full"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let past = witness.check().expect("the state of the first checkpoint");
    assert_eq!(past.nonce, born.nonce);
    assert_eq!((past.ram, past.disk), (after_checkpoint.ram, after_checkpoint.disk));
    alpha.run(&["verify"]);
}

/// Fails on whatever another user could read, and lets one try.
fn assert_closed_to_other_users(host: &HostProcess) {
    let data = host.data();
    for top in [data, host.run_dir()] {
        // The folders of the cluster would hide what is in them, so that nothing was proved.
        let above = top.parent().expect("a folder of the cluster");
        fs::set_permissions(above, fs::Permissions::from_mode(0o755)).expect("an open folder");
        let mut left = vec![top.to_owned()];
        while let Some(path) = left.pop() {
            // Whatever the daemon has removed meanwhile is no matter.
            let Ok(found) = fs::symlink_metadata(&path) else { continue };
            // Groups of the QEMUs of machines, which the directories above close out.
            let open_to = if found.gid() > FIRST_MACHINE_GROUP { 0o007 } else { 0o077 };
            assert!(found.mode() & open_to == 0, "{} has mode {:o}", path.display(), found.mode());
            if found.is_dir() {
                left.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
            }
        }
    }
    let machine = data.join("machines/web");
    for secret in [host.slot("web").join("ram"), machine.join("disk0/data"), machine.join("machine.json")] {
        assert!(secret.is_file(), "{}", secret.display());
        // Somebody else, and the machine's own QEMU.
        for user in [65_534, qemu_user(host, "web")] {
            let mut reader = Command::new("cat");
            let read = reader.arg(&secret).uid(user).gid(user).output().expect("a program");
            assert!(!read.status.success() && read.stdout.is_empty(), "{}", secret.display());
        }
    }
}

/// QEMU has a user of its own, no capability and no network but its port's, cannot change its directory, and
/// gave up the system calls that it does not need.
fn assert_confined(host: &HostProcess) {
    let (_, record) = host.record("web");
    let pid = record["process"]["pid"].as_u64().expect("a process");
    let user = qemu_user(host, "web");
    assert!(user > FIRST_MACHINE_GROUP, "{user}");
    let ids = format!("{user}.{user}.{user}.{user}");
    for line in [
        "Seccomp:.2",
        "NoNewPrivs:.1",
        "CapEff:.0000000000000000",
        "CapBnd:.0000000000000000",
        &format!("Uid:.{ids}"),
        &format!("Gid:.{ids}"),
    ] {
        host.exec("grep", &["-qE", &format!("^{line}$"), &format!("/proc/{pid}/status")]);
    }
    // No device but the loopback one and that of its port, which leads to the daemon alone; no address and no
    // route (at most a line of titles).
    let devices =
        format!("test \"$(tail -n +3 /proc/{pid}/net/dev | cut -d: -f1 | sort | xargs)\" = 'lo net0'");
    host.exec("sh", &["-c", &devices]);
    host.exec("sh", &["-c", &format!("test $(cat /proc/{pid}/net/if_inet6 | wc -l) = 0")]);
    host.exec("sh", &["-c", &format!("test $(wc -l < /proc/{pid}/net/route) -le 1")]);
    let place = fs::metadata(host.slot("web").join("qemu")).expect("its directory");
    assert_eq!((place.uid(), place.mode() & 0o777), (0, 0o710));
}

/// QEMU and the process that waits for its machine are in the group of the machine, which limits them as far
/// as this kernel can, and counts what they use.
fn assert_in_group(user: u32) {
    if !["cgroup.procs", "unified/cgroup.procs"]
        .iter()
        .any(|file| Path::new("/sys/fs/cgroup").join(file).exists())
    {
        return eprintln!("this host has no cgroup v2");
    }
    let group = control_group(user).expect("a group of the machine");
    let deadline = Instant::now() + PATIENCE;
    let members = || fs::read_to_string(group.join("cgroup.procs")).expect("the members of the group");
    while members().lines().count() < 2 {
        assert!(Instant::now() < deadline, "the processes of the machine: {:?}", members());
        thread::sleep(Duration::from_millis(20));
    }
    let usage = fs::read_to_string(group.join("cpu.stat")).expect("the processor time of the group");
    assert!(!usage.starts_with("usage_usec 0\n"), "{usage}");
    let controllers = fs::read_to_string(group.join("cgroup.controllers")).expect("controllers");
    for (controller, file) in [("memory", "memory.max"), ("pids", "pids.max")] {
        if controllers.split_whitespace().any(|name| name == controller) {
            assert_ne!(fs::read_to_string(group.join(file)).expect("a limit").trim(), "max", "{file}");
        }
    }
}

/// The user of a machine's QEMU, which has a group of the same number.
fn qemu_user(host: &HostProcess, machine: &str) -> u32 {
    fs::metadata(host.slot(machine).join("qemu")).expect("its directory").gid()
}

#[test]
fn clones_share_a_past_and_have_identities_and_disks_of_their_own() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("seed") }.run(&cluster, alpha);
    let mut seed = console(alpha, "seed");
    seed.wait_ready(PATIENCE).expect("a guest that is up");
    let original = seed.write(100).expect("an answer");
    alpha.run(&["checkpoint", "seed", "--tag", "golden"]);
    alpha.run(&["clone", "golden", "--count", "4", "--prefix", "kid"]);
    let mut genids = vec![original.genid];
    for number in 1..=4 {
        let mut kid = console(alpha, &format!("kid-{number}"));
        kid.wait_ready(PATIENCE).expect("a clone that answers");
        let before = kid.check().expect("an answer");
        assert_eq!(before.nonce, original.nonce, "a clone has the original's memory");
        assert!(
            matches!(before.ram, CheckResult::Good(_)) && matches!(before.disk, CheckResult::Good(_)),
            "{before:?}"
        );
        let after = kid.write(10 + number).expect("a write of its own");
        assert_same_life(&before, &after);
        genids.push(after.genid);
    }
    let known: Vec<_> = genids.iter().flatten().collect();
    let distinct: std::collections::BTreeSet<_> = known.iter().collect();
    assert_eq!(distinct.len(), known.len(), "every clone has a generation id of its own: {genids:x?}");
    for number in 1..=4 {
        let mut kid = console(alpha, &format!("kid-{number}"));
        let check = kid.check().expect("an answer");
        assert!(
            matches!(check.disk, CheckResult::Good(_)),
            "another clone's writes are on this disk: {check:?}"
        );
    }
    assert_same_life(&original, &seed.check().expect("the original lives on"));
}

#[test]
fn a_capsule_is_whole_though_the_one_before_it_was_deleted_and_collected() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    let mut witness = console(alpha, "web");
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    let born = witness.write(100).expect("a first life");
    alpha.run(&["checkpoint", "web"]);
    alpha.run(&["untag", "web"]);
    alpha.run(&["gc"]);
    alpha.run(&["checkpoint", "web"]);
    alpha.run(&["verify"]);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "web", "--name", "again", "--full"]);
    let mut witness = console(alpha, "again");
    witness.wait_ready(PATIENCE).expect("a guest that goes on");
    let again = witness.check().expect("an answer");
    assert_same_life(&born, &again);
    assert!(
        matches!(again.ram, CheckResult::Good(_)) && matches!(again.disk, CheckResult::Good(_)),
        "{again:?}"
    );
}

#[test]
fn a_machine_that_was_switched_off_or_died_starts_again_from_its_own_disk() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    let mut witness = console(alpha, "web");
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    let born = witness.write(300).expect("a disk with something on it");
    let running = alpha.refuse(&["start", "web"]);
    assert!(running.code == 4 && running.text.contains("whimbrel stop web"), "{running:?}");
    alpha.run(&["checkpoint", "web", "--tag", "before"]);
    let before = disk_of(&cluster, "before");
    assert!(before.iter().any(|byte| *byte != 0), "the disk is empty");
    witness.power_off().expect("a request to switch off");
    alpha.wait_state("web", &["stopped"]);
    assert_eq!(alpha.refuse(&["start", "nobody"]).code, 3);

    alpha.run(&["start", "web"]);
    let mut witness = console(alpha, "web");
    witness.wait_ready(PATIENCE).expect("a guest that has booted");
    let again = witness.check().expect("an answer");
    assert!(again.boot != born.boot && again.nonce != born.nonce, "memory came back: {again:?}");
    assert_eq!(again.genid, born.genid, "the same machine, switched off and on");
    alpha.run(&["checkpoint", "web", "--tag", "after"]);
    assert!(disk_of(&cluster, "after") == before, "the disk is not the one it was switched off with");

    witness.write(50).expect("a disk that takes writes");
    let pid = alpha.json(&["ps"])[0]["pid"].as_u64().expect("a pid").to_string();
    alpha.exec("kill", &["-9", &pid]);
    alpha.wait_state("web", &["crashed"]);
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that has booted after a crash");
    alpha.run(&["suspend", "web"]);
    let written = disk_of(&cluster, "web");
    assert!(written != before, "what was written before the crash is not on the disk");
    let suspended = alpha.refuse(&["start", "web"]);
    assert!(suspended.code == 4 && suspended.text.contains("whimbrel resume web"), "{suspended:?}");
    alpha.run(&["verify"]);
}

/// The content of the first disk of a capsule on alpha.
fn disk_of(cluster: &Cluster, capsule: &str) -> Vec<u8> {
    let path = cluster.disk.path().join(format!("disk-of-{capsule}.raw"));
    let file = path.to_str().expect("a path in UTF-8");
    cluster.host("alpha").run(&["export", capsule, file, "--format", "raw"]);
    std::fs::read(&path).expect("an exported disk")
}

#[test]
fn machines_outlive_their_daemon_and_are_taken_up_again() {
    let mut cluster = Cluster::start(&["alpha"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    cluster.host("alpha").run(&["suspend", "web"]);
    cluster.host("alpha").run(&["resume", "web"]);
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    alpha.wait_state("web", &["running", "loading"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let after = witness.check().expect("memory that is still filled on demand, a disk that is still served");
    assert_same_life(&born, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
    let written = witness.write(60).expect("a disk that takes writes");
    assert_same_life(&after, &written);
    alpha.run(&["checkpoint", "web"]);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "web", "--name", "copy"]);
    let copy = cluster.witness(GUEST_ADDRESS).check().expect("the checkpoint of the daemon that came later");
    assert_same_life(&written, &copy);
    assert!(matches!(copy.disk, CheckResult::Good(_)), "{copy:?}");
}

/// Tells a machine's QEMU to stop while a read of its disk is under way, and leaves before it answers: it
/// waits for the disk.
fn stop_amid_a_read(slot: &Path) {
    let mut qmp = UnixStream::connect(slot.join("qemu/qmp")).expect("the control socket of a QEMU");
    qmp.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
    let read = r#"{"command-line": "qemu-io disk0 \"aio_read 0 4k\""}"#;
    let commands = [
        r#"{"execute": "qmp_capabilities"}"#.to_owned(),
        format!(r#"{{"execute": "human-monitor-command", "arguments": {read}}}"#),
        r#"{"execute": "stop", "id": "last"}"#.to_owned(),
    ];
    qmp.write_all(commands.join("\n").as_bytes()).expect("commands");
    let (mut heard, mut more) = (Vec::new(), [0; 4096]);
    while let Ok(length @ 1..) = qmp.read(&mut more) {
        heard.extend(&more[..length]);
    }
    let heard = String::from_utf8_lossy(&heard);
    assert!(heard.contains("return") && !heard.contains("last"), "it was to hang in its disk: {heard}");
}

#[test]
fn a_machine_that_waits_for_its_disks_is_taken_up_and_goes_on() {
    let mut cluster = Cluster::start(&["alpha"]);
    // No process serves its disks while there is no daemon.
    cluster.host_mut("alpha").restart_with("machine_processes = false\n");
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    cluster.host_mut("alpha").kill_daemon();
    stop_amid_a_read(&cluster.host("alpha").slot("web"));
    cluster.host_mut("alpha").start_daemon();
    cluster.host("alpha").wait_state("web", &["running"]);
    let after = cluster.witness(GUEST_ADDRESS).check().expect("a machine that goes on");
    assert_same_life(&born, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
}
