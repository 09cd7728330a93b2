//! Machines with a hot standby: whatever of the primary's host dies, the machine goes on at the other one,
//! its clients see a short pause, and nobody ever sees two of it.
//!
//! The open TCP stream is the strictest witness of all: were anything seen outside that the standby did not
//! have, its guest would get acknowledgements for what it never sent, and the connection would break.

use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    cell::RefCell,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, PATIENCE, console};
use whimbrel_testkit::{
    guest::{CheckResult, Identity, Work, assert_same_life},
    lab::{Process, StreamEnd},
};

/// A lease that a busy machine does not lose by being busy.
const LEASE: &str = "2s";

pub(crate) fn busy(name: &str) -> Guest {
    let work = Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 64 };
    Guest { work, ..Guest::small(name) }
}

fn protect(host: &HostProcess, more: &[&str]) -> Value {
    let arguments = [&["protect", "web", "beta", "--lease", LEASE], more].concat();
    host.json(&arguments)
}

pub(crate) fn protection(host: &HostProcess) -> Value {
    protection_of(host, "web")
}

fn protection_of(host: &HostProcess, name: &str) -> Value {
    let machines = host.json(&["ps"]);
    let machines = machines.as_array().expect("a list of machines").clone();
    machines.into_iter().find(|one| one["name"] == name).map_or(Value::Null, |one| one["protection"].clone())
}

/// Waits until the machine has been protected for some epochs.
pub(crate) fn wait_epochs(host: &HostProcess, epochs: u64) -> Value {
    wait_epochs_of(host, "web", epochs)
}

fn wait_epochs_of(host: &HostProcess, name: &str, epochs: u64) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = protection_of(host, name);
        if now["state"]["kind"] == "protected" && now["epoch"].as_u64().unwrap_or(0) >= epochs {
            let log = host.log_text();
            assert!(!log.contains("is stopped by name"), "a confined QEMU cannot be held by a pipe: {log}");
            return now;
        }
        assert!(Instant::now() < deadline, "not protected: {now}\n{}", host.log_text());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// When the epochs were kept of which there are capsules at this host.
fn kept(host: &HostProcess) -> Vec<u64> {
    let capsules = host.json(&["ls"]);
    let names = capsules.as_array().expect("a list").iter().flat_map(|one| one["names"].as_array().cloned());
    let time = |name: Value| name.as_str()?.strip_prefix("kept.web.")?.parse().ok();
    names.flatten().filter_map(time).collect()
}

/// Waits until so many more epochs are kept than at the beginning, each later than it.
fn wait_kept(host: &HostProcess, more: usize) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_millis() as u64;
    let deadline = Instant::now() + PATIENCE;
    while kept(host).iter().filter(|time| **time > since).count() < more {
        assert!(Instant::now() < deadline, "nothing is kept: {}", host.log_text());
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub(crate) fn end_qemu(host: &HostProcess) {
    signal_qemu(host, "-KILL");
}

fn signal_qemu(host: &HostProcess, signal: &str) {
    let (_, record) = host.record("web");
    let pid = record["process"]["pid"].as_u64().expect("a machine with a process").to_string();
    host.exec("kill", &[signal, &pid]);
}

/// A machine on beta, whose QEMU gets a signal there and then, on alpha, another one: each time it goes on at
/// its standby.
fn goes_on_after_signals(cluster: &Cluster, before: Identity) {
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let mut before = before;
    for (from, to, name, signal) in [(beta, alpha, "alpha", "-TERM"), (alpha, beta, "beta", "-STOP")] {
        from.json(&["protect", "web", name, "--lease", LEASE, "--witness", "gamma"]);
        wait_epochs(from, 10);
        signal_qemu(from, signal);
        to.wait_state("web", &["running"]);
        from.wait_empty();
        before = assert_whole(&before, cluster);
    }
}

/// It is the machine it was, with all of its memory and everything it wrote to its disk.
pub(crate) fn assert_whole(before: &Identity, cluster: &Cluster) -> Identity {
    let now = cluster.witness(GUEST_ADDRESS).check().expect("an answer");
    assert_same_life(before, &now);
    assert!(matches!(now.ram, CheckResult::Good(_)) && matches!(now.disk, CheckResult::Good(_)), "{now:?}");
    now
}

/// `web` on alpha for a while, protected by beta with gamma as the witness: what it was then.
fn protected() -> (Cluster, Identity) {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    busy("web").run(&cluster, cluster.host("alpha"));
    let before = cluster.witness(GUEST_ADDRESS).write(100).expect("a first life");
    protect(cluster.host("alpha"), &["--witness", "gamma"]);
    wait_epochs(cluster.host("alpha"), 10);
    (cluster, before)
}

/// What dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Qemu,
    Daemon,
    Everything,
}

