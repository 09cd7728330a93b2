//! Names and attributes: inodes, cached directories, owners, and changes of names on their way to the server.

pub(in crate::client) mod attribute_changes;
pub(in crate::client) mod change_batch;
pub(in crate::client) mod change_merge;
pub(in crate::client) mod change_queue;
pub(in crate::client) mod directory_cache;
pub(in crate::client) mod eviction;
pub(in crate::client) mod id_map;
pub(in crate::client) mod inodes;
pub(in crate::client) mod name_changes;
pub(in crate::client) mod xattrs;
