//! Content of files: reads, writes, holes, copies, and the requests that fetch what is missing.

pub(in crate::client) mod fetcher;
pub(in crate::client) mod file_content;
pub(in crate::client) mod free_space;
pub(in crate::client) mod hole_query;
pub(in crate::client) mod server_copies;
pub(in crate::client) mod space;
pub(in crate::client) mod warm_files;
