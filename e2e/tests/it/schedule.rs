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

#[test]
fn scheduled_pushes_leave_as_many_tags_at_the_other_host_as_their_rule_retains() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    let create =
        ["schedule", "create", "offsite", "push", "web", "--to", "beta", "--every", "366d", "--last", "2"];
    alpha.run(&create);
    let mut capsules = Vec::new();
    for _ in 0..4 {
        let taken = alpha.json(&["checkpoint", "web"])["result"]["capsule"].clone();
        alpha.run(&["schedule", "run", "offsite"]);
        // The same capsule again drives out no other.
        alpha.run(&["schedule", "run", "offsite"]);
        capsules.push(taken);
    }
    let there = beta.json(&["ls"]);
    let is_named = |one: &&serde_json::Value| one["names"].as_array().is_some_and(|names| !names.is_empty());
    let mut there: Vec<_> = there.as_array().expect("a list").iter().filter(is_named).collect();
    there.reverse();
    let there: Vec<_> = there.into_iter().map(|one| one["id"].clone()).collect();
    assert_eq!(there, capsules[2..], "the newest two are there, oldest first");
    let tags = alpha.json(&["schedule", "show", "offsite"])["tags"].clone();
    let names = beta.run(&["ls"]);
    let tags: Vec<&str> = tags.as_array().expect("a list").iter().filter_map(|tag| tag.as_str()).collect();
    assert!(tags.len() == 2 && tags.iter().all(|tag| names.contains(tag)), "{tags:?}\n{names}");
    beta.run(&["resume", tags[1], "--name", "again"]);
    let refusal = alpha.refuse(&[
        "schedule",
        "create",
        "pool",
        "push",
        "web",
        "--to",
        "pool:m/vms",
        "--every",
        "1d",
        "--last",
        "2",
    ]);
    assert!(refusal.text.contains("policy"), "{refusal:?}");
}
