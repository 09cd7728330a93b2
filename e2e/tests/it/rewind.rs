//! A machine goes back to an earlier state, and forward again.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::fs;
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, Identity, assert_same_life};

fn checked(host: &HostProcess) -> Identity {
    let found = console(host, "web").check().expect("an answer");
    let whole = matches!((found.ram, found.disk), (CheckResult::Good(_), CheckResult::Good(_)));
    assert!(whole, "memory or disk is not of one moment: {found:?}");
    found
}

#[test]
fn a_machine_goes_back_to_an_earlier_state_and_its_present_one_is_not_lost() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    let mut guest = console(alpha, "web");
    guest.wait_ready(PATIENCE).expect("a guest that is up");
    guest.write(50).expect("a first life");
    drop(guest);
    alpha.run(&["set", "web", "--note", "the shop"]);
    let early = checked(alpha);
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    console(alpha, "web").write(50).expect("a disk that takes writes");
    let late = checked(alpha);
    assert_ne!(early.disk, late.disk);

    let rewound = alpha.json(&["rewind", "web", "early"])["result"].clone();
    let again = checked(alpha);
    assert_same_life(&early, &again);
    assert_eq!(again.disk, early.disk, "the disk went back with the memory");
    assert_ne!(again.genid, late.genid, "the guest can tell that it has been here before");
    assert_eq!(alpha.json(&["inspect", "web"])["settings"]["note"], "the shop");

    let before = rewound["tag"].as_str().expect("a tag of the state before");
    alpha.run(&["gc"]);
    alpha.run(&["rewind", "web", before]);
    let forward = checked(alpha);
    assert_same_life(&late, &forward);
    assert_eq!(forward.disk, late.disk);

    // Suspended, it goes back as well. A state of another machine is no past of this one.
    alpha.run(&["suspend", "web"]);
    alpha.run(&["rewind", "web", "early"]);
    assert_same_life(&early, &checked(alpha));
    alpha.run(&["resume", before, "--name", "other"]);
    alpha.run(&["checkpoint", "other", "--tag", "others"]);
    let refusal = alpha.refuse(&["rewind", "web", "others"]);
    assert!(refusal.code == 2 && refusal.text.contains("earlier state of web"), "{refusal:?}");
    assert_same_life(&early, &checked(alpha));
}

#[test]
fn a_rewind_that_is_cancelled_or_fails_leaves_the_machine_running_as_it_was() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    let mut guest = console(alpha, "web");
    guest.wait_ready(PATIENCE).expect("a guest that is up");
    guest.write(50).expect("a first life");
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    guest.write(50).expect("a disk that takes writes");
    drop(guest);
    let late = checked(alpha);
    let is_as_it_was = || {
        alpha.wait_state("web", &["running", "loading"]);
        let now = checked(alpha);
        assert_same_life(&late, &now);
        assert_eq!(now.disk, late.disk);
    };

    // Cancelled by its user while the machine is suspended.
    alpha.hold_at("rewind");
    let mut command = alpha.start_command(&["rewind", "web", "early"]);
    alpha.wait_held("rewind");
    kill(Pid::from_raw(command.id() as i32), Signal::SIGINT).expect("a command that waits");
    assert_eq!(command.wait().expect("the command ends").code(), Some(130));
    is_as_it_was();

    // The present state cannot get its tag, as something else is in its place.
    let mut command = alpha.start_command(&["rewind", "web", "early"]);
    alpha.wait_held("rewind");
    let before = alpha.json(&["inspect", "web"])["follows"].as_str().expect("a capsule").to_owned();
    let tag = alpha.data().join("store").join("refs").join(format!("rewound.{}", &before[..12]));
    fs::create_dir(&tag).expect("a place that is free");
    alpha.release("rewind");
    assert!(!command.wait().expect("the command ends").success());
    fs::remove_dir(&tag).expect("nothing was put there");
    is_as_it_was();

    // And it goes back when nothing is in the way.
    alpha.run(&["rewind", "web", "early"]);
    assert_ne!(checked(alpha).disk, late.disk);
}

/// Content of the first disk of a capsule.
fn disk_of(host: &HostProcess, cluster: &Cluster, capsule: &str) -> Vec<u8> {
    let file = cluster.disk.path().join("exported.raw");
    host.run(&["export", capsule, file.to_str().expect("a path in UTF-8"), "--image", "disk0"]);
    let content = fs::read(&file).expect("a disk");
    fs::remove_file(&file).expect("to make room for the next");
    content
}

#[test]
fn a_machine_that_is_off_goes_back_too_and_is_off_again_if_it_cannot() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    let mut guest = console(alpha, "web");
    guest.wait_ready(PATIENCE).expect("a guest that is up");
    guest.write(50).expect("a first life");
    let early = checked(alpha);
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    guest.write(50).expect("a disk that takes writes");
    drop(guest);
    alpha.run(&["checkpoint", "web", "--tag", "late"]);
    let late = disk_of(alpha, &cluster, "late");
    alpha.run(&["stop", "web", "--kill"]);

    // Cancelled, it is switched off, with its disk: also to the next daemon, and it starts.
    alpha.hold_at("rewind");
    let mut command = alpha.start_command(&["rewind", "web", "early"]);
    alpha.wait_held("rewind");
    kill(Pid::from_raw(command.id() as i32), Signal::SIGINT).expect("a command that waits");
    assert_eq!(command.wait().expect("the command ends").code(), Some(130));
    alpha.release("rewind");
    alpha.wait_state("web", &["stopped"]);
    alpha.run(&["gc"]);
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "off"]);
    assert!(disk_of(alpha, &cluster, "off") == late, "the disk is not what it was");
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    alpha.run(&["stop", "web", "--kill"]);

    // Nothing in the way, it goes back and runs; and then to what it was, which boots.
    let rewound = alpha.json(&["rewind", "web", "early"])["result"].clone();
    assert_same_life(&early, &checked(alpha));
    let before = rewound["tag"].as_str().expect("a tag of the state before");
    alpha.run(&["rewind", "web", before]);
    let mut guest = console(alpha, "web");
    guest.wait_ready(PATIENCE).expect("a guest that is up");
    assert_ne!(guest.check().expect("an answer").nonce, early.nonce, "it has booted");
    drop(guest);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "again"]);
    assert!(disk_of(alpha, &cluster, "again") == disk_of(alpha, &cluster, before), "another disk");
}
