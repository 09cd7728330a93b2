//! A running machine on a real QEMU, passed from process to process.

mod lab;
mod swap;
