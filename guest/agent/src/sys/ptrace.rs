//! Holding threads by ptrace, as checked calls.
//!
//! `PTRACE_SEIZE` changes nothing that the process or its parent can see, unlike `SIGSTOP`. Nothing here
//! waits with `waitpid` for a stop: that would consume it, and with it a signal that is about to be
//! delivered.

use std::{
    ffi::{c_int, c_void},
    io,
};

/// What a traced thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It stands still; this signal is about to be delivered, 0 for none.
    Stopped(c_int),
    /// It runs, or has ended.
    Runs,
}

/// Begins to trace a thread, and asks it to stand still.
pub(crate) fn hold(thread: i32) -> io::Result<()> {
    request(libc::PTRACE_SEIZE, thread, 0)?;
    request(libc::PTRACE_INTERRUPT, thread, 0)
}

/// What the thread does.
pub(crate) fn inspect(thread: i32) -> io::Result<Seen> {
    // SAFETY: a structure of plain integers (and a union of them), for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    match request(libc::PTRACE_GETSIGINFO, thread, &raw mut info as usize) {
        Ok(()) if info.si_code >> 8 == libc::PTRACE_EVENT_STOP => Ok(Seen::Stopped(0)),
        Ok(()) => Ok(Seen::Stopped(info.si_signo)),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(Seen::Runs),
        Err(error) => Err(error),
    }
}

/// Lets a thread that stands still go, with this signal unless 0.
pub(crate) fn release(thread: i32, signal: c_int) -> io::Result<()> {
    request(libc::PTRACE_DETACH, thread, signal as usize)
}

/// Hands a traced thread that has ended on to its parent; whether it had.
pub(crate) fn reap(thread: i32) -> bool {
    // SAFETY: a structure of plain integers (and a union of them), for which zero is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::__WALL;
    // SAFETY: `info` lives until the call has returned, and is of the type it asks for.
    let result = unsafe { libc::waitid(libc::P_PID, thread.unsigned_abs(), &raw mut info, flags) };
    // Without a result the signal stays 0.
    result < 0 || info.si_signo != 0
}

fn request(request: libc::c_uint, thread: i32, data: usize) -> io::Result<()> {
    // SAFETY: every caller above passes for `data` either a plain number or the address of a live, writable
    // local of the size its request calls for; the address argument is none.
    let result =
        unsafe { libc::ptrace(request, thread, std::ptr::null_mut::<c_void>(), data as *mut c_void) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
