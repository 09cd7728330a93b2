//! Protected machines while connections between their hosts stop: no lease ends because of one of them, and
//! nobody sees what the standby does not know.

use std::time::{Duration, Instant};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::assert_same_life;

fn is_protected(host: &HostProcess) -> bool {
    let machines = host.json(&["ps"]);
    machines[0]["protection"]["state"]["kind"] == "protected"
}

fn wait_protected(host: &HostProcess) {
    let deadline = Instant::now() + PATIENCE;
    while !is_protected(host) {
        assert!(Instant::now() < deadline, "not protected:\n{}", host.log_text());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_connection_that_stops_for_longer_than_a_lease_ends_none() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest::small("web").run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    alpha.run(&["protect", "web", "beta", "--lease", "2s", "--witness", "gamma"]);
    wait_protected(alpha);

    let network = cluster.lab.host("alpha");
    let run = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        network.output(words[0], &words[1..]).expect("a command to succeed")
    };
    let (address, port) = beta.address().rsplit_once(':').map(|(a, p)| (a.to_owned(), p.to_owned())).unwrap();
    let open = run(&format!("ss -Htn state established dst {address} dport = :{port}"));
    let own_port =
        |line: &str| line.split_whitespace().nth(2)?.rsplit_once(':').map(|(_, port)| port.to_owned());
    let ports: Vec<String> = open.lines().filter_map(own_port).collect();
    assert!(ports.len() > 2, "{open}");
    run("nft add table inet cut");
    run("nft add chain inet cut out { type filter hook output priority 0 ; }");
    let (here, there) = (alpha.log_text().len(), beta.log_text().len());
    for port in &ports {
        run(&format!("nft add rule inet cut out tcp sport {port} drop"));
        std::thread::sleep(Duration::from_secs(3));
        run("nft flush chain inet cut out");
    }
    assert_same_life(&born, &witness.check().expect("a machine that goes on"));
    let (here, there) = (&alpha.log_text()[here..], &beta.log_text()[there..]);
    assert!(
        is_protected(alpha) && !here.contains("unprotected") && !here.contains("lease has run out"),
        "{here}"
    );
    assert!(!there.contains("the primary is silent"), "{there}");
}

#[test]
fn the_console_shows_nothing_that_the_standby_does_not_know() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    let mut guest = console(alpha, "web");
    guest.wait_ready(PATIENCE).expect("a guest that is up");
    alpha.run(&["protect", "web", "beta", "--lease", "30s", "--witness", "gamma"]);
    wait_protected(alpha);
    guest.check().expect("an answer, an epoch later");

    cluster.lab.unplug("beta").expect("a cable to pull");
    // An epoch that was under way may still arrive; none after it does.
    std::thread::sleep(Duration::from_secs(1));
    let logged = alpha.run(&["console", "web", "--log"]);
    let early = guest.state_within(Duration::from_secs(3));
    assert!(early.is_err(), "seen before it is at the standby: {early:?}");
    assert_eq!(alpha.run(&["console", "web", "--log"]), logged);
    cluster.lab.replug("beta").expect("a cable to put back");
    guest.wait_ready(PATIENCE).expect("what it said meanwhile, and an answer");
    // Alone it holds nothing.
    alpha.run(&["unprotect", "web"]);
    guest.check().expect("an answer");
}
