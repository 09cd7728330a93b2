//! A guest moves between two hosts while a client talks to it.

use nix::sys::signal::Signal;
use serde_json::json;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console, wait_reborn};
use whimbrel_testkit::{
    guest::{CheckResult, Work, assert_same_life},
    lab::StreamEnd,
};

#[test]
fn a_machine_moves_to_and_fro_with_its_connections_and_reboots_at_the_end() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let work = Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 64 };
    Guest { work, ..Guest::small("web") }.run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(300).expect("a first life");
    let (probe, stream) = (cluster.probe(GUEST_ADDRESS), cluster.stream(GUEST_ADDRESS));

    let mut before = born;
    for (from, to) in [(alpha, beta), (beta, alpha), (alpha, beta)] {
        let moved = from.json(&["migrate", "web", to.name()]);
        assert_eq!(moved["kind"], "migrate", "{moved}");
        assert!(from.machines().is_empty(), "nothing is left on the source");
        to.wait_state("web", &["running"]);
        let after = witness.check().expect("an answer on the connection that was open all the time");
        assert_same_life(&before, &after);
        assert!(
            matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
            "{after:?}"
        );
        before = witness.write(20).expect("a disk that takes writes");
    }
    wait_given_back(alpha);
    let stream = stream.stop();
    assert_eq!(stream.end, StreamEnd::Stopped, "the TCP stream broke: {stream:?}");
    let probe = probe.stop();
    assert!(probe.answered > 0 && probe.downtime < Duration::from_secs(10), "{probe:?}");

    witness.reboot().expect("a request to reboot");
    drop(witness);
    let mut console = console(beta, "web");
    wait_reborn(&mut console, &before);
}

#[test]
fn what_is_sent_to_a_machine_while_it_is_handed_over_reaches_it_where_it_goes_on() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest { memory_mib: 128, buffer_mib: 8, ..Guest::small("web") }.run(&cluster, alpha);
    cluster.witness(GUEST_ADDRESS).state().expect("a guest that has booted");
    // First it stays, because its target cannot run it; then it goes.
    for goes in [false, true] {
        let probe = cluster.probe(GUEST_ADDRESS);
        assert!(probe.wait_answers(100, PATIENCE), "the guest does not answer");
        beta.hold_at("last");
        let mut command = alpha.start_command(&["migrate", "web", "beta"]);
        beta.wait_held("last");
        // It stands still now, and is asked a thousand times a second.
        std::thread::sleep(Duration::from_millis(100));
        if !goes {
            let (_, record) = beta.record("web");
            beta.exec("kill", &["-9", &record["process"]["pid"].to_string()]);
        }
        beta.release("last");
        assert_eq!(command.wait().expect("the command ends").success(), goes);
        assert!(probe.wait_answers(200, PATIENCE), "the guest does not answer any more");
        let report = probe.stop();
        // A slow guest may drop some at any time: only those that were sent in the gap count.
        let (asked, lost) = (report.sent_in_gap, report.lost_in_gap);
        println!("{:?} without an answer, {lost} of {asked} sent in it never answered", report.downtime);
        assert!(report.downtime >= Duration::from_millis(100), "{report:?}");
        assert!(asked >= lost + 50, "{lost} of {asked} datagrams have not reached it");
    }
}

#[test]
fn a_machine_that_its_user_has_paused_moves_and_stays_paused() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    Guest { memory_mib: 128, buffer_mib: 8, ..Guest::small("web") }.run(&cluster, cluster.host("alpha"));
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    cluster.host("alpha").run(&["pause", "web"]);
    for (from, to, mode) in [("alpha", "beta", "precopy"), ("beta", "alpha", "postcopy")] {
        let said = cluster.host(from).run(&["migrate", "web", to, "--mode", mode]);
        assert!(said.contains("still paused"), "{said}");
        cluster.host(to).wait_state("web", &["paused"]);
        cluster.host_mut(to).kill_daemon();
        cluster.host_mut(to).start_daemon();
        assert_eq!(cluster.host(to).machines(), [("web".to_owned(), "paused".to_owned())]);
    }
    cluster.host("alpha").run(&["unpause", "web"]);
    let after = cluster.witness(GUEST_ADDRESS).check().expect("a guest that goes on");
    assert_same_life(&born, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
}

