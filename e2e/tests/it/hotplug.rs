//! Disks and network ports that come and go while a machine runs.

use crate::{
    network::{agent, ask, ask_for},
    protect::{end_qemu, wait_epochs},
};
use std::net::Ipv4Addr;
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, Identity, Work, assert_same_life};

/// Address of the guest on the port that comes later, and the same network of the client.
const LATER: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const CLIENT: &str = "addr add 10.78.0.9/24 dev br0";
const LATER_MAC: &str = "52:54:00:00:07:02";
/// Lines for the shell of the guest.
const SUM: &str = "echo 3 >/proc/sys/vm/drop_caches; md5sum </dev/vdb";
const USE_BOTH: &str = "ip link set eth1 up && ip addr replace 10.78.0.2/24 dev eth1 && \
                        dd if=/dev/urandom of=/dev/vdb bs=1M count=20 && sync && echo done";
const DEVICES: &str = "ls /sys/block /sys/class/net";

/// A machine with a shell that the client reaches, and what it is.
fn start(cluster: &Cluster, host: &HostProcess) -> Identity {
    Guest { work: Work::GuestAgent, ..Guest::small("web") }.run(cluster, host);
    console(host, "web").wait_ready(PATIENCE).expect("a guest that is up");
    let mut guest = cluster.witness(GUEST_ADDRESS);
    guest.write(50).expect("a first life");
    guest.check().expect("an answer")
}

/// The machine is that of `before`, by its later port, and the later disk has what was put on it.
fn assert_whole(cluster: &Cluster, before: &Identity, sum: &str) {
    let client = cluster.lab.host("client");
    let now = agent(client, (LATER, 7000).into()).check().expect("an answer over the later port");
    assert!(matches!(now.disk, CheckResult::Good(_)), "{now:?}");
    assert_same_life(before, &now);
    assert_eq!(ask(client, LATER, SUM), sum, "the later disk has other content");
}

/// Number of its disks and of its network ports.
fn counts(host: &HostProcess) -> [usize; 2] {
    let info = host.json(&["inspect", "web"]);
    ["disks", "nics"].map(|what| info[what].as_array().map_or(0, Vec::len))
}

#[test]
fn devices_come_while_a_machine_runs_go_wherever_it_goes_and_go_again() {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, client) = (cluster.host("alpha"), cluster.lab.host("client"));
    let guest: Ipv4Addr = GUEST_ADDRESS.parse().expect("an address");
    client.ip(CLIENT).expect("an address of the client");
    let born = start(&cluster, alpha);
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    let port = format!("br0,mac={LATER_MAC}");
    alpha.run(&["set", "web", "--add-disk", "20M", "--add-net", &port]);
    assert_eq!(counts(alpha), [2, 2]);
    ask_for(client, guest, "cat /sys/block/vdb/size", "40960");
    ask_for(client, guest, "ls /sys/class/net", "eth1");
    ask_for(client, guest, USE_BOTH, "done");
    let sum = ask(client, guest, SUM);
    assert_whole(&cluster, &born, &sum);
    alpha.run(&["checkpoint", "web", "--tag", "both"]);

    // They stay when the daemon is another one, and with the machine on other hosts.
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let [alpha, beta, gamma] = ["alpha", "beta", "gamma"].map(|name| cluster.host(name));
    let client = cluster.lab.host("client");
    assert_whole(&cluster, &born, &sum);
    alpha.run(&["migrate", "web", "beta"]);
    assert_whole(&cluster, &born, &sum);
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web"]);
    assert_whole(&cluster, &born, &sum);
    beta.run(&["protect", "web", "gamma", "--lease", "2s", "--witness", "alpha"]);
    wait_epochs(beta, 3);
    let refusal = beta.refuse(&["set", "web", "--add-disk", "8M"]);
    assert!(refusal.text.contains("unprotect"), "{refusal:?}");
    end_qemu(beta);
    gamma.wait_state("web", &["running"]);
    assert_whole(&cluster, &born, &sum);

    // The last ones go, and nothing else does.
    for (change, why) in [
        (["--remove-disk", "0"], "only its last disk"),
        (["--remove-net", &first_mac(gamma)], "taken away first"),
        (["--memory", "256M"], "must be stopped"),
    ] {
        let refusal = gamma.refuse(&[&["set", "web"][..], &change].concat());
        assert!(refusal.text.contains(why), "{refusal:?}");
    }
    gamma.run(&["set", "web", "--remove-disk", "1", "--remove-net", LATER_MAC]);
    assert_eq!(counts(gamma), [1, 1]);
    let left = ask(client, guest, DEVICES);
    assert!(!left.contains("vdb") && !left.contains("eth1"), "{left}");
    for (change, why) in [
        (["--remove-disk", "0"], "was there when it started"),
        (["--remove-net", &first_mac(gamma)], "was there"),
    ] {
        let refusal = gamma.refuse(&[&["set", "web"][..], &change].concat());
        assert!(refusal.text.contains(why), "{refusal:?}");
    }
    assert_same_life(&born, &cluster.witness(GUEST_ADDRESS).check().expect("an answer"));

    // A disk in the same place is a new one. It stays where it is when the machine boots again.
    gamma.run(&["set", "web", "--add-disk", "8M"]);
    ask_for(client, guest, "cat /sys/block/vdb/size", "16384");
    ask_for(client, guest, "cmp -n 8388608 /dev/vdb /dev/zero && echo empty", "empty");
    gamma.run(&["checkpoint", "web", "--tag", "one"]);
    gamma.run(&["stop", "web", "--kill"]);
    gamma.run(&["start", "web"]);
    ask_for(client, guest, "cat /sys/block/vdb/size", "16384");
    gamma.run(&["stop", "web", "--kill"]);
    gamma.run(&["set", "web", "--remove-disk", "1"]);
    assert!(!gamma.data().join("machines/web/disk1").exists(), "an overlay of a disk that is gone");

    // Its past has the devices of then.
    alpha.run(&["resume", "both", "--name", "web"]);
    assert_whole(&cluster, &born, &sum);
    alpha.run(&["rewind", "web", "early"]);
    assert_eq!(counts(alpha), [1, 1]);
    assert_same_life(&born, &cluster.witness(GUEST_ADDRESS).check().expect("an answer"));
    alpha.run(&["set", "web", "--add-disk", "8M"]);
    ask_for(client, guest, "cat /sys/block/vdb/size", "16384");
}

