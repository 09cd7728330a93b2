//! Versions of a machine: children of a golden capsule, an update of it, and the end of the old one.

use serde_json::Value;
use std::{fs, path::Path};
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, Identity, TestAgent, assert_same_life};

const PAGE: usize = 4096;

/// A small guest without a network, and its witness.
fn start(cluster: &Cluster, alpha: &HostProcess, name: &str) -> TestAgent {
    Guest { address: None, ..Guest::small(name) }.run(cluster, alpha);
    ready(alpha, name)
}

fn ready(alpha: &HostProcess, name: &str) -> TestAgent {
    let mut witness = console(alpha, name);
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    witness
}

fn assert_good(state: &Identity) {
    assert!(
        matches!(state.ram, CheckResult::Good(_)) && matches!(state.disk, CheckResult::Good(_)),
        "{state:?}"
    );
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_else(|| panic!("no {field} in {value}"))
}

/// The id that a capsule has.
fn id(alpha: &HostProcess, capsule: &str) -> String {
    text(&alpha.json(&["show", capsule]), "id").to_owned()
}

/// The first disk of a capsule, byte for byte.
fn disk(cluster: &Cluster, alpha: &HostProcess, capsule: &str) -> Vec<u8> {
    let path = cluster.disk.path().join(format!("{capsule}.exported"));
    let file = path.to_str().expect("a path in UTF-8");
    alpha.run(&["export", capsule, file, "--format", "raw"]);
    let content = fs::read(Path::new(file)).expect("the exported disk");
    fs::remove_file(path).expect("a file to remove");
    content
}

/// Pages for which this is so of the contents of three disks.
fn pages(disks: [&[u8]; 3], is_so: impl Fn([&[u8]; 3]) -> bool) -> u64 {
    let page = |disk: usize, at: usize| &disks[disk][at..at + PAGE];
    let all = (0..disks[0].len()).step_by(PAGE);
    all.filter(|at| is_so([page(0, *at), page(1, *at), page(2, *at)])).count() as u64
}

fn standing<'a>(report: &'a Value, name: &str) -> &'a Value {
    let all = report["standing"].as_array().expect("a list");
    let is_it = |entry: &&Value| {
        entry["machine"] == name
            || (entry["machine"].is_null()
                && entry["names"].as_array().is_some_and(|names| names.contains(&name.into())))
    };
    all.iter().find(is_it).unwrap_or_else(|| panic!("{name} is not in {report}"))
}

