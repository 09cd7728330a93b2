//! Setup of a machine: what it is made of, and what it needs of its host. Values, and two things that only
//! the host can do: connect a tunnel, and carry out what the guest requests.

use super::{CapsuleImages, ConnectTunnel, DiskBase, GuestRequests, MachineDirs};
use std::sync::Arc;
use whimbrel_core::{HostName, MachineConfig, MachineName};
use whimbrel_migrate::postcopy::PageFetcher;
use whimbrel_net::PortFilter;

/// All that a machine needs to start, or to be adopted.
pub struct MachineSetup {
    /// Name of this host.
    pub host: HostName,
    /// Name of the machine.
    pub name: MachineName,
    /// Hardware of the machine.
    pub config: MachineConfig,
    /// Base of each disk's overlay.
    pub bases: Vec<DiskBase>,
    /// Folders of the machine.
    pub dirs: MachineDirs,
    /// Store, and the capsule that the machine was resumed from.
    pub images: CapsuleImages,
    /// Fetcher of the pages that are on another host, if any are.
    pub fetcher: Option<Arc<PageFetcher>>,
    /// Frames that each network port lets the guest send.
    pub port_filters: Vec<PortFilter>,
    /// Tunnel to its network, if that is on another host.
    pub tunnel: Option<ConnectTunnel>,
    /// Service that carries out the requests of its guest.
    pub guest_requests: Arc<dyn GuestRequests>,
}
