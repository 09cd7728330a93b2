//! A machine that runs on a host of another network keeps its address and its connections, by a tunnel to its
//! home.

use serde_json::Value;
use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::{
    guest::{CheckResult, Identity, TestAgent, assert_same_life},
    lab::{Namespace, StreamEnd, StreamProbe},
};

const GUEST: &str = "10.88.0.100";

/// A network `lan0` that only alpha has, with a client in it. Beta reaches alpha, and nothing behind it.
fn home_network(cluster: &Cluster) -> Namespace {
    let (alpha, client) = (cluster.lab.host("alpha"), Namespace::new().expect("a namespace"));
    let ip = |place: &Namespace, words: &str| drop(place.ip(words).expect("a command of iproute2"));
    ip(alpha, "link add lan0 address 52:54:01:88:00:01 type bridge mcast_snooping 0");
    ip(alpha, "link set lan0 up");
    ip(&client, &format!("link add eth0 type veth peer name to-client netns {}", alpha.path()));
    ip(alpha, "link set to-client master lan0 up");
    ip(&client, "addr add 10.88.0.1/24 dev eth0");
    ip(&client, "link set eth0 up");
    alpha.wait_forwarding().expect("a bridge that forwards");
    client
}

fn start(cluster: &Cluster, name: &str) {
    let address = Some(GUEST.to_owned());
    Guest { address, bridge: "lan0", ..Guest::small(name) }.run(cluster, cluster.host("alpha"));
}

fn witness(client: &Namespace) -> TestAgent {
    let address: SocketAddr = format!("{GUEST}:7000").parse().expect("an address");
    let deadline = Instant::now() + PATIENCE;
    loop {
        match client.connect(address, Duration::from_secs(2)) {
            Ok(stream) => return TestAgent::connected(stream).expect("a connection"),
            Err(error) => assert!(Instant::now() < deadline, "the guest does not answer: {error}"),
        }
    }
}

fn stream(client: &Namespace) -> StreamProbe {
    let address = format!("{GUEST}:7001").parse().expect("an address");
    StreamProbe::start(client, address, PATIENCE).expect("a stream")
}

