//! The integration tests of the test kit, one binary: linking costs more than most of the tests.

mod guest;
mod lab;
