//! Network port that passes to another process: the port with its tap device and its place in both streams,
//! and how to open it anew if the old process ends without a word.

use crate::running::{NetworkPort, RunningError};
use serde::{Deserialize, Serialize};
use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};
use whimbrel_net::{
    Gates, GuestSide, NetError, Port, PortConfig, PortDescriptors, PortFilter, PortState, TapConfig, Uplink,
};
use whimbrel_qemu::Qemu;

/// Longest time for a reader of its counters to let go of a port.
const READERS: Duration = Duration::from_millis(100);

/// How to open the port of a running machine anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PortOffer {
    guest: GuestOffer,
    /// Name pattern and bridge of its tap device; none if the port is isolated.
    tap: Option<(String, Option<String>)>,
    filter: PortFilter,
}

/// End of a port at QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum GuestOffer {
    /// Socket on which QEMU listens.
    Stream(PathBuf),
    /// Tap device of QEMU, for the port of this number.
    Tap(usize),
}

impl PortOffer {
    /// How to open a port of this configuration anew. A frame pipe is not opened again: its machine has a
    /// tunnel, and does not pass.
    pub(crate) fn of(config: &PortConfig) -> Self {
        let tap = match &config.uplink {
            Uplink::Isolated | Uplink::Pipe(_) => None,
            Uplink::Tap(tap) => Some((tap.name.clone(), tap.bridge.clone())),
        };
        let guest = match &config.guest {
            GuestSide::Stream(socket) => GuestOffer::Stream(socket.clone()),
            GuestSide::Tap { port, .. } => GuestOffer::Tap(*port),
        };
        Self { guest, tap, filter: config.filter }
    }

    fn config(&self, qemu: &Qemu) -> Result<PortConfig, NetError> {
        let Self { guest, tap, filter } = self.clone();
        let failed = |source| NetError::GuestNetwork { action: "connect to", source };
        let guest = match guest {
            GuestOffer::Stream(socket) => GuestSide::Stream(socket),
            GuestOffer::Tap(port) => {
                let (namespace, device) =
                    (qemu.network().map_err(failed)?, qemu.tap_device(port).map_err(failed)?);
                GuestSide::Tap { namespace, device, port }
            }
        };
        let uplink = tap.map(|(name, bridge)| Uplink::Tap(TapConfig { name, bridge }));
        // A port is opened anew only for a machine that runs here.
        Ok(PortConfig { guest, uplink: uplink.unwrap_or(Uplink::Isolated), gates: Gates::OPEN, filter })
    }
}

/// Network port of a machine that passes to another process.
pub(crate) enum PassablePort {
    Open(NetworkPort),
    /// No thread here moves frames.
    Suspended(PortOffer, PortDescriptors, Box<PortState>),
    /// Nobody serves it, as its tap device ended with another process.
    Unopened(PortOffer),
}

impl PassablePort {
    /// Port of another process, with the parts that this one told, if it did. No frame passes yet.
    pub(crate) fn passed(offer: PortOffer, parts: Option<(PortDescriptors, PortState)>) -> Self {
        match parts {
            Some((descriptors, state)) => Self::Suspended(offer, descriptors, Box::new(state)),
            None => Self::Unopened(offer),
        }
    }

    /// Ends the port between two frames. Returns it as it is if it cannot.
    pub(crate) fn suspend(self) -> Result<Self, Box<(Self, RunningError)>> {
        let Self::Open(mut open) = self else { return Ok(self) };
        let deadline = Instant::now() + READERS;
        let (mut port, offer) = loop {
            match open.into_parts() {
                Ok(parts) => break parts,
                Err(used) if Instant::now() > deadline => {
                    return Err(Box::new((Self::Open(used), failed("it is in use".into()))));
                }
                Err(used) => open = used,
            }
            thread::yield_now();
        };
        match port.suspend() {
            Ok((descriptors, state)) => Ok(Self::Suspended(offer, descriptors, Box::new(state))),
            Err(error) => {
                let open = Self::Open(NetworkPort::over(port, offer));
                Err(Box::new((open, failed(error.into()))))
            }
        }
    }

    /// Copies of the parts of a suspended port.
    pub(crate) fn parts(&self) -> Result<(PortDescriptors, PortState), RunningError> {
        match self {
            Self::Suspended(_, descriptors, state) => {
                let copies = descriptors.try_clone().map_err(|error| failed(error.into()))?;
                Ok((copies, (**state).clone()))
            }
            Self::Open(_) | Self::Unopened(_) => Err(failed("it is not suspended".into())),
        }
    }

    /// Ends the connection of a suspended port, because another process may have used it: QEMU accepts a new
    /// one, which begins with a whole frame. Packets of a tap device are whole anyway.
    pub(crate) fn disconnect(&mut self) {
        if let Self::Suspended(offer, descriptors, state) = self {
            if matches!(offer.guest, GuestOffer::Stream(_)) {
                descriptors.guest = None;
            }
            state.received.clear();
            state.unsent.clear();
        }
    }

    /// Moves frames between `qemu` and the network.
    pub(crate) fn serve(self, qemu: &Qemu) -> Result<NetworkPort, RunningError> {
        let net = |error: NetError| failed(error.into());
        Ok(match self {
            Self::Open(port) => port,
            Self::Suspended(offer, descriptors, state) => {
                NetworkPort::over(Port::from_parts(descriptors, *state).map_err(net)?, offer)
            }
            Self::Unopened(offer) => {
                let port = Port::open(offer.config(qemu).map_err(net)?).map_err(net)?;
                NetworkPort::over(port, offer)
            }
        })
    }
}

fn failed(source: Box<dyn std::error::Error + Send + Sync>) -> RunningError {
    RunningError::Port { port: "net".into(), source }
}
