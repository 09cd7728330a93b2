//! `session.*`: a mounted directory of a server 32 ms and 30 or 100 Mbit/s away, or on a LAN, beside a local
//! disk and other people's mounts.
//!
//! Server and mount are in network namespaces of their own with the test kit's link between them. Every
//! figure is seconds by the clock, unless the row says otherwise.

mod build;
mod clone_images;
mod clones;
mod copy;
mod documents;
mod far;
mod faults;
mod fsx;
mod guest;
mod io;
mod names;
mod nfs;
mod peers;
mod pjdfstest;
mod posix;
mod reads;
mod save;
mod scenario;
mod scp;
mod sides;
mod two_clients;

pub(crate) use build::builds;
pub(crate) use clone_images::{hosts as clone_hosts, images as clone_images};
pub(crate) use clones::clones;
pub(crate) use copy::copy;
pub(crate) use documents::document_runs;
pub(crate) use faults::faults;
pub(crate) use fsx::fsx;
pub(crate) use guest::guests;
pub(crate) use io::runs as io_runs;
pub(crate) use names::names;
pub(crate) use peers::peers;
pub(crate) use pjdfstest::pjdfstest;
pub(crate) use posix::posix;
pub(crate) use reads::{listing_behind, open_dir, random_reads, whole_file};
pub(crate) use save::save;
pub(crate) use scp::scp;
pub(crate) use two_clients::{alone_asks, two_writers};
