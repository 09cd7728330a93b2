//! Debian's own qemu-ga in a guest: programs, files, addresses, file systems at rest, and the wall clock
//! after a machine stood still. And machines of before, which have no port for it.

use serde_json::Value;
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, HostProcess, PATIENCE};
use whimbrel_testkit::guest::{GuestFiles, GuestOptions, Work, assert_same_life, image};

/// A machine called `web` with qemu-ga and a file system on its disk.
fn start(cluster: &Cluster, host: &HostProcess) {
    let files = GuestFiles::with_qemu_ga().expect("qemu-ga on this host: scripts/bootstrap installs it");
    let disk = cluster.disk.path().join("web.raw");
    image::ext4(&disk, 64, None).expect("a file system");
    let address = Some(format!("{GUEST_ADDRESS}/24"));
    let append = format!("{} data=vda", GuestOptions { address, buffer_mib: 16, work: Work::Idle });
    let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    let (disk, kernel, initrd) = (text(&disk), text(&files.kernel), text(&files.initrd));
    let arguments = ["run", "web", "--disk", &disk, "--memory", "320M", "--net", "br0", "--kernel", &kernel];
    host.run(&[&arguments[..], &["--initrd", &initrd, "--append", &append]].concat());
    wait_for("qemu-ga to answer", || host.try_run(&["exec", "web", "--", "true"]).is_ok());
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// What the disk of a capsule has in a file, as another program reads it.
fn file_on_disk(host: &HostProcess, capsule: &str, to: PathBuf, file: &str) -> String {
    let path = to.to_str().expect("a path in UTF-8");
    host.run(&["export", capsule, path, "--format", "raw", "--image", "disk0"]);
    let output = Command::new("debugfs").args(["-R", &format!("cat {file}"), path]).output();
    String::from_utf8_lossy(&output.expect("debugfs").stdout).into_owned()
}

#[test]
fn programs_and_files_of_a_guest_are_used_from_its_host() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    start(&cluster, alpha);
    assert_eq!(alpha.run(&["exec", "web", "--", "sh", "-c", "echo $((6 * 7))"]), "42\n");
    let failed =
        alpha.refuse(&["exec", "web", "--env", "A=b c", "--", "sh", "-c", "echo $A; echo no >&2; exit 7"]);
    assert_eq!((failed.code, &*failed.result, &*failed.text), (7, "b c\n", "no\n"), "{failed:?}");
    let told = alpha.json(&["exec", "web", "--", "echo", "hi"]);
    assert_eq!((&told["exit_code"], &told["stdout"]), (&0.into(), &"aGkK".into()), "{told}");
    let missing = alpha.refuse(&["exec", "web", "--", "/no/such/program"]);
    assert!(missing.code == 2 && missing.text.contains("qemu-ga in the guest refuses"), "{missing:?}");
    let slow = alpha.refuse(&["exec", "web", "--timeout", "1s", "--", "sleep", "600"]);
    assert!(slow.code == 4 && slow.text.contains("still runs"), "{slow:?}");

    // Longer than some parts, and not a multiple of one.
    let (out, back) = (cluster.disk.path().join("out"), cluster.disk.path().join("back"));
    let content: Vec<u8> =
        (0..700_001_u32).flat_map(|number| number.wrapping_mul(7919).to_le_bytes()).collect();
    std::fs::write(&out, &content).expect("a file");
    let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    alpha.run(&["cp", &text(&out), "web:/mnt/copy"]);
    alpha.run(&["cp", "web:/mnt/copy", &text(&back)]);
    assert!(std::fs::read(&back).expect("a copy") == content, "the copy of the copy differs");
    let refused = alpha.refuse(&["cp", "web:/no/such", &text(&back)]);
    assert!(refused.text.contains("No such file"), "{refused:?}");
    assert!(std::fs::read(&back).expect("the old copy") == content, "a failed copy has replaced a file");

    wait_for("the guest's address", || {
        alpha.json(&["inspect", "web"])["nics"][0]["addresses"].to_string().contains(GUEST_ADDRESS)
    });
    assert!(alpha.run(&["ps"]).contains(GUEST_ADDRESS));
}

#[test]
fn a_quiesced_capsule_has_what_the_guest_had_only_in_its_caches() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    start(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let before = witness.state().expect("an answer");
    // Nothing writes back within the test but the freeze.
    let write = "echo 360000 >/proc/sys/vm/dirty_writeback_centisecs; sync; echo precious >/mnt/note";
    alpha.run(&["exec", "web", "--", "sh", "-c", write]);
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "torn"]);
    let file = |tag: &str| file_on_disk(alpha, tag, cluster.disk.path().join(tag), "note");
    assert!(!file("torn").contains("precious"), "the test shows nothing");
    let memory = alpha.refuse(&["checkpoint", "web", "--quiesce"]);
    assert_eq!(memory.code, 2, "{memory:?}");
    alpha.run(&["checkpoint", "web", "--disks-only", "--quiesce", "--tag", "rest"]);
    assert_eq!(file("rest"), "precious\n");
    // It is thawed: a write ends.
    alpha.run(&["exec", "web", "--", "sh", "-c", "echo more >>/mnt/note; sync"]);
    assert_same_life(&before, &witness.check().expect("an answer"));

    // Without qemu-ga nothing is taken, and the machine runs on.
    let stop = "echo -1000 >/proc/self/oom_score_adj; kill -STOP $(pidof qemu-ga)";
    let _ = alpha.try_run(&["exec", "web", "--timeout", "1s", "--", "sh", "-c", stop]);
    let refused = alpha.refuse(&["checkpoint", "web", "--disks-only", "--quiesce", "--tag", "none"]);
    assert!(refused.text.contains("qemu-guest-agent"), "{refused:?}");
    assert_eq!(alpha.refuse(&["show", "none"]).code, 3);
    assert_same_life(&before, &witness.check().expect("an answer"));
}

