//! Capsules between two hosts: pulled, resumed from afar, pushed with their machine, uploaded in the
//! background.

use nix::sys::signal::Signal;
use std::time::{Duration, Instant};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, PATIENCE, console, wait_reborn};
use whimbrel_testkit::guest::{CheckResult, Identity, assert_same_life};

fn check(cluster: &Cluster, before: &Identity) -> Identity {
    let after = cluster.witness(GUEST_ADDRESS).check().expect("an answer");
    assert_same_life(before, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
    after
}

/// What came of an operation.
fn result(host: &whimbrel_e2e::HostProcess, arguments: &[&str]) -> serde_json::Value {
    host.json(arguments)["result"].clone()
}

/// Why a machine waits for another host, as `ps` tells it.
fn stalled(host: &whimbrel_e2e::HostProcess, machine: &str) -> Option<String> {
    let machines = host.json(&["ps"]);
    let found = machines.as_array()?.iter().find(|found| found["name"] == machine)?;
    found["state"]["stalled"].as_str().map(str::to_owned)
}

fn state(host: &whimbrel_e2e::HostProcess, machine: &str) -> String {
    let machines = host.machines();
    machines.into_iter().find(|(name, _)| name == machine).map(|(_, state)| state).unwrap_or_default()
}

#[test]
fn a_shared_file_runs_the_machine_for_whoever_has_its_key_and_for_nobody_else() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest::small("web").run(&cluster, alpha);
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    alpha.run(&["suspend", "web"]);
    let path = cluster.disk.path().join("web.whimbrel");
    let file = path.to_str().expect("a path in UTF-8");
    let shared = alpha.json(&["share", "web", file]);
    let key = shared["key"].as_str().expect("a key");
    let content = std::fs::read(&path).expect("a file");
    assert_eq!(shared["bytes"].as_u64(), Some(content.len() as u64));
    assert!(!alpha.log_text().contains(key), "the log has the key");
    assert!(alpha.refuse(&["share", "web", file]).text.contains("exists"), "it was overwritten");

    let (other, cut) = ("0".repeat(64), cluster.disk.path().join("cut.whimbrel"));
    std::fs::write(&cut, &content[..content.len() - 1]).expect("a file");
    let cut = cut.to_str().expect("a path in UTF-8");
    for (arguments, why) in [
        (["open", file, &other], "not its key"),
        (["open", cut, key], "damaged"),
        (["import", file, "web"], "needs its key"),
    ] {
        let refusal = beta.refuse(&arguments);
        assert!(refusal.text.contains(why), "{arguments:?}: {refusal:?}");
    }
    assert_eq!(beta.json(&["ls"]).as_array().map(Vec::len), Some(0), "something was imported");

    beta.run(&["open", file, key]);
    check(&cluster, &born);
    assert_eq!(beta.machines()[0].0, "web");
    let refusal = beta.refuse(&["open", file, key]);
    assert!(refusal.code == 4 && refusal.text.contains("whimbrel show opened."), "{refusal:?}");
    beta.run(&["open", file, key, "--name", "web2"]);
}

#[test]
fn a_machine_that_is_pushed_goes_on_elsewhere_and_comes_home_for_the_price_of_the_change() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest::small("web").run(&cluster, alpha);
    let born = cluster.witness(GUEST_ADDRESS).write(200).expect("a first life");

    let pushed = result(alpha, &["push", "web", "beta"]);
    assert_eq!((&pushed["kind"], &pushed["machine"]), (&"push".into(), &"web".into()), "{pushed}");
    assert_eq!(state(alpha, "web"), "handed_off");
    let refusal = alpha.refuse(&["resume", "web"]);
    assert!(refusal.code == 4 && refusal.text.contains("beta"), "{refusal:?}");
    assert_eq!(state(beta, "web"), "suspended");
    beta.run(&["resume", "web"]);
    let there = check(&cluster, &born);
    let written = cluster.witness(GUEST_ADDRESS).write(40).expect("a disk that takes writes");
    assert_same_life(&there, &written);

    // Home again: alpha has the version before, so little travels.
    let back = result(beta, &["push", "web"]);
    let (first, second) = (pushed["wire_bytes"].as_u64().unwrap(), back["wire_bytes"].as_u64().unwrap());
    assert!(second * 3 < first, "{first} bytes there, {second} bytes back");
    alpha.run(&["resume", "web"]);
    let home = check(&cluster, &written);
    assert_eq!(state(beta, "web"), "handed_off");
    let mut witness = cluster.witness(GUEST_ADDRESS);
    witness.reboot().expect("a request to reboot");
    drop(witness);
    wait_reborn(&mut console(alpha, "web"), &home);
    // Its owner is lost for good: whoever knows that may have it run here from the last capsule.
    alpha.run(&["stop", "web", "--kill"]);
    assert!(beta.refuse(&["resume", "web"]).text.contains("--reclaim"));
    beta.run(&["resume", "web", "--reclaim"]);
    check(&cluster, &written);
    for host in [alpha, beta] {
        let verified = result(host, &["verify"]);
        assert_eq!(verified["damaged"].as_array().map(Vec::len), Some(0), "{verified}");
    }
}

