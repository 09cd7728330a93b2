//! Topology of a lab: hosts on one switch; each host is a namespace with a bridge `br0` and an uplink in it.
//!
//! ```text
//!   alpha: br0 10.77.0.11      beta: br0 10.77.0.12      client: br0 10.77.0.13     (in the order named)
//!            | uplink                   | uplink                    | uplink
//!            +------------------ switch: sw0 ----------------------+
//! ```
//!
//! A guest's tap joins `br0` and so is on the same network segment as all hosts. Addresses 10.77.0.100 and up
//! are free for guests.

use super::{LabError, Namespace, Process};
use std::{net::Ipv4Addr, ops::Deref, process::Command};

/// Several hosts and the switch between them.
pub struct Lab {
    hosts: Vec<Host>,
    switch: Namespace,
}

/// Host of a lab: a namespace with an address.
pub struct Host {
    name: String,
    namespace: Namespace,
    address: Ipv4Addr,
}

impl Lab {
    /// Creates the usual lab: `alpha`, `beta`, `client`.
    pub fn new() -> Result<Self, LabError> {
        Self::with_hosts(&["alpha", "beta", "client"])
    }

    /// Creates hosts of these names (up to 80, of at most ten letters), all on one switch.
    pub fn with_hosts(names: &[&str]) -> Result<Self, LabError> {
        let switch = Namespace::new()?;
        switch.ip("link add sw0 address 52:54:01:77:00:01 type bridge mcast_snooping 0")?;
        switch.ip("link set sw0 up")?;
        let mut lab = Self { hosts: Vec::new(), switch };
        for name in names {
            let host = lab.plug_in(name)?;
            lab.hosts.push(host);
        }
        lab.switch.wait_forwarding()?;
        lab.hosts.iter().try_for_each(|host| host.wait_forwarding())?;
        Ok(lab)
    }

    fn plug_in(&self, name: &str) -> Result<Host, LabError> {
        let namespace = Namespace::new()?;
        let address = Ipv4Addr::new(10, 77, 0, 11 + self.hosts.len() as u8);
        let (port, switch) = (port_of(name), &self.switch);
        namespace.ip(&format!("link add uplink type veth peer name {port} netns {}", switch.path()))?;
        switch.ip(&format!("link set {port} master sw0 up"))?;
        // Without an address of its own a bridge takes that of a port, and another when the port leaves.
        let mac = format!("52:54:01:77:01:{:02x}", address.octets()[3]);
        namespace.ip(&format!("link add br0 address {mac} type bridge mcast_snooping 0"))?;
        namespace.ip("link set uplink master br0 up")?;
        namespace.ip(&format!("addr add {address}/24 dev br0"))?;
        namespace.ip("link set br0 up")?;
        Ok(Host { name: name.to_owned(), namespace, address })
    }

    /// Host of this name.
    ///
    /// # Panics
    /// If there is none, which is a mistake in the test.
    pub fn host(&self, name: &str) -> &Host {
        self.hosts
            .iter()
            .find(|host| host.name == name)
            .unwrap_or_else(|| panic!("the lab has no host {name:?}"))
    }

    /// Limits the rates at which a host sends and receives to `mbit` Mbit/s each (token bucket; 50 ms of
    /// queue).
    pub fn limit(&self, name: &str, mbit: u64) -> Result<(), LabError> {
        let limit = |device: &str| {
            format!("qdisc replace dev {device} root tbf rate {mbit}mbit burst 256k latency 50ms")
        };
        self.host(name).tc(&limit("uplink"))?;
        self.switch.tc(&limit(&port_of(name))).map(drop)
    }

    /// Disconnects a host from the switch.
    pub fn unplug(&self, name: &str) -> Result<(), LabError> {
        self.switch.ip(&format!("link set {} down", port_of(name))).map(drop)
    }

    /// Reconnects a host to the switch.
    pub fn replug(&self, name: &str) -> Result<(), LabError> {
        self.switch.ip(&format!("link set {} up", port_of(name))).map(drop)
    }

    /// Namespace of the switch, to watch its traffic.
    pub fn switch(&self) -> &Namespace {
        &self.switch
    }
}

impl Host {
    /// Name of the host.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address of the host.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Starts a process on this host.
    pub fn command(&self, command: Command) -> Result<Process, LabError> {
        self.namespace.start(command)
    }
}

impl Deref for Host {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.namespace
    }
}

fn port_of(host: &str) -> String {
    format!("to-{host}")
}
