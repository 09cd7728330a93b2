//! The primary side of a protection: seeding, epochs, heartbeats.

mod captured_machine;
pub(crate) mod epochs;
mod events;
pub(crate) mod group;
pub(crate) mod handle;
pub(crate) mod heartbeat;
pub(crate) mod inherited;
mod input_shipping;
pub(crate) mod offer;
pub(crate) mod run;
pub(crate) mod seeding;
mod stall;
