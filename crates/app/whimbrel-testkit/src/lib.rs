//! Tests only: guests that prove their identity, hosts in network namespaces, links, probes, fakes.
//!
//! Everything made here is gone when its value is dropped, and also when the test process is killed. What
//! takes long to make (kernel, initial RAM disk, a Debian root) is made once and kept below `target/`.
//! Needs root (namespaces, TUN devices) and Debian's `apt`; failures to set up panic or are plain errors.

pub mod fake_machine;
pub mod guest;
pub mod lab;
