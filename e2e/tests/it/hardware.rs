//! Other hardware for a machine that is switched off: what its next boot has, and what happens to it then.

use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, assert_same_life};

/// Words of the command line of a machine's QEMU.
fn words(cluster: &Cluster, host: &HostProcess, machine: &str) -> Vec<String> {
    let pid = host.json(&["inspect", machine])["pid"].as_u64().expect("a process");
    let output = host.shell(&format!("cat /proc/{pid}/cmdline"), cluster.disk.path());
    output.stdout.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

#[test]
fn a_stopped_machine_gets_other_hardware_and_goes_on_with_its_disks() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    console(alpha, "web").write(50).expect("a first life");
    let before = console(alpha, "web").check().expect("an answer");
    alpha.run(&["checkpoint", "web", "--tag", "early"]);
    let refusal = alpha.refuse(&["set", "web", "--memory", "256M"]);
    assert!(refusal.text.contains("must be stopped"), "{refusal:?}");
    alpha.run(&["stop", "web", "--kill"]);

    let change = ["set", "web", "--memory", "256M", "--cpus", "2", "--display", "yes", "--add-disk", "20M"];
    alpha.run(&[&change[..], &["--add-net", "br0,mac=52:54:00:00:07:01"]].concat());
    // The daemon reads back what it wrote.
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    let has = words(&cluster, alpha, "web");
    for part in ["virtio-blk-pci,id=disk1", "virtio-net-pci,id=nic0", "VGA,", "256M"] {
        assert!(has.iter().any(|word| word.starts_with(part)), "no {part}: {has:?}");
    }
    let at = has.iter().position(|word| word == "-smp").expect("a number of CPUs");
    assert_eq!(has[at + 1], "2");
    let now = console(alpha, "web").check().expect("an answer");
    assert!(now.nonce != before.nonce && !matches!(now.disk, CheckResult::Bad), "{now:?}");
    console(alpha, "web").write(50).expect("a second life");
    let now = console(alpha, "web").check().expect("an answer");

    // From here on it is a machine like any other, with two disks.
    alpha.run(&["checkpoint", "web", "--tag", "late"]);
    alpha.run(&["migrate", "web", "beta"]);
    let moved = console(beta, "web").check().expect("an answer");
    assert_same_life(&now, &moved);
    assert_eq!(beta.json(&["inspect", "web"])["disks"].as_array().map(Vec::len), Some(2));
    beta.run(&["migrate", "web", "alpha"]);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["set", "web", "--remove-net", "52:54:00:00:07:01", "--display", "no"]);
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "off"]);
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    assert!(!words(&cluster, alpha, "web").iter().any(|word| word.contains("virtio-net")), "a port stays");

    // Its past has the hardware of then.
    alpha.run(&["rewind", "web", "early"]);
    assert_same_life(&before, &console(alpha, "web").check().expect("an answer"));
    let info = alpha.json(&["inspect", "web"]);
    assert_eq!((info["cpus"].as_u64(), info["display"].as_bool()), (Some(1), None), "{info}");
}

/// Sizes of the disks of `web` in MiB.
fn disk_sizes(host: &HostProcess) -> Vec<u64> {
    let info = host.json(&["inspect", "web"]);
    let sizes = info["disks"].as_array().expect("disks").iter().map(|disk| disk["size"].as_u64());
    sizes.map(|size| size.expect("a size") >> 20).collect()
}

#[test]
fn a_disk_becomes_larger_where_it_is_and_keeps_what_it_has() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    let up = |host: &HostProcess| {
        let mut guest = console(host, "web");
        guest.wait_ready(PATIENCE).expect("a guest that is up");
        let found = guest.check().expect("an answer");
        assert!(!matches!(found.disk, CheckResult::Bad), "{found:?}");
        guest.write(50).expect("more writes");
        let found = guest.check().expect("an answer");
        assert!(matches!(found.disk, CheckResult::Good(_)), "{found:?}");
        found
    };
    up(alpha);
    let refusal = alpha.refuse(&["set", "web", "--disk-size", "48M"]);
    assert!(refusal.text.contains("must be stopped"), "{refusal:?}");

    // Over a file of the host. The daemon dies between the change and the start.
    alpha.run(&["stop", "web", "--kill"]);
    for (size, why) in [("31M", "not smaller"), ("1=48M", "no disk 1")] {
        let refusal = alpha.refuse(&["set", "web", "--disk-size", size]);
        assert!(refusal.text.contains(why), "{refusal:?}");
    }
    alpha.run(&["set", "web", "--disk-size", "48M"]);
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    alpha.run(&["start", "web"]);
    let before = up(alpha);
    assert_eq!(disk_sizes(alpha), [48]);
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    assert_same_life(&before, &console(alpha, "web").check().expect("an answer"));

    // Over an image of the store.
    up(alpha);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["set", "web", "--disk-size", "96M"]);
    alpha.run(&["checkpoint", "web", "--disks-only", "--tag", "off"]);
    alpha.run(&["start", "web"]);
    up(alpha);
    alpha.run(&["checkpoint", "web", "--tag", "large"]);
    let before = up(alpha);
    alpha.run(&["migrate", "web", "beta"]);
    assert_same_life(&before, &console(beta, "web").check().expect("an answer"));
    assert_eq!(disk_sizes(beta), [96]);
    beta.run(&["stop", "web", "--kill"]);
    beta.run(&["set", "web", "--disk-size", "128M"]);
    beta.run(&["start", "web"]);
    up(beta);
    alpha.run(&["derive", "off", "web"]);
    up(alpha);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["delete", "web"]);
    alpha.run(&["resume", "large", "--name", "web"]);
    up(alpha);
    assert_eq!((disk_sizes(alpha), disk_sizes(beta)), (vec![96], vec![128]));
}