#[test]
fn a_machine_is_resumed_from_another_host_before_it_has_come_and_waits_when_that_host_is_away() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let born = cluster.witness(GUEST_ADDRESS).write(200).expect("a first life");
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    alpha.run(&["suspend", "web"]);
    let offered = beta.json(&["ls", "--from", "alpha"]);
    assert_eq!(offered[0]["machine"], "web", "{offered}");

    beta.run(&["resume", "alpha:web"]);
    assert_eq!(state(alpha, "web"), "handed_off");
    let there = check(&cluster, &born);
    assert_eq!(state(beta, "web"), "loading", "most of it was never touched");

    // The holder retains what the machine lives from, though nothing of its own needs it any more.
    let pinned = |host: &whimbrel_e2e::HostProcess| host.json(&["ls"]).to_string().contains("reader.beta.");
    assert!(pinned(alpha), "{}", alpha.json(&["ls"]));
    alpha.run(&["untag", "web"]);
    alpha.run(&["gc"]);

    // The holder goes away in the middle: the machine stands still where it misses something, and goes on
    // later.
    cluster.lab.unplug("alpha").expect("a cable to pull");
    cluster.host("beta").signal_daemon(Signal::SIGKILL);
    cluster.host_mut("beta").kill_daemon();
    cluster.host_mut("beta").start_daemon();
    let beta = cluster.host("beta");
    let after = std::thread::scope(|scope| {
        let answer = scope.spawn(|| check(&cluster, &there));
        let deadline = Instant::now() + PATIENCE;
        while stalled(beta, "web").is_none() && !answer.is_finished() {
            assert!(Instant::now() < deadline, "`ps` does not say that it waits: {:?}", beta.machines());
            std::thread::sleep(Duration::from_millis(100));
        }
        cluster.lab.replug("alpha").expect("a cable to put back");
        answer.join().expect("a machine that goes on")
    });

    // A capsule of a machine that is partly elsewhere is kept, and its machine goes on from it.
    let beta = cluster.host("beta");
    beta.run(&["suspend", "web"]);
    beta.run(&["gc"]);
    beta.run(&["resume", "web", "--fetch-rest"]);
    let last = check(&cluster, &after);
    let deadline = Instant::now() + PATIENCE;
    while state(beta, "web") != "running" {
        assert!(Instant::now() < deadline, "it does not become whole: {:?}", beta.machines());
        std::thread::sleep(Duration::from_millis(100));
    }
    check(&cluster, &last);
}

#[test]
fn what_a_capsule_shares_with_others_does_not_travel_and_a_followed_machine_survives_its_host() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let born = cluster.witness(GUEST_ADDRESS).write(100).expect("a first life");
    alpha.run(&["push", "web", "beta", "--continuous"]);
    alpha.run(&["checkpoint", "web", "--tag", "one"]);
    let whole = |host: &whimbrel_e2e::HostProcess, capsule: &str| {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let there = host.json(&["ls"]);
            let whole = |c: &serde_json::Value| c["id"] == *capsule && c["whole"] != false;
            if there.as_array().unwrap().iter().any(whole) {
                return;
            }
            assert!(Instant::now() < deadline, "{capsule} does not come: {there}");
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    let one = alpha.json(&["show", "one"])["id"].as_str().unwrap().to_owned();
    whole(beta, &one);
    let pulled = result(beta, &["pull", "alpha:one", "--tag", "first"]);
    assert_eq!(pulled["whole"], true, "{pulled}");
    assert!(pulled["wire_bytes"].as_u64().unwrap() < 100_000, "{pulled}: it is here already");

    let second = result(alpha, &["checkpoint", "web"]);
    whole(beta, second["capsule"].as_str().unwrap());
    let refusal = beta.refuse(&["pull", "alpha:nothing"]);
    assert_eq!(refusal.code, 3, "{refusal:?}");
    let refusal = beta.refuse(&["pull", "gamma:web"]);
    assert_eq!(refusal.code, 5, "{refusal:?}");

    // The host is lost, its machine is not.
    cluster.host_mut("alpha").kill_daemon();
    cluster.lab.unplug("alpha").expect("a cable to pull");
    let beta = cluster.host("beta");
    let deadline = Instant::now() + PATIENCE;
    while beta.try_run(&["resume", "web"]).is_err() {
        assert!(Instant::now() < deadline, "not all of it came: {}", beta.log_text());
        std::thread::sleep(Duration::from_millis(500));
    }
    check(&cluster, &born);
}

