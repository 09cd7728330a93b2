//! Machines that processes of their own serve: at rest, and while no daemon runs, whether it was told to stop
//! or killed.

use nix::sys::signal::Signal;
use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, TestAgent, assert_same_life};

/// A host with the machine `web`.
fn cluster() -> Cluster {
    let cluster = Cluster::start(&["alpha"]);
    let arguments = vec!["--tpm".to_owned()];
    Guest { arguments, ..Guest::small("web") }.run(&cluster, cluster.host("alpha"));
    cluster
}

/// Process that has the machine `web`, or waits for it, as its host counts.
fn machine_process(alpha: &HostProcess) -> String {
    let record = fs::read_to_string(alpha.slot("web").join("machine-process")).expect("a recorded process");
    record.split_whitespace().next().expect("its number").to_owned()
}

/// Waits until a process waits for the machine `web`: should the daemon be killed, it has the machine.
fn wait_waiting(alpha: &HostProcess) {
    let deadline = Instant::now() + PATIENCE;
    let has_one = || {
        let record = fs::read_to_string(alpha.slot("web").join("machine-process")).ok()?;
        let told = format!("pid={}", record.split_whitespace().next()?);
        let log = alpha.log_text();
        let mut waits = log.lines().filter(|line| line.contains("a process waits for it"));
        waits.any(|line| line.split_whitespace().any(|word| word == told)).then_some(())
    };
    while has_one().is_none() {
        assert!(Instant::now() < deadline, "no process waits for web: {}", alpha.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until its own process has the machine `web`, after as many bytes of the log.
fn wait_at_rest(alpha: &HostProcess, after: usize) {
    alpha.wait_log(after, "at rest: its own process has it");
}

/// Value of a metric of the machine `web`; 0 without one.
fn metric(cluster: &Cluster, name: &str) -> f64 {
    let address = cluster.host("alpha").metrics_address().parse().expect("an address");
    let mut stream = cluster.lab.host("client").connect(address, PATIENCE).expect("a page of metrics");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("a request");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("a page");
    let mut lines = page.lines().filter(|line| line.starts_with(&format!("{name}{{machine=\"web\"")));
    let value = lines.next().and_then(|line| line.rsplit(' ').next()?.parse().ok());
    value.unwrap_or_default()
}

fn assert_good(witness: &mut TestAgent) {
    let now = witness.check().expect("an answer");
    assert!(matches!(now.ram, CheckResult::Good(_)) && matches!(now.disk, CheckResult::Good(_)), "{now:?}");
}

/// Waits until the daemon has taken the machine from its process, and knows what was written.
fn assert_taken(alpha: &HostProcess, after: usize) {
    alpha.wait_log(after, "took it from its own process");
    let log = alpha.log_text();
    let taken = log[after..].lines().find(|line| line.contains("took it from its own process"));
    assert!(taken.is_some_and(|line| line.contains("Complete")), "{log}");
}

/// Starts the next daemon, which leaves the machine to its process.
fn start_and_leave(cluster: &mut Cluster) {
    let process = machine_process(cluster.host("alpha"));
    let after = cluster.host("alpha").log_text().len();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    let log = &alpha.log_text()[after..];
    assert!(log.contains("its own process has it") && !log.contains("took it from"), "{log}");
    assert_eq!(machine_process(alpha), process);
    let web = alpha.json(&["inspect", "web"]);
    assert_eq!(
        (&web["state"]["kind"], web["process"]["pid"].to_string()),
        (&"running".into(), process),
        "{web}"
    );
    assert!(web["disks"][0]["owned"].as_u64() > Some(0), "{web}");
}

/// Whether a checkpoint has all that the guest has written, across daemons.
fn assert_kept_whole(cluster: &Cluster, witness: &mut TestAgent) {
    let alpha = cluster.host("alpha");
    let last = witness.write(40).expect("a disk that takes writes");
    alpha.run(&["checkpoint", "web", "--tag", "after"]);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "after", "--name", "copy"]);
    let mut copy = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&last, &copy.state().expect("the state of the last daemon"));
    assert_good(&mut copy);
    alpha.run(&["verify"]);
}

