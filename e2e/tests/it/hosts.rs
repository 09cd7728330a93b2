//! Machines of several hosts in one list.

use serde_json::Value;
use whimbrel_e2e::{Cluster, Guest, HostProcess};

/// Names of the machines of each host, as `host` sees them, and why a host has not answered.
fn seen(host: &HostProcess) -> Vec<(String, Vec<String>, bool)> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let all = host.json(&["ps", "--all-hosts"]);
    let of = |host: &Value| {
        let machines = host["machines"].as_array().expect("a list of machines");
        (
            text(&host["name"]),
            machines.iter().map(|one| text(&one["name"])).collect(),
            host["failure"].is_null(),
        )
    };
    all.as_array().expect("a list of hosts").iter().map(of).collect()
}

#[test]
fn machines_of_all_hosts_are_listed_as_far_as_they_may_be_read() {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let small = |name: &str| Guest { address: None, ..Guest::small(name) };
    small("web").run(&cluster, alpha);
    small("db").run(&cluster, beta);
    small("secret").run(&cluster, beta);
    let host = |name: &str, machines: &[&str], answers| {
        (name.to_owned(), machines.iter().map(|one| (*one).to_owned()).collect(), answers)
    };
    let whole =
        [host("alpha", &["web"], true), host("beta", &["db", "secret"], true), host("gamma", &[], true)];
    assert_eq!(seen(alpha), whole);

    beta.run(&["trust", "set", "alpha", "--read", "db"]);
    beta.run(&["checkpoint", "secret", "--tag", "kept"]);
    for (hidden, how) in [("secret", &[][..]), ("kept", &[]), ("secret", &["--follow"])] {
        let refusal = beta.refuse(&[&["push", hidden, "alpha"], how].concat()).text;
        assert!(
            refusal.contains(&format!("alpha may not read {hidden} here: `whimbrel trust set")),
            "{refusal}"
        );
    }
    beta.wait_state("secret", &["running"]);
    cluster.host_mut("gamma").kill_daemon();
    let alpha = cluster.host("alpha");
    assert_eq!(
        seen(alpha),
        [host("alpha", &["web"], true), host("beta", &["db"], true), host("gamma", &[], false)]
    );
    let text = alpha.run(&["ps", "--all-hosts"]);
    assert!(text.contains("beta   db") && text.contains("\ngamma: "), "{text}");
    let first = &alpha.json(&["ps", "--all-hosts"])[1];
    assert!(first["memory"]["spare"].as_u64() > Some(0), "{first}");
    assert_eq!(first["machines"][0]["disks"][0]["base"], "", "a path of beta is nobody else's business");
}