#[test]
fn a_file_that_the_cache_knows_need_not_travel() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let disk = cluster.disk.path().join("golden.img");
    let content: Vec<u8> =
        (0..8u32 << 20 >> 2).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    std::fs::write(&disk, &content).expect("a file");
    let path = disk.to_str().unwrap();
    alpha.run(&["import", path, "golden"]);
    let added = result(beta, &["cache", "add", path]);
    assert_eq!(added["pages"], 2048, "{added}");
    let pulled = result(beta, &["pull", "golden"]);
    assert!(pulled["wire_bytes"].as_u64().unwrap() < 400_000, "{pulled}");
    let stats = beta.json(&["cache", "stats"]);
    assert!(stats["sources"][0]["hits"].as_u64() > Some(2000), "{stats}");
    // The image changes behind the cache's back: nothing wrong comes of it.
    std::fs::write(&disk, &content[..content.len() / 2]).expect("a file");
    let out = cluster.disk.path().join("out.img");
    beta.run(&["export", "golden", out.to_str().unwrap(), "--format", "raw"]);
    assert!(std::fs::read(&out).expect("an export") == content);
}

#[test]
fn a_receiver_that_runs_out_of_disk_says_so_and_goes_on_when_there_is_room() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let data = cluster.host("beta").data().to_owned();
    let data = data.to_str().expect("a path in UTF-8");
    // Small enough to be full soon; trust and key of the host move along.
    cluster.host_mut("beta").kill_daemon();
    let kept = cluster.disk.path().join("kept");
    let beta = cluster.host("beta");
    beta.exec("cp", &["-a", data, kept.to_str().unwrap()]);
    beta.exec("mount", &["-t", "tmpfs", "-o", "size=12m", "tmpfs", data]);
    beta.exec("sh", &["-c", &format!("cp -a {}/. {data}", kept.display())]);
    cluster.host_mut("beta").start_daemon();
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let born = cluster.witness(GUEST_ADDRESS).write(100).expect("a first life");
    cluster.host("alpha").run(&["suspend", "web"]);

    let beta = cluster.host("beta");
    let refusal = beta.refuse(&["pull", "alpha:web"]);
    assert!(refusal.text.contains("hint:"), "{refusal:?}");
    beta.exec("mount", &["-o", "remount,size=400m", "tmpfs", data]);
    cluster.host_mut("beta").kill_daemon();
    cluster.host_mut("beta").start_daemon();
    let beta = cluster.host("beta");
    let pulled = result(beta, &["pull", "alpha:web"]);
    assert_eq!(pulled["whole"], true, "{pulled}");
    beta.run(&["verify"]);
    beta.run(&["resume", "alpha:web"]);
    check(&cluster, &born);
    assert_eq!(state(cluster.host("alpha"), "web"), "handed_off");
}

#[test]
fn a_namesake_elsewhere_never_takes_the_name_of_a_machine_that_lives_here() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    for (host, address) in [(alpha, "10.77.0.20"), (beta, "10.77.0.21")] {
        Guest { address: Some(address.into()), ..Guest::small("web") }.run(&cluster, host);
        host.run(&["suspend", "web"]);
    }
    let newest = |host: &whimbrel_e2e::HostProcess| host.json(&["show", "web"])["id"].clone();
    let (at_alpha, at_beta) = (newest(alpha), newest(beta));
    assert_ne!(at_alpha, at_beta);

    beta.refuse(&["pull", "alpha:web"]);
    beta.refuse(&["resume", "alpha:web"]);
    alpha.refuse(&["push", "web", "beta"]);
    assert_eq!((newest(alpha), newest(beta)), (at_alpha.clone(), at_beta), "nothing was renamed");
    assert_eq!((state(alpha, "web"), state(beta, "web")), ("suspended".to_owned(), "suspended".to_owned()));
    let pulled = result(beta, &["pull", "alpha:web", "--tag", "theirs"]);
    assert_eq!((&pulled["capsule"], &pulled["whole"]), (&at_alpha, &true.into()), "{pulled}");
    beta.run(&["gc"]);
    beta.run(&["resume", "web", "--full"]);
}
