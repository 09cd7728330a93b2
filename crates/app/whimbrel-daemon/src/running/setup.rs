//! Setup of a machine: what it is made of, and what it needs of its host. Values, and two things that only
//! the host can do: connect a tunnel, and carry out what the guest requests.

use super::{CapsuleImages, ConnectTunnel, DiskBase, GuestRequests, MachinePlaces};
use std::sync::Arc;
use whimbrel_core::{HostName, MachineConfig, MachineName};
use whimbrel_migrate::postcopy::PageFetcher;
use whimbrel_net::PortFilter;

/// All that a machine needs to start, or to be adopted.
pub(crate) struct MachineSetup {
    /// Name of this host.
    pub(crate) host: HostName,
    /// Name of the machine.
    pub(crate) name: MachineName,
    /// Hardware of the machine.
    pub(crate) config: MachineConfig,
    /// Base of each disk's overlay.
    pub(crate) bases: Vec<DiskBase>,
    /// Folders of the machine.
    pub(crate) places: MachinePlaces,
    /// Store, and the capsule that the machine was resumed from.
    pub(crate) images: CapsuleImages,
    /// Fetcher of the pages that are on another host, if any are.
    pub(crate) fetcher: Option<Arc<PageFetcher>>,
    /// Frames that each network port lets the guest send.
    pub(crate) port_filters: Vec<PortFilter>,
    /// Tunnel to its network, if that is on another host.
    pub(crate) tunnel: Option<ConnectTunnel>,
    /// Who carries out the requests of its guest.
    pub(crate) guest_requests: Arc<dyn GuestRequests>,
}
