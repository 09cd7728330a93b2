//! What is sampled of a machine is what its guest writes, and sampling takes nothing from anybody.

use serde_json::Value;
use std::time::Instant;
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::guest::{CheckResult, Work, assert_same_life};

/// What a guest that does nothing else writes beside its work: its kernel, its answers, the page cache.
const BESIDE: f64 = 3_000.0;

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Different pages after `writes` writes to random ones of `pages`.
fn different(pages: f64, writes: f64) -> f64 {
    pages * (1.0 - (1.0 - 1.0 / pages).powf(writes))
}

fn sample(host: &HostProcess, more: &[&str]) -> Value {
    let arguments: Vec<&str> = ["dirty-rate", "web"].iter().chain(more).copied().collect();
    host.json(&arguments)
}

#[test]
fn a_known_load_is_seen_as_what_it_is_and_predicted_from_the_trace_alone() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let work = Work::Dirty { region_mib: 64, pages_per_second: 2000, bytes_per_page: 64 };
    Guest { work, memory_mib: 256, ..Guest::small("web") }.run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);

    let trace = cluster.disk.path().join("web.trace").to_str().expect("a path in UTF-8").to_owned();
    // At first it fills its region, and makes up for what it is behind since its boot.
    let deadline = Instant::now() + PATIENCE;
    while number(&sample(alpha, &["--duration", "1s"])["unique_pages"]) > 1.5 * different(16_384.0, 2000.0) {
        assert!(Instant::now() < deadline, "the guest never comes to its rate");
    }
    let seen = sample(alpha, &["--duration", "5s", "--save", &trace]);
    // How long they were, the trace says itself. On a machine with other work the guest is late and makes up
    // for it, so this is about the order of magnitude; the small region below is exact.
    let seconds = number(&seen["duration_ms"]) / 1e3;
    let expected = different(16_384.0, 2000.0 * seconds);
    let unique = number(&seen["unique_pages"]);
    assert!(
        unique > 0.5 * expected && unique < 2.0 * expected + BESIDE,
        "{unique} of {expected} in {seconds} s"
    );
    assert!(seconds >= 5.0 && number(&seen["samples"]) >= 10.0, "{seen}");

    // All of a small region, again and again.
    witness.dirty(16, 0, 64).expect("a guest that is told to write more");
    let seen = sample(alpha, &["--window", "2s", "--duration", "6s"]);
    let sets = seen["working_sets"].as_array().expect("working sets").iter();
    // The new load fills its region before the first stretch or in it, and from then on writes all of it.
    let sets: Vec<f64> = sets.skip(1).map(|set| number(&set["pages"])).collect();
    let all = |set: &&f64| **set > 0.95 * 4096.0 && **set < 1.05 * 4096.0 + BESIDE;
    assert!(!sets.is_empty() && sets.iter().filter(all).count() * 2 > sets.len(), "{sets:?}");
    witness.calm().expect("a guest that is told to stop");

    for (arguments, code) in [
        (vec!["dirty-rate", "nobody"], 3),
        (vec!["dirty-rate", "web", "--sample", "1ms"], 2),
        (vec!["dirty-rate", "--trace", "/dev/null"], 2),
    ] {
        assert_eq!(alpha.refuse(&arguments).code, code, "{arguments:?}");
    }

    cluster.host_mut("alpha").kill_daemon();
    let alpha = cluster.host("alpha");
    // Without the machine, and without a daemon.
    let again = alpha.json(&["dirty-rate", "--trace", &trace, "--bandwidth", "100Mbit,1Gbit"]);
    assert_eq!(number(&again["unique_pages"]), unique);
    let predicted = again["predictions"].as_array().expect("predictions");
    assert_eq!(predicted.len(), 8, "two links, one to four rounds");
    let downtime = |at: usize| number(&predicted[at]["downtime_ms"]);
    assert!(downtime(0) > downtime(4), "a faster link stands still for less: {again}");
    assert!(downtime(0) > downtime(3), "a further round leaves less of what is written slowly: {again}");
}

#[test]
fn a_machine_that_is_looked_at_is_kept_and_moved_whole() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let work = Work::Dirty { region_mib: 8, pages_per_second: 2000, bytes_per_page: 64 };
    Guest { work, ..Guest::small("web") }.run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    alpha.run(&["checkpoint", "web"]);
    // Sampled all the time from here on, as often as it goes, by two who look at once.
    let lookers = [(); 2].map(|()| {
        alpha.begin(&["dirty-rate", "web", "--sample", "10ms", "--duration", "1h", "--json", "-q"])
    });
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while std::time::Instant::now() < deadline {
        witness.write(5).expect("a guest that writes");
    }
    // What changed since the first one.
    let kept = witness.check().expect("a machine that runs on");
    alpha.run(&["checkpoint", "web", "--tag", "second"]);
    alpha.run(&["migrate", "web", "beta"]);
    for looker in lookers {
        let output = looker.wait_with_output().expect("the end of a look at a machine that left");
        let seen: Value = serde_json::from_slice(&output.stdout).expect("what was seen until then");
        assert!(output.status.success() && number(&seen["samples"]) >= 10.0, "{seen}");
    }
    let moved = witness.check().expect("an answer from the target");
    assert_same_life(&born, &moved);
    assert!(
        matches!(moved.ram, CheckResult::Good(_)) && matches!(moved.disk, CheckResult::Good(_)),
        "{moved:?}"
    );
    drop(witness);
    beta.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "second", "--name", "web", "--full"]);
    let resumed = cluster.witness(GUEST_ADDRESS).check().expect("the machine of the second capsule");
    assert_same_life(&kept, &resumed);
    assert!(
        matches!(resumed.ram, CheckResult::Good(_)) && matches!(resumed.disk, CheckResult::Good(_)),
        "{resumed:?}"
    );
}