#[test]
fn children_of_a_golden_capsule_are_found_after_its_update_and_outlive_it() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let mut maintained = start(&cluster, alpha, "maintained");
    maintained.write(300).expect("a system");
    let taken = alpha.json(&["checkpoint", "maintained", "--disks-only", "--tag", "golden"]);
    assert_eq!(alpha.json(&["show", "golden"])["active"], false, "{taken}");
    alpha.run(&["tag", "golden", "golden-1"]);
    let first = id(alpha, "golden-1");

    alpha.run(&["derive", "golden", "kid-a"]);
    alpha.run(&["derive", "golden", "kid-b", "--memory", "160M", "--cpus", "2"]);
    let (mut kid_a, mut kid_b) = (ready(alpha, "kid-a"), ready(alpha, "kid-b"));
    let born_a = kid_a.write(400).expect("a life of its own");
    let born_b = kid_b.write(40).expect("another one");
    assert_ne!(born_a.nonce, born_b.nonce, "children boot, they are no clones");
    alpha.run(&["checkpoint", "kid-a", "--tag", "kid-a-1"]);
    alpha.run(&["suspend", "kid-b", "--tag", "kid-b-1"]);
    for kid in ["kid-a-1", "kid-b-1"] {
        assert_eq!(alpha.json(&["show", kid])["parents"], serde_json::json!([first]));
    }
    alpha.run(&["derive", "golden-1", "kid-c"]);
    ready(alpha, "kid-c");

    maintained.write(500).expect("an update");
    let moved = alpha.json(&["checkpoint", "maintained", "--disks-only", "--tag", "golden"]);
    let second = id(alpha, "golden");
    assert_eq!(text(&moved["result"], "capsule"), second);

    let report = alpha.json(&["outdated", "golden"]);
    assert_eq!((text(&report, "onto"), text(&report["old"][0], "capsule")), (&*second, &*first));
    let disks = [
        disk(&cluster, alpha, "golden-1"),
        disk(&cluster, alpha, "kid-a-1"),
        disk(&cluster, alpha, "golden"),
    ];
    let disks = [&*disks[0], &*disks[1], &*disks[2]];
    let found = &standing(&report, "kid-a-1")["disks"][0];
    assert_eq!(found["changed"], pages(disks, |[base, kid, _]| kid != base));
    assert_eq!(found["updated"], pages(disks, |[base, _, new]| new != base));
    let both = pages(disks, |[base, kid, new]| kid != base && new != base && kid != new);
    assert_eq!(found["conflicts"], both);
    // Two dozen are to be expected: that none meets happens once in ten thousand million times.
    assert!(both > 0 && both < 400, "the places are drawn from 8192, yet {both} of 400 and 500 met");
    assert_eq!(text(standing(&report, "kid-b-1"), "old"), first);
    assert_eq!(text(standing(&report, "kid-c"), "capsule"), first);
    assert_eq!(
        standing(&report, "kid-a")["disks"][0]["changed"],
        found["changed"],
        "what it wrote is its overlay"
    );
    let names: Vec<_> = report["standing"].as_array().expect("a list").iter().map(|s| &s["names"]).collect();
    assert!(
        !names.iter().any(|names| names.to_string().contains("golden\"")),
        "the update stands on nothing old"
    );

    let nodes = alpha.json(&["log", "golden-1", "--graph"]);
    let node = |name: &str| {
        let nodes = nodes.as_array().expect("a list");
        nodes.iter().find(|node| node["id"] == *id(alpha, name)).expect("a node").clone()
    };
    assert_eq!(node("golden-1")["children"].as_array().map(Vec::len), Some(3));
    assert_eq!(node("golden-1")["machines"], serde_json::json!([{"name": "kid-c", "live": true}]));
    assert_eq!(node("kid-a-1")["under"], serde_json::json!([first]));
    assert_eq!(node("golden")["adds"], 4096 * pages(disks, |[base, _, new]| new != base));
    let drawn = alpha.run(&["log", "--graph"]);
    assert!(drawn.contains("├─●") && drawn.contains("└─○") && drawn.contains("← kid-c"), "{drawn}");

    alpha.run(&["stop", "kid-c", "--kill"]);
    alpha.run(&["untag", "golden-1"]);
    alpha.run(&["gc"]);
    assert_eq!(alpha.json(&["log", "golden", "--refs"])[1]["here"], true, "kid-c still lies over it");
    alpha.run(&["delete", "kid-c"]);
    assert_same_life(&born_a, &kid_a.check().expect("a machine that reads from what has no name"));
    alpha.run(&["suspend", "kid-a"]);
    alpha.run(&["gc"]);
    assert_eq!(alpha.json(&["log", "golden", "--refs"])[1]["here"], false);
    assert_eq!(alpha.refuse(&["show", &first]).code, 3);
    alpha.run(&["verify"]);
    let report = alpha.json(&["outdated", "golden"]);
    assert!(text(standing(&report, "kid-b-1"), "unknown").contains("no longer"), "{report}");
    for (kid, born) in [("kid-a", born_a), ("kid-b", born_b)] {
        alpha.run(&["resume", kid, "--full"]);
        let after = console(alpha, kid).check().expect("a child that goes on without its parent");
        assert_same_life(&born, &after);
        assert_good(&after);
    }
}

#[test]
fn capsules_of_disks_only_do_not_disturb_those_with_memory() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let mut web = start(&cluster, alpha, "web");
    let born = web.write(100).expect("a first life");
    alpha.run(&["checkpoint", "web"]);
    for round in 1..=2 {
        web.write(50).expect("writes");
        alpha.run(&["checkpoint", "web", "--disks-only", "--tag", &format!("disks-{round}")]);
    }
    web.write(50).expect("writes");
    let taken = alpha.json(&["checkpoint", "web", "--tag", "whole"]);
    assert_eq!(
        alpha.json(&["show", "whole"])["parents"],
        serde_json::json!([id(alpha, "disks-2")]),
        "{taken}"
    );
    alpha.run(&["untag", "disks-1", "disks-2"]);
    alpha.run(&["gc"]);
    web.write(20).expect("writes");
    let last = web.check().expect("an answer");
    alpha.run(&["suspend", "web"]);
    alpha.run(&["verify"]);
    alpha.run(&["resume", "web", "--full"]);
    let after = console(alpha, "web").check().expect("a life that goes on");
    assert_same_life(&born, &after);
    assert_good(&after);
    assert_eq!((after.ram, after.disk), (last.ram, last.disk));
}

