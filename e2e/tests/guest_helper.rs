//! The program inside a guest helps a migration that cannot get ahead of what the guest writes, frees caches, announces the guest, and
//! asks for its own migration. Without it the host throttles.

use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    path::Path,
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, HostProcess};
use whimbrel_testkit::guest::{GuestOptions, Verdict, Work, assert_same_life};

const PATIENCE: Duration = Duration::from_secs(60);
/// A region that is written flat out, larger than the sender remembers versions of, so that copying never gets ahead of it.
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

    /// The state of the muncher: `R`, `S`, or `t` while it is held.
    fn muncher(&self) -> String {
        let text = self.run("cat /proc/$(pidof muncher)/status");
        let state =
            text.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or_else(|| panic!("{text}"));
        state.trim()[..1].to_owned()
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

/// Starts a machine called `web` with these words more on its kernel's command line and these arguments more.
fn start(cluster: &Cluster, host: &HostProcess, more: &str, arguments: &[&str]) {
    let disk = cluster.disk.path().join("web.raw");
    std::fs::File::create(&disk).and_then(|file| file.set_len(32 << 20)).expect("a disk image");
    let address = Some(format!("{GUEST_ADDRESS}/24"));
    let append = format!("{} {more}", GuestOptions { address, buffer_mib: 16, work: Work::Idle });
    let files = cluster.files();
    let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    let (disk, kernel, initrd) = (text(&disk), text(&files.kernel), text(&files.initrd));
    let mut all = vec!["run", "web", "--disk", &disk, "--memory", "320M", "--net", "br0"];
    all.extend(["--kernel", &kernel, "--initrd", &initrd, "--append", &append]);
    all.extend(arguments);
    host.run(&all);
}

fn wait_heard(host: &HostProcess) {
    let deadline = Instant::now() + PATIENCE;
    while !host.log_text().contains("the program inside the guest is here") {
        assert!(Instant::now() < deadline, "nobody inside says hello:\n{}", host.log_text());
        std::thread::sleep(Duration::from_millis(20));
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
    inside.wait_muncher("RS");

    let moved = alpha.json(&["migrate", "web", "beta", "--rate-max", "400Mbit", "--throttle", "off"]);
    println!("{moved}");
    assert_eq!(names(&moved, "stunned"), ["muncher"], "{moved}");
    assert_eq!(moved["result"]["slowed"]["cpu_percent"], Value::Null);
    let after = witness.check().expect("a machine on the target");
    assert_same_life(&born, &after);
    assert!(matches!(after.ram, Verdict::Good(_)) && matches!(after.disk, Verdict::Good(_)), "{after:?}");
    wait_heard(beta);
    inside.wait_muncher("RS");
    let deadline = Instant::now() + PATIENCE;
    while !beta.log_text().contains("the guest has announced itself") {
        assert!(Instant::now() < deadline, "it does not announce itself:\n{}", beta.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
}
