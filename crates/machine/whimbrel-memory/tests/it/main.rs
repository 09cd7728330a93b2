//! The integration tests of guest memory, one binary: linking costs more than most of the tests.

mod attach;
mod dirty;
mod figures;
mod kvm;
mod lazy;
mod parts;
mod qemu;
mod support;
