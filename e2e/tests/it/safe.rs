//! Moves with a third host behind them: while pages are missing on the target, whichever of the hosts dies,
//! the machine goes on, and what it had answered it still knows.
//!
//! The open TCP stream is the strictest witness of it: were anything seen outside that the third host did not
//! have, the connection would break.

use serde_json::Value;
use std::{
    process::Child,
    thread::sleep,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::{
    guest::{CheckResult, Identity, TestAgent, Work, assert_same_life},
    lab::StreamEnd,
};

/// The stage of a target before the background fetches anything: what arrives there is what the guest
/// touches.
const FETCH: &str = "fetch";

fn machine(host: &HostProcess) -> Value {
    let machines = host.json(&["ps"]);
    let all = machines.as_array().expect("a list of machines");
    all.iter().find(|m| m["name"] == "web").cloned().unwrap_or(Value::Null)
}

fn wait_until(host: &HostProcess, what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: {}\n{}", machine(host), host.log_text());
        sleep(Duration::from_millis(50));
    }
}

fn assert_whole(before: &Identity, after: &Identity) {
    assert_same_life(before, after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
}

fn dirtying(cluster: &Cluster) {
    let work = Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 64 };
    Guest { work, ..Guest::small("web") }.run(cluster, cluster.host("alpha"));
}

/// Begins a move, and returns once the machine runs on the target with pages missing, protected; they stay
/// missing until [`FETCH`] is released there.
fn move_and_hold(from: &HostProcess, to: &HostProcess, third: &str) -> Child {
    to.hold_at(FETCH);
    let child = from.begin(&["migrate", "web", to.name(), "--mode", "postcopy", "--backup-host", third]);
    to.wait_held(FETCH);
    wait_until(to, "the machine is not there and protected", || {
        let now = machine(to);
        now["state"]["kind"] == "loading" && now["protection"]["epoch"].as_u64() >= Some(5)
    });
    child
}

#[test]
fn whichever_host_dies_while_pages_are_missing_the_machine_goes_on_where_all_of_it_is() {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    dirtying(&cluster);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(200).expect("a first life");
    let stream = cluster.stream(GUEST_ADDRESS);
    let (alpha, beta, gamma) = (cluster.host("alpha"), cluster.host("beta"), cluster.host("gamma"));
    for wrong in [
        &["--mode", "postcopy", "--backup-host", "beta"][..],
        &["--mode", "precopy", "--backup-host", "gamma"],
    ] {
        assert_eq!(alpha.refuse(&[&["migrate", "web", "beta"], wrong].concat()).code, 2, "{wrong:?}");
    }

    // Nobody dies: it ends where it was to go, and the third host has nothing left.
    let moved = alpha.json(&["migrate", "web", "beta", "--mode", "postcopy", "--backup-host", "gamma"]);
    assert_eq!(moved["result"]["host"], "beta", "{moved}");
    assert_whole(&born, &witness.check().expect("an answer from the other host"));
    alpha.wait_empty();
    gamma.wait_empty();
    wait_until(beta, "it is still protected", || machine(beta)["protection"].is_null());

    // The target dies.
    let moving = move_and_hold(beta, alpha, "gamma");
    let after = dies(&cluster, &mut witness, ("alpha", alpha), gamma);
    let output = moving.wait_with_output().expect("the command ends");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("it runs on gamma"), "{text}");
    beta.wait_empty();
    comes_back(&mut cluster, "alpha");
    assert_whole(&after, &witness.check().expect("an answer"));

    // The source dies.
    let (alpha, beta, gamma) = (cluster.host("alpha"), cluster.host("beta"), cluster.host("gamma"));
    let moving = move_and_hold(gamma, beta, "alpha");
    let after = dies(&cluster, &mut witness, ("gamma", beta), alpha);
    drop(moving.wait_with_output());
    beta.wait_empty();
    comes_back(&mut cluster, "gamma");
    assert_whole(&after, &witness.check().expect("an answer"));
    assert_eq!(cluster.host("alpha").machines(), [("web".to_owned(), "running".to_owned())]);
    assert_eq!(stream.stop().end, StreamEnd::Stopped, "the TCP stream broke");
}

/// Ends every process of a host while the machine runs on `on` with pages missing: it goes on at `third`, as
/// what is answered.
fn dies(
    cluster: &Cluster,
    witness: &mut TestAgent,
    (victim, on): (&str, &HostProcess),
    third: &HostProcess,
) -> Identity {
    let before = witness.write(50).expect("a machine that answers while pages are missing");
    assert_eq!(machine(on)["state"]["kind"], "loading", "it was to take longer");
    cluster.host(victim).start_program("sh", &["-c", "kill -9 -1"]).wait().expect("an end");
    on.release(FETCH);
    let died = Instant::now();
    third.wait_state("web", &["running"]);
    println!("{victim} died: runs on {} after {:.0} ms", third.name(), died.elapsed().as_secs_f64() * 1e3);
    let after = witness.check().expect("an answer on the connection that was open all the time");
    assert_whole(&before, &after);
    after
}

/// A host that had died has nothing of the machine, and never runs it.
fn comes_back(cluster: &mut Cluster, host: &str) {
    cluster.host_mut(host).kill_daemon();
    cluster.host_mut(host).start_daemon();
    cluster.host(host).wait_empty();
}
