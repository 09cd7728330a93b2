//! Machines that run on the target before all of them is there: what they hold is right, and stays so when
//! the link or a daemon fails meanwhile.

use serde_json::Value;
use std::{
    process::Child,
    thread::sleep,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::guest::{
    CheckResult, Identity, TestAgent, Work, assert_same_life,
    image::{page_of, patterned},
};

/// Of a disk's content.
const SEED: u64 = 77;
/// The stage of a target before the background fetches anything: what arrives there is what the guest
/// touches.
const FETCH: &str = "fetch";

fn dirtying(name: &str) -> Guest {
    let work = Work::Dirty { region_mib: 8, pages_per_second: 800, bytes_per_page: 64 };
    Guest { work, ..Guest::small(name) }
}

fn state_of(host: &HostProcess, machine: &str) -> Value {
    let machines = host.json(&["ps"]);
    let all = machines.as_array().expect("a list of machines");
    all.iter().find(|m| m["name"] == machine).map_or(Value::Null, |m| m["state"].clone())
}

fn wait_until(host: &HostProcess, what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}:\n{}", host.log_text());
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

/// Begins a move, and returns once the machine runs on the target with pages missing; they stay so until
/// [`FETCH`] is released there.
fn move_and_hold(from: &HostProcess, to: &HostProcess) -> Child {
    to.hold_at(FETCH);
    let child = from.begin(&["migrate", "web", to.name(), "--mode", "postcopy"]);
    to.wait_held(FETCH);
    wait_until(to, "the machine does not come", || state_of(to, "web")["kind"] == "loading");
    let state = state_of(to, "web");
    assert_eq!(state["from"], from.name(), "{state}");
    child
}

fn ended(child: Child) -> (bool, String) {
    let output = child.wait_with_output().expect("the command ends");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn a_life(cluster: &Cluster, on: &str) -> (TestAgent, Identity) {
    dirtying("web").run(cluster, cluster.host(on));
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(300).expect("a first life");
    (witness, born)
}

#[test]
fn a_dirtying_machine_moves_lazily_and_back_in_rounds_and_nothing_of_it_is_lost() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let (mut witness, born) = a_life(&cluster, "alpha");
    let stream = cluster.stream(GUEST_ADDRESS);

    let printed = alpha.run(&["--json", "migrate", "web", "beta", "--mode", "postcopy"]);
    let lines: Vec<Value> =
        serde_json::Deserializer::from_str(&printed).into_iter().map(|v| v.expect("JSON")).collect();
    let (result, told) = lines.split_last().expect("a result");
    let moved = &result["result"];
    println!("{moved}");
    assert!(
        moved["postcopy"]["initial_missing_pages"].as_u64() > Some(1000),
        "hardly anything followed: {moved}"
    );
    assert_eq!(moved["postcopy"]["missing_pages"], 0, "{moved}");
    assert!(
        told.iter().any(|line| line["postcopy"]["initial_missing_pages"].is_u64()),
        "nothing was told: {printed}"
    );
    let after = witness.check().expect("an answer on the connection that was open all the time");
    assert_whole(&born, &after);
    alpha.wait_empty();
    beta.wait_state("web", &["running"]);
    let before = witness.write(50).expect("a disk that takes writes");

    let moved = beta.json(&["migrate", "web", "alpha", "--mode", "hybrid", "--rounds", "1"]);
    println!("{moved}");
    // The first round and the one with the machine stopped.
    assert_eq!(moved["result"]["rounds"].as_array().map(Vec::len), Some(2), "{moved}");
    let after = witness.check().expect("an answer from the other host");
    assert_whole(&before, &after);
    beta.wait_empty();
    alpha.wait_state("web", &["running"]);
    stream.stop();

    // What arrived so is like any other machine: kept, resumed, moved in rounds.
    let before = witness.write(20).expect("a disk that takes writes");
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    alpha.run(&["migrate", "web", "beta"]);
    assert_whole(&before, &cluster.witness(GUEST_ADDRESS).check().expect("an answer"));
}

#[test]
fn a_link_that_is_lost_while_pages_are_missing_costs_waiting_and_nothing_else() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let (mut witness, born) = a_life(&cluster, "alpha");
    let moving = move_and_hold(alpha, beta);

    // The source's cable: the guest and its network stay where the client is.
    cluster.lab.unplug("alpha").expect("a cable to pull");
    beta.release(FETCH);
    wait_until(beta, "nobody notices", || state_of(beta, "web")["stalled"].is_string());
    let state = state_of(beta, "web");
    println!("{state}");
    assert_eq!((&state["kind"], &state["from"]), (&"loading".into(), &"alpha".into()), "{state}");
    let kept = state_of(alpha, "web");
    assert_eq!((&kept["kind"], &kept["to"]), (&"serving_pages".into(), &"beta".into()), "{kept}");
    assert!(kept["missing_pages"].as_u64() > Some(0), "{kept}");
    for verb in ["start", "unpause", "delete"] {
        assert_eq!(alpha.refuse(&[verb, "web"]).code, 4, "{verb} of a machine that runs elsewhere");
    }

    cluster.lab.replug("alpha").expect("a cable to put back");
    let after = witness.check().expect("an answer, once all of its memory can be had");
    assert_whole(&born, &after);
    let (succeeded, text) = ended(moving);
    assert!(succeeded, "{text}");
    alpha.wait_empty();
    beta.wait_state("web", &["running"]);
    witness.write(20).expect("a disk that takes writes");
    assert_whole(&after, &witness.check().expect("an answer"));
}

