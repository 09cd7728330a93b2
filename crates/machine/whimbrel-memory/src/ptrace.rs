//! The few ptrace requests that injection needs, as checked calls.
//!
//! Not nix: its `Signal` has no real-time signals, and one that arrives while we hold the thread must be
//! passed on. Nothing here waits with `waitpid`: that would consume the stop, and with it a signal that is
//! about to be delivered would be lost if we died before passing it on. [`stop`] looks at the stop without
//! consuming it.

use crate::arch::Registers;
use rustix::process::Pid;
use std::{
    ffi::{c_int, c_void},
    io,
};

/// Why a traced thread stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// We asked for it (`PTRACE_INTERRUPT`).
    Interrupt,
    /// Job control: `SIGSTOP` or one of its kin.
    Group,
    /// At the entry or exit of a system call.
    Syscall,
    /// This signal is about to be delivered.
    Signal(c_int),
}

/// `SIGTRAP` with the mark of `PTRACE_O_TRACESYSGOOD`.
const SYSCALL_TRAP: c_int = libc::SIGTRAP | 0x80;

/// `PTRACE_SEIZE`.
///
/// `TRACESYSGOOD` is not for convenience: a tracer that dies at a system call stop leaves the stop's code
/// behind as a signal to be sent, and a bare `SIGTRAP` would kill the target. With the mark it is no valid
/// signal and is dropped.
pub(crate) fn seize(pid: Pid) -> io::Result<()> {
    request(libc::PTRACE_SEIZE, pid, 0, libc::PTRACE_O_TRACESYSGOOD as usize)
}

/// `PTRACE_INTERRUPT`.
pub(crate) fn interrupt(pid: Pid) -> io::Result<()> {
    request(libc::PTRACE_INTERRUPT, pid, 0, 0)
}

/// Lets the thread run, delivering `signal` unless 0.
pub(crate) fn resume(pid: Pid, signal: c_int) -> io::Result<()> {
    request(libc::PTRACE_CONT, pid, 0, signal as usize)
}

/// Like [`resume`], up to the next entry or exit of a system call.
pub(crate) fn resume_to_syscall(pid: Pid, signal: c_int) -> io::Result<()> {
    request(libc::PTRACE_SYSCALL, pid, 0, signal as usize)
}

/// Lets the thread run and leaves it, delivering `signal` unless 0.
pub(crate) fn detach(pid: Pid, signal: c_int) -> io::Result<()> {
    request(libc::PTRACE_DETACH, pid, 0, signal as usize)
}

/// The stop the thread is in; `None` while it runs (or is gone).
pub(crate) fn stop(pid: Pid) -> io::Result<Option<Stop>> {
    // SAFETY: a structure of plain integers (and a union of them), for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    match request(libc::PTRACE_GETSIGINFO, pid, 0, &raw mut info as usize) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    }
    Ok(Some(match (info.si_code, info.si_code >> 8, info.si_code & 0xff) {
        (SYSCALL_TRAP, ..) => Stop::Syscall,
        (_, libc::PTRACE_EVENT_STOP, libc::SIGTRAP) => Stop::Interrupt,
        (_, libc::PTRACE_EVENT_STOP, _) => Stop::Group,
        _ => Stop::Signal(info.si_signo),
    }))
}

/// The general registers.
pub(crate) fn registers(pid: Pid) -> io::Result<Registers> {
    // SAFETY: a structure of plain integers, for which zero is a value.
    let mut regs: Registers = unsafe { std::mem::zeroed() };
    let mut area = libc::iovec { iov_base: (&raw mut regs).cast(), iov_len: size_of::<Registers>() };
    request(libc::PTRACE_GETREGSET, pid, libc::NT_PRSTATUS as usize, &raw mut area as usize)?;
    Ok(regs)
}

/// Sets the general registers, all at once.
pub(crate) fn set_registers(pid: Pid, regs: &Registers) -> io::Result<()> {
    let mut area =
        libc::iovec { iov_base: (&raw const *regs).cast_mut().cast(), iov_len: size_of::<Registers>() };
    request(libc::PTRACE_SETREGSET, pid, libc::NT_PRSTATUS as usize, &raw mut area as usize)
}

/// Writes code. Unlike `/proc/PID/mem` this always passes write protection, whatever
/// `proc_mem.force_override` says.
pub(crate) fn write_code(pid: Pid, at: u64, code: &[u8]) -> io::Result<()> {
    for (index, chunk) in code.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        request(libc::PTRACE_POKEDATA, pid, at as usize + 8 * index, usize::from_le_bytes(word))?;
    }
    Ok(())
}

/// If the thread is at the exit of the system call that ends at `counter`: its result.
pub(crate) fn syscall_result(pid: Pid, counter: u64) -> io::Result<Option<i64>> {
    // SAFETY: a structure of plain integers (and a union of them), for which zero is a value.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::ptrace_syscall_info>();
    request(libc::PTRACE_GET_SYSCALL_INFO, pid, size, &raw mut info as usize)?;
    if info.op != libc::PTRACE_SYSCALL_INFO_EXIT || info.instruction_pointer != counter {
        return Ok(None);
    }
    // SAFETY: `op` says which member of the union the kernel filled, and it is this one.
    Ok(Some(unsafe { info.u.exit.sval }))
}

fn request(request: libc::c_uint, pid: Pid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: every caller above passes for `data` either a plain number or the address of a live, writable
    // local of the size its request calls for; `address` is a number or an address in the other process,
    // never one of ours.
    let result = unsafe {
        libc::ptrace(request, pid.as_raw_nonzero().get(), address as *mut c_void, data as *mut c_void)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
