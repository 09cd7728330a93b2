//! System calls that no safe wrapper has; all `unsafe` of the program is below here.

pub(crate) mod interfaces;
pub(crate) mod packet;
pub(crate) mod ptrace;
