//! The messages of a tunnel. docs/protocols/tunnel.md tells the story.

use serde::{Deserialize, Serialize};
use whimbrel_core::{CapsuleId, MachineName};
use whimbrel_migrate::protocol::TunnelId;
use whimbrel_wire::{Call, range};

/// Requests of tunnels.
pub(crate) const RANGE: u16 = range::TUNNEL;
/// Open the home end; header [`Open`].
pub(super) const OPEN: u16 = RANGE;
/// Frames for the other end, from either; header [`Frames`], payload a batch.
pub(super) const FRAMES: u16 = RANGE + 1;
/// The machine is no more, or needs its home no more; header [`Close`]. May come again.
pub(super) const CLOSE: u16 = RANGE + 2;

/// The ordered stream of batches: frames arrive in the order in which they were sent.
pub(super) const STREAM: u16 = 2;

/// Opens the home end for a machine that runs where this comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Open {
    pub(super) id: TunnelId,
    pub(super) name: MachineName,
    /// The capsule as which the home host suspended it, if that is how it came away: proof enough to begin a
    /// tunnel.
    pub(super) capsule: Option<CapsuleId>,
}

/// Which tunnel a batch belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Frames {
    pub(super) id: TunnelId,
}

/// Ends a tunnel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Close {
    pub(super) id: TunnelId,
}

pub(super) struct OpenCall;

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
