//! Network port that can pass to another process: the port with its tap device and its place in both streams,
//! and how to open it anew if the old process ends without a word.

use crate::PartError;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use whimbrel_net::{Gates, Port, PortConfig, PortDescriptors, PortFilter, PortState, TapConfig, Uplink};

/// Network port of a machine that can pass to another process.
pub struct PassablePort {
    offer: PortOffer,
    serving: Serving,
}

whimbrel_core::opaque_debug!(PassablePort);

/// How to open the port of a running machine anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PortOffer {
    stream_socket: PathBuf,
    /// Name pattern and bridge of its tap device; none if the port is isolated.
    tap: Option<(String, Option<String>)>,
    filter: PortFilter,
}

enum Serving {
    Running(Port),
    /// No thread here moves frames.
    Suspended(PortDescriptors, Box<PortState>),
    /// Nobody serves it, as its tap device ended with another process.
    Unopened,
    /// Serving failed; no frame passes.
    Broken,
}

impl PassablePort {
    /// Opens the port of a machine.
    ///
    /// # Errors
    /// If the port fails, or leads into a frame pipe, whose other end no process can take over.
    pub fn open(config: PortConfig) -> Result<Self, PartError> {
        let tap = match &config.uplink {
            Uplink::Isolated => None,
            Uplink::Tap(tap) => Some((tap.name.clone(), tap.bridge.clone())),
            Uplink::Pipe(_) => return Err(PartError::Tunnel),
        };
        let offer = PortOffer { stream_socket: config.stream_socket.clone(), tap, filter: config.filter };
        Ok(Self { offer, serving: Serving::Running(Port::open(config)?) })
    }

    /// The port, while it moves frames.
    pub fn port(&self) -> Option<&Port> {
        match &self.serving {
            Serving::Running(port) => Some(port),
            _ => None,
        }
    }

    pub(crate) fn offer(&self) -> PortOffer {
        self.offer.clone()
    }

    /// Port of another process, with the parts that this one told, if it did. No frame passes yet.
    pub(crate) fn passed(offer: PortOffer, parts: Option<(PortDescriptors, PortState)>) -> Self {
        let suspended = |(descriptors, state)| Serving::Suspended(descriptors, Box::new(state));
        Self { offer, serving: parts.map_or(Serving::Unopened, suspended) }
    }

    /// Ends the port between two frames.
    pub(crate) fn suspend(&mut self) -> Result<(), PartError> {
        if let Serving::Running(port) = &mut self.serving {
            let (descriptors, state) = port.suspend()?;
            self.serving = Serving::Suspended(descriptors, Box::new(state));
        }
        Ok(())
    }

    /// Copies of the parts of a suspended port.
    pub(crate) fn parts(&self) -> Result<(PortDescriptors, PortState), PartError> {
        match &self.serving {
            Serving::Suspended(descriptors, state) => {
                let copies = descriptors.try_clone().map_err(PartError::Serve)?;
                Ok((copies, (**state).clone()))
            }
            _ => Err(PartError::NotServed),
        }
    }

    /// Ends the connection of a suspended port, because another process may have used it: QEMU accepts a new
    /// one, which begins with a whole frame.
    pub(crate) fn disconnect(&mut self) {
        if let Serving::Suspended(descriptors, state) = &mut self.serving {
            descriptors.stream = None;
            state.received.clear();
            state.unsent.clear();
        }
    }

    /// Moves frames, if the port does not yet.
    pub(crate) fn serve(&mut self) -> Result<(), PartError> {
        self.serving = match std::mem::replace(&mut self.serving, Serving::Broken) {
            Serving::Suspended(descriptors, state) => {
                Serving::Running(Port::from_parts(descriptors, *state)?)
            }
            Serving::Unopened => Serving::Running(Port::open(self.config())?),
            other => other,
        };
        Ok(())
    }

    fn config(&self) -> PortConfig {
        let PortOffer { stream_socket, tap, filter } = self.offer.clone();
        let tap = tap.map(|(name, bridge)| Uplink::Tap(TapConfig { name, bridge }));
        PortConfig { stream_socket, uplink: tap.unwrap_or(Uplink::Isolated), gates: Gates::OPEN, filter }
    }
}
