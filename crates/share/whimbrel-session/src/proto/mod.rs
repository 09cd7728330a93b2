//! Messages of a session: names, attributes and calls. Types only.
//!
//! Everything received is bounded by the wire (64 KiB of header, 8 MiB of payload) and by the parsers here
//! before it is used. The bytes are described in `docs/protocols/session.md`.

mod attr;
mod calls;
mod digests;
mod entries;
mod holes;
mod leases;
mod locks;
mod name_change;
mod pages;
mod path;
mod session_key;
mod share_key;
mod walk_reply;

pub use attr::{Attr, DeviceNumber, Ident, Kind, Time, Version};
pub use calls::{
    AttrBatch, AttrCall, ClaimCall, Copied, Copy, CopyCall, DigestCall, Digests, DigestsDone, End, EndCall,
    FIRST_WITH_CONDITIONS, FIRST_WITH_LEASES, FIRST_WITH_NODES, FileRef, FilesystemSpace, HolesCall,
    HolesDone, Keyed, List, ListCall, ListTree, Listed, LockCall, LookedUp, Lookup, LookupCall, OpCall, Open,
    OpenCall, Opened, PagesCall, Range, Read, ReadCall, ReadDone, ReadPages, ReadlinkCall, ReturnCall,
    SPOKEN, StatfsCall, Sync, SyncCall, VERSIONS, WalkCall, Walked, WatchCall, Write, WriteCall, WriteDone,
    Xattr, XattrAction, XattrCall, code, errno, request_name,
};
pub use digests::{DigestedPages, digest_of_page, pack_digests, unpack_digests};
pub use entries::{EntriesError, Entry, MAX_LISTING, pack_entries, unpack_entries};
pub use holes::{MAX_HOLES, pack_holes, unpack_holes};
pub use leases::{Claim, MAX_LEASES, Return, Standing, Watch, Watched};
pub use locks::{Lock, LockAction, Locked};
pub use name_change::{AttrChange, EntryKind, Known, Op, OpDone, Overwrite, Owner, version_before};
pub use pages::{PAGE, PackedPages, PagesError, is_in, is_zero, pack_pages, pack_some, unpack_pages};
pub use path::{MAX_NAME, MAX_PATH, Name, PathError, RelPath};
pub use session_key::{ClientId, SessionKey};
pub use share_key::{PIECE, PIECE_PAGES, ShareKey};
pub use walk_reply::{DirPacker, WalkedDir, unpack_dirs};
