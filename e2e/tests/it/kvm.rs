//! Machines under KVM, with a guest of our own that checks its memory and its disk by itself. Skipped, with
//! the reason, where it does not run.

use std::time::{Duration, Instant};
use whimbrel_e2e::{HostProcess, KvmLane, PATIENCE};

#[test]
fn a_machine_under_kvm_goes_on_through_checkpoint_suspend_both_resumes_and_clones() {
    let Some(lane) = KvmLane::open("a_machine_under_kvm_goes_on") else { return };
    let cluster = lane.cluster(&["alpha"]);
    let alpha = cluster.host("alpha");
    let born = lane.run(alpha, 1);
    alpha.run(&["checkpoint", "web", "--tag", "first"]);
    let kept = lane.goes_on(alpha, "web", &born);
    alpha.run(&["checkpoint", "web", "--tag", "second"]);
    let second = lane.goes_on(alpha, "web", &kept);
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    let lazy = lane.goes_on(alpha, "web", &second);
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web", "--full"]);
    lane.goes_on(alpha, "web", &lazy);
    alpha.run(&["clone", "second", "--count", "2", "--prefix", "kid"]);
    for kid in ["kid-1", "kid-2"] {
        lane.goes_on(alpha, kid, &kept);
    }
    alpha.run(&["resume", "first", "--name", "past"]);
    lane.goes_on(alpha, "past", &born);
    alpha.run(&["verify"]);
}

#[test]
fn a_machine_of_four_processors_under_kvm_migrates_in_every_mode() {
    let Some(lane) = KvmLane::open("a_machine_of_four_processors_under_kvm_migrates") else { return };
    let cluster = lane.cluster(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let mut tick = lane.run(alpha, 4);
    let modes = [
        (alpha, beta, &["precopy"][..]),
        (beta, alpha, &["postcopy"]),
        (alpha, beta, &["hybrid", "--rounds", "1"]),
        (beta, alpha, &["precopy"]),
    ];
    for (from, to, mode) in modes {
        from.run(&[&["migrate", "web", to.name(), "--mode"], mode].concat());
        tick = lane.goes_on(to, "web", &tick);
        from.wait_empty();
    }
}

#[test]
fn a_machine_under_kvm_goes_on_at_its_standby_when_its_qemu_is_killed() {
    let Some(lane) = KvmLane::open("a_machine_under_kvm_goes_on_at_its_standby") else { return };
    let cluster = lane.cluster(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let born = lane.run(alpha, 1);
    alpha.run(&["protect", "web", "beta", "--lease", "2s", "--witness", "gamma"]);
    wait_epochs(alpha, 20);
    let (_, record) = alpha.record("web");
    let pid = record["process"]["pid"].as_u64().expect("a machine with a process").to_string();
    alpha.exec("kill", &["-KILL", &pid]);
    beta.wait_state("web", &["running"]);
    lane.goes_on(beta, "web", &born);
    alpha.wait_empty();
}

/// Waits until the standby has had so many epochs: it holds at least what the machine was when this began.
fn wait_epochs(host: &HostProcess, epochs: u64) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let machines = host.json(&["ps"]);
        let protection = &machines[0]["protection"];
        if protection["state"]["kind"] == "protected" && protection["epoch"].as_u64() >= Some(epochs) {
            return;
        }
        assert!(Instant::now() < deadline, "not protected: {protection}\n{}", host.log_text());
        std::thread::sleep(Duration::from_millis(50));
    }
}
