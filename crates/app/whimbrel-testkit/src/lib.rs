//! Test kit, for tests only: guests that prove their identity, hosts in network namespaces, links, probes,
//! fakes.
//!
//! Everything created here ends when its value is dropped, and also when the test process is killed. Files
//! that take long to build (kernel, initial RAM disk, a Debian root) are built once and cached below
//! `target/`. Needs root (namespaces, TUN devices) and Debian's `apt`; failed set-up panics or returns an
//! error.

pub mod fake_machine;
pub mod guest;
pub mod lab;
pub mod leaked_content;
