//! The integration tests of the hash cache, one binary: linking costs more than most of the tests.

mod common;
mod damage;
mod files;
mod qcow2;
