//! A real QEMU with a real Linux in it, under TCG.

mod disk;
mod figures;
mod guest;
mod lifecycle;
mod state;
