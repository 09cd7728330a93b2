//! Guest agent as the host uses it: the optional program inside a guest helps a migration and makes guest
//! requests.
//!
//! [`GuestAgent`] is the connection. [`GuestThrottle`] slows down a machine that writes faster than it can be
//! copied, with the agent's help or without. `memory_release` has the guest free memory before it is copied.
//! `requests` does what a guest requests, if its owner allowed it. No wait for a silent guest exceeds its
//! time limit, and nothing that a guest says decides who may run it.

mod agent;
mod memory_release;
mod permissions;
pub(crate) mod requests;
mod throttle;

pub(crate) use agent::{ArrivalKind, GuestAgent};
pub(crate) use permissions::SetGuestPermissions;
pub(crate) use throttle::{GuestThrottle, ThrottledMachine};