#[test]
fn while_the_daemon_is_stopped_a_guest_has_disk_and_network_and_the_next_daemon_knows_what_it_wrote() {
    let mut cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    cluster.host("alpha").run(&["checkpoint", "web", "--tag", "before"]);
    for round in 0..2 {
        cluster.host_mut("alpha").stop_daemon();
        // Over the connection of before: neither network nor disk waits for a daemon.
        let alone = witness.write(60).expect("a disk and a network without a daemon");
        assert_same_life(&born, &alone);
        let in_tpm = witness.tpm(Some(round)).expect("a TPM without a daemon");
        start_and_leave(&mut cluster);
        assert_good(&mut witness);
        assert_eq!(witness.tpm(None).expect("a TPM"), in_tpm);
        if round == 0 {
            // The second time memory is still filled on demand.
            let alpha = cluster.host("alpha");
            let after = alpha.log_text().len();
            alpha.run(&["suspend", "web"]);
            assert_taken(alpha, after);
            alpha.run(&["resume", "web"]);
            witness = cluster.witness(GUEST_ADDRESS);
        }
    }
    assert_kept_whole(&cluster, &mut witness);
}

#[test]
fn a_guest_whose_daemon_is_killed_goes_on_with_disk_and_network_and_loses_nothing() {
    let mut cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    cluster.host("alpha").run(&["checkpoint", "web", "--tag", "before"]);
    for round in 0..3 {
        wait_waiting(cluster.host("alpha"));
        witness.write(20).expect("a disk of the daemon");
        cluster.host_mut("alpha").kill_daemon();
        // Over the connection of before: neither network nor disk waits for a daemon.
        let alone = witness.write(60).expect("a disk and a network without a daemon");
        assert_same_life(&born, &alone);
        assert_good(&mut witness);
        start_and_leave(&mut cluster);
        assert_good(&mut witness);
        let alpha = cluster.host("alpha");
        match round {
            0 => {
                let after = alpha.log_text().len();
                alpha.run(&["checkpoint", "web"]);
                assert_taken(alpha, after);
            }
            1 => {
                // The last time memory is still filled on demand.
                alpha.run(&["suspend", "web"]);
                alpha.run(&["resume", "web"]);
                witness = cluster.witness(GUEST_ADDRESS);
            }
            _ => {}
        }
    }
    assert_kept_whole(&cluster, &mut witness);
}

#[test]
fn a_machine_at_rest_needs_no_daemon_and_comes_back_to_whoever_asks_for_it() {
    let mut cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    let alpha = cluster.host("alpha");
    alpha.run(&["checkpoint", "web", "--tag", "before"]);
    let logged = alpha.log_text().len();
    wait_at_rest(alpha, logged);
    let written = "whimbrel_machine_storage_write_traffic_bytes_total";
    let before = metric(&cluster, written);
    // The connection of before goes on, though the daemon stands still.
    alpha.signal_daemon(Signal::SIGSTOP);
    let alone = witness.write(60).expect("a disk and a network beside a daemon that hangs");
    alpha.signal_daemon(Signal::SIGCONT);
    assert_same_life(&born, &alone);
    assert!(metric(&cluster, written) > before, "nobody counts what it writes");
    assert_eq!(alpha.machines(), [("web".to_owned(), "running".to_owned())]);
    assert!(!alpha.run(&["logs", "web"]).is_empty(), "the log of the console");
    assert!(!alpha.log_text()[logged..].contains("took it from"), "looking at it has taken it back");
    // The console takes it back, and keeps it.
    console(alpha, "web").check().expect("a guest at its console");
    assert_taken(alpha, logged);
    assert_good(&mut witness);
    let logged = alpha.log_text().len();
    wait_at_rest(alpha, logged);
    alpha.run(&["checkpoint", "web"]);
    assert_taken(alpha, logged);
    let logged = alpha.log_text().len();
    wait_at_rest(alpha, logged);
    // Neither a daemon that ends nor one that is killed changes anything for it.
    let process = machine_process(alpha);
    cluster.host_mut("alpha").stop_daemon();
    assert_same_life(&born, &witness.write(20).expect("a disk and a network without a daemon"));
    assert_eq!(machine_process(cluster.host("alpha")), process);
    start_and_leave(&mut cluster);
    cluster.host_mut("alpha").kill_daemon();
    assert_same_life(&born, &witness.write(20).expect("a disk and a network without a daemon"));
    start_and_leave(&mut cluster);
    assert_good(&mut witness);
    assert_kept_whole(&cluster, &mut witness);
}