fn dies(victim: Victim) {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    busy("web").run(&cluster, cluster.host("alpha"));
    let mut witness = cluster.witness(GUEST_ADDRESS);
    witness.write(200).expect("a first life");
    println!("{}", protect(cluster.host("alpha"), &["--witness", "gamma"]));
    let (probe, stream) = (cluster.probe(GUEST_ADDRESS), cluster.stream(GUEST_ADDRESS));
    wait_epochs(cluster.host("alpha"), 40);
    let before = witness.write(50).expect("a machine that writes");
    println!("{:#}", protection(cluster.host("alpha")));

    match victim {
        Victim::Qemu => end_qemu(cluster.host("alpha")),
        Victim::Daemon => cluster.host_mut("alpha").kill_daemon(),
        Victim::Everything => {
            cluster.lab.unplug("alpha").expect("a cable to pull");
            cluster.host("alpha").start_program("sh", &["-c", "kill -9 -1"]).wait().expect("an end");
        }
    }
    let died = Instant::now();
    cluster.host("beta").wait_state("web", &["running"]);
    println!("{victim:?}: runs on beta after {:.0} ms", died.elapsed().as_secs_f64() * 1e3);
    let after = witness.check().expect("an answer on the connection that was open all the time");
    assert_same_life(&before, &after);
    assert_eq!(after.genid, before.genid, "nobody has seen what it no longer knows");
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
    std::thread::sleep(Duration::from_millis(300));
    let (stream, probe) = (stream.stop(), probe.stop());
    println!("{stream:?}\n{:?} {}", probe.downtime, probe.answered);
    assert_eq!(stream.end, StreamEnd::Stopped, "the TCP stream broke: {stream:?}");

    // The old primary comes back, and never runs what was taken over.
    match victim {
        Victim::Qemu => {}
        Victim::Daemon => cluster.host_mut("alpha").start_daemon(),
        Victim::Everything => {
            cluster.host_mut("alpha").kill_daemon();
            cluster.host_mut("alpha").start_daemon();
            assert_ne!(cluster.host("alpha").machines(), [("web".to_owned(), "running".to_owned())]);
            cluster.lab.replug("alpha").expect("a cable to put back");
        }
    }
    cluster.host("alpha").wait_empty();
    let after = assert_whole(&after, &cluster);
    assert_eq!(cluster.host("beta").machines(), [("web".to_owned(), "running".to_owned())]);
    if victim == Victim::Qemu {
        goes_on_after_signals(&cluster, after);
    }
}

#[test]
fn a_machine_whose_qemu_is_killed_goes_on_at_its_standby() {
    dies(Victim::Qemu);
}

#[test]
fn a_machine_whose_daemon_is_killed_goes_on_at_its_standby() {
    dies(Victim::Daemon);
}

#[test]
fn a_machine_whose_host_is_gone_goes_on_at_its_standby() {
    dies(Victim::Everything);
}

