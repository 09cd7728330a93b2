//! Stopping threads by ptrace, as checked calls.
//!
//! `PTRACE_SEIZE` changes nothing that the process or its parent can see, unlike `SIGSTOP`. Nothing here
//! waits for a stop with `waitpid`: that would consume the stop, and with it a signal that is about to be
//! delivered.

use std::{
    ffi::{c_int, c_long},
    io,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThreadState {
    /// The thread is stopped, with this signal to be delivered, 0 for none.
    Stopped(c_int),
    /// The thread runs, or has ended.
    Runs,
}

/// Starts tracing a thread, and asks it to stop.
pub(crate) fn stop(thread: i32) -> io::Result<()> {
    request(libc::PTRACE_SEIZE, thread, 0)?;
    request(libc::PTRACE_INTERRUPT, thread, 0)
}

pub(crate) fn inspect(thread: i32) -> io::Result<ThreadState> {
    // SAFETY: the structure has only integers (and a union of them), for which zero is valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    match request(libc::PTRACE_GETSIGINFO, thread, &raw mut info as usize) {
        Ok(()) if info.si_code >> 8 == libc::PTRACE_EVENT_STOP => Ok(ThreadState::Stopped(0)),
        Ok(()) => Ok(ThreadState::Stopped(info.si_signo)),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(ThreadState::Runs),
        Err(error) => Err(error),
    }
}

/// Detaches a stopped thread and delivers this signal, unless 0.
pub(crate) fn detach(thread: i32, signal: c_int) -> io::Result<()> {
    request(libc::PTRACE_DETACH, thread, signal as usize)
}

/// Reaps a traced thread that has ended, so that its parent sees its end; returns whether it had ended.
pub(crate) fn reap(thread: i32) -> bool {
    // SAFETY: the structure has only integers (and a union of them), for which zero is valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::__WALL;
    // SAFETY: `info` lives until the call has returned, and has the type that the call expects.
    let result = unsafe { libc::waitid(libc::P_PID, thread.unsigned_abs(), &raw mut info, flags) };
    // Without a result the signal stays 0.
    result < 0 || info.si_signo != 0
}

/// C libraries differ in the type of a request, so it is the kernel's that is called.
fn request(request: impl Into<c_long>, thread: i32, data: usize) -> io::Result<()> {
    let (request, thread) = (request.into(), c_long::from(thread));
    // SAFETY: for `data` every caller above passes a plain number or the address of a live, writable local of
    // the size that its request expects; the address argument is null.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, request, thread, 0usize, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
