//! The integration tests of sessions, one binary: linking costs more than most of the tests.

mod ahead;
mod bad_input;
mod cache_crashes;
mod calls;
mod common;
mod copies;
mod holes;
mod journal_retry;
mod kept;
mod known;
mod known_versions;
mod large;
mod leases;
mod locks;
mod messages;
mod mount;
mod nbd;
mod posix;
mod power;
mod random;
mod renames;
mod server;
mod slow;
mod uncached;
mod waiting;
mod writeback;
