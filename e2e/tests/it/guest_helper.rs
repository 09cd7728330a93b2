//! The program inside a guest helps a migration that cannot get ahead of what the guest writes, frees caches,
//! announces the guest, and asks for its own migration. Without it the host throttles.

use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    path::Path,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, HostProcess, PATIENCE};
use whimbrel_testkit::guest::{CheckResult, GuestOptions, Work, assert_same_life, image};

/// A region that is written flat out, larger than the sender remembers versions of, so that copying never
/// gets ahead of it.
const MUNCH: &str = "munch=128:0:4096";

struct Inside<'a> {
    cluster: &'a Cluster,
}

impl Inside<'_> {
    /// Sends a line to the shell inside the guest. What it prints comes line by line.
    fn begin(&self, line: &str) -> BufReader<TcpStream> {
        let client = self.cluster.lab.host("client");
        let address = format!("{GUEST_ADDRESS}:7070").parse().expect("an address");
        let deadline = Instant::now() + PATIENCE;
        loop {
            match client.connect(address, Duration::from_secs(2)) {
                Ok(mut stream) => {
                    stream.set_read_timeout(Some(PATIENCE * 2)).expect("a timeout");
                    stream.write_all(format!("{line}\n").as_bytes()).expect("a shell that reads");
                    return BufReader::new(stream);
                }
                Err(error) => assert!(Instant::now() < deadline, "no shell inside: {error}"),
            }
        }
    }

    /// What a line prints, its exit code last.
    fn run(&self, line: &str) -> String {
        let lines = self.begin(line).lines().map(|line| line.expect("a guest that answers"));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Time that each CPU has worked for programs, in ticks.
    fn worked(&self) -> Vec<u64> {
        let text = self.run("cat /proc/stat");
        let cpus = text.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
        cpus.map(|line| line.split(' ').nth(1).and_then(|ticks| ticks.parse().ok()).expect("ticks")).collect()
    }

    /// The state of the muncher: `R`, `S`, or `t` while it is held.
    fn muncher(&self) -> String {
        let text = self.run("cat /proc/$(pidof muncher)/status");
        let state =
            text.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or_else(|| panic!("{text}"));
        state.trim()[..1].to_owned()
    }

    /// Waits until the muncher has all of its memory and goes round in it.
    fn wait_munching(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = self.run("cat /proc/$(pidof muncher)/statm");
            let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
            if pages > Some(120 << 8) {
                return;
            }
            assert!(Instant::now() < deadline, "the muncher does not get its memory: {text}");
        }
    }

    fn wait_muncher(&self, wanted: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.muncher();
            if wanted.contains(&state) {
                return;
            }
            assert!(Instant::now() < deadline, "the muncher is in state {state} and not in {wanted}");
        }
    }
}

/// An address that the guest has and never uses.
const SILENT: &str = "10.77.0.177";

/// A machine called `web` with these words more on its kernel's command line and these arguments more.
fn start(cluster: &Cluster, host: &HostProcess, more: &str, arguments: &[&str]) {
    let disk = cluster.disk.path().join("web.raw");
    std::fs::File::create(&disk).and_then(|file| file.set_len(32 << 20)).expect("a disk image");
    start_on(cluster, host, &disk, more, arguments);
}

fn start_on(cluster: &Cluster, host: &HostProcess, disk: &Path, more: &str, arguments: &[&str]) {
    let address = Some(format!("{GUEST_ADDRESS}/24"));
    let append = format!("{} {more}", GuestOptions { address, buffer_mib: 16, work: Work::Idle });
    let files = cluster.files();
    let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    let (disk, kernel, initrd) = (text(disk), text(&files.kernel), text(&files.initrd));
    let mut all = vec!["run", "web", "--disk", &disk, "--memory", "320M", "--net", "br0"];
    all.extend(["--kernel", &kernel, "--initrd", &initrd, "--append", &append]);
    all.extend(arguments);
    host.run(&all);
}