#[test]
fn a_drill_loses_nothing_and_without_a_witness_a_person_decides() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    busy("web").run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    witness.write(100).expect("a first life");
    protect(alpha, &[]);
    let stream = cluster.stream(GUEST_ADDRESS);
    wait_epochs(alpha, 20);
    assert_eq!(alpha.refuse(&["suspend", "web"]).code, 4, "it is busy with being protected");
    assert_eq!(alpha.refuse(&["protect", "web", "beta"]).code, 4, "it is protected already");
    let refusal = beta.refuse(&["failover", "web"]);
    assert!(refusal.text.contains("--primary-is-dead"), "{refusal:?}");
    let refusal = beta.refuse(&["failover", "web", "--primary-is-dead"]);
    assert!(refusal.text.contains("alpha answers"), "{refusal:?}");
    let before = witness.write(10).expect("a machine that writes");

    // There and back.
    println!("{}", alpha.json(&["failover", "web"]));
    beta.wait_state("web", &["running"]);
    alpha.wait_empty();
    let after = assert_whole(&before, &cluster);
    beta.json(&["protect", "web", "alpha", "--lease", LEASE, "--mode", "remus", "--epoch", "100ms"]);
    let now = wait_epochs(beta, 10);
    assert_eq!(now["figures"]["dirty_bytes"], now["figures"]["changed_bytes"], "whole pages: {now}");
    beta.json(&["failover", "web"]);
    alpha.wait_state("web", &["running"]);
    beta.wait_empty();
    let after = assert_whole(&after, &cluster);

    // No longer protected, the standby has nothing left but what was kept on the way.
    protect(alpha, &["--diff-block", "256", "--snapshots", "1/s,3"]);
    wait_epochs(alpha, 5);
    let then = assert_whole(&after, &cluster);
    wait_kept(beta, 2);
    alpha.run(&["unprotect", "web"]);
    beta.wait_empty();
    cluster.witness(GUEST_ADDRESS).write(100).expect("a machine that writes");
    let after = assert_whole(&then, &cluster);
    assert_ne!(after.disk, then.disk);
    assert_eq!(protection(alpha), Value::Null);
    assert_eq!(kept(beta).len(), 3, "the newest three are kept");
    let refusal = beta.refuse(&["resume", "web@-1d", "--name", "before"]);
    assert!(refusal.text.contains("the oldest of web is"), "{refusal:?}");
    beta.run(&["clone", "web@-0s", "--count", "1", "--prefix", "before"]);
    let back = console(beta, "before-1").check().expect("a machine that was kept");
    assert_same_life(&then, &back);
    assert_eq!(back.disk, then.disk, "it is as it was then");
    beta.run(&["stop", "before-1", "--kill"]);
    beta.run(&["delete", "before-1"]);

    // Switching it off ends its protection: nobody takes it for dead.
    protect(alpha, &[]);
    let stream = stream.stop();
    assert_eq!(stream.end, StreamEnd::Stopped, "the TCP stream broke: {stream:?}");
    assert_whole(&after, &cluster);
    alpha.run(&["stop", "web", "--kill"]);
    beta.wait_empty();
    assert_eq!(alpha.machines(), [("web".to_owned(), "stopped".to_owned())]);

    // And its host goes back to what the other one has kept of it.
    alpha.run(&["resume", "web@-0s", "--name", "again"]);
    let again = assert_whole(&then, &cluster);
    assert_eq!(again.disk, then.disk, "it is as it was then");
}

