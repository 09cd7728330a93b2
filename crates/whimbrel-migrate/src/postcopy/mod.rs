//! Post-copy: the machine runs on the target before all of it is there.
//!
//! The handover is that of every migration, with one commit point. What is not sent at the pause ([`leave`]) stays with the
//! source, which keeps it until the target says that it lacks nothing ([`giving`]). The target fetches a page when
//! it is touched, over a connection of its own, and asks for the others in the background, those around the last faults
//! first ([`taking`], in the order of [`schedule`]). Who owes what to whom, and when the source may forget, is
//! [`phase`].
//!
//! What is not here: connections, userfaultfd, overlays: the host brings them as [`taking::Lane`] and [`taking::Store`].
//!
//! Invariants: nothing but the target's word that it lacks nothing, said after it is durable there, lets the source forget;
//! what the target's stores say is missing is the only truth about what is missing, so whatever is lost on the way
//! is asked for again; a page that came never overwrites one that is there. A lost link costs waiting and nothing else.

mod frame;
pub mod giving;
pub mod leave;
pub mod messages;
pub mod phase;
pub mod schedule;
mod sets;
pub mod taking;

pub use frame::FrameError;
pub use giving::{GiveError, Giving};
pub use sets::{SetError, decode_sets, encode_sets};
pub use taking::Taking;
