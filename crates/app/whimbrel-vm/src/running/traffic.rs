//! Traffic of a running machine: the counters of its network ports and disks, read without the machine lock.

use super::RunningMachine;
use std::sync::Weak;
use whimbrel_block::WriteThrottle;
use whimbrel_net::{Port, PortCounters};

/// Counters of a machine, for as long as its ports and disks live.
#[derive(Clone, Default)]
pub struct TrafficView {
    ports: Vec<Weak<Port>>,
    disks: Vec<(String, Weak<WriteThrottle>)>,
}

impl TrafficView {
    /// Counters of each network port, in order.
    pub fn ports(&self) -> Vec<PortCounters> {
        self.ports.iter().filter_map(|port| Some(port.upgrade()?.counters())).collect()
    }

    /// Name of each disk, and the bytes read and written by the guest since QEMU or the daemon started.
    pub fn disks(&self) -> Vec<(&str, u64, u64)> {
        let living = self.disks.iter().filter_map(|(name, disk)| Some((name.as_str(), disk.upgrade()?)));
        living.map(|(name, disk)| (name, disk.read(), disk.written())).collect()
    }
}

impl RunningMachine {
    /// Counters of its ports and disks.
    pub fn traffic(&self) -> TrafficView {
        TrafficView {
            ports: self.ports.iter().map(super::NetworkPort::port).collect(),
            disks: self.disks.iter().map(super::RunningDisk::traffic).collect(),
        }
    }
}