/// Waits until the stream has brought more lines.
fn wait_lines(stream: &StreamProbe, when: &str) {
    let (begun, deadline) = (stream.lines(), Instant::now() + PATIENCE);
    while stream.lines() < begun + 20 {
        assert!(Instant::now() < deadline, "{when}: the stream stands still at line {begun}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The median of some questions to the guest.
fn round_trip(witness: &mut TestAgent) -> Duration {
    let mut ask = || {
        let begun = Instant::now();
        witness.state().expect("an answer");
        begun.elapsed()
    };
    let mut took: Vec<_> = (0..51).map(|_| ask()).collect();
    took.sort();
    took[took.len() / 2]
}

fn machine(host: &HostProcess, name: &str) -> Option<Value> {
    let machines = host.json(&["ps"]);
    machines.as_array()?.iter().find(|machine| machine["name"] == name).cloned()
}

/// Waits until `ps` shows what is wanted of the machine.
fn wait_for(host: &HostProcess, name: &str, what: &str, is_so: impl Fn(Option<&Value>) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = machine(host, name);
        if is_so(now.as_ref()) {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{name} on {}: not {what}: {now:?}\n{}",
            host.name(),
            host.log_text()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn wait_connected(cluster: &Cluster, name: &str) {
    for host in ["alpha", "beta"] {
        wait_for(cluster.host(host), name, "connected", |machine| {
            machine.is_some_and(|machine| machine["tunnel"]["connected"] == true)
        });
    }
}

/// Nothing of a tunnel is left on a host: no device, no note.
fn wait_nothing_left(cluster: &Cluster, host: &str) {
    let (deadline, process) = (Instant::now() + PATIENCE, cluster.host(host));
    loop {
        let devices = cluster.lab.host(host).ip("-o link show").expect("a list of devices");
        let devices: Vec<_> = devices.lines().filter(|line| line.contains("wmh")).collect();
        let notes = std::fs::read_dir(process.data().join("tunnels")).expect("a directory").count();
        if devices.is_empty() && notes == 0 {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "left on {host}: {devices:?}, {notes} notes\n{}",
            process.log_text()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn assert_unharmed(before: &Identity, after: &Identity) {
    assert_same_life(before, after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
}

#[test]
fn a_machine_on_another_network_keeps_its_connections_until_it_is_home_again() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let client = home_network(&cluster);
    start(&cluster, "web");
    let mut witness = witness(&client);
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    let born = witness.write(100).expect("a first life");
    let stream = stream(&client);

    let at_home = round_trip(&mut witness);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let refusal = alpha.refuse(&["migrate", "web", "beta"]);
    assert!(refusal.text.contains("lan0"), "beta has no such network: {refusal:?}");
    let moved = alpha.json(&["migrate", "web", "beta", "--network", "home"]);
    assert_eq!(moved["result"]["network"]["kind"], "tunnelled", "{moved}");
    assert_eq!(moved["result"]["network"]["home"], "alpha", "{moved}");
    beta.wait_state("web", &["running"]);
    wait_connected(&cluster, "web");
    wait_lines(&stream, "away");
    assert_unharmed(&born, &witness.check().expect("an answer on the connection that was open all the time"));
    println!("a question to the guest takes {at_home:?} at home, {:?} away", round_trip(&mut witness));
    let away = machine(alpha, "web").expect("what alpha knows of it");
    assert_eq!(
        (&away["state"]["kind"], &away["tunnel"]["away"]),
        (&"remote".into(), &"beta".into()),
        "{away}"
    );
    assert!(alpha.run(&["ps"]).contains("lan0 for beta") && beta.run(&["ps"]).contains("lan0 of alpha"));

    // Either daemon may be killed: the tunnel is there again with the next one.
    for host in ["alpha", "beta"] {
        cluster.host_mut(host).kill_daemon();
        cluster.host_mut(host).start_daemon();
        wait_connected(&cluster, "web");
        wait_lines(&stream, host);
    }
    // And so may the cable between them.
    cluster.lab.unplug("beta").expect("a cable to pull");
    wait_for(cluster.host("beta"), "web", "cut off", |machine| {
        machine.is_some_and(|machine| machine["tunnel"]["connected"] == false)
    });
    cluster.lab.replug("beta").expect("a cable to put back");
    wait_connected(&cluster, "web");
    wait_lines(&stream, "after the cable was put back");

    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let moved = beta.json(&["migrate", "web", "alpha"]);
    assert_eq!(moved["result"]["network"]["kind"], "announced", "{moved}");
    wait_lines(&stream, "home again");
    assert_unharmed(&born, &witness.check().expect("an answer on the same connection"));
    let stream = stream.stop();
    assert_eq!(stream.end, StreamEnd::Stopped, "the TCP stream broke: {stream:?}");
    assert_eq!(alpha.machines(), [("web".to_owned(), "running".to_owned())]);
    assert_eq!(machine(alpha, "web").expect("the machine")["tunnel"], Value::Null);
    beta.wait_empty();
    wait_nothing_left(&cluster, "alpha");
    wait_nothing_left(&cluster, "beta");
}

#[test]
fn a_suspended_machine_resumed_elsewhere_has_its_network_until_it_is_stopped() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let client = home_network(&cluster);
    start(&cluster, "web");
    let mut before = witness(&client);
    before.wait_ready(PATIENCE).expect("a guest that is up");
    let born = before.write(50).expect("a first life");
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    alpha.run(&["suspend", "web"]);
    let file = cluster.disk.path().join("web.capsule");
    let file = file.to_str().expect("a path in UTF-8");
    alpha.run(&["export", "web", file]);
    beta.run(&["import", file, "carried"]);
    beta.run(&["resume", "carried", "--name", "web", "--network", "home"]);
    wait_connected(&cluster, "web");
    let mut after = witness(&client);
    after.wait_ready(PATIENCE).expect("a guest that is up");
    assert_unharmed(&born, &after.check().expect("a life that goes on in its network"));

    beta.run(&["stop", "web", "--kill"]);
    wait_nothing_left(&cluster, "alpha");
    wait_nothing_left(&cluster, "beta");
    assert_eq!(machine(alpha, "web").expect("the machine")["tunnel"], Value::Null);
}

#[test]
fn a_host_without_the_right_gets_no_network_and_its_machine_can_be_given_up() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let client = home_network(&cluster);
    start(&cluster, "web");
    witness(&client).wait_ready(PATIENCE).expect("a guest that is up");
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let path = alpha.data().join("trust.toml");
    let trust = std::fs::read_to_string(&path).expect("alpha's trust file");
    let rights = trust.lines().find(|line| line.contains("tunnel")).map(str::to_owned);
    let without = rights.map_or(trust.clone(), |line| trust.replace(&line, &line.replace("tunnel", "pool")));
    assert_ne!(trust, without, "{trust}");
    std::fs::write(&path, without).expect("a trust file that can be written");

    alpha.run(&["migrate", "web", "beta", "--network", "home"]);
    wait_for(beta, "web", "refused", |machine| {
        let reason = machine.and_then(|machine| machine["tunnel"]["reason"].as_str());
        reason.is_some_and(|reason| reason.contains("not allowed"))
    });
    wait_for(alpha, "web", "away", |machine| {
        machine.is_some_and(|m| m["state"]["kind"] == "remote" && m["tunnel"]["connected"] == false)
    });
    alpha.run(&["delete", "web"]);
    assert!(alpha.machines().is_empty());
    wait_nothing_left(&cluster, "alpha");
    beta.run(&["stop", "web", "--kill"]);
    wait_nothing_left(&cluster, "beta");
}
