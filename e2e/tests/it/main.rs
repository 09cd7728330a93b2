//! The integration tests of the whole product, one binary: linking costs more than most of the tests.

mod adaptive;
mod alignment;
mod balloon;
mod bases;
mod bases_live;
mod capsules;
mod clones;
mod evacuate;
mod faults;
mod growth;
mod guest_helper;
mod hierarchy;
mod lease;
mod life;
mod migration;
mod network;
mod pool;
mod postcopy;
mod protect;
mod refusals;
mod safe;
mod session;
mod ssh;
mod stages;
mod tunnel;
mod wws;
