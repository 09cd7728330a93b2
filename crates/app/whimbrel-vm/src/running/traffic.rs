//! Traffic of a running machine: the counters of its network ports and disks, read without the machine lock.

use super::RunningMachine;
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, sync::Weak};
use whimbrel_block::WriteThrottle;
use whimbrel_net::{Port, PortCounters};

/// Counters of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// Counters of each network port, in order.
    pub ports: Vec<PortCounters>,
    /// Counters of each disk, in order.
    pub disks: Vec<DiskTraffic>,
}

/// Counters of a disk since QEMU, or the process that serves the disk, started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskTraffic {
    /// Name of the disk.
    pub disk: String,
    /// Bytes that the guest has read.
    pub read: u64,
    /// Bytes that the guest has written.
    pub written: u64,
}

/// Where the counters of a machine are.
#[derive(Clone, Default)]
pub enum TrafficView {
    /// Nowhere: the machine does not run.
    #[default]
    None,
    /// In this process, for as long as its ports and disks live.
    Here {
        /// Network ports, in order.
        ports: Vec<Weak<Port>>,
        /// Name of each disk, and what counts its bytes.
        disks: Vec<(String, Weak<WriteThrottle>)>,
    },
    /// In the process that has the machine of this runtime directory.
    InProcess(PathBuf),
}

impl TrafficView {
    /// Reads the counters; none of ports and disks that live no more, or of a process that does not answer.
    pub fn read(&self) -> Traffic {
        match self {
            Self::None => Traffic::default(),
            Self::Here { ports, disks } => {
                let disk = |(name, disk): &(String, Weak<WriteThrottle>)| {
                    let disk = disk.upgrade()?;
                    Some(DiskTraffic { disk: name.clone(), read: disk.read(), written: disk.written() })
                };
                Traffic {
                    ports: ports.iter().filter_map(|port| Some(port.upgrade()?.counters())).collect(),
                    disks: disks.iter().filter_map(disk).collect(),
                }
            }
            Self::InProcess(slot) => crate::process_report::traffic(slot),
        }
    }
}

impl RunningMachine {
    /// Counters of its ports and disks.
    pub fn traffic(&self) -> TrafficView {
        TrafficView::Here {
            ports: self.ports.iter().map(super::NetworkPort::port).collect(),
            disks: self.disks.iter().map(super::RunningDisk::traffic).collect(),
        }
    }
}