#[test]
fn a_standby_that_dies_leaves_the_machine_running_and_is_filled_again() {
    let (mut cluster, before) = protected();
    let stream = cluster.stream(GUEST_ADDRESS);

    let logged = cluster.host("alpha").log_text().len();
    cluster.host_mut("beta").kill_daemon();
    cluster.host("alpha").wait_log(logged, "the machine runs unprotected");
    let lived_on = assert_whole(&before, &cluster);
    assert_eq!(protection(cluster.host("alpha"))["state"]["kind"], "unprotected");
    cluster.host_mut("beta").start_daemon();
    wait_epochs(cluster.host("alpha"), 10);
    assert_whole(&lived_on, &cluster);

    // A QEMU that waits and dies takes no pages any more, and says nothing: its host must notice.
    let logged = cluster.host("alpha").log_text().len();
    end_qemu(cluster.host("beta"));
    cluster.host("alpha").wait_log(logged, "the machine runs unprotected");
    wait_epochs(cluster.host("alpha"), 10);
    let lived_on = assert_whole(&lived_on, &cluster);

    // Cut off for a while it still has its pages, also after attempts that did not reach it: only what
    // differs is sent.
    cluster.lab.unplug("beta").expect("a cable to pull");
    for _ in 0..3 {
        let logged = cluster.host("alpha").log_text().len();
        cluster.host("alpha").wait_log(logged, "the machine runs unprotected");
    }
    let lived_on = assert_whole(&lived_on, &cluster);
    cluster.lab.replug("beta").expect("a cable to put back");
    wait_epochs(cluster.host("alpha"), 10);
    assert_eq!(stream.stop().end, StreamEnd::Stopped);
    let lived_on = assert_whole(&lived_on, &cluster);

    // It dies between loading the machine that was given to it and saying so: the machine goes on where it
    // was, and nothing of it waits at the other one for ever.
    cluster.host("beta").hold_at("ready");
    let failover = cluster.host("alpha").begin(&["failover", "web"]);
    cluster.host("beta").wait_held("ready");
    cluster.host_mut("beta").kill_daemon();
    cluster.host("beta").release("ready");
    cluster.host_mut("beta").start_daemon();
    let said = failover.wait_with_output().expect("an end of the drill");
    assert!(!said.status.success(), "it did not move: {said:?}");
    cluster.host("beta").wait_empty();
    let before = assert_whole(&lived_on, &cluster);
    protect(cluster.host("alpha"), &["--witness", "gamma"]);
    wait_epochs(cluster.host("alpha"), 10);
    end_qemu(cluster.host("alpha"));
    cluster.host("beta").wait_state("web", &["running"]);
    assert_whole(&before, &cluster);
}

#[test]
fn cut_off_from_both_the_primary_stops_and_one_side_answers() {
    let (cluster, before) = protected();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    cluster.lab.unplug("alpha").expect("a cable to pull");
    beta.wait_state("web", &["running"]);
    // By now the lease has run out there, and nothing of the machine is seen: not even by neighbours on its
    // own bridge.
    assert!(alpha.log_text().contains("the lease has run out"), "{}", alpha.log_text());
    let after = assert_whole(&before, &cluster);
    cluster.lab.replug("alpha").expect("a cable to put back");
    alpha.wait_empty();
    assert_whole(&after, &cluster);
}

/// What one of these sends to the other is lost, without a word.
fn part(cluster: &Cluster, hosts: [&str; 2], apart: bool) {
    for (one, other) in [(hosts[0], hosts[1]), (hosts[1], hosts[0])] {
        let other = cluster.lab.host(other).address();
        let words = match apart {
            true => format!("neigh replace {other} lladdr 02:00:00:00:00:99 dev br0 nud permanent"),
            false => format!("neigh del {other} dev br0"),
        };
        cluster.lab.host(one).ip(&words).expect("a neighbour to forget");
    }
}

