//! Machines that processes of their own serve while no daemon runs.

use std::{
    fs,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, TestAgent, assert_same_life};

const SETTINGS: &str = "machine_processes = true\n";

/// A host whose daemon leaves machines to processes, with the machine `web`.
fn cluster() -> Cluster {
    let mut cluster = Cluster::start(&["alpha"]);
    cluster.host_mut("alpha").restart_with(SETTINGS);
    let arguments = vec!["--tpm".to_owned()];
    Guest { arguments, ..Guest::small("web") }.run(&cluster, cluster.host("alpha"));
    cluster
}

/// Process that has the machine `web` while there is no daemon, as its host counts.
fn machine_process(alpha: &HostProcess) -> String {
    let record = fs::read_to_string(alpha.slot("web").join("machine-process")).expect("a recorded process");
    record.split_whitespace().next().expect("its number").to_owned()
}

fn assert_good(witness: &mut TestAgent) {
    let now = witness.check().expect("an answer");
    assert!(matches!(now.ram, CheckResult::Good(_)) && matches!(now.disk, CheckResult::Good(_)), "{now:?}");
}

/// Waits until the next daemon has taken the machine from its process, and knows what was written.
fn assert_taken(alpha: &HostProcess, after: usize) {
    alpha.wait_log(after, "took it from its own process");
    let log = alpha.log_text();
    let taken = log[after..].lines().find(|line| line.contains("took it from its own process"));
    assert!(taken.is_some_and(|line| line.contains("Complete")), "{log}");
    assert!(!alpha.slot("web").join("machine-process").exists(), "two have the machine");
}

#[test]
fn while_the_daemon_is_stopped_a_guest_has_disk_and_network_and_the_next_daemon_knows_what_it_wrote() {
    let mut cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    cluster.host("alpha").run(&["checkpoint", "web", "--tag", "before"]);
    for round in 0..2 {
        cluster.host_mut("alpha").stop_daemon();
        // Over the connection of before: neither network nor disk waits for a daemon.
        let alone = witness.write(60).expect("a disk and a network without a daemon");
        assert_same_life(&born, &alone);
        let in_tpm = witness.tpm(Some(round)).expect("a TPM without a daemon");
        let after = cluster.host("alpha").log_text().len();
        cluster.host_mut("alpha").start_daemon();
        let alpha = cluster.host("alpha");
        alpha.wait_state("web", &["running", "loading"]);
        assert_taken(alpha, after);
        assert_good(&mut witness);
        assert_eq!(witness.tpm(None).expect("a TPM"), in_tpm);
        if round == 0 {
            // The second time memory is still filled on demand.
            alpha.run(&["suspend", "web"]);
            alpha.run(&["resume", "web"]);
            witness = cluster.witness(GUEST_ADDRESS);
        }
    }
    let alpha = cluster.host("alpha");
    let last = witness.write(40).expect("a disk that takes writes");
    alpha.run(&["checkpoint", "web", "--tag", "after"]);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "after", "--name", "copy"]);
    let mut copy = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&last, &copy.state().expect("the state of the last daemon"));
    assert_good(&mut copy);
    cluster.host("alpha").run(&["verify"]);
}

#[test]
fn a_machine_whose_process_died_is_adopted_and_has_lost_nothing() {
    let mut cluster = cluster();
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    cluster.host_mut("alpha").stop_daemon();
    let alpha = cluster.host("alpha");
    alpha.exec("kill", &["-9", &machine_process(alpha)]);
    cluster.host_mut("alpha").start_daemon();
    cluster.host("alpha").wait_state("web", &["running"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&born, &witness.state().expect("a machine that goes on"));
    assert_good(&mut witness);
}

#[test]
fn a_guest_that_shuts_down_while_there_is_no_daemon_is_stopped_and_not_crashed() {
    let mut cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    cluster.host_mut("alpha").stop_daemon();
    let mark = cluster.host("alpha").slot("web").join("shut-down");
    witness.power_off().expect("a request to switch off");
    let deadline = Instant::now() + PATIENCE;
    while !mark.exists() {
        assert!(Instant::now() < deadline, "nobody has seen the guest shut down");
        std::thread::sleep(Duration::from_millis(20));
    }
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    alpha.wait_state("web", &["stopped"]);
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that has booted");
}
