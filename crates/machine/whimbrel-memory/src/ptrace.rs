//! Checked calls of the ptrace requests that injection and the throttle need.
//!
//! Not nix: its `Signal` has no real-time signals, and one that arrives while the thread is stopped must be
//! passed on. Nothing here waits with `waitpid`: that would consume the stop, and a signal about to be
//! delivered would be lost if this process died before passing it on. [`stop`] inspects the stop without
//! consuming it.

use crate::arch::Registers;
use linux_raw_sys::ptrace as sys;
use rustix::process::Pid;
use std::{
    ffi::{c_int, c_long},
    io,
};

/// Reason why a traced thread is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The tracer requested it (`PTRACE_INTERRUPT`).
    Interrupt,
    /// Job control: `SIGSTOP` or a similar signal.
    Group,
    /// Entry or exit of a system call.
    Syscall,
    Signal(c_int),
}

/// `SIGTRAP` with the mark of `PTRACE_O_TRACESYSGOOD`.
const SYSCALL_TRAP: c_int = libc::SIGTRAP | 0x80;
/// Event of a stop that is no signal, as a number of the type in which the kernel tells it.
const EVENT_STOP: c_int = sys::PTRACE_EVENT_STOP as c_int;

/// Starts tracing with `PTRACE_SEIZE`.
///
/// `TRACESYSGOOD` is required: a tracer that dies at a system call stop leaves the stop's code behind as a
/// signal to be sent, and a bare `SIGTRAP` would kill the target. With the mark it is no valid signal and is
/// dropped.
pub(crate) fn seize(pid: Pid) -> io::Result<()> {
    request(sys::PTRACE_SEIZE, pid, 0, sys::PTRACE_O_TRACESYSGOOD as usize)
}

pub(crate) fn interrupt(pid: Pid) -> io::Result<()> {
    request(sys::PTRACE_INTERRUPT, pid, 0, 0)
}

/// Lets the thread run, delivering `signal` unless 0.
pub(crate) fn resume(pid: Pid, signal: c_int) -> io::Result<()> {
    request(sys::PTRACE_CONT, pid, 0, signal as usize)
}

/// Lets the thread run up to the next entry or exit of a system call.
pub(crate) fn resume_to_syscall(pid: Pid, signal: c_int) -> io::Result<()> {
    request(sys::PTRACE_SYSCALL, pid, 0, signal as usize)
}

/// Ends tracing and lets the thread run, delivering `signal` unless 0.
pub(crate) fn detach(pid: Pid, signal: c_int) -> io::Result<()> {
    request(sys::PTRACE_DETACH, pid, 0, signal as usize)
}

/// Stop of the thread; `None` while it runs (or is gone).
pub(crate) fn stop(pid: Pid) -> io::Result<Option<Stop>> {
    // SAFETY: the structure has only integers (and a union of them), for which zero is valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    match request(sys::PTRACE_GETSIGINFO, pid, 0, &raw mut info as usize) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    }
    Ok(Some(match (info.si_code, info.si_code >> 8, info.si_code & 0xff) {
        (SYSCALL_TRAP, ..) => Stop::Syscall,
        (_, EVENT_STOP, libc::SIGTRAP) => Stop::Interrupt,
        (_, EVENT_STOP, _) => Stop::Group,
        _ => Stop::Signal(info.si_signo),
    }))
}

pub(crate) fn registers(pid: Pid) -> io::Result<Registers> {
    // SAFETY: the structure has only integers, for which zero is valid.
    let mut regs: Registers = unsafe { std::mem::zeroed() };
    let mut area = libc::iovec { iov_base: (&raw mut regs).cast(), iov_len: size_of::<Registers>() };
    request(sys::PTRACE_GETREGSET, pid, libc::NT_PRSTATUS as usize, &raw mut area as usize)?;
    Ok(regs)
}

/// Sets the general registers, all at once.
pub(crate) fn set_registers(pid: Pid, regs: &Registers) -> io::Result<()> {
    let mut area =
        libc::iovec { iov_base: (&raw const *regs).cast_mut().cast(), iov_len: size_of::<Registers>() };
    request(sys::PTRACE_SETREGSET, pid, libc::NT_PRSTATUS as usize, &raw mut area as usize)
}

/// Writes code. Unlike `/proc/PID/mem` this always passes write protection, independent of
/// `proc_mem.force_override`.
pub(crate) fn write_code(pid: Pid, at: u64, code: &[u8]) -> io::Result<()> {
    for (index, chunk) in code.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        request(sys::PTRACE_POKEDATA, pid, at as usize + 8 * index, usize::from_le_bytes(word))?;
    }
    Ok(())
}

/// Result of the system call that ends at `counter`, if the thread is at its exit.
pub(crate) fn syscall_result(pid: Pid, counter: u64) -> io::Result<Option<i64>> {
    // SAFETY: the structure has only integers (and a union of them), for which zero is valid.
    let mut info: sys::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of::<sys::ptrace_syscall_info>();
    request(sys::PTRACE_GET_SYSCALL_INFO, pid, size, &raw mut info as usize)?;
    if u32::from(info.op) != sys::PTRACE_SYSCALL_INFO_EXIT || info.instruction_pointer != counter {
        return Ok(None);
    }
    // SAFETY: `op` tells that the kernel filled this member of the union.
    Ok(Some(unsafe { info.__bindgen_anon_1.exit.rval }))
}

fn request(request: u32, pid: Pid, address: usize, data: usize) -> io::Result<()> {
    let (request, pid) = (c_long::from(request), c_long::from(pid.as_raw_nonzero().get()));
    // SAFETY: for `data` every caller above passes a plain number or the address of a live, writable local of
    // the size that its request expects; `address` is a number or an address in the other process, never one
    // in this process.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, request, pid, address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