#[test]
fn two_that_lose_each_other_ask_the_witness_and_one_that_slept_finds_itself_replaced() {
    let (cluster, before) = protected();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let stream = cluster.stream(GUEST_ADDRESS);

    // Both see the witness: the primary closes the protection and goes on, the standby gets no yes.
    let logged = alpha.log_text().len();
    part(&cluster, ["alpha", "beta"], true);
    alpha.wait_log(logged, "the machine runs unprotected");
    beta.wait_log(0, "the witness has decided for the primary");
    let before = assert_whole(&before, &cluster);
    assert_ne!(beta.machines(), [("web".to_owned(), "running".to_owned())]);
    part(&cluster, ["alpha", "beta"], false);
    wait_epochs(alpha, 10);
    let before = assert_whole(&before, &cluster);

    // A daemon that is stopped has shut its machine off; one that goes on looks at the clock before anything
    // else.
    alpha.signal_daemon(Signal::SIGSTOP);
    beta.wait_state("web", &["running"]);
    let after = assert_whole(&before, &cluster);
    alpha.signal_daemon(Signal::SIGCONT);
    alpha.wait_empty();
    let after = assert_whole(&after, &cluster);
    assert_eq!(stream.stop().end, StreamEnd::Stopped);
    // It is well, and takes the machine back.
    // Nothing is to fail any more, however busy this machine is.
    beta.json(&["protect", "web", "alpha", "--lease", "30s", "--witness", "gamma", "--next-standby", "beta"]);
    wait_epochs(beta, 5);
    beta.json(&["failover", "web"]);
    alpha.wait_state("web", &["running"]);
    let after = assert_whole(&after, &cluster);
    // And protects it by itself where it was told to.
    wait_epochs(alpha, 5);
    assert!(alpha.run(&["ps"]).contains("taken over from beta"), "{}", alpha.run(&["ps"]));
    assert_whole(&after, &cluster);
}

#[test]
fn a_witness_that_is_gone_changes_nothing_as_long_as_both_see_each_other() {
    let (mut cluster, before) = protected();
    cluster.host_mut("gamma").kill_daemon();
    let alpha = cluster.host("alpha");
    alpha.wait_log(0, "the witness does not answer");
    let epoch = protection(alpha)["epoch"].as_u64().expect("an epoch");
    std::thread::sleep(Duration::from_secs(3));
    let now = wait_epochs(alpha, epoch + 20);
    assert_eq!(now["witness_answers"], false, "{now}");
    // A machine that is not talked to has nothing to say, and is stopped less often.
    let deadline = Instant::now() + PATIENCE;
    while protection(alpha)["figures"]["epoch_ms"].as_f64().is_none_or(|length| length < 75.0) {
        assert!(Instant::now() < deadline, "its epochs stay short: {}", protection(alpha));
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_whole(&before, &cluster);
    // It comes back without what it knew: a new protection is registered there.
    let logged = alpha.log_text().len();
    std::fs::remove_dir_all(cluster.host("gamma").data().join("leases")).expect("leases to lose");
    cluster.host_mut("gamma").start_daemon();
    cluster.host("alpha").wait_log(logged, "the witness has forgotten this protection");
    // Until then the figures are those of the protection that has ended.
    cluster.host("alpha").wait_log(logged, "the machine is protected");
    let now = wait_epochs(cluster.host("alpha"), 10);
    assert_eq!(now["witness_answers"], true, "{now}");

    end_qemu(cluster.host("alpha"));
    cluster.host("beta").wait_state("web", &["running"]);
    assert_whole(&before, &cluster);
}

/// An etcd on a host.
struct Etcd<'a> {
    host: &'a HostProcess,
    address: String,
    dir: tempfile::TempDir,
    process: RefCell<Option<Process>>,
}

impl<'a> Etcd<'a> {
    fn start(cluster: &'a Cluster, on: &str) -> Self {
        let address = format!("{}:2379", cluster.lab.host(on).address());
        let (host, dir) = (cluster.host(on), tempfile::tempdir().expect("a directory"));
        let etcd = Self { host, address, dir, process: RefCell::default() };
        etcd.go_on();
        etcd
    }

