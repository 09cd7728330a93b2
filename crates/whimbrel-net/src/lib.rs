//! The network port of a machine: between QEMU's stream socket and a tap device on a bridge.
//!
//! ```text
//!   guest -- virtio-net -- QEMU -- unix socket -- [ Port: gates, hold queue, strays, addresses ] -- tap -- bridge
//! ```
//!
//! A [`Port`] is the only way between a machine and the world, so it is where frames are kept back until a
//! machine may be heard (on the target of a migration) or until what they tell is committed (under
//! protection), where frames for a guest that stands still wait until it runs again, and where the network learns that a machine has moved.
//!
//! The world may also be elsewhere: [`tunnel`] has the two ends of the way there.
//!
//! The cores are pure and without I/O: [`HoldQueue`], [`Addresses`], [`announcements`], the framing, the replay of [`Inputs`]. What a
//! guest sends is hostile input: bounded before it is stored, checked before it is read.

mod address;
mod announce;
mod batch;
mod error;
mod framing;
mod inputs;
mod line;
mod netlink;
mod parse;
mod port;
mod pump;
mod queue;
mod replay;
mod strays;
mod tap;
pub mod tunnel;

pub use address::{Addresses, Mac, Station};
pub use announce::{ANNOUNCE_GAPS, announcements};
pub use error::NetError;
pub use inputs::{Input, Inputs, Told};
pub use line::{LineEnd, line};
pub use port::{Gate, Gates, Port, PortConfig, PortCounters, TapConfig, World};
pub use queue::{Epoch, Full, HoldLimits, HoldQueue};

/// Bytes of the largest frame QEMU passes (its `NET_BUFSIZE`, `include/net/net.h`).
pub const FRAME_MAX: usize = 4096 + 65536;
