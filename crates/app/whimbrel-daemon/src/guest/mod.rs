//! Guest agent as the host uses it: the optional program inside a guest helps a migration and makes guest
//! requests.
//!
//! The connection belongs to the running machine. [`GuestThrottle`] slows down a machine that writes faster
//! than it can be copied, with the agent's help or without. `memory_release` has the guest free memory before
//! it is copied. `requests` does what a guest requests, if its owner allowed it. `programs` and
//! `addresses` use qemu-ga, the agent that distributions have. No wait for a silent guest
//! exceeds its time limit, and nothing that a guest says decides who may run it.

pub(crate) mod addresses;
mod memory_release;
mod permissions;
mod programs;
pub(crate) mod requests;
mod throttle;

pub(crate) use permissions::SetGuestPermissions;
pub(crate) use requests::GuestRequestHandler;
pub(crate) use throttle::{GuestThrottle, ThrottledMachine};

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(work) {
        tracing::error!(%error, "could not start a thread for a guest agent");
    }
}
