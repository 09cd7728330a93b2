//! The integration tests of network ports, one binary: linking costs more than most of the tests.

mod offloads;
mod parts;
mod port;
mod qemu;
mod support;
