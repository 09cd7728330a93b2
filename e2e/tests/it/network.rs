//! Managed networks: addresses, names, a way out, published ports; what a move keeps, and what is left.

use serde_json::Value;
use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, DHCP, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::{
    guest::{TestAgent, Work, assert_same_life},
    lab::{Namespace, StreamEnd, StreamProbe},
};

pub(crate) fn start(cluster: &Cluster, host: &HostProcess, name: &str) {
    let small = Guest { arguments: seed(cluster), ..Guest::small(name) };
    Guest { address: Some(DHCP.to_owned()), bridge: "lan0", work: Work::GuestAgent, ..small }
        .run(cluster, host);
}

const KEY: &str = "AAAAC3NzaC1lZDI1NTE5AAAAIJ0i0xV0sZ0nq3o0r6JbqgqQ0d8kq2wV8m2s3sZb1e2F";

/// Arguments that give a machine a seed disk for cloud-init.
fn seed(cluster: &Cluster) -> Vec<String> {
    let path = cluster.disk.path().join("id.pub");
    std::fs::write(&path, format!("ssh-ed25519 {KEY} me@home\n")).expect("a file");
    vec!["--ssh-key".to_owned(), path.display().to_string()]
}

/// Connects to `address` once something there takes connections.
fn connect(place: &Namespace, address: SocketAddr) -> TcpStream {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match place.connect(address, Duration::from_secs(2)) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < deadline, "{address} does not answer: {error}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub(crate) fn agent(place: &Namespace, address: SocketAddr) -> TestAgent {
    let mut agent = TestAgent::connected(connect(place, address)).expect("a connection");
    agent.wait_ready(PATIENCE).expect("a guest that is up");
    agent
}

