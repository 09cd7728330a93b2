//! A real QEMU with a real Linux in it, under TCG.

mod guest;
mod lifecycle;
mod pool;
mod state;
