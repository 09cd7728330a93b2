//! Some hosts on one network segment, each with a daemon.
//!
//! Nothing of a cluster outlives this process, however it ends: processes and networks are the kernel's to
//! end, the directories are removed by a child that notices.

use crate::{HostProcess, PATIENCE};
use std::{
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tempfile::TempDir;
use whimbrel_testkit::{
    guest::{GuestFiles, TestAgent},
    lab::{Lab, Probe, StreamProbe},
};

/// Hosts `alpha`, `beta`, … and a `client` on one switch.
pub struct Cluster {
    /// One a name, in the order they were asked for.
    pub hosts: Vec<HostProcess>,
    /// The network.
    pub lab: Lab,
    /// What survives a daemon's host, for all hosts.
    pub disk: TempDir,
    _memory: TempDir,
    sweeper: Mutex<Option<Sweeper>>,
}

impl Cluster {
    /// Starts a daemon on each of these hosts and lets them trust each other.
    pub fn start(names: &[&str]) -> Self {
        let all: Vec<&str> = names.iter().copied().chain(["client"]).collect();
        let lab = Lab::with_hosts(&all).expect("a lab");
        let disk = tempfile::Builder::new().prefix("whimbrel-e2e").tempdir().expect("a directory");
        let memory =
            tempfile::Builder::new().prefix("wmb").tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let sweeper = Mutex::new(Some(Sweeper::start(&[disk.path(), memory.path()])));
        let start = |name: &&str| HostProcess::start(&lab, name, disk.path(), memory.path());
        let hosts: Vec<HostProcess> = names.iter().map(start).collect();
        for host in &hosts {
            for other in hosts.iter().filter(|other| other.name() != host.name()) {
                host.run(&["trust", "add", other.name(), &other.key(), &other.address()]);
            }
        }
        Self { hosts, lab, disk, _memory: memory, sweeper }
    }

    /// Ends all processes of all hosts and removes their directories, and waits for both. Dropping the value
    /// does the same; this is for the end of a program while another of its threads is still using the hosts.
    pub fn end(&self) {
        self.hosts.iter().for_each(HostProcess::end);
        self.sweeper.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The daemon called `name`.
    pub fn host(&self, name: &str) -> &HostProcess {
        self.hosts.iter().find(|host| host.name() == name).expect("a host of that name")
    }

    /// The same, to stop and start it.
    pub fn host_mut(&mut self, name: &str) -> &mut HostProcess {
        self.hosts.iter_mut().find(|host| host.name() == name).expect("a host of that name")
    }

    /// Kernel and initial RAM disk of the guest.
    pub fn files(&self) -> &'static GuestFiles {
        GuestFiles::get()
    }

    /// The witness of the guest at `address`, over the network, from the client.
    pub fn witness(&self, address: &str) -> TestAgent {
        let address: SocketAddr = format!("{address}:7000").parse().expect("an address");
        let client = self.lab.host("client");
        let deadline = std::time::Instant::now() + PATIENCE;
        let stream = loop {
            match client.connect(address, Duration::from_secs(2)) {
                Ok(stream) => break stream,
                Err(error) if std::time::Instant::now() > deadline => {
                    panic!("the guest does not answer: {error}")
                }
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        let mut witness = TestAgent::connected(stream).expect("a connection");
        witness.wait_ready(PATIENCE).expect("a guest that is up");
        witness
    }

    /// A 1 kHz probe of the guest, from the client.
    pub fn probe(&self, address: &str) -> Probe {
        let address = format!("{address}:7003").parse().expect("an address");
        let probe = Probe::start(self.lab.host("client"), address).expect("a probe");
        assert!(probe.wait_answers(50, PATIENCE), "the probe gets no answers");
        probe
    }

    /// An open TCP stream from the guest, to the client.
    pub fn stream(&self, address: &str) -> StreamProbe {
        let address = format!("{address}:7001").parse().expect("an address");
        StreamProbe::start(self.lab.host("client"), address, PATIENCE).expect("a stream")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits for the end of its standard input, which comes from us or from the kernel that ends us, then removes
/// its arguments. Whoever still writes there was killed with us and may be in the way for a moment, hence the
/// repeats.
const SWEEP: &str = r#"cat; for _ in $(seq 100); do rm -rf -- "$@" && exit; sleep 0.1; done"#;

/// A child that removes directories when it is dropped, or when this process is killed and can no longer do
/// so.
struct Sweeper(Child);

impl Sweeper {
    fn start(directories: &[&Path]) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", SWEEP, "sweeper"]).args(directories);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // In a group of its own a Ctrl-C at the terminal does not end it with us.
        Self(command.process_group(0).spawn().expect("a shell"))
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // Whether it could remove everything or not, there is nobody left to try again.
        let _ = self.0.wait();
    }
}
