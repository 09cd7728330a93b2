//! Migrations whose rate follows the guest, on the lab's real link: limits on the wire, rounds while they
//! happen, records.

use serde_json::Value;
use std::{
    thread::sleep,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess};
use whimbrel_testkit::guest::{CheckResult, Work, assert_same_life};

const MBIT: f64 = 1e6;
/// What a page is taken to cost at least, however little those of a short round came to.
const BYTES_A_PAGE_MIN: f64 = 256.0;

/// Bytes that a host has put on its cable, headers and all.
fn bytes_on_the_wire(cluster: &Cluster, host: &str) -> u64 {
    let counters = cluster.lab.host(host).output("cat", &["/proc/net/dev"]).expect("counters");
    let uplink = counters.lines().find_map(|line| line.trim().strip_prefix("uplink:")).expect("a cable");
    uplink.split_whitespace().nth(8).expect("sixteen numbers").parse().expect("a number")
}

/// What `alpha` had put on its cable, again and again until `work` ends.
fn watch_the_wire<T: Send>(cluster: &Cluster, work: impl FnOnce() -> T + Send) -> (Vec<(Instant, u64)>, T) {
    std::thread::scope(|scope| {
        let work = scope.spawn(work);
        let mut seen = vec![(Instant::now(), bytes_on_the_wire(cluster, "alpha"))];
        while !work.is_finished() {
            sleep(Duration::from_millis(20));
            seen.push((Instant::now(), bytes_on_the_wire(cluster, "alpha")));
        }
        (seen, work.join().expect("the command ends"))
    })
}

/// Bits a second in the middle of the first round, which lasted for `first`.
fn rate_of_the_first_round(seen: &[(Instant, u64)], first: Duration) -> f64 {
    let margin = Duration::from_millis(500);
    assert!(first > 4 * margin, "a first round of {first:?} is too short to be measured");
    // The boot files go at the same rate ahead of it.
    let begun = seen.iter().find(|(_, bytes)| *bytes > seen[0].1 + 200_000).expect("a first round").0;
    let within = |at: Instant| at > begun + margin && at < begun + first - margin;
    let middle: Vec<_> = seen.iter().filter(|(at, _)| within(*at)).collect();
    let (from, to) = (middle[0], middle[middle.len() - 1]);
    (to.1 - from.1) as f64 * 8.0 / (to.0 - from.0).as_secs_f64()
}

#[test]
fn rates_follow_a_guest_that_dirties_memory_and_keep_their_limits_on_the_wire() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    // Packets as on a cable: each with its own headers.
    cluster.lab.host("alpha").ip("link set uplink gso_max_segs 1").expect("a cable without offload");
    let work = Work::Dirty { region_mib: 32, pages_per_second: 1500, bytes_per_page: 4096 };
    Guest { work, ..Guest::small("web") }.run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(200).expect("a first life");

    let arguments = ["--json", "migrate", "web", "beta", "--rate-min", "40Mbit", "--rate-max", "400Mbit"];
    let (seen, printed) = watch_the_wire(&cluster, || alpha.run(&arguments));
    // Every round was printed when it ended, the result last.
    let values: Vec<Value> =
        serde_json::Deserializer::from_str(&printed).into_iter().map(|v| v.expect("JSON")).collect();
    let (result, rounds) = values.split_last().expect("a result");
    assert_eq!(result["result"]["rounds"].as_array().map(Vec::len), Some(rounds.len()), "{printed}");
    assert!(rounds.len() >= 3, "a first round, one that follows the guest, one with it stopped: {printed}");
    assert_eq!(rounds[0]["limit"], 5_000_000);
    let first = Duration::from_secs_f64(rounds[0]["ms"].as_f64().expect("a number") / 1e3);
    let seen = rate_of_the_first_round(&seen, first);
    println!("{:.2} Mbit/s on the wire in the first round", seen / MBIT);
    // Only the upper bound is a promise on a busy machine.
    assert!(seen <= 42.0 * MBIT, "{:.2} Mbit/s on the wire, not 40", seen / MBIT);
    let (step, max) = (6_250_000.0, 50_000_000.0);
    let mut bytes_a_page = 4096.0;
    // On a busy machine the guest may outrun its link; it is throttled then, and rounds go at the maximum.
    let unthrottled = |pair: &&[Value]| pair[1]["limit"] != 50_000_000;
    for pair in rounds.windows(2).take(rounds.len() - 2).take_while(unthrottled) {
        let number = |name: &str| pair[0][name].as_f64().expect("a number");
        if number("pages") > 0.0 {
            bytes_a_page = (number("bytes") / number("pages")).max(BYTES_A_PAGE_MIN);
        }
        let dirtied = number("left") * bytes_a_page / (number("ms") / 1e3);
        let limit = pair[1]["limit"].as_f64().expect("a limit");
        assert!(limit <= max && limit >= 5_000_000.0, "{pair:?}");
        assert!(
            (limit - (dirtied + step).max(5_000_000.0)).abs() <= limit * 0.01,
            "{dirtied} and a step: {pair:?}"
        );
    }
    assert!(rounds.iter().any(|round| round["skipped"].as_u64() > Some(0)), "no page waited: {printed}");
    assert_eq!(rounds.last().expect("a last one")["limit"], 50_000_000, "the last round goes at the maximum");

    let after = witness.check().expect("a machine on the target");
    assert_same_life(&born, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
    assert!(beta.machines().iter().any(|(name, _)| name == "web"));
    the_report_shows_it(alpha, result);
}

fn the_report_shows_it(alpha: &HostProcess, result: &Value) {
    let record = alpha.json(&["migrations", "web"]);
    assert_eq!(record["end"], "moved");
    assert_eq!(record["rounds"], result["result"]["rounds"]);
    assert_eq!(record["downtime_ms"], result["result"]["downtime_ms"]);
    let text = alpha.run(&["migrations", record["id"].as_str().expect("an id")]);
    assert!(text.contains("web from alpha to beta") && text.contains("paused because"), "{text}");
}

#[test]
fn a_migration_that_is_refused_or_cancelled_is_remembered_as_one() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let alpha = cluster.host("alpha");
    Guest::small("web").run(&cluster, alpha);
    let refusal = alpha.refuse(&["migrate", "web", "beta", "--rate-min", "80M", "--rate-max", "80Mbit"]);
    assert_eq!(refusal.code, 2, "{refusal:?}");
    assert!(refusal.text.contains("Mbit/s") && refusal.text.contains("above the maximum"), "{refusal:?}");
    assert_eq!(alpha.json(&["migrations"]), Value::Array(vec![]), "what was not begun leaves no record");
    let nobody = alpha.refuse(&["migrations", "web"]);
    assert_eq!(nobody.code, 3, "{nobody:?}");

    cluster.lab.unplug("beta").expect("a cable to pull");
    alpha.refuse(&["migrate", "web", "beta"]);
    cluster.lab.replug("beta").expect("a cable to put back");
    let record = alpha.json(&["migrations", "web"]);
    assert_eq!(record["end"], "failed", "{record}");
    assert!(record["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{record}");
    alpha.wait_state("web", &["running"]);
}
