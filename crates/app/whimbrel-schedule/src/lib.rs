//! Scheduled care: checkpoints with retention, pushes, verifications and garbage collections that a host does
//! by itself.
//!
//! [`Schedules`] knows records and times. What is done goes through [`ScheduledActions`], which is all that
//! it knows of the host. It removes only tags that it has made: their prefix is reserved, they name the
//! schedule, and they are no older than it. A tag is removed after a run that succeeded, and only if it still
//! names the same capsule. Tags of copies at another host are not removed but used again (`copies`).
//!
//! Invariants: a run is recorded before it begins, and what a run has done before it is told. What is read
//! when a host starts is durable, so a loss of power takes back nothing that was acted on.

mod actions;
mod copies;
mod error;
mod plan;
mod record;
mod schedules;
#[cfg(test)]
mod tests;

pub use actions::ScheduledActions;
pub use error::{HostFailure, ScheduleError};
pub use record::{TAG_PREFIX, check_file};
pub use schedules::Schedules;
