//! The integration tests of protection, one binary: linking costs more than most of the tests.

mod epoch_model;
mod flaky_link;
mod group;
mod inherit;
mod keep;
mod lease_model;
mod messages;
mod replay;
mod room;
mod sharing;
mod spoken;
