//! What a host and the optional program inside a guest say to each other, over a virtio serial port.
//!
//! What is here: frames and how they are found in a stream that may begin anywhere ([`frame`]), what the host
//! asks for ([`Command`]), what the guest says ([`Report`]). What is not: the port, either end of it, and
//! what either does. Pure, and without dependencies: half of it runs inside guests. docs/protocols/guest.md
//! is the description.
//!
//! Neither side trusts the other: every length is bounded before anything is allocated, and what makes no
//! sense is an error and never a panic.

mod codec;
mod command;
pub mod frame;
mod report;

pub use codec::Malformed;
pub use command::{Command, RequestOutcome, SAMPLE_MAX};
pub use report::{FEATURES, GuestRequest, PROCESSES_MAX, Process, Report};

/// The name of the port, as the guest sees it in `/sys/class/virtio-ports/*/name`.
pub const PORT: &str = "org.whimbrel.guest.0";
/// The version of everything here. A frame of another one is passed over.
pub const VERSION: u8 = 1;
/// A process that wrote no more pages than this while it was looked at is never stunned (Clark et al., NSDI
/// 2005, section 5.5).
pub const WRITES_ALLOWED: u32 = 40;
