//! `session.*`: a mounted directory of a server 32 ms and 30 or 100 Mbit/s away, beside a local disk and other people's mounts.
//!
//! Server and mount are in network namespaces of their own with the test kit's link between them. Every figure is seconds by
//! the clock, unless the row says otherwise.

mod build;
mod clones;
mod documents;
mod far;
mod faults;
mod io;
mod peers;
mod posix;
mod reads;

pub(crate) use build::builds;
pub(crate) use clones::clones;
pub(crate) use documents::document_runs;
pub(crate) use faults::faults;
pub(crate) use io::runs as io_runs;
pub(crate) use peers::peers;
pub(crate) use posix::posix;
pub(crate) use reads::{open_dir, whole_file};
