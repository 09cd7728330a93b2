//! The optional program inside a guest, as the host sees it: one that helps a migration, and asks for some.
//!
//! [`GuestPort`] is the connection; [`Brake`] slows a machine down that writes faster than it can be copied, with its guest's
//! help or without; `caches` has it free memory before it is copied; `wishes` does what a guest asks for, if its owner
//! allowed it. Nothing waits for a guest that is silent longer than its bounds, and nothing that a guest says decides who may run it.

mod brake;
mod caches;
mod permits;
mod port;
mod wishes;

pub(crate) use brake::{Brake, Braked};
pub(crate) use permits::Permit;
pub(crate) use port::{Arrived, GuestPort};
