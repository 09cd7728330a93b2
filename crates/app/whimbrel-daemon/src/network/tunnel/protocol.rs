//! Messages of tunnels (docs/protocols/tunnel.md).

use serde::{Deserialize, Serialize};
use whimbrel_core::{CapsuleId, MachineName};
use whimbrel_migrate::protocol::TunnelId;
use whimbrel_wire::{Call, Protocol, Version, range};

/// Versions of these messages.
pub(crate) const PROTOCOL: Protocol = Protocol {
    name: "tunnel",
    kinds: (range::TUNNEL, range::TUNNEL + 0xff),
    versions: &[Version { number: 1, reason: "the first: a tunnel for each machine, frames in batches" }],
};

/// Open the home end; header [`Open`].
pub(crate) const OPEN: u16 = range::TUNNEL;
/// Frames for the other end, from either; header [`Frames`], payload a batch.
pub(crate) const FRAMES: u16 = OPEN + 1;
/// The machine is gone or no longer needs its home; header [`Close`]. May be repeated.
pub(crate) const CLOSE: u16 = OPEN + 2;

/// The ordered stream of batches: frames arrive in the order in which they were sent.
pub(super) const STREAM: u16 = 2;

/// Opens the home end for a machine that runs on the sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Open {
    pub(crate) id: TunnelId,
    pub(crate) name: MachineName,
    /// The capsule as which the home host suspended the machine, if it left that way: enough proof to start a
    /// tunnel.
    pub(crate) capsule: Option<CapsuleId>,
}

/// The tunnel that a batch belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Frames {
    pub(super) id: TunnelId,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Close {
    pub(super) id: TunnelId,
}

pub(crate) struct OpenCall;

impl Call for OpenCall {
    const KIND: u16 = OPEN;
    type Header = Open;
    type Reply = ();
}

pub(super) struct FramesCall;

impl Call for FramesCall {
    const KIND: u16 = FRAMES;
    type Header = Frames;
    type Reply = ();
}

pub(super) struct CloseCall;

impl Call for CloseCall {
    const KIND: u16 = CLOSE;
    type Header = Close;
    type Reply = ();
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_wire::golden::{call, check};

    #[test]
    fn messages_keep_their_bytes_as_long_as_their_version_stays() {
        let samples =
            [("OPEN", call::<OpenCall>()), ("FRAMES", call::<FramesCall>()), ("CLOSE", call::<CloseCall>())];
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/network/tunnel/messages.txt");
        check(path, PROTOCOL.range(), &samples);
    }
}
