//! Machines that start without a user: with their host, and after their QEMU has died.

use std::{
    fs,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console};

#[test]
fn a_machine_starts_with_its_host_and_again_when_its_qemu_dies_but_not_after_its_user_stopped_it() {
    let mut cluster = Cluster::start(&["alpha"]);
    Guest { address: None, ..Guest::small("web") }.run(&cluster, cluster.host("alpha"));
    let alpha = cluster.host("alpha");
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    alpha.run(&["set", "web", "--autostart", "yes", "--restart", "on-failure", "--label", "tier=front"]);
    assert_eq!(alpha.json(&["ps", "--label", "tier=front"])[0]["name"], "web");
    assert_eq!(alpha.json(&["ps", "--label", "tier=back"]).as_array().map(Vec::len), Some(0));

    alpha.exec("kill", &["-9", &pid(alpha)]);
    wait_restarted(alpha);
    let events = alpha.run(&["events", "--past"]);
    assert!(!events.contains("starting"), "the entry of before still speaks: {events}");
    assert!(events.contains("crashed: its QEMU ended") && events.contains("by itself: started"), "{events}");

    // A host that lost its power has neither processes nor what was on a tmpfs.
    let died = pid(alpha);
    cluster.host_mut("alpha").kill_daemon();
    let alpha = cluster.host("alpha");
    alpha.exec("kill", &["-9", &died]);
    for entry in fs::read_dir(alpha.run_dir()).expect("the run directory").flatten() {
        fs::remove_dir_all(entry.path()).or_else(|_| fs::remove_file(entry.path())).expect("a tmpfs");
    }
    cluster.host_mut("alpha").start_daemon();
    wait_restarted(cluster.host("alpha"));
    let past = cluster.host("alpha").run(&["events", "--past"]);
    assert!(past.contains("crashed: its QEMU ended"), "what an earlier daemon saw is forgotten: {past}");

    cluster.host("alpha").run(&["stop", "web", "--kill"]);
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let now = &cluster.host("alpha").json(&["ps"])[0];
    assert_eq!(now["state"]["kind"], "stopped", "{now}");
    assert!(now["restarts"].is_null(), "a restart of the daemon alone plans nothing: {now}");
}

fn pid(host: &HostProcess) -> String {
    host.json(&["ps"])[0]["pid"].as_u64().expect("a pid").to_string()
}

/// Waits for the start without a user, and then for the guest.
fn wait_restarted(host: &HostProcess) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = &host.json(&["ps"])[0];
        if now["restarts"]["count"] == 1 && now["state"]["kind"] == "running" {
            break;
        }
        assert!(Instant::now() < deadline, "it does not start: {now}\n{}", host.log_text());
        std::thread::sleep(Duration::from_millis(50));
    }
    console(host, "web").wait_ready(PATIENCE).expect("a guest that has booted");
}
