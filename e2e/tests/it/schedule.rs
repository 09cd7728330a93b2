//! Work that the daemon does by itself.

use whimbrel_e2e::{Cluster, Guest, PATIENCE, console};

#[test]
fn a_schedule_checkpoints_retains_what_its_rule_says_and_shows_a_failure() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    alpha.run(&["checkpoint", "web", "--tag", "mine"]);
    let create = ["schedule", "create", "nightly", "checkpoint", "web", "--every", "366d", "--last", "1"];
    alpha.run(&create);
    assert!(alpha.refuse(&create).text.contains("already"));
    alpha.run(&["schedule", "run", "nightly"]);
    let first = alpha.json(&["schedule", "show", "nightly"])["tags"].clone();
    let ran = alpha.json(&["schedule", "run", "nightly"]);
    assert_eq!((&ran["removed"], ran["retained"].as_array().map(Vec::len)), (&first, Some(1)), "{ran}");
    let capsules = alpha.run(&["ls"]);
    assert!(capsules.contains("mine") && !capsules.contains(first[0].as_str().expect("a tag")), "{capsules}");
    alpha.refuse(&["tag", "mine", "schedule.nightly.0000000000001"]);

    alpha.run(&["stop", "web", "--kill"]);
    assert!(alpha.refuse(&["schedule", "run", "nightly"]).text.contains("failed"));
    let shown = alpha.run(&["ps"]);
    assert!(shown.contains("schedule FAILED: nightly"), "{shown}");
    assert_eq!(alpha.json(&["schedule", "ls"])[0]["tags"], ran["retained"], "a failure removes nothing");
    alpha.run(&["verify"]);
}