/// Waits until nothing is left of machines that have gone, and no handover is on anybody's mind.
fn wait_given_back(host: &HostProcess) {
    let names = |folder: PathBuf| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).collect::<Vec<_>>()
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        let [trash, machines] = ["trash", "machines"].map(|folder| names(host.data().join(folder)));
        let bitmaps = names(host.run_dir().join("bitmaps"));
        let handovers = fs::read_to_string(host.data().join("handovers.json")).unwrap_or_default();
        if trash.is_empty() && machines.is_empty() && bitmaps.is_empty() && !handovers.contains("\"to\"") {
            return;
        }
        assert!(Instant::now() < deadline, "left: {trash:?} {machines:?} {bitmaps:?} {handovers}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_migration_that_fails_leaves_the_machine_where_it_was_and_the_next_one_loses_no_page() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let born = cluster.witness(GUEST_ADDRESS).write(200).expect("a first life");

    cluster.host_mut("beta").kill_daemon();
    let refusal = cluster.host("alpha").refuse(&["migrate", "web", "beta"]);
    assert_eq!(refusal.code, 5, "{refusal:?}");
    assert!(refusal.text.contains("hint:"), "{refusal:?}");
    // As if that had been in the middle of removing what a machine had.
    fs::create_dir_all(cluster.host("beta").data().join("trash/db-0123456789abcdef/disk0"))
        .expect("a folder");
    cluster.host_mut("beta").start_daemon();
    wait_given_back(cluster.host("beta"));

    // Slow enough to be cut in the middle of the first round.
    let alpha = cluster.host("alpha");
    let socket = alpha.socket().to_owned();
    let migrate = std::thread::scope(|scope| {
        let migrate = scope.spawn(|| alpha.try_run(&["migrate", "web", "beta", "--rate-max", "2M"]));
        alpha.wait_state("web", &["migrating"]);
        std::thread::sleep(Duration::from_millis(1500));
        cluster.lab.unplug("beta").expect("a cable to pull");
        migrate.join().expect("the command ends")
    });
    let refusal = migrate.expect_err("a migration over a cable that was pulled");
    assert_eq!(refusal.code, 5, "{refusal:?} {}", socket.display());
    cluster.lab.replug("beta").expect("a cable to put back");
    alpha.wait_state("web", &["running"]);
    let lived_on = cluster.witness(GUEST_ADDRESS).write(30).expect("a source that runs on");
    assert_same_life(&born, &lived_on);

    let beta = cluster.host("beta");
    let deadline = std::time::Instant::now() + PATIENCE;
    while !beta.machines().is_empty() {
        assert!(
            std::time::Instant::now() < deadline,
            "something is left on the target: {:?}",
            beta.machines()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    alpha.run(&["migrate", "web", "beta"]);
    let after = cluster.witness(GUEST_ADDRESS).check().expect("a machine on the target");
    assert_same_life(&lived_on, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
}

#[test]
fn a_machine_that_is_still_partly_in_the_store_moves_whole_and_is_kept_whole_there() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest::small("web").run(&cluster, alpha);
    let born = cluster.witness(GUEST_ADDRESS).write(100).expect("a first life");
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    alpha.run(&["migrate", "web", "beta"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let moved = witness.check().expect("an answer from the target");
    assert_same_life(&born, &moved);
    assert!(
        matches!(moved.ram, CheckResult::Good(_)) && matches!(moved.disk, CheckResult::Good(_)),
        "{moved:?}"
    );
    // The target's store has none of the machine's history; it must not matter.
    beta.run(&["checkpoint", "web"]);
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web"]);
    let again = cluster.witness(GUEST_ADDRESS).check().expect("a capsule of the target");
    assert_same_life(&moved, &again);
    assert!(
        matches!(again.ram, CheckResult::Good(_)) && matches!(again.disk, CheckResult::Good(_)),
        "{again:?}"
    );
}

#[test]
fn a_target_that_waits_is_told_by_the_next_daemon_that_its_machine_never_comes() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    // A machine on beta that is as one whose old host fell silent between "ready" and the commit point.
    Guest { address: None, ..Guest::small("ghost") }.run(&cluster, cluster.host("beta"));
    cluster.host("beta").run(&["pause", "ghost"]);
    let begun = cluster.host("alpha").data().join("handovers.json");
    for host in ["alpha", "beta"] {
        cluster.host_mut(host).kill_daemon();
    }
    let handover = [7; 16];
    let (path, mut record) = cluster.host("beta").record("ghost");
    record["phase"] = json!({"phase": "prepared", "handover": handover});
    std::fs::write(path, record.to_string()).expect("a record of a machine that waits");
    let kept = json!({"format": 1, "begun": [{"handover": handover, "to": "beta"}]});
    std::fs::write(&begun, kept.to_string()).expect("a note of what was begun");

    cluster.host_mut("beta").start_daemon();
    let beta = cluster.host("beta");
    assert_eq!(beta.machines(), [("ghost".to_owned(), "migrating".to_owned())], "it waits for its old host");
    for verb in ["start", "unpause", "delete"] {
        assert_eq!(beta.refuse(&[verb, "ghost"]).code, 4, "{verb} of a machine that is not known to be here");
    }
    cluster.host_mut("alpha").start_daemon();
    cluster.host("beta").wait_empty();
    let alpha = cluster.host("alpha");
    alpha.run(&["migrate", "web", "beta"]);
    let after = cluster.witness(GUEST_ADDRESS).check().expect("a machine on the target");
    assert_same_life(&born, &after);
    let kept = std::fs::read_to_string(begun).expect("the note");
    assert!(kept.contains("\"begun\": []"), "handovers that have ended are still noted: {kept}");
}

#[test]
fn a_daemon_that_is_killed_in_the_middle_of_a_migration_costs_nothing() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let mut before = cluster.witness(GUEST_ADDRESS).write(100).expect("a first life");
    for victim in ["beta", "alpha"] {
        std::thread::scope(|scope| {
            let alpha = cluster.host("alpha");
            let migrate = scope.spawn(|| alpha.try_run(&["migrate", "web", "beta", "--rate-max", "2M"]));
            alpha.wait_state("web", &["migrating"]);
            std::thread::sleep(Duration::from_millis(800));
            cluster.host(victim).signal_daemon(Signal::SIGKILL);
            migrate.join().expect("the command ends").expect_err("it cannot have moved yet");
        });
        cluster.host_mut(victim).kill_daemon();
        cluster.host_mut(victim).start_daemon();
        let alpha = cluster.host("alpha");
        alpha.wait_state("web", &["running"]);
        let after = cluster.witness(GUEST_ADDRESS).check().expect("a source that runs on");
        assert_same_life(&before, &after);
        assert!(
            matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
            "{after:?}"
        );
        before = after;
        cluster.host("beta").wait_empty();
    }
    cluster.host("alpha").run(&["migrate", "web", "beta"]);
    let after = cluster.witness(GUEST_ADDRESS).check().expect("a machine on the target");
    assert_same_life(&before, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
}