#[test]
fn a_paused_machine_and_one_of_an_encrypted_store_stay_with_their_processes_too() {
    let keys = tempfile::tempdir().expect("a folder for keys");
    let key = keys.path().join("key");
    fs::write(&key, "ab".repeat(32)).expect("a key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("a key of its owner");
    let mut cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    let alpha = cluster.host("alpha");
    alpha.run(&["checkpoint", "web"]);
    wait_at_rest(alpha, 0);
    // The process of a store that was not encrypted ends, and the machine is adopted.
    let after = alpha.log_text().len();
    cluster.host_mut("alpha").restart_with(&format!("encrypt = true\nkey_file = {key:?}\n"));
    let alpha = cluster.host("alpha");
    assert!(!alpha.log_text()[after..].contains("took it from"), "{}", alpha.log_text());
    // Memory is filled on demand from sealed packs, and the disk is encrypted.
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    cluster.host_mut("alpha").stop_daemon();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&born, &witness.write(60).expect("a disk without a daemon"));
    assert_good(&mut witness);
    start_and_leave(&mut cluster);
    assert_good(&mut witness);
    let alpha = cluster.host("alpha");
    alpha.run(&["pause", "web"]);
    cluster.host_mut("alpha").stop_daemon();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    assert_eq!(alpha.machines(), [("web".to_owned(), "paused".to_owned())]);
    assert!(alpha.json(&["inspect", "web"])["process"]["pid"].is_number(), "the daemon has taken it");
    alpha.run(&["unpause", "web"]);
    assert_kept_whole(&cluster, &mut witness);
}

#[test]
fn whatever_ends_while_a_process_has_the_machine_the_daemon_finds_out() {
    let cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    let alpha = cluster.host("alpha");
    wait_at_rest(alpha, 0);
    // The process: the daemon adopts the machine, of which the guest notices a pause.
    let logged = alpha.log_text().len();
    alpha.exec("kill", &["-9", &machine_process(alpha)]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&born, &witness.write(20).expect("a machine that goes on"));
    assert_good(&mut witness);
    // A process that hangs is ended, though nobody asks for the machine.
    wait_at_rest(alpha, logged);
    let logged = alpha.log_text().len();
    alpha.exec("kill", &["-STOP", &machine_process(alpha)]);
    alpha.wait_log(logged, "adopting it");
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&born, &witness.write(20).expect("a machine that goes on"));
    // The guest: the machine is stopped, and nothing of it is left.
    wait_at_rest(alpha, logged);
    let slot = alpha.slot("web");
    witness.power_off().expect("a request to switch off");
    alpha.wait_state("web", &["stopped"]);
    assert!(!slot.exists(), "its memory is still there");
    // QEMU: the machine has crashed.
    let logged = alpha.log_text().len();
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that has booted");
    wait_at_rest(alpha, logged);
    let pid = alpha.json(&["inspect", "web"])["pid"].to_string();
    alpha.exec("kill", &["-9", &pid]);
    alpha.wait_state("web", &["crashed"]);
    assert!(!fs::exists(format!("/proc/{pid}")).expect("an answer"), "QEMU is a zombie");
}

#[test]
fn a_daemon_that_cannot_take_its_machine_back_leaves_it_running_and_takes_it_when_it_can() {
    let cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    let alpha = cluster.host("alpha");
    wait_at_rest(alpha, 0);
    // Too few descriptors for a machine, and enough for a request.
    let limit = |limit: &str| {
        // The least of several counts: a busy daemon has some open for a moment.
        let daemon = "pid=$(pgrep -f '[w]himbrel host --name alpha'); \
                      counts=$(for i in 1 2 3 4 5 6; do ls /proc/$pid/fd | wc -l; sleep 0.1; done); \
                      count=$(echo \"$counts\" | sort -n | head -1)";
        alpha.exec("sh", &["-c", &format!("{daemon}; prlimit --pid $pid --nofile={limit}")]);
    };
    limit("$((count + 6)):1024");
    let refusal = alpha.refuse(&["checkpoint", "web"]);
    assert!(refusal.text.contains("process"), "{refusal:?}");
    assert_eq!(alpha.machines(), [("web".to_owned(), "running".to_owned())]);
    assert_same_life(&born, &witness.write(20).expect("a machine that goes on"));
    limit("1024:1024");
    // What lies at the path of a base is not what the machine reads any more.
    let base = alpha.record("web").1["bases"][0]["path"].as_str().expect("a base").to_owned();
    fs::write(&base, "another image").expect("another base");
    alpha.run(&["checkpoint", "web"]);
    assert_good(&mut witness);
    assert_same_life(&born, &witness.write(20).expect("a machine that goes on"));
    let logged = alpha.log_text().len();
    wait_at_rest(alpha, logged);
    alpha.run(&["upgrade", "web"]);
    assert_good(&mut witness);
}