    /// Starts it, also again with what it had.
    fn go_on(&self) {
        let (dir, address) = (self.dir.path().display(), &self.address);
        let script = format!(
            "echo $$ >{dir}/pid; exec etcd --data-dir {dir}/data --logger zap --listen-client-urls http://{address} \
             --advertise-client-urls http://{address} --listen-peer-urls http://127.0.0.1:2380 >{dir}/log 2>&1"
        );
        *self.process.borrow_mut() = Some(self.host.start_program("sh", &["-c", &script]));
        self.wait("endpoint health");
    }

    fn kill(&self) {
        let pid = std::fs::read_to_string(self.dir.path().join("pid")).expect("its process");
        self.host.exec("kill", &["-9", pid.trim()]);
    }

    /// Waits until its own client succeeds, in the words of a shell.
    fn wait(&self, words: &str) {
        let deadline = Instant::now() + PATIENCE;
        let script = format!("ETCDCTL_API=3 etcdctl --endpoints={} {words}", self.address);
        while !self.host.start_program("sh", &["-c", &script]).wait().expect("an end").success() {
            let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "not in time: {words}\n{log}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn an_etcd_decides_as_a_witness_does_and_its_absence_is_said_and_harms_nobody() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let etcd = Etcd::start(&cluster, "gamma");
    busy("web").run(&cluster, alpha);
    let before = cluster.witness(GUEST_ADDRESS).write(100).expect("a first life");
    let refusal = alpha.refuse(&["protect", "web", "beta", "--witness", "etcd://127.0.0.1:1"]);
    assert!(refusal.text.contains("does not act as a witness"), "{refusal:?}");
    // One of its members is not there, which changes nothing.
    let witness = format!("etcd://127.0.0.1:1,{}", etcd.address);
    protect(alpha, &["--witness", &witness]);
    wait_epochs(alpha, 10);

    etcd.kill();
    alpha.wait_log(0, "the witness does not answer");
    let epoch = protection(alpha)["epoch"].as_u64().expect("an epoch");
    let now = wait_epochs(alpha, epoch + 20);
    assert_eq!((now["witness"].as_str(), &now["witness_answers"]), (Some(&*witness), &Value::Bool(false)));
    let logged = alpha.log_text().len();
    etcd.go_on();
    alpha.wait_log(logged, "the witness answers");

    // The two lose each other and both see it: the primary goes on.
    let logged = alpha.log_text().len();
    part(&cluster, ["alpha", "beta"], true);
    alpha.wait_log(logged, "the machine runs unprotected");
    beta.wait_log(0, "the witness has decided for the primary");
    let before = assert_whole(&before, &cluster);
    assert_ne!(beta.machines(), [("web".to_owned(), "running".to_owned())]);
    part(&cluster, ["alpha", "beta"], false);
    wait_epochs(alpha, 10);

    // The primary is cut off from both: it stops, and the standby has it.
    cluster.lab.unplug("alpha").expect("a cable to pull");
    beta.wait_state("web", &["running"]);
    assert!(alpha.log_text().contains("the lease has run out"), "{}", alpha.log_text());
    let after = assert_whole(&before, &cluster);
    cluster.lab.replug("alpha").expect("a cable to put back");
    alpha.wait_empty();
    assert_whole(&after, &cluster);
    // Whoever is done with it leaves nothing behind.
    etcd.wait("get --prefix whimbrel --keys-only | (! grep -q .)");
}

#[test]
fn a_machine_that_is_protected_by_its_inputs_does_again_what_it_had_acknowledged() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest::small("web").run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    witness.write(50).expect("a first life");
    protect(alpha, &["--witness", "gamma", "--mode", "replay", "--epoch", "10s"]);
    let (probe, mut epoch, mut writes) = (cluster.probe(GUEST_ADDRESS), 0, 6);
    // On a connection of before: acknowledged, and in no epoch.
    let before = loop {
        for _ in 0..writes {
            witness.write(3).expect("a machine that writes");
        }
        // On a busy host six may take as long as an epoch, each time.
        writes = (writes - 1).max(1);
        let before = witness.check().expect("an answer");
        let now = epoch_of(alpha, "web");
        if now == epoch {
            break before;
        }
        epoch = now;
    };
    let told = protection(alpha);
    assert_eq!(told["mode"], "replay", "{told}");
    assert!(alpha.run(&["ps"]).contains("by replay"));
    println!("{told:#}");

    cluster.lab.unplug("alpha").expect("a cable to pull");
    alpha.start_program("sh", &["-c", "kill -9 -1"]).wait().expect("an end");
    beta.wait_state("web", &["running"]);
    let after = witness.check().expect("an answer on the connection that was open all the time");
    assert_same_life(&Identity { counter: 0, uptime: Duration::ZERO, ..before.clone() }, &after);
    assert_eq!(after.disk, before.disk, "all that was acknowledged was done again, once");
    assert_ne!(after.genid, before.genid, "clients have seen what it no longer knows");
    witness.write(3).expect("a machine that goes on");
    println!("{:?}\n{}", probe.stop().downtime, beta.log_text());
    // A drill has nothing to do again.
    let after = assert_whole(&after, &cluster);
    beta.json(&["protect", "web", "gamma", "--lease", LEASE, "--mode", "replay"]);
    wait_epochs(beta, 2);
    beta.json(&["failover", "web"]);
    cluster.host("gamma").wait_state("web", &["running"]);
    assert_whole(&after, &cluster);
}

/// The last epoch of a machine that its standby has.
fn epoch_of(host: &HostProcess, name: &str) -> u64 {
    protection_of(host, name)["epoch"].as_u64().expect("an epoch")
}

#[test]
fn machines_of_a_group_are_cut_together_and_go_on_without_one_that_leaves() {
    const OTHER: &str = "10.77.0.101";
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    busy("web").run(&cluster, alpha);
    Guest { address: Some(OTHER.to_owned()), ..Guest::small("db") }.run(&cluster, alpha);
    let before = cluster.witness(GUEST_ADDRESS).write(50).expect("a first life");
    let other = cluster.witness(OTHER).write(50).expect("a first life");
    // Alone one of them would have eighty epochs while the other has two.
    protect(alpha, &["--witness", "gamma", "--group", "shop", "--epoch", "25ms"]);
    let slow =
        ["protect", "db", "beta", "--lease", LEASE, "--witness", "gamma", "--group", "shop", "--epoch", "1s"];
    alpha.json(&slow);
    wait_epochs_of(alpha, "db", 2);
    // What is read first is not later than what is read second.
    let (web, db) = (epoch_of(alpha, "web"), epoch_of(alpha, "db"));
    wait_epochs_of(alpha, "db", db + 4);
    let (web_now, db_now) = (epoch_of(alpha, "web"), epoch_of(alpha, "db"));
    assert!((3..=db_now - db + 2).contains(&(web_now - web)), "{web} to {web_now}, {db} to {db_now}");
    assert_eq!(protection(alpha)["group"], "shop");

    alpha.run(&["stop", "db", "--kill"]);
    let web = epoch_of(alpha, "web");
    wait_epochs(alpha, web + 40);
    alpha.run(&["start", "db"]);
    alpha.json(&slow);
    wait_epochs_of(alpha, "db", 2);
    let before = assert_whole(&before, &cluster);
    let again = cluster.witness(OTHER).write(50).expect("another life");
    assert_ne!(again.boot, other.boot);
    wait_epochs_of(alpha, "db", 4);

    // Their host is gone: both go on.
    cluster.lab.unplug("alpha").expect("a cable to pull");
    beta.wait_state("web", &["running"]);
    beta.wait_state("db", &["running"]);
    assert_whole(&before, &cluster);
    assert_same_life(&again, &cluster.witness(OTHER).check().expect("an answer"));
    cluster.lab.replug("alpha").expect("a cable to put back");
    alpha.wait_empty();
}
