//! What differs between processors: registers, the system call convention, how an interrupted call restarts.
//!
//! One file each. The rest of the crate names only [`Registers`], [`SLOT`] and [`detour`].

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Registers, SLOT, counter, detour};

/// A system call and its first three arguments, as the target is to make it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) number: u32,
    pub(crate) arguments: [u64; 3],
}

/// Code that makes one system call in a stopped thread and then goes on where the thread was.
#[derive(Debug)]
pub(crate) struct SyscallStub {
    /// Machine code, less than [`SLOT`] bytes, good only at the address it was made for.
    pub(crate) code: Vec<u8>,
    /// Registers that start it.
    pub(crate) start: Registers,
    /// The program counter at the exit of the system call.
    pub(crate) returned: u64,
}

/// The thread does not run in the mode this build knows (a 32-bit program, for one).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ForeignMode;
