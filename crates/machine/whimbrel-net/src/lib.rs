//! The network port of a machine: between QEMU's stream socket and a tap device on a bridge.
//!
//! ```text
//!   guest -- virtio-net -- QEMU -- unix socket -- [ Port: gates, hold queue, strays, addresses ] -- tap -- bridge
//! ```
//!
//! A [`Port`] is the only way between a machine and the world, so it is where frames are kept back until a
//! machine may be heard (on the target of a migration) or until what they tell is committed (under
//! protection), where frames for a guest that stands still wait until it runs again, and where the network
//! learns that a machine has moved.
//!
//! The world may also be elsewhere: [`tunnel`] has the two ends of the way there.
//!
//! The cores are pure and without I/O: [`OutputBuffer`], [`Addresses`], [`announcements`], the framing, the
//! replay of [`InputLog`]. What a guest sends is hostile input: bounded before it is stored, checked before
//! it is read.

mod announcement;
mod error;
mod forwarder;
mod frame_buffer;
mod frame_parser;
mod frame_pipe;
mod framing;
mod input_log;
mod input_replay;
mod late_frames;
mod learned_addresses;
mod netlink;
mod output_buffer;
mod port;
mod tap;
pub mod tunnel;

pub use announcement::{ANNOUNCE_GAPS, announcements};
pub use error::NetError;
pub use frame_pipe::{FramePipeEnd, frame_pipe};
pub use input_log::{Input, InputBatch, InputLog};
pub use learned_addresses::{Addresses, Mac, Station};
pub use output_buffer::{BufferFull, Epoch, HoldLimits, OutputBuffer};
pub use port::{Gate, Gates, Port, PortConfig, PortCounters, TapConfig, Uplink};

/// Bytes of the largest frame QEMU passes (its `NET_BUFSIZE`, `include/net/net.h`).
pub const FRAME_MAX: usize = 4096 + 65536;
