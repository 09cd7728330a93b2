//! Hosts: each has a disk, a wall clock of its own, and messages that are on their way to it.

use super::{disk::Disk, network::Mail};
use std::collections::BTreeMap;

pub(crate) type HostId = usize;

#[derive(Debug, Default)]
pub(crate) struct Host {
    pub(crate) disk: Disk,
    /// Nanoseconds by which the wall clock is wrong.
    pub(crate) wall_error: i64,
    /// Parts in 1,024 that the clock since boot loses.
    pub(crate) drift: u64,
    /// Messages under way, by the time of their arrival.
    pub(crate) mail: BTreeMap<(u64, u64), Mail>,
    /// Microseconds after which it answers a request.
    pub(crate) answers_after: u64,
    /// Hosts from which nothing arrives.
    pub(crate) cut_from: u64,
}
