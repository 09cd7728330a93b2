//! The optional program inside a guest, as the host sees it: one that helps a migration, and asks for some.
//!
//! [`GuestAgent`] is the connection; [`GuestThrottle`] slows a machine down that writes faster than it can be
//! copied, with its guest's help or without; `caches` has it free memory before it is copied; `wishes` does
//! what a guest asks for, if its owner allowed it. Nothing waits for a guest that is silent longer than its
//! bounds, and nothing that a guest says decides who may run it.

mod agent;
mod memory_release;
mod permissions;
pub(crate) mod requests;
mod throttle;

pub(crate) use agent::{ArrivalKind, GuestAgent};
pub(crate) use permissions::SetGuestPermissions;
pub(crate) use throttle::{GuestThrottle, ThrottledMachine};
