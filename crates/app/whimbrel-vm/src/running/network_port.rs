//! Network port of a running machine: closed until the machine runs, announced after a migration.

use super::{RunningError, runtime_dir::RuntimeDir};
use crate::passable_port::PortOffer;
use std::sync::{Arc, Weak};
use whimbrel_core::NicConfig;
use whimbrel_net::{
    Addresses, FramePipeEnd, Gates, GuestNetwork, GuestSide, NetError, Port, PortConfig, PortFilter,
    TapConfig, Uplink, frame_pipe,
};
use whimbrel_qemu::{Qemu, TapDevices};

/// Name pattern of tap devices; the kernel replaces `%d` by a number.
const TAP: &str = "wmb%d";

/// Network port of a running machine.
pub struct NetworkPort {
    port: Arc<Port>,
    /// How to open it anew.
    offer: PortOffer,
    /// Far end of its frame pipe, until it is taken.
    pipe_end: Option<FramePipeEnd>,
}

/// Where a network port leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortTarget {
    /// The bridge of its configuration.
    Bridge,
    /// A frame pipe, which leads to the bridge of another host.
    FramePipe,
}

/// Tap devices for a QEMU with so many ports; none if it has no port.
pub(super) fn tap_devices(ports: usize) -> Result<Option<Arc<TapDevices>>, RunningError> {
    if ports == 0 {
        return Ok(None);
    }
    let network = GuestNetwork::create(ports);
    let network =
        network.map_err(|source| RunningError::Port { port: "net0".into(), source: source.into() })?;
    Ok(Some(Arc::new(TapDevices { namespace: network.namespace, taps: network.taps })))
}

fn tap_of(qemu: &Qemu, port: usize) -> std::io::Result<GuestSide> {
    Ok(GuestSide::Tap { namespace: qemu.network()?, device: qemu.tap_device(port)?, port })
}

impl NetworkPort {
    /// Connects port `index` of the machine in `slot` to its bridge, if it has one. No frame passes yet.
    pub fn connect(
        (slot, qemu): (&RuntimeDir, &Qemu),
        index: usize,
        nic: &NicConfig,
        plug: PortTarget,
        filter: PortFilter,
    ) -> Result<Self, RunningError> {
        let (world, line) = match (nic.bridge.clone(), plug) {
            (None, _) => (Uplink::Isolated, None),
            (bridge, PortTarget::Bridge) => (Uplink::Tap(TapConfig { name: TAP.to_owned(), bridge }), None),
            (Some(_), PortTarget::FramePipe) => {
                let (near, far) = frame_pipe().map_err(|source| RunningError::Port {
                    port: format!("net{index}"),
                    source: source.into(),
                })?;
                (Uplink::Pipe(near), Some(far))
            }
        };
        let failed =
            |source: NetError| RunningError::Port { port: format!("net{index}"), source: source.into() };
        // A QEMU that an earlier version of this program has started listens there.
        let socket = slot.qemu_dir().join(format!("net{index}"));
        let guest = match socket.exists() {
            true => GuestSide::Stream(socket),
            false => tap_of(qemu, index)
                .map_err(|source| failed(NetError::GuestNetwork { action: "connect to", source }))?,
        };
        let config = PortConfig { guest, uplink: world, gates: Gates::BLOCKED, filter };
        let offer = PortOffer::of(&config);
        let port = Arc::new(Port::open(config).map_err(failed)?);
        Ok(Self { port, offer, pipe_end: line })
    }

    /// Port that is open, and how to open it anew.
    pub(crate) fn over(port: Port, offer: PortOffer) -> Self {
        Self { port: Arc::new(port), offer, pipe_end: None }
    }

    /// The port and how to open it anew, if nobody else uses it at this moment.
    pub(crate) fn into_parts(self) -> Result<(Port, PortOffer), Self> {
        let Self { port, offer, pipe_end } = self;
        match Arc::try_unwrap(port) {
            Ok(port) => Ok((port, offer)),
            Err(port) => Err(Self { port, offer, pipe_end }),
        }
    }

    /// How to open it anew.
    pub(crate) fn offer(&self) -> &PortOffer {
        &self.offer
    }

    /// Takes the far end of its frame pipe, once.
    pub fn take_pipe_end(&mut self) -> Option<FramePipeEnd> {
        self.pipe_end.take()
    }

    /// The port, for announcements while it lives.
    pub fn port(&self) -> Weak<Port> {
        Arc::downgrade(&self.port)
    }

    /// The port, for the holder of the machine.
    pub fn port_ref(&self) -> &Port {
        &self.port
    }

    /// Lets frames pass: the machine runs here.
    pub fn open(&self) {
        self.port.set_gates(Gates::OPEN);
    }

    /// Announces the stations behind the port.
    pub fn announce(&self) {
        self.port.announce();
    }

    /// Encodes the addresses that the machine was seen to use.
    pub fn addresses(&self) -> Vec<u8> {
        postcard::to_stdvec(&self.port.addresses()).unwrap_or_default()
    }

    /// Adds addresses that another host has seen. An unreadable list is no failure: the machine sends frames
    /// itself sooner or later.
    pub fn add_addresses(&self, addresses: &[u8]) {
        match postcard::from_bytes::<Addresses>(addresses) {
            Ok(addresses) => self.port.add_addresses(&addresses),
            Err(error) => tracing::warn!(%error, "cannot read the addresses of an incoming machine"),
        }
    }
}