/// What a line prints in the shell of the guest at `address`.
pub(crate) fn ask(place: &Namespace, address: Ipv4Addr, line: &str) -> String {
    let mut stream = connect(place, (address, 7070).into());
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.write_all(format!("{line}\n").as_bytes()).expect("a shell that reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// Asks until the answer has `expected` in it: dnsmasq and the guest are ready at their own times.
pub(crate) fn ask_for(place: &Namespace, address: Ipv4Addr, line: &str, expected: &str) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = ask(place, address, line);
        if answer.contains(expected) {
            return;
        }
        assert!(Instant::now() < deadline, "{line}: {answer}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// An address beside `address` that is none of `taken`.
fn beside(address: Ipv4Addr, taken: &[Ipv4Addr]) -> Ipv4Addr {
    let others = (1..).map(|step| Ipv4Addr::from(u32::from(address) ^ step));
    others.into_iter().find(|other| !taken.contains(other)).expect("a free address")
}

pub(crate) fn address_of(host: &HostProcess, machine: &str) -> Ipv4Addr {
    let network = host.json(&["network", "show", "lan0"]);
    let machines = network["machines"].as_array().expect("a list");
    let found = machines.iter().find(|it| it["machine"] == machine).unwrap_or_else(|| panic!("{network}"));
    found["address"].as_str().and_then(|text| text.parse().ok()).expect("an address")
}

/// Waits until no machine has an address in the network.
fn wait_no_leases(host: &HostProcess) {
    let deadline = Instant::now() + PATIENCE;
    while host.json(&["network", "show", "lan0"])["machines"] != Value::Array(Vec::new()) {
        assert!(Instant::now() < deadline, "a machine that is gone keeps its address");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn machines_of_a_network_have_addresses_names_a_way_out_and_published_ports() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let created = alpha.json(&["network", "create", "lan0"]);
    assert_eq!(created["subnet6"].as_str().map(|subnet| subnet.starts_with("fd")), Some(true), "{created}");
    start(&cluster, alpha, "web");
    start(&cluster, alpha, "db");
    alpha.run(&["network", "publish", "web", "2222:7000", "7071:7070"]);
    let (web, db) = (address_of(alpha, "web"), address_of(alpha, "db"));

    // From the host itself, and from another one.
    let (place, client) = (cluster.lab.host("alpha"), cluster.lab.host("client"));
    agent(place, (Ipv4Addr::LOCALHOST, 2222).into());
    let mut outside = agent(client, (place.address(), 2222).into());
    let before = outside.state().expect("an answer");
    assert_eq!(alpha.json(&["network", "show", "lan0"])["ports"][0]["answers"], true);
    // Whoever has a route to the network still reaches only what is published.
    client.ip(&format!("route add {db} via {}", place.address())).expect("a route");
    let refused = client.connect((db, 7000).into(), Duration::from_secs(2));
    assert!(refused.is_err(), "a port that was not published is reached from outside");

    ask_for(place, web, "nslookup db.internal", &db.to_string());
    // By address: a static busybox looks up no names but in nslookup.
    ask_for(place, web, &format!("nc -w 2 {db} 7000 </dev/null && echo reached"), "reached");
    ask_for(place, web, &format!("ping -c 1 -W 2 {} && echo reached", client.address()), "reached");
    ask_for(place, web, "ip -6 addr show dev eth0", "scope global");

    // A machine speaks from its own address only, whatever it gives itself.
    let gateway: Ipv4Addr =
        created["gateway"].as_str().and_then(|text| text.parse().ok()).expect("a gateway");
    ask_for(place, web, &format!("ping -c 1 -W 2 {gateway} && echo reached"), "reached");
    let foreign = format!(
        "ip addr add {}/24 dev eth0; ping -I {0} -c 1 -W 2 {gateway} && echo reached",
        beside(db, &[web, gateway])
    );
    assert!(!ask(place, web, &foreign).contains("reached"), "a machine has two addresses");

    let refusal = alpha.refuse(&["network", "rm", "lan0"]);
    assert!(refusal.text.contains("has a port in the network"), "{refusal:?}");
    let refusal = alpha.refuse(&["network", "publish", "db", "2222:22"]);
    assert!(refusal.text.contains("leads to web already"), "{refusal:?}");

    // The next daemon has the same networks, and the machines the same addresses.
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let (alpha, place) = (cluster.host("alpha"), cluster.lab.host("alpha"));
    assert_eq!((address_of(alpha, "web"), address_of(alpha, "db")), (web, db));
    let mut again = agent(cluster.lab.host("client"), (place.address(), 2222).into());
    assert_same_life(&before, &again.check().expect("an answer"));

    for name in ["web", "db"] {
        alpha.run(&["stop", name, "--kill"]);
        alpha.run(&["delete", name]);
    }
    wait_no_leases(alpha);
    alpha.run(&["network", "rm", "lan0"]);
    let left = place.ip("link show").expect("interfaces");
    assert!(!left.contains("lan0"), "{left}");
    assert_eq!(place.output("nft", &["list", "tables"]).expect("tables"), "");
    let servers = alpha.run_dir().join("networks");
    assert_eq!(std::fs::read_dir(servers).expect("a directory").count(), 0);
}

/// Waits until `network show` says of each of the hosts that it is joined.
fn wait_joined(host: &HostProcess, others: &[&str]) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let network = host.json(&["network", "show", "lan0"]);
        let hosts = network["hosts"].as_array().cloned().unwrap_or_default();
        let joined = hosts.iter().filter(|it| it["joined"] == true).map(|it| it["host"].clone());
        if joined.collect::<Vec<_>>() == others {
            return;
        }
        assert!(Instant::now() < deadline, "{} is not joined: {network}\n{}", host.name(), host.log_text());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until `host` knows that `machine` is on `other`, at an address.
fn wait_told(host: &HostProcess, other: &str, machine: &str, address: Ipv4Addr) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let network = host.json(&["network", "show", "lan0"]);
        let hosts = network["hosts"].as_array().expect("a list").iter();
        let told = hosts.filter(|it| it["host"] == other).flat_map(|it| it["machines"].as_array());
        if told.flatten().any(|it| it["machine"] == machine && it["address"] == address.to_string()) {
            return;
        }
        assert!(Instant::now() < deadline, "{} does not know of {machine}: {network}", host.name());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A station in the network of a host, at an address beside `address`, as a machine would be.
fn station(place: &Namespace, address: Ipv4Addr, taken: &[Ipv4Addr]) -> (Namespace, Ipv4Addr) {
    let (station, own) = (Namespace::new().expect("a namespace"), beside(address, taken));
    let ip = |place: &Namespace, words: &str| drop(place.ip(words).expect("a command of iproute2"));
    ip(&station, &format!("link add eth0 type veth peer name to-station netns {}", place.path()));
    ip(place, "link set to-station master lan0 up");
    ip(&station, &format!("addr add {own}/24 dev eth0"));
    ip(&station, "link set eth0 up");
    (station, own)
}

fn wait_lines(stream: &StreamProbe, when: &str) {
    let (begun, deadline) = (stream.lines(), Instant::now() + PATIENCE);
    while stream.lines() < begun + 20 {
        assert!(Instant::now() < deadline, "{when}: the stream stands still at line {begun}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_machine_moves_in_a_network_that_three_hosts_share_and_keeps_address_and_connections() {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let names = ["alpha", "beta", "gamma"];
    for name in names {
        cluster.host(name).run(&["network", "create", "lan0"]);
    }
    let (alpha, beta, gamma) = (cluster.host("alpha"), cluster.host("beta"), cluster.host("gamma"));
    assert!(alpha.refuse(&["network", "share", "lan0", "alpha"]).text.contains("is this host"));
    assert!(alpha.refuse(&["network", "share", "lan0", "delta"]).text.contains("delta"));
    alpha.run(&["network", "share", "lan0", "beta", "gamma"]);
    let deadline = Instant::now() + PATIENCE;
    while !alpha.run(&["network", "show", "lan0"]).contains("beta does not share lan0 with alpha") {
        assert!(Instant::now() < deadline, "{}", alpha.run(&["network", "show", "lan0"]));
        std::thread::sleep(Duration::from_millis(50));
    }
    beta.run(&["network", "share", "lan0", "alpha", "gamma"]);
    gamma.run(&["network", "share", "lan0", "alpha", "beta"]);
    wait_joined(alpha, &["beta", "gamma"]);
    wait_joined(beta, &["alpha", "gamma"]);
    wait_joined(gamma, &["alpha", "beta"]);

    start(&cluster, alpha, "web");
    let address = address_of(alpha, "web");
    wait_told(gamma, "alpha", "web", address);
    let before = agent(cluster.lab.host("alpha"), (address, 7000).into()).state().expect("an answer");
    let gateway = gamma.json(&["network", "show", "lan0"])["gateway"].as_str().expect("a gateway").to_owned();
    let taken = [address, gateway.parse().expect("an address")];
    let (there, _) = station(cluster.lab.host("gamma"), address, &taken);
    // By the name, of the name server of gamma; and each ping is answered once, so no frame goes in a circle.
    let named = there.output("busybox", &["nslookup", "web.internal", &gateway]).expect("a name");
    assert!(named.contains(&address.to_string()), "{named}");
    let pings = there.output("busybox", &["ping", "-c", "3", "-W", "5", &address.to_string()]);
    let pings = pings.expect("a machine that is reached");
    assert!(!pings.contains("DUP"), "{pings}");
    let stream = StreamProbe::start(&there, (address, 7001).into(), PATIENCE).expect("a stream");
    wait_lines(&stream, "on alpha");

    alpha.run(&["migrate", "web", "beta"]);
    wait_lines(&stream, "on beta");
    assert_eq!(address_of(beta, "web"), address);
    wait_no_leases(alpha);
    wait_told(gamma, "beta", "web", address);
    let mut moved = agent(cluster.lab.host("beta"), (address, 7000).into());
    assert_same_life(&before, &moved.check().expect("an answer"));
    // Its seed disk has come along.
    let find = format!("grep -q CIDATA /dev/vdb && grep -q {KEY} /dev/vdb && echo found");
    ask_for(cluster.lab.host("beta"), address, &find, "found");
    // Its gateway is beta now, at the same addresses.
    let client = cluster.lab.host("client").address();
    let way_out = format!("ping -c 1 -W 2 {client} && echo reached");
    ask_for(cluster.lab.host("beta"), address, &way_out, "reached");

    // The daemon of either end may be killed.
    for name in ["beta", "gamma"] {
        cluster.host_mut(name).kill_daemon();
        cluster.host_mut(name).start_daemon();
        wait_joined(cluster.host("beta"), &["alpha", "gamma"]);
        wait_joined(cluster.host("gamma"), &["alpha", "beta"]);
        wait_lines(&stream, name);
    }
    let stream = stream.stop();
    assert_eq!(stream.end, StreamEnd::Stopped, "the TCP stream broke: {stream:?}");

    let (beta, gamma) = (cluster.host("beta"), cluster.host("gamma"));
    beta.run(&["network", "unshare", "lan0", "gamma"]);
    let missed = there.connect((address, 7000).into(), Duration::from_secs(2));
    assert!(missed.is_err(), "a host of another network reaches the machine");
    let refusal = beta.refuse(&["network", "unshare", "lan0", "gamma"]);
    assert!(refusal.text.contains("is not shared with gamma"), "{refusal:?}");
    wait_joined(gamma, &["alpha"]);
    gamma.run(&["network", "rm", "lan0"]);
    let left = cluster.lab.host("gamma").ip("-o link show").expect("a list of devices");
    assert!(!left.contains("wms"), "{left}");
}

#[test]
fn networks_that_cannot_be_are_refused_and_leave_nothing() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let cases: [(&[&str], &str); 7] = [
        (&["create", "Bad-Name"], "cannot be a network"),
        (&["create", "br0"], "an interface br0"),
        (&["create", "lan1", "--subnet", "8.8.8.0/24"], "private addresses"),
        (&["create", "lan1", "--subnet", "10.77.0.0/16"], "the interface br0"),
        (&["create", "lan1", "--ipv6", "fd00::/48"], "a /64"),
        (&["show", "lan1"], "no network lan1"),
        (&["publish", "web", "2222:22"], "no machine web"),
    ];
    for (arguments, reason) in cases {
        let refusal = alpha.refuse(&[&["network"], arguments].concat());
        assert!(refusal.text.contains(reason), "{arguments:?}: {refusal:?}");
    }
    assert_eq!(alpha.json(&["network", "ls"]), Value::Array(Vec::new()));
    alpha.run(&["network", "create", "lan1", "--subnet", "10.9.0.0/24", "--isolated", "--ipv6", "none"]);
    let refusal = alpha.refuse(&["network", "create", "lan2", "--subnet", "10.9.0.128/25"]);
    assert!(refusal.text.contains("the network lan1"), "{refusal:?}");
    let unmanaged = ["run", "x", "--memory", "64M", "--net", "br0", "--publish", "80:80"];
    assert!(alpha.refuse(&unmanaged).text.contains("managed network"));
    let path = cluster.disk.path().join("user-data");
    std::fs::write(&path, "packages: [nginx]\n").expect("a file");
    let file = path.to_str().expect("a path in UTF-8");
    let ignored = alpha.refuse(&["run", "x", "--memory", "64M", "--user-data", file]);
    assert!(ignored.text.contains("must begin with #cloud-config"), "{ignored:?}");
    std::fs::write(&path, "#cloud-config\n{}\n").expect("a file");
    let nowhere = alpha.refuse(&["run", "x", "--memory", "64M", "--net", "nobridge", "--user-data", file]);
    assert!(nowhere.text.contains("nobridge"), "{nowhere:?}");
    assert!(alpha.machines().is_empty());
    assert_eq!(std::fs::read_dir(alpha.data().join("machines")).expect("a directory").count(), 0);
    alpha.run(&["network", "rm", "lan1"]);
}