#[test]
fn the_clock_of_a_guest_is_right_again_after_a_pause_a_suspend_and_a_move() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    start(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let before = witness.state().expect("an answer");
    let right = |host: &HostProcess, what: &str| {
        let mut witness = cluster.witness(GUEST_ADDRESS);
        let said = "qemu-ga has set the guest's clock forward";
        let mut is_right = || witness.clock_lag_ms().expect("an answer").abs() < 100.0;
        wait_for(what, || is_right() && host.log_text().contains(said));
        assert_same_life(&before, &witness.check().expect("an answer"));
    };
    drop(witness);
    alpha.run(&["pause", "web"]);
    std::thread::sleep(Duration::from_secs(2));
    alpha.run(&["unpause", "web"]);
    right(alpha, "the clock after a pause");
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    right(alpha, "the clock after a suspend");
    alpha.run(&["exec", "web", "--", "date", "-s", "@1000000000"]);
    alpha.run(&["migrate", "web", "beta"]);
    right(beta, "the clock after a move");
}

#[test]
fn a_machine_of_before_the_port_says_what_to_do_and_moves_as_it_did() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let alpha = cluster.host("alpha");
    start(&cluster, alpha);
    alpha.run(&["stop", "web", "--kill"]);
    // As its record was before there was the port; the checksum is left out, as then.
    let record = alpha.data().join("machines/web/machine.json");
    let mut old: Value = serde_json::from_slice(&std::fs::read(&record).expect("a record")).expect("JSON");
    let members = old.as_object_mut().expect("an object");
    members.remove("check");
    assert_eq!(
        members["config"].as_object_mut().expect("a configuration").remove("agent_port"),
        Some(true.into())
    );
    std::fs::write(&record, old.to_string()).expect("a record");
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "old"]);
    alpha.run(&["resume", "old", "--name", "old"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let before = witness.state().expect("an answer");
    let refused = alpha.refuse(&["exec", "old", "--", "true"]);
    assert!(
        refused.text.contains("no port for qemu-ga") && refused.text.contains("whimbrel start"),
        "{refused:?}"
    );
    alpha.run(&["migrate", "old", "beta"]);
    assert_same_life(&before, &witness.check().expect("an answer"));
    drop(witness);
    beta.run(&["suspend", "old"]);
    beta.run(&["resume", "old"]);
    assert_same_life(&before, &cluster.witness(GUEST_ADDRESS).check().expect("an answer"));
    // Switched off and on, it has the port.
    beta.run(&["stop", "old", "--kill"]);
    beta.run(&["start", "old"]);
    wait_for("qemu-ga to answer", || beta.try_run(&["exec", "old", "--", "true"]).is_ok());
}

#[test]
fn the_capsule_from_which_on_a_command_fails_is_found() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    start(&cluster, alpha);
    for state in 0..6 {
        if state == 4 {
            alpha.run(&["exec", "web", "--", "touch", "/broken"]);
        }
        alpha.run(&["checkpoint", "web", "--tag", &format!("state-{state}")]);
    }
    let bisect = ["bisect", "web", "--good", "state-0"];
    let found = alpha.json(&[&bisect[..], &["--", "test", "!", "-e", "/broken"]].concat());
    let has = |capsule: &Value, tag: &str| capsule["names"].to_string().contains(tag);
    assert!(has(&found["last_good"], "state-3") && has(&found["first_bad"][0], "state-4"), "{found}");
    let trials = |found: &Value| found["trials"].as_array().map_or(0, Vec::len);
    assert!(trials(&found) <= 3, "{found}");
    // A command of this host, which can judge none of them.
    let outside = ["--outside", "--", "sh", "-c", "test $WHIMBREL_MACHINE = bisect-1 && exit 125"];
    let open = alpha.json(&[&bisect[..], &outside].concat());
    assert_eq!((trials(&open), open["first_bad"].as_array().map_or(0, Vec::len)), (4, 5), "{open}");
    let unclear = alpha.refuse(&[&bisect[..], &["--outside", "--", "sh", "-c", "exit 200"]].concat());
    assert!(unclear.code == 2 && unclear.text.contains("neither good nor bad"), "{unclear:?}");
    let turned = alpha.refuse(&["bisect", "state-0", "--good", "web", "--", "true"]);
    assert!(turned.code == 2 && turned.text.contains("no ancestor"), "{turned:?}");
    assert_eq!(alpha.machines(), [("web".to_owned(), "running".to_owned())], "a clone is left");
}
