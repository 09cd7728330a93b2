//! A host is emptied, on its own word or on another host's: all of its machines move, those that write least
//! first, to hosts that have room.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE};
use whimbrel_testkit::guest::{CheckResult, TestAgent, Work, assert_same_life};

/// Machines and their addresses; the last one writes all the time.
const MACHINES: [(&str, &str); 3] =
    [("calm", "10.77.0.101"), ("idle", "10.77.0.102"), ("busy", "10.77.0.103")];

fn start(cluster: &Cluster, host: &HostProcess) -> Vec<TestAgent> {
    for (name, address) in MACHINES {
        let work = match name {
            "busy" => Work::Dirty { region_mib: 32, pages_per_second: 8000, bytes_per_page: 64 },
            _ => Work::Idle,
        };
        let guest = Guest { address: Some(address.to_owned()), memory_mib: 160, work, ..Guest::small(name) };
        guest.run(cluster, host);
    }
    MACHINES.iter().map(|(_, address)| cluster.witness(address)).collect()
}

/// Leaves a host with hardly any room for memory.
fn fill(host: &mut HostProcess) {
    host.kill_daemon();
    let place = host.run_dir().to_str().expect("a path in UTF-8").to_owned();
    host.exec("mount", &["-t", "tmpfs", "-o", "size=64m", "none", &place]);
    host.start_daemon();
}

fn outcomes(report: &Value) -> Vec<(String, String)> {
    let machines =
        report["result"]["machines"].as_array().unwrap_or_else(|| panic!("no machines in {report}"));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    machines.iter().map(|m| (text(&m["name"]), text(&m["outcome"]["kind"]))).collect()
}

/// An evacuation that leaves machines behind.
fn incomplete(host: &HostProcess, arguments: &[&str]) -> Value {
    let arguments: Vec<&str> = ["--json", "-q", "evacuate"].iter().chain(arguments).copied().collect();
    let refusal = host.refuse(&arguments);
    assert_eq!(refusal.code, 1, "{refusal:?}");
    serde_json::from_str(&refusal.result).unwrap_or_else(|error| panic!("{error}: {refusal:?}"))
}

