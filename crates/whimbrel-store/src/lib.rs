//! Content-addressed store of pages, image trees and capsules.
//!
//! A directory of append-only packs, immutable index files and small refs; `docs/formats/store.md` has every byte.
//! Order of durability: pack, index, ref. Any crash leaves the old or the new ref and a store that verifies. Many
//! processes may read and write at once, and collect garbage beside each other (`gc` has the argument).
//!
//! Calls block; handles are cheap to clone and may be used from any thread. After a failed write or sync the handle
//! is latched: it still reads, and refuses to write until the store is opened again.

mod append;
mod cache;
mod capsules;
mod catalog;
mod changed;
mod closure;
mod disk;
mod elsewhere;
mod error;
pub mod files;
mod gc;
mod image_writer;
mod index;
mod layout;
mod lease;
mod mark;
mod object;
mod os;
mod partial;
mod refs;
mod reindex;
mod restore;
mod shadow;
mod store;
mod stored;
mod transfer;
mod verify;
mod whole;
mod worker;
mod writer;

pub use capsules::{CapsuleInfo, Divergence, ImageChange};
pub use disk::StoredDisk;
pub use elsewhere::{Elsewhere, ElsewhereError, ObjectWant, PageWant};
pub use error::{Result, StoreError};
pub use gc::{GcReport, Keep};
pub use image_writer::{FinishedImage, ImageWriter};
pub use os::OsFiles;
pub use refs::{Expected, RefChange};
pub use shadow::ShadowWriter;
pub use store::{Options, Pin, Store};
pub use stored::StoredImage;
pub use verify::{BrokenCapsule, Damage, Report};
pub use writer::Writer;
