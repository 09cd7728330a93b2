//! Content-addressed store of pages, image trees and capsules.
//!
//! A directory of append-only packs, immutable index files and small refs; `docs/formats/store.md` has every
//! byte. Order of durability: pack, index, ref. Any crash leaves the old or the new ref and a store that
//! verifies. Many processes may read, write and collect garbage at once (`gc` has the argument).
//!
//! Calls block; handles are cheap to clone and may be used from any thread. A full disk fails the operation
//! that meets it, and nothing else. After a failed sync or an I/O error the handle is latched: reads still
//! work, writes are rejected until [`Store::reopen`] or garbage collection finds that the disk works again.

mod capsule_copy;
mod capsule_queries;
mod capsule_stream;
mod capsule_writer;
mod changed_pages;
mod complete_capsules;
pub mod encrypted_file;
mod encryption;
mod error;
mod examine;
mod extent_reader;
mod fetched_objects;
mod file_names;
mod gc;
mod gc_lease;
mod image_writer;
mod index;
mod index_cipher;
mod index_set;
mod keys;
mod layout;
mod mark;
mod object_cache;
mod object_reader;
mod os_vfs;
mod pack_file;
mod pack_writer;
mod page_worker;
mod partial_capsules;
mod reachability;
mod refs;
mod reindex;
mod remote_objects;
mod repair;
mod reserve;
mod sealed_frame;
mod store;
mod stored_disk;
mod stored_image;
mod verify;
pub mod vfs;

pub use capsule_copy::CopyProgress;
pub use capsule_queries::{CapsuleInfo, Divergence, ImageChange};
pub use capsule_writer::CapsuleWriter;
pub use encryption::{Encryption, SealReport};
pub use error::{Result, StoreError};
pub use examine::{FileKind, StoreFinding, examine};
pub use fetched_objects::FetchedObjectsWriter;
pub use gc::{GcReport, GcRoots};
pub use image_writer::{FinishedImage, ImageWriter};
pub use keys::{DataKey, KeyFile, KeyId, MasterKey, MasterKeyError};
pub use os_vfs::OsVfs;
pub use refs::{Expected, RefChange};
pub use remote_objects::{ObjectWant, PageWant, RemoteObjects, RemoteObjectsError};
pub use repair::{RepairReport, RepairedCapsule};
pub use store::{Options, Pin, Store};
pub use stored_disk::StoredDisk;
pub use stored_image::StoredImage;
pub use verify::{BrokenCapsule, Damage, Report};
