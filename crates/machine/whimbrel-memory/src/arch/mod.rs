//! Processor architecture: registers, the system call convention, how an interrupted call restarts.
//!
//! One file for each. The rest of the crate uses only [`Registers`], [`STUB_SIZE`], [`program_counter`] and
//! [`build_stub`].

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Registers, STUB_SIZE, build_stub, program_counter};

/// System call and its first three arguments, for the target to execute.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) number: u32,
    pub(crate) arguments: [u64; 3],
}

/// Code that makes one system call in a stopped thread and then continues where the thread was.
#[derive(Debug)]
pub(crate) struct SyscallStub {
    /// Machine code, less than [`STUB_SIZE`] bytes, valid only at the address it was generated for.
    pub(crate) code: Vec<u8>,
    pub(crate) start: Registers,
    /// Program counter at the exit of the system call.
    pub(crate) returned: u64,
}

/// The thread runs in a mode that this build does not support, such as 32-bit code.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ForeignMode;
