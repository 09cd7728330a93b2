//! Constants of the NBD protocol, with the names of `doc/proto.md`, and the limits of this server.

/// First word of the greeting.
pub(crate) const NBDMAGIC: u64 = 0x4e42444d41474943;
/// Second word of the greeting, first word of every option.
pub(crate) const IHAVEOPT: u64 = 0x49484156454F5054;
/// First word of every reply to an option.
pub(crate) const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of every request.
pub(crate) const REQUEST_MAGIC: u32 = 0x25609513;
/// First word of a simple reply.
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x67446698;
/// First word of a structured reply chunk.
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e33ef;

/// Handshake flags of both sides.
pub(crate) const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub(crate) const FLAG_NO_ZEROES: u16 = 2;

/// Numbers of options.
pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(crate) const OPT_SET_META_CONTEXT: u32 = 10;

/// Replies to options.
pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_SERVER: u32 = 2;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;
pub(crate) const REP_ERR_UNSUP: u32 = 1 << 31 | 1;
pub(crate) const REP_ERR_INVALID: u32 = 1 << 31 | 3;
pub(crate) const REP_ERR_UNKNOWN: u32 = 1 << 31 | 6;

/// Kinds of information in `REP_INFO`.
pub(crate) const INFO_EXPORT: u16 = 0;
pub(crate) const INFO_BLOCK_SIZE: u16 = 3;

pub(crate) const EXPORT_HAS_FLAGS: u16 = 1 << 0;
pub(crate) const EXPORT_READ_ONLY: u16 = 1 << 1;
pub(crate) const EXPORT_FLUSH: u16 = 1 << 2;
pub(crate) const EXPORT_FUA: u16 = 1 << 3;
pub(crate) const EXPORT_TRIM: u16 = 1 << 5;
pub(crate) const EXPORT_WRITE_ZEROES: u16 = 1 << 6;
pub(crate) const EXPORT_DF: u16 = 1 << 7;
pub(crate) const EXPORT_MULTI_CONN: u16 = 1 << 8;

/// Flags of requests.
pub(crate) const CMD_FUA: u16 = 1 << 0;
pub(crate) const CMD_NO_HOLE: u16 = 1 << 1;
pub(crate) const CMD_DF: u16 = 1 << 2;
pub(crate) const CMD_REQ_ONE: u16 = 1 << 3;

/// Flags and types of structured reply chunks.
pub(crate) const CHUNK_DONE: u16 = 1;
pub(crate) const CHUNK_OFFSET_DATA: u16 = 1;
pub(crate) const CHUNK_OFFSET_HOLE: u16 = 2;
pub(crate) const CHUNK_BLOCK_STATUS: u16 = 5;
pub(crate) const CHUNK_ERROR: u16 = 1 << 15 | 1;

/// States of `base:allocation`.
pub(crate) const STATE_HOLE: u32 = 1;
pub(crate) const STATE_ZERO: u32 = 2;

/// Name of the only metadata context.
pub(crate) const ALLOCATION: &[u8] = b"base:allocation";
/// Id of the metadata context.
pub(crate) const ALLOCATION_ID: u32 = 1;

/// Longest accepted option, in bytes: a name (the protocol's limit is 4096) and some queries.
pub(crate) const MAX_OPTION: usize = 16 << 10;
/// Longest payload of a read or write: the protocol's customary limit.
pub(crate) const MAX_PAYLOAD: u32 = 32 << 20;
/// Announced block sizes: any byte can be addressed, whole pages are best.
pub(crate) const MIN_BLOCK: u32 = 1;
pub(crate) const PREFERRED_BLOCK: u32 = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WireError {
    Perm = 1,
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
    Overflow = 75,
    Shutdown = 108,
}
