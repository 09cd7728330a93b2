//! Guests to test with: their files, and the client of the witness inside them.

mod cache;
pub mod cpio;
mod debian;
mod error;
mod files;
pub mod image;
mod kernel;
mod options;
mod witness;

pub use debian::DebianGuest;
pub use error::GuestError;
pub use files::GuestFiles;
pub use options::{GuestOptions, Work};
pub use witness::{GuestMemory, Identity, Verdict, Witness, WitnessError, assert_same_life};