#[test]
fn disks_are_the_same_of_a_machine_that_is_paused_switched_off_or_suspended() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    start(&cluster, alpha, "seed").write(200).expect("a system");
    alpha.run(&["checkpoint", "seed", "--disks-only", "--tag", "golden"]);
    for name in ["seed", "kid"] {
        if name == "kid" {
            alpha.run(&["derive", "golden", "kid"]);
        }
        ready(alpha, name).write(70).expect("writes");
        alpha.run(&["pause", name]);
        alpha.run(&["checkpoint", name, "--disks-only", "--tag", "paused"]);
        alpha.run(&["checkpoint", name, "--tag", "active"]);
        alpha.run(&["stop", name, "--kill"]);
        alpha.run(&["checkpoint", name, "--disks-only", "--tag", "off"]);
        let content = disk(&cluster, alpha, "paused");
        assert!(content == disk(&cluster, alpha, "off"), "{name}: switched off it has other disks");
        assert!(content == disk(&cluster, alpha, "active"), "{name}: with memory it has other disks");
        assert!(content != disk(&cluster, alpha, "golden") || name == "seed");
        assert_eq!(alpha.json(&["show", "off"])["active"], false);
    }
    alpha.run(&["resume", "active", "--name", "again"]);
    alpha.run(&["suspend", "again", "--tag", "asleep"]);
    alpha.run(&["checkpoint", "again", "--disks-only", "--tag", "of-asleep"]);
    assert_eq!(
        alpha.refuse(&["checkpoint", "again", "--disks-only"]).code,
        2,
        "its name is what it resumes from"
    );
    assert!(disk(&cluster, alpha, "asleep") == disk(&cluster, alpha, "of-asleep"));
    alpha.run(&["verify"]);
}

#[test]
fn a_promoted_capsule_is_the_same_machine_without_a_past() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let mut web = start(&cluster, alpha, "web");
    web.write(100).expect("a first life");
    alpha.run(&["checkpoint", "web", "--tag", "first"]);
    let born = web.check().expect("an answer");
    alpha.run(&["suspend", "web", "--tag", "second"]);
    let before = alpha.json(&["show", "second"]);
    let report = alpha.json(&["promote", "second", "--all-refs"]);
    assert_eq!((&report["bytes_copied"], &report["was"]), (&0.into(), &before["id"]));
    assert!(report["bytes_added"].as_u64().is_some_and(|bytes| bytes < 16 << 10), "{report}");
    let after = alpha.json(&["show", "web"]);
    assert_eq!((&after["images"], &after["parents"]), (&before["images"], &serde_json::json!([])));
    assert_eq!(after["id"], report["capsule"]);
    assert_eq!(alpha.json(&["log", "second"]).as_array().map(Vec::len), Some(1));
    assert_eq!(alpha.json(&["promote", "second"])["capsule"], report["capsule"], "again is nothing more");
    let refused = alpha.refuse(&["promote", text(&report, "capsule")]);
    assert!(refused.text.contains("--tag"), "{refused:?}");
    alpha.run(&["untag", "first"]);
    alpha.run(&["gc"]);
    alpha.run(&["resume", "web", "--full"]);
    let resumed = console(alpha, "web").check().expect("a life that goes on");
    assert_same_life(&born, &resumed);
    assert_good(&resumed);
    alpha.run(&["checkpoint", "web"]);
    assert_eq!(alpha.json(&["show", "web"])["parents"], serde_json::json!([report["capsule"]]));
}

#[test]
fn a_trusted_host_is_limited_by_name_and_a_pattern_that_matches_nothing_is_refused() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    alpha.run(&["trust", "add", "beta", "--ssh", "root@beta", "--read", "web,golden*"]);
    let entry = &alpha.json(&["trust", "ls"])[0];
    assert_eq!((&entry["read"], entry.get("write")), (&serde_json::json!(["web", "golden*"]), None));
    let limited = alpha.run(&["trust", "set", "beta", "--write", "backup-*"]);
    assert_eq!(limited, "beta: reads none, writes backup-*\n");
    assert_eq!(alpha.refuse(&["trust", "set", "beta", "--read", "golden/*"]).code, 2);
    assert_eq!(alpha.refuse(&["trust", "set", "gamma", "--read", "web"]).code, 3);
    assert_eq!(alpha.run(&["trust", "set", "beta", "--all"]), "beta: reads all, writes all\n");
}
