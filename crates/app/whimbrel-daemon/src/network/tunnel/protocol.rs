//! Messages of tunnels (docs/protocols/tunnel.md).

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, Ipv6Addr};
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

/// Join the parts of a network on two hosts; header [`Join`], payload the sender's addresses.
pub(crate) const JOIN: u16 = OPEN + 3;
/// The sender's machines have these addresses now; header [`Frames`], payload the addresses.
pub(crate) const ADDRESSES: u16 = OPEN + 4;

/// Most addresses in a message: those of a /16.
const ADDRESSES_MAX: usize = 1 << 16;

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

/// The tunnel or link that a batch belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Frames {
    pub(crate) id: TunnelId,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Close {
    pub(super) id: TunnelId,
}

/// Asks to join the sender's part of a network with the receiver's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Join {
    /// Name of the network on both hosts.
    pub(crate) network: String,
    /// Id of the link, by which both send frames.
    pub(crate) id: TunnelId,
    /// Addresses of the network, first address and length of the prefix, which are the same on both.
    pub(crate) subnet: (Ipv4Addr, u8),
    pub(crate) subnet6: Option<(Ipv6Addr, u8)>,
}

/// Address of a machine of the sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    /// Hardware address of the machine's port.
    pub(crate) mac: [u8; 6],
    pub(crate) machine: MachineName,
    pub(crate) address: Ipv4Addr,
}

/// Addresses as a payload.
pub(crate) fn write_addresses(addresses: &[Address]) -> Result<Bytes, postcard::Error> {
    let first = addresses.len().min(ADDRESSES_MAX);
    postcard::to_stdvec(&addresses[..first]).map(Bytes::from)
}

/// Addresses of a payload.
pub(crate) fn read_addresses(payload: &[u8]) -> Result<Vec<Address>, String> {
    let addresses: Vec<Address> = postcard::from_bytes(payload).map_err(|error| error.to_string())?;
    if addresses.len() > ADDRESSES_MAX {
        return Err("more addresses than a network has".to_owned());
    }
    Ok(addresses)
}

pub(crate) struct OpenCall;

impl Call for OpenCall {
    const KIND: u16 = OPEN;
    type Header = Open;
    type Reply = ();
}

pub(crate) struct JoinCall;

impl Call for JoinCall {
    const KIND: u16 = JOIN;
    type Header = Join;
    /// The payload of the reply has the receiver's addresses.
    type Reply = ();
}

pub(crate) struct AddressesCall;

impl Call for AddressesCall {
    const KIND: u16 = ADDRESSES;
    type Header = Frames;
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
    use whimbrel_wire::golden::{call, check, sample};

    #[test]
    fn messages_keep_their_bytes_as_long_as_their_version_stays() {
        let samples = [
            ("OPEN", call::<OpenCall>()),
            ("FRAMES", call::<FramesCall>()),
            ("CLOSE", call::<CloseCall>()),
            ("JOIN", call::<JoinCall>()),
            ("ADDRESSES", call::<AddressesCall>()),
            ("addresses of a payload", sample::<Vec<Address>>()),
        ];
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/network/tunnel/messages.txt");
        check(path, PROTOCOL.range(), &samples);
    }
}
