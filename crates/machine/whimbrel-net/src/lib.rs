//! Network port of a machine: connects QEMU to a tap device on a bridge.
//!
//! ```text
//!   guest -- virtio-net -- QEMU -- tap -- packet socket -- [ Port ] -- tap -- bridge
//!                                  |                       gates, output buffer, late frames, addresses
//!                                  namespace of QEMU
//! ```
//!
//! Frames of up to 64 KiB pass whole, with a header that says what is left to do: a checksum, cutting. A QEMU
//! without a tap device, which an earlier version started, has a unix socket there and single frames.
//!
//! A [`Port`] is the only connection of a machine to its network. So it holds output back until the machine
//! may send (on the target of a migration) or until the epoch is committed (under protection), buffers
//! frames for a paused guest, and announces that a machine has moved. Another process can go on with it
//! ([`Port::suspend`]).
//!
//! The network may also be on another host: [`tunnel`] has the two ends of the connection. [`managed`] makes
//! networks for machines to be in.
//!
//! The cores are pure and without I/O: [`OutputBuffer`], [`Addresses`], [`announcements`], the framing, the
//! replay of [`InputLog`]. The output of a guest is untrusted: bounded before it is stored, checked before it
//! is read.

mod announcement;
mod error;
mod forwarder;
mod frame_buffer;
mod frame_parser;
mod frame_pipe;
mod framing;
mod guest_network;
mod input_log;
mod input_replay;
mod late_frames;
mod learned_addresses;
pub mod managed;
mod netlink;
pub mod offload;
mod output_buffer;
mod packet_socket;
mod port;
mod port_filter;
mod tap;
pub mod tunnel;

pub use announcement::{ANNOUNCE_GAPS, announcements};
pub use error::NetError;
pub use forwarder::parts::{PortDescriptors, PortState};
pub use frame_pipe::{FramePipeEnd, frame_pipe};
pub use guest_network::GuestNetwork;
pub use input_log::{Input, InputBatch, InputLog};
pub use learned_addresses::{Addresses, Mac, Station};
pub use output_buffer::{BufferFull, BufferLimits, Epoch, OutputBuffer};
pub use port::{Gate, Gates, GuestSide, Port, PortConfig, PortCounters, TapConfig, Uplink};
pub use port_filter::{Dropped, FilterCounters, PortFilter, allowed};
pub use tap::open_tun;

/// Most bytes of a frame that QEMU passes (its `NET_BUFSIZE`, `include/net/net.h`).
pub const FRAME_MAX: usize = 4096 + 65536;
