//! Guest protocol: messages between a host and the guest agent, over a virtio serial port.
//!
//! This crate has frames and their decoder for a stream that may begin anywhere ([`frame`]), commands of the
//! host ([`Command`]) and reports of the guest ([`Report`]). It does not open the port or act on messages.
//! Pure and without dependencies, since half of it runs inside guests. docs/protocols/guest.md is the
//! description.
//!
//! Neither side trusts the other: every length is bounded before memory is allocated, and invalid input is an
//! error, never a panic.

mod codec;
mod command;
pub mod frame;
mod report;

pub use codec::Malformed;
pub use command::{Command, RequestOutcome, SAMPLE_MAX};
pub use report::{FEATURE_CLOCK, FEATURES, GuestRequest, PROCESSES_MAX, Process, Report};

/// Name of the port, as the guest sees it in `/sys/class/virtio-ports/*/name`.
pub const PORT: &str = "org.whimbrel.guest.0";
/// Every version of the protocol and the reason for it, oldest first.
pub const VERSIONS: &[(u8, &str)] = &[(1, "the first: caches, stuns, announcements and requests of guests")];
/// The newest version, which this build speaks. Frames of another version are skipped.
pub const VERSION: u8 = VERSIONS[VERSIONS.len() - 1].0;
/// Pages that a process may write during the observation without being stunned (Clark et al., NSDI 2005,
/// section 5.5).
pub const WRITES_ALLOWED: u32 = 40;
