//! Real daemons, real guests: hosts in namespaces, driven through the command line as a person would.
//!
//! [`Cluster`] makes the hosts, [`HostProcess`] is one of them, [`Guest`] describes the machine under test.
//! Everything is gone when a `Cluster` is dropped and also when the process is killed: the daemons and their
//! QEMUs live in a PID namespace whose first process ends with us, and the kernel ends the rest.

mod cluster;
mod console;
mod guest;
mod host;
mod kvm_lane;
mod ssh;

pub use cluster::Cluster;
pub use console::{console, console_stream, wait_reborn};
pub use guest::{DHCP, GUEST_ADDRESS, Guest};
pub use host::{HostProcess, Refusal, WEB, binary as command_line, control_group};
pub use kvm_lane::KvmLane;
pub use ssh::Ssh;

use std::time::Duration;

/// How long a case waits for what has to happen. Only a case that hangs reaches it: guests are translated and
/// share two cores with builds and other tests.
pub const PATIENCE: Duration = Duration::from_secs(300);