fn wait_heard(host: &HostProcess) {
    let deadline = Instant::now() + PATIENCE;
    while !host.log_text().contains("the guest agent is present") {
        assert!(Instant::now() < deadline, "nobody inside says hello:\n{}", host.log_text());
        // A process of its own would hear it, and log it elsewhere.
        host.run(&["upgrade", "web"]);
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn names(result: &Value, of: &str) -> Vec<String> {
    let list = result["result"]["slowed"][of].as_array().cloned().unwrap_or_default();
    list.iter()
        .map(|name| name.as_str().unwrap_or_default().split(' ').next().unwrap_or_default().to_owned())
        .collect()
}

#[test]
fn a_process_that_writes_too_fast_is_held_and_goes_on_where_it_arrives() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    start(&cluster, alpha, &format!("helper=on {MUNCH}"), &[]);
    let inside = Inside { cluster: &cluster };
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    wait_heard(alpha);
    inside.wait_munching();
    inside.run(&format!("ip addr add {SILENT}/24 dev eth0"));
    cluster
        .lab
        .host("client")
        .output("sysctl", &["-w", "net.ipv4.conf.all.arp_accept=1"])
        .expect("a setting");

    let moved = alpha.json(&["migrate", "web", "beta", "--rate-max", "100Mbit", "--throttle", "off"]);
    println!("{moved}");
    assert_eq!(names(&moved, "stunned"), ["muncher"], "{moved}");
    assert_eq!(moved["result"]["slowed"]["cpu_percent"], Value::Null);
    let after = witness.check().expect("a machine on the target");
    assert_same_life(&born, &after);
    assert!(
        matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
        "{after:?}"
    );
    wait_heard(beta);
    inside.wait_muncher("RS");
    // The host announces what it has seen pass. Of this address only the guest knows.
    let deadline = Instant::now() + PATIENCE;
    let known = || cluster.lab.host("client").output("ip", &["neigh", "show", SILENT]).expect("neighbours");
    while !known().contains("lladdr 52:54:00") {
        assert!(Instant::now() < deadline, "it does not announce itself:\n{}", beta.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_migration_that_is_cut_off_lets_go_of_whom_it_held() {
    // On a busy machine a guest may get too little of the processors to write more than is copied: then
    // nobody is held.
    assert!((0..3).any(|_| a_migration_is_cut_off()), "nobody was held in three migrations");
}

/// Whether somebody was held.
fn a_migration_is_cut_off() -> bool {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    start(&cluster, alpha, &format!("helper=on {MUNCH}"), &[]);
    let inside = Inside { cluster: &cluster };
    wait_heard(alpha);
    inside.wait_munching();
    beta.hold_at("last");
    std::thread::scope(|scope| {
        let migrate = scope.spawn(|| {
            alpha.refuse(&["migrate", "web", "beta", "--rate-max", "100Mbit", "--throttle", "off"])
        });
        beta.wait_held("last");
        cluster.lab.unplug("beta").expect("a cable to pull");
        let refusal = migrate.join().expect("the command ends");
        assert!(refusal.text.contains("still runs here"), "{refusal:?}");
    });
    beta.release("last");
    if !alpha.log_text().contains("suspended processes that write too fast") {
        return false;
    }
    cluster.lab.replug("beta").expect("a cable to put back");
    inside.wait_muncher("RS");
    // Not because a lease ran out.
    let console = alpha.run(&["console", "web", "--log"]);
    assert!(!console.contains("the host is silent"), "{console}");
    alpha.wait_state("web", &["running"]);
    true
}

#[test]
fn who_is_allowed_is_never_held_and_the_cpus_are_throttled_instead() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let alpha = cluster.host("alpha");
    start(&cluster, alpha, &format!("helper=on allow=muncher {MUNCH}"), &[]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    wait_heard(alpha);
    Inside { cluster: &cluster }.wait_munching();
    let moved = alpha.json(&["migrate", "web", "beta", "--rate-max", "100Mbit", "--throttle", "50"]);
    assert_eq!(
        (names(&moved, "stunned"), names(&moved, "spared")),
        (vec![], vec!["muncher".to_owned()]),
        "{moved}"
    );
    // A first step may do on a busy host; below what was allowed it never goes.
    let percent = moved["result"]["slowed"]["cpu_percent"].as_u64();
    assert!(matches!(percent, Some(50 | 60)), "{moved}");
    let after = witness.check().expect("a machine on the target");
    assert_same_life(&born, &after);
    assert!(matches!(after.ram, CheckResult::Good(_)), "{after:?}");
}

#[test]
fn a_machine_without_the_program_is_throttled_and_moves() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let alpha = cluster.host("alpha");
    start(&cluster, alpha, MUNCH, &[]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    let wrong = alpha.refuse(&["migrate", "web", "beta", "--throttle", "5"]);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    let moved = alpha.json(&["migrate", "web", "beta", "--rate-max", "100Mbit"]);
    println!("{}", moved["result"]["slowed"]);
    assert!(names(&moved, "stunned").is_empty(), "{moved}");
    let percent = moved["result"]["slowed"]["cpu_percent"].as_u64();
    assert!(percent.is_some_and(|percent| (20..=60).contains(&percent)), "{moved}");
    let after = witness.check().expect("a machine on the target");
    assert_same_life(&born, &after);
    assert!(matches!(after.ram, CheckResult::Good(_)), "{after:?}");
}

#[test]
fn a_machine_with_four_cpus_moves_while_all_of_them_work() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    start(&cluster, alpha, "helper=on", &["--cpus", "4"]);
    let inside = Inside { cluster: &cluster };
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let mut before = witness.write(50).expect("a first life");
    // Each works again and again, and leaves the processors of the test's host to others.
    let busy = "taskset $mask sh -c 'while usleep 50000; do :; done' </dev/null >/dev/null 2>&1 &";
    inside.run(&format!("for mask in 1 2 4 8; do {busy} done"));
    let wait_working = || {
        let (begun, deadline) = (inside.worked(), Instant::now() + PATIENCE);
        assert_eq!(begun.len(), 4);
        loop {
            let now = inside.worked();
            if now.iter().zip(&begun).all(|(now, begun)| now > begun) {
                return;
            }
            assert!(Instant::now() < deadline, "a CPU stands still: {begun:?} {now:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    wait_working();
    let moves = [(alpha, beta, "precopy"), (beta, alpha, "postcopy"), (alpha, beta, "hybrid")];
    for (from, to, mode) in moves {
        from.run(&["migrate", "web", to.name(), "--mode", mode]);
        wait_working();
        let after = witness.check().expect("a machine on the target");
        assert_same_life(&before, &after);
        assert!(
            matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
            "{after:?}"
        );
        before = witness.write(20).expect("a disk that takes writes");
    }
    beta.run(&["suspend", "web"]);
    beta.run(&["resume", "web"]);
    wait_working();
    let mut witness = cluster.witness(GUEST_ADDRESS);
    assert_same_life(&before, &witness.check().expect("a machine that goes on"));
}

/// Seconds for which a guest stands still at least; so far behind it would stay.
const STOOD_STILL: u64 = 8;

#[test]
fn the_clock_of_a_guest_that_stood_still_is_set_forward() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    start(&cluster, alpha, "helper=on", &[]);
    let inside = Inside { cluster: &cluster };
    wait_heard(alpha);
    let behind = || {
        let there: u64 =
            inside.run("date +%s").lines().next().and_then(|line| line.parse().ok()).expect("a time");
        let here = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a time");
        here.as_secs().saturating_sub(there)
    };
    let steps: [&[&[&str]]; 2] =
        [&[&["pause", "web"], &["unpause", "web"]], &[&["suspend", "web"], &["resume", "web"]]];
    for [stop, go_on] in steps.map(|step| [step[0], step[1]]) {
        let logged = alpha.log_text().len();
        alpha.run(stop);
        std::thread::sleep(Duration::from_secs(STOOD_STILL));
        alpha.run(go_on);
        alpha.wait_log(logged, "the guest has set its clock forward");
        assert!(behind() < STOOD_STILL, "after {go_on:?}");
    }
    // What is ahead stays ahead: programs bear no clock that goes back.
    inside.run("date -s @$(($(date +%s) + 1000))");
    alpha.run(&["suspend", "web"]);
    let logged = alpha.log_text().len();
    alpha.run(&["resume", "web"]);
    alpha.wait_log(logged, "the guest agent is present");
    assert!(inside.run("test $(date +%Y) -lt 1; date +%s").contains("exit 0"));
    assert_eq!(behind(), 0);
}

#[test]
fn a_guest_asks_for_its_own_migration_and_gets_what_its_owner_allowed() {
    let cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    // The owner of beta lets the other hosts say what their guests may request there.
    let path = beta.data().join("trust.toml");
    let trust = std::fs::read_to_string(&path).expect("beta's trust file");
    let given = trust.replace("\"tunnel\"", "\"tunnel\", \"guest\"");
    assert_ne!(trust, given, "{trust}");
    std::fs::write(&path, given).expect("a trust file that can be written");
    start(&cluster, alpha, "helper=on", &["--guest-requests", "migrate=beta,migrate=alpha"]);
    let inside = Inside { cluster: &cluster };
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(50).expect("a first life");
    wait_heard(alpha);
    let refused = inside.run("whimbrel-guest migrate gamma 2>&1");
    assert!(refused.contains("did not allow this") && refused.ends_with("exit 3"), "{refused}");
    let refused = inside.run("whimbrel-guest checkpoint mine 2>&1");
    assert!(refused.contains("--guest-requests checkpoint") && refused.ends_with("exit 3"), "{refused}");

    let moved = inside.run("whimbrel-guest migrate beta 2>&1");
    assert!(moved.ends_with("on beta\nexit 0"), "{moved}");
    beta.wait_state("web", &["running"]);
    alpha.wait_empty();
    assert_same_life(&born, &witness.check().expect("a machine on the target"));
    // What its owner allowed goes with it.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let back = inside.run("whimbrel-guest migrate alpha 2>&1");
        if back.ends_with("on alpha\nexit 0") {
            break;
        }
        assert!(Instant::now() < deadline, "{back}");
    }
    alpha.wait_state("web", &["running"]);
    assert_same_life(&born, &witness.check().expect("a machine that came back"));
}

#[test]
fn caches_are_freed_before_they_are_copied() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let alpha = cluster.host("alpha");
    let disk = cluster.disk.path().join("web.raw");
    image::patterned(&disk, 128, 7).expect("a disk of noise");
    start_on(&cluster, alpha, &disk, "helper=on", &["--guest-requests", "checkpoint"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.check().expect("a first life");
    let (before, cached) =
        (witness.memory().expect("its memory"), witness.fill_cache().expect("a disk to read"));
    assert!(cached.cached > 112 << 20, "{cached:?}");
    wait_heard(alpha);
    let kept = Inside { cluster: &cluster }.run("whimbrel-guest checkpoint mine 2>&1");
    assert!(kept.ends_with("exit 0") && alpha.run(&["show", "guest.web.mine"]).contains("web"), "{kept}");

    let moved = alpha.json(&["migrate", "web", "beta", "--drop-caches"]);
    let freed = moved["result"]["freed"].as_u64().unwrap_or_default();
    println!("{} MiB freed, {} bytes on the wire", freed >> 20, moved["result"]["wire_bytes"]);
    assert!(freed > 96 << 20, "{moved}");
    let after = witness.check().expect("a machine on the target");
    assert_same_life(&born, &after);
    assert!(matches!(after.ram, CheckResult::Good(_)), "{after:?}");
    let deadline = Instant::now() + PATIENCE;
    while witness.memory().expect("an answer").total != before.total {
        assert!(Instant::now() < deadline, "the guest stays squeezed: {before:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