fn running(host: &HostProcess) -> Vec<String> {
    let machines = host.machines();
    assert!(machines.iter().all(|(_, state)| state == "running"), "{machines:?}");
    machines.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn three_machines_leave_for_where_there_is_room_and_what_stays_is_named() {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    fill(cluster.host_mut("beta"));
    let (alpha, beta, gamma) = (cluster.host("alpha"), cluster.host("beta"), cluster.host("gamma"));
    let mut witnesses = start(&cluster, alpha);
    let born: Vec<_> = witnesses.iter_mut().map(|witness| witness.write(20).expect("a first life")).collect();
    // One more lies there and does not run, and one name is taken on the only host with room.
    Guest { address: None, ..Guest::small("stopped") }.run(&cluster, alpha);
    alpha.run(&["stop", "stopped", "--kill"]);
    Guest { address: None, ..Guest::small("idle") }.run(&cluster, gamma);

    let full = incomplete(alpha, &["--to", "beta"]);
    assert!(outcomes(&full)[..3].iter().all(|(_, outcome)| outcome == "no_room"), "{full}");
    let reason = full["result"]["machines"][0]["outcome"]["reasons"][0].to_string();
    assert!(reason.contains("beta: it needs 160 MiB of memory"), "{reason}");
    assert_eq!(alpha.machines().len(), 4);

    let dry = incomplete(alpha, &["--dry-run"]);
    let planned = outcomes(&dry);
    assert_eq!(planned[2], ("busy".to_owned(), "planned".to_owned()), "who writes most goes last: {dry}");
    assert!(planned.contains(&("idle".to_owned(), "no_room".to_owned())), "{dry}");
    assert_eq!(planned[3], ("stopped".to_owned(), "left".to_owned()));

    let most = incomplete(alpha, &["--parallel", "2"]);
    let moved = outcomes(&most);
    assert_eq!(moved.iter().filter(|(_, outcome)| outcome == "moved").count(), 2, "{most}");
    assert!(most.to_string().contains("gamma: the name idle is taken"), "{most}");
    assert!(alpha.machines().contains(&("idle".to_owned(), "running".to_owned())));

    gamma.run(&["stop", "idle", "--kill"]);
    gamma.run(&["delete", "idle"]);
    let rest = alpha.json(&["evacuate"]);
    assert_eq!(rest["result"]["empty"], true, "{rest}");
    assert_eq!(alpha.machines(), [("stopped".to_owned(), "stopped".to_owned())]);
    assert_eq!(running(gamma), ["busy", "calm", "idle"]);
    assert!(beta.machines().is_empty());
    let nothing = alpha.json(&["evacuate", "alpha", "--to", "gamma"]);
    assert_eq!(nothing["result"]["empty"], true, "an empty host is empty: {nothing}");
    gamma_is_emptied_from_elsewhere(&cluster);
    for (before, witness) in born.iter().zip(&mut witnesses) {
        let after = witness.check().expect("an answer on the connection that was open all the time");
        assert_same_life(before, &after);
        assert!(
            matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
            "{after:?}"
        );
    }
}

/// Of what runs on gamma a host moves what it may, and learns of nothing else; one that may all of it empties
/// gamma without taking anything itself.
fn gamma_is_emptied_from_elsewhere(cluster: &Cluster) {
    let (alpha, beta, gamma) = (cluster.host("alpha"), cluster.host("beta"), cluster.host("gamma"));
    let unknown = alpha.refuse(&["evacuate", "delta"]);
    assert!(unknown.code != 0 && unknown.text.contains("host delta is not trusted here"), "{unknown:?}");
    let itself = alpha.refuse(&["evacuate", "gamma", "--to", "gamma"]);
    assert!(itself.text.contains("gamma is the host that is to be evacuated"), "{itself:?}");

    gamma.run(&["trust", "set", "alpha", "--read", "*", "--write", "calm"]);
    let some = incomplete(alpha, &["gamma", "--to", "alpha"]);
    assert_eq!(outcomes(&some), [("calm".to_owned(), "moved".to_owned())], "{some}");
    assert_eq!((&some["subject"], &some["result"]["withheld"]), (&"gamma".into(), &2.into()), "{some}");
    assert_eq!(running(gamma), ["busy", "idle"]);

    let rest = beta.json(&["evacuate", "gamma", "--to", "alpha", "--parallel", "2"]);
    assert_eq!(rest["result"]["empty"], true, "{rest}");
    assert!(gamma.machines().is_empty() && beta.machines().is_empty());
    let back = ["busy", "calm", "idle", "stopped"];
    assert_eq!(alpha.machines().iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), back);
}

#[test]
fn an_evacuation_that_is_interrupted_leaves_each_machine_whole_on_one_host_and_goes_on_when_called_again() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let mut witnesses = start(&cluster, alpha);
    let born: Vec<_> = witnesses.iter_mut().map(|witness| witness.write(20).expect("a first life")).collect();
    // Slow enough to be met in the middle, and on the word of the host that takes the machines.
    let evacuate = beta.begin(&["evacuate", "alpha", "--rate-max", "2M", "--sample", "200ms"]);
    let deadline = std::time::Instant::now() + PATIENCE;
    while !alpha.machines().iter().any(|(_, state)| state == "migrating") {
        assert!(std::time::Instant::now() < deadline, "nothing moves: {:?}", alpha.machines());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(alpha.refuse(&["evacuate"]).code, 4, "one evacuation at a time");
    kill(Pid::from_raw(evacuate.id().cast_signed()), Signal::SIGINT).expect("a command to interrupt");
    let output = evacuate.wait_with_output().expect("the end of the command");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{text}");
    assert!(text.contains("still on alpha: ") && text.contains("call it again"), "{text}");

    alpha.wait_state("busy", &["running"]);
    beta.wait_empty();
    assert_eq!(running(alpha), ["busy", "calm", "idle"]);
    let done = alpha.json(&["evacuate", "--parallel", "3", "--stop-on-failure"]);
    assert_eq!(done["result"]["empty"], true, "{done}");
    assert_eq!((running(alpha).len(), running(beta).len()), (0, 3));
    for (before, witness) in born.iter().zip(&mut witnesses) {
        let after = witness.check().expect("an answer from the target");
        assert_same_life(before, &after);
        assert!(
            matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
            "{after:?}"
        );
    }
}