fn first_mac(host: &HostProcess) -> String {
    host.json(&["inspect", "web"])["nics"][0]["mac"].as_str().expect("an address").to_owned()
}

#[test]
fn a_device_that_was_being_added_when_the_daemon_died_is_there_and_one_that_failed_is_not() {
    let mut cluster = Cluster::start(&["alpha"]);
    let guest: Ipv4Addr = GUEST_ADDRESS.parse().expect("an address");
    let born = start(&cluster, cluster.host("alpha"));
    let alpha = cluster.host("alpha");
    let refusal = alpha.refuse(&["set", "web", "--add-net", "nowhere"]);
    assert!(refusal.text.contains("nowhere"), "{refusal:?}");
    assert_eq!(counts(alpha), [1, 1]);
    alpha.run(&["pause", "web"]);
    let refusal = alpha.refuse(&["set", "web", "--add-disk", "8M"]);
    assert!(refusal.text.contains("it is paused"), "{refusal:?}");
    alpha.run(&["unpause", "web"]);

    for (change, count) in [(["--add-disk", "8M"], [2, 1]), (["--add-net", "br0"], [2, 2])] {
        let alpha = cluster.host("alpha");
        alpha.hold_at("device");
        let mut adding = alpha.begin(&[&["set", "web"][..], &change].concat());
        alpha.wait_held("device");
        cluster.host_mut("alpha").kill_daemon();
        assert!(!adding.wait().expect("an end").success());
        cluster.host("alpha").release("device");
        cluster.host_mut("alpha").start_daemon();
        assert_eq!(counts(cluster.host("alpha")), count);
    }
    let client = cluster.lab.host("client");
    ask_for(client, guest, "cat /sys/block/vdb/size", "16384");
    ask_for(client, guest, "ls /sys/class/net", "eth1");
    assert_same_life(&born, &cluster.witness(GUEST_ADDRESS).check().expect("an answer"));
    let alpha = cluster.host("alpha");
    alpha.run(&["checkpoint", "web"]);
    alpha.run(&["set", "web", "--add-net", "br0", "--add-disk", "4M"]);
    ask_for(client, guest, "cat /sys/block/vdc/size", "8192");
    ask_for(client, guest, "ls /sys/class/net", "eth2");
    assert_same_life(&born, &cluster.witness(GUEST_ADDRESS).check().expect("an answer"));
}
