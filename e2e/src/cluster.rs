//! Some hosts on one network segment, each with a daemon.

use crate::HostProcess;
use std::{net::SocketAddr, time::Duration};
use tempfile::TempDir;
use whimbrel_testkit::{
    guest::{GuestFiles, Witness},
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
}

impl Cluster {
    /// Starts a daemon on each of these hosts and lets them trust each other.
    pub fn start(names: &[&str]) -> Self {
        let all: Vec<&str> = names.iter().copied().chain(["client"]).collect();
        let lab = Lab::with_hosts(&all).expect("a lab");
        let disk = tempfile::Builder::new().prefix("whimbrel-e2e").tempdir().expect("a directory");
        let memory =
            tempfile::Builder::new().prefix("wmb").tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let start = |name: &&str| HostProcess::start(&lab, name, disk.path(), memory.path());
        let hosts: Vec<HostProcess> = names.iter().map(start).collect();
        for host in &hosts {
            for other in hosts.iter().filter(|other| other.name() != host.name()) {
                host.run(&["trust", "add", other.name(), &other.key(), &other.address()]);
            }
        }
        Self { hosts, lab, disk, _memory: memory }
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
    pub fn witness(&self, address: &str) -> Witness {
        let address: SocketAddr = format!("{address}:7000").parse().expect("an address");
        let client = self.lab.host("client");
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let stream = loop {
            match client.connect(address, Duration::from_secs(2)) {
                Ok(stream) => break stream,
                Err(error) if std::time::Instant::now() > deadline => {
                    panic!("the guest does not answer: {error}")
                }
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        let mut witness = Witness::connected(stream).expect("a connection");
        witness.wait_ready(Duration::from_secs(30)).expect("a guest that is up");
        witness
    }

    /// A 1 kHz probe of the guest, from the client.
    pub fn probe(&self, address: &str) -> Probe {
        let address = format!("{address}:7003").parse().expect("an address");
        let probe = Probe::start(self.lab.host("client"), address).expect("a probe");
        assert!(probe.wait_answers(50, Duration::from_secs(20)), "the probe gets no answers");
        probe
    }

    /// An open TCP stream from the guest, to the client.
    pub fn stream(&self, address: &str) -> StreamProbe {
        let address = format!("{address}:7001").parse().expect("an address");
        StreamProbe::start(self.lab.host("client"), address, Duration::from_secs(20)).expect("a stream")
    }
}