#[test]
fn an_operation_ends_the_process_of_its_machine_that_hangs() {
    let cluster = cluster();
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    let alpha = cluster.host("alpha");
    wait_at_rest(alpha, 0);
    let process = machine_process(alpha);
    alpha.exec("kill", &["-STOP", &process]);
    alpha.run(&["checkpoint", "web"]);
    assert!(alpha.log_text().contains("adopting it"), "{}", alpha.log_text());
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&born, &witness.write(20).expect("a machine that goes on"));
    assert_good(&mut witness);
}

#[test]
fn a_daemon_with_too_few_open_files_does_not_start_and_costs_no_guest() {
    let mut cluster = cluster();
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    wait_at_rest(cluster.host("alpha"), 0);
    // Its machine is to be adopted: its process is gone too.
    let process = machine_process(cluster.host("alpha"));
    cluster.host_mut("alpha").kill_daemon();
    cluster.host("alpha").exec("kill", &["-9", &process]);
    let alpha = cluster.host_mut("alpha");
    let mut starts = (20..).step_by(4).map(|files| alpha.start_daemon_with_files(files));
    let refused = starts.by_ref().take_while(|serves| !serves).count();
    assert!(refused > 0, "every number of files was enough");
    let alpha = cluster.host("alpha");
    assert!(alpha.log_text().contains("cannot adopt it"), "{}", alpha.log_text());
    assert_eq!(alpha.machines(), [("web".to_owned(), "running".to_owned())]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&born, &witness.state().expect("a machine that goes on"));
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    assert_same_life(&born, &witness.write(20).expect("a machine that goes on"));
    assert_good(&mut witness);
}

#[test]
fn a_daemon_that_is_killed_again_and_again_and_started_at_once_finds_its_machine_each_time() {
    let mut cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    for _ in 0..5 {
        cluster.host("alpha").run(&["upgrade", "web"]);
        // The next daemon may find a process that waits, is just taking the machine, or is not there yet.
        wait_waiting(cluster.host("alpha"));
        cluster.host_mut("alpha").kill_daemon();
        cluster.host_mut("alpha").start_daemon();
        cluster.host_mut("alpha").kill_daemon();
        cluster.host_mut("alpha").start_daemon();
        cluster.host("alpha").wait_state("web", &["running"]);
        assert_same_life(&born, &witness.write(20).expect("a machine that goes on"));
        assert_good(&mut witness);
    }
}

#[test]
fn a_machine_that_moves_or_has_ended_has_no_process_that_could_take_it() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    wait_waiting(cluster.host("alpha"));
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let process = alpha.slot("web").join("machine-process");
    beta.hold_at("pages");
    let mut command = alpha.start_command(&["migrate", "web", "beta"]);
    beta.wait_held("pages");
    assert!(!process.exists(), "two could have the machine");
    alpha.signal_daemon(Signal::SIGKILL);
    beta.release("pages");
    command.wait().expect("the end of the command");
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    cluster.host("alpha").wait_state("web", &["running"]);
    cluster.host("beta").wait_empty();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&born, &witness.state().expect("a machine that goes on"));
    assert_good(&mut witness);
    wait_waiting(cluster.host("alpha"));
    let alpha = cluster.host("alpha");
    alpha.run(&["stop", "web", "--kill"]);
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    cluster.host("alpha").wait_state("web", &["stopped"]);
}

#[test]
fn a_machine_whose_process_died_is_adopted_and_has_lost_nothing() {
    let mut cluster = cluster();
    let born = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    cluster.host_mut("alpha").stop_daemon();
    let alpha = cluster.host("alpha");
    alpha.exec("kill", &["-9", &machine_process(alpha)]);
    cluster.host_mut("alpha").start_daemon();
    cluster.host("alpha").wait_state("web", &["running"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&born, &witness.state().expect("a machine that goes on"));
    assert_good(&mut witness);
}

#[test]
fn a_guest_that_shuts_down_while_there_is_no_daemon_is_stopped_and_not_crashed() {
    let mut cluster = cluster();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    cluster.host_mut("alpha").stop_daemon();
    let mark = cluster.host("alpha").slot("web").join("shut-down");
    witness.power_off().expect("a request to switch off");
    let deadline = Instant::now() + PATIENCE;
    while !mark.exists() {
        assert!(Instant::now() < deadline, "nobody has seen the guest shut down");
        std::thread::sleep(Duration::from_millis(20));
    }
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    alpha.wait_state("web", &["stopped"]);
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that has booted");
}
