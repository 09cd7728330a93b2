//! The integration tests of capsule transfer, one binary: linking costs more than most of the tests.

mod common;
mod messages;
mod pull;
mod wire;