#[test]
fn either_daemon_may_be_killed_while_pages_are_missing() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let (mut witness, born) = a_life(&cluster, "alpha");
    let moving = move_and_hold(cluster.host("alpha"), cluster.host("beta"));

    cluster.host_mut("alpha").kill_daemon();
    let (succeeded, text) = ended(moving);
    assert!(!succeeded, "its daemon is gone: {text}");
    cluster.host_mut("alpha").start_daemon();
    assert_eq!(state_of(cluster.host("alpha"), "web")["kind"], "serving_pages");
    let beta = cluster.host("beta");
    assert_eq!(state_of(beta, "web")["kind"], "loading", "nothing was fetched meanwhile");

    cluster.host_mut("beta").kill_daemon();
    cluster.host("beta").release(FETCH);
    cluster.host_mut("beta").start_daemon();
    let after = witness.check().expect("an answer, once all of its memory can be had");
    assert_whole(&born, &after);
    cluster.host("alpha").wait_empty();
    let beta = cluster.host("beta");
    beta.wait_state("web", &["running"]);
    assert!(beta.record("web").1["owed"].is_null(), "{}", beta.record("web").1);
    let before = witness.write(20).expect("a disk that takes writes");

    // Nothing is left behind that a later daemon would trip over.
    cluster.host_mut("beta").kill_daemon();
    cluster.host_mut("beta").start_daemon();
    cluster.host("beta").wait_state("web", &["running"]);
    assert_whole(&before, &witness.check().expect("an answer"));
}

#[test]
fn a_machine_that_lacks_pages_waits_for_them_before_it_moves_on() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta, gamma) = (cluster.host("alpha"), cluster.host("beta"), cluster.host("gamma"));
    let (mut witness, born) = a_life(&cluster, "alpha");
    let first = move_and_hold(alpha, beta);
    let second = beta.begin(&["migrate", "web", "gamma", "--mode", "postcopy"]);
    wait_until(beta, "the second move does not start", || beta.json(&["ps"])[0]["operation"].is_number());
    beta.release(FETCH);
    for moving in [first, second] {
        let (succeeded, text) = ended(moving);
        assert!(succeeded, "{text}");
    }
    assert_whole(&born, &witness.check().expect("an answer from the third host"));
    alpha.wait_empty();
    beta.wait_empty();
    gamma.wait_state("web", &["running"]);
}

#[test]
fn a_machine_that_ends_while_its_disk_is_partly_elsewhere_fetches_it_when_it_runs_again() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    dirtying("web").run_on(&cluster, alpha, |disk| {
        patterned(disk, 32, SEED).expect("a disk with content");
    });
    let mut witness = cluster.witness(GUEST_ADDRESS);
    witness.write(300).expect("a first life");
    let moving = move_and_hold(alpha, beta);
    drop(witness);
    beta.run(&["stop", "web", "--kill"]);
    assert_eq!(state_of(beta, "web")["kind"], "stopped");
    assert_eq!(state_of(alpha, "web")["kind"], "serving_pages", "its disk is still here");
    assert!(!beta.record("web").1["owed"].is_null());
    let refusal = beta.refuse(&["checkpoint", "web", "--disks-only"]);
    assert!(refusal.text.contains("still on alpha") && refusal.text.contains("hint:"), "{refusal:?}");

    beta.release(FETCH);
    beta.run(&["start", "web"]);
    let (succeeded, text) = ended(moving);
    assert!(succeeded, "{text}");
    alpha.wait_empty();
    assert!(beta.record("web").1["owed"].is_null());
    beta.run(&["stop", "web", "--kill"]);
    beta.run(&["checkpoint", "web", "--disks-only", "--tag", "disks"]);
    let file = cluster.disk.path().join("disks.raw");
    beta.run(&["export", "disks", file.to_str().expect("a path in UTF-8"), "--format", "raw"]);
    let disk = std::fs::read(&file).expect("the disk");
    let pages = disk.chunks_exact(4096).enumerate();
    let other = pages.filter(|(page, content)| page_of(SEED, *page as u64) != **content).count();
    println!("{other} of {} pages are not what the disk began as", disk.len() / 4096);
    assert!((1..=300).contains(&other), "{other} pages differ after 300 writes");
    beta.run(&["start", "web"]);
    cluster.witness(GUEST_ADDRESS).check().expect("a guest that has booted from its own disk");

    // One that is forgotten needs nothing either.
    let moving = move_and_hold(beta, alpha);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["delete", "web"]);
    ended(moving);
    beta.wait_empty();
}
