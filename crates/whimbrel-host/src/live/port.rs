//! A network port of a running machine: closed until the machine runs, announced when it has moved.

use crate::{error::HostError, slot::Slot};
use whimbrel_core::NicConfig;
use whimbrel_net::{Addresses, Gates, Port, PortConfig, TapConfig, World};

/// Names of our tap devices; the kernel puts a number in the place of `%d`.
const TAP: &str = "wmb%d";

/// One port.
pub(crate) struct LivePort {
    port: Port,
}

impl LivePort {
    /// Connects port `index` of the machine in `slot` to its bridge, if it has one. No frame passes yet.
    pub(crate) fn connect(slot: &Slot, index: usize, nic: &NicConfig) -> Result<Self, HostError> {
        let tap = nic.bridge.clone().map(|bridge| TapConfig { name: TAP.to_owned(), bridge: Some(bridge) });
        let world = tap.map_or(World::Nobody, World::Tap);
        let stream_socket = slot.dir().join(format!("net{index}"));
        let port = Port::open(PortConfig { stream_socket, world, gates: Gates::BLOCKED });
        let failed = |source: whimbrel_net::NetError| HostError::Port {
            port: format!("net{index}"),
            source: source.into(),
        };
        Ok(Self { port: port.map_err(failed)? })
    }

    /// Lets frames pass: the machine runs here.
    pub(crate) fn open(&self) {
        self.port.set_gates(Gates::OPEN);
    }

    /// Tells the network that the machine is here now.
    pub(crate) fn announce(&self) {
        self.port.announce();
    }

    /// The addresses that the machine was seen to use, in the form they travel in.
    pub(crate) fn addresses(&self) -> Vec<u8> {
        postcard::to_stdvec(&self.port.addresses()).unwrap_or_default()
    }

    /// Takes over what another host has seen. What cannot be read is not worth failing for: the machine will
    /// speak up by itself sooner or later.
    pub(crate) fn learn(&self, addresses: &[u8]) {
        match postcard::from_bytes::<Addresses>(addresses) {
            Ok(addresses) => self.port.add_addresses(&addresses),
            Err(error) => tracing::warn!(%error, "the addresses of an arriving machine cannot be read"),
        }
    }
}
