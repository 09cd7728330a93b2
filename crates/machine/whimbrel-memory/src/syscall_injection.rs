//! System call injection: makes another process create a userfaultfd or replace descriptors, safely even if
//! this process dies at any instant.
//!
//! Only the call that creates a userfaultfd has to run in the target: the descriptor belongs to the address
//! space it was created in, so the handshake and the registration use a duplicate of it in this process.
//!
//! **The guarantee.** The code of a complete stub (call, restore, jump back; see [`crate::arch`]) is written
//! into unused bytes of the target first. Then one `PTRACE_SETREGSET` sends the stopped main thread there.
//! Before it, nothing that the target can see has changed; after it, the target returns by itself. So
//! whenever this process dies, the kernel detaches it and the target continues correctly. At worst the target
//! has an idle descriptor. The stub avoids:
//! - single steps with borrowed registers: if the tracer died, the thread would be left in the middle, with
//!   its trap flag set;
//! - `rt_sigreturn` as the way back: it cancels the restart block, so an interrupted `nanosleep` or `poll`
//!   would return `EINTR`, and it would need the complete FPU state; a stub that touches neither has nothing
//!   to restore;
//! - the stack: none is used, so red zones, coroutine stacks and guard pages do not matter;
//! - `waitpid`: see [`crate::ptrace`].
//!
//! A signal that arrives before the stub's first instruction is delivered with the original registers, so
//! that an interrupted call ends or restarts as usual. The used slot is left as it is, dead bytes in padding.
//! Not covered: a thread interrupted inside a restartable sequence (rseq) is not aborted as a preemption
//! would.

use crate::{
    AttachError,
    arch::{self, Call, STUB_SIZE, SyscallStub},
    code_cave,
    process::Process,
    ptrace::{self, Stop},
    userfaultfd::{self, USERFAULTFD_IOC_NEW},
};
use std::{
    io,
    os::fd::RawFd,
    thread,
    time::{Duration, Instant},
};

/// Time in which the target must stop and make the call. A healthy one takes under a millisecond; on a host
/// with many more busy processes than processors it may wait seconds for its turn.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Polls of the target without sleeping, before those with sleeps in between.
const SPINS: u32 = 200;
const NAP: Duration = Duration::from_micros(50);

/// Makes `process` create a userfaultfd; returns the descriptor's number there.
///
/// A process without capabilities may do that with a descriptor of the device only, for faults of the kernel
/// (`userfaultfd(2)`). Whoever started it has left it one.
pub(crate) fn create_userfaultfd(process: &Process) -> Result<RawFd, AttachError> {
    let device = process.userfaultfd_device()?;
    in_tracer(process, |tracer| {
        tracer.call("create a userfaultfd", |_| match device {
            Some(fd) => call(libc::SYS_ioctl, [fd as u64, USERFAULTFD_IOC_NEW, userfaultfd::FLAGS]),
            None => call(libc::SYS_userfaultfd, [userfaultfd::FLAGS, 0, 0]),
        })
    })
}

/// Makes `process` replace each descriptor of `fds` by an empty memory file of its own. If this process dies
/// in between, some are replaced, and the target has an idle descriptor of the empty file.
pub(crate) fn replace_with_empty(process: &Process, fds: &[RawFd]) -> Result<(), AttachError> {
    in_tracer(process, |tracer| {
        // The name is empty: it is the zero byte at the end of every slot.
        let create = |slot| {
            call(libc::SYS_memfd_create, [slot + STUB_SIZE as u64 - 1, u64::from(libc::MFD_CLOEXEC), 0])
        };
        let empty = tracer.call("create a memory file", create)?;
        fds.iter().try_for_each(|fd| {
            let replace = |_| call(libc::SYS_dup3, [empty as u64, *fd as u64, libc::O_CLOEXEC as u64]);
            tracer.call("replace a descriptor", replace).map(drop)
        })
    })
}

fn call(number: libc::c_long, arguments: [u64; 3]) -> Call {
    Call { number: number as u32, arguments }
}

/// Runs `work` in a thread of its own: a tracer is a thread, and its end releases a target that could not be
/// detached.
fn in_tracer<T: Send>(
    process: &Process,
    work: impl FnOnce(&Tracer<'_>) -> Result<T, AttachError> + Send,
) -> Result<T, AttachError> {
    let trace = || {
        let tracer = Tracer::seize(process)?;
        let outcome = work(&tracer)?;
        tracer.check(ptrace::detach(process.id(), 0))?;
        Ok(outcome)
    };
    thread::scope(|scope| scope.spawn(trace).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

struct Tracer<'a> {
    process: &'a Process,
    deadline: Instant,
}

enum Attempt {
    Returned(i64),
    /// A signal came first; the thread has its own registers again.
    Interrupted,
}

impl<'a> Tracer<'a> {
    fn seize(process: &'a Process) -> Result<Self, AttachError> {
        let pid = process.number();
        check_state(process)?;
        // EPERM may mean any of the states above, reached just now.
        ptrace::seize(process.id()).or_else(|error| {
            check_state(process)?;
            Err(AttachError::io(pid, "trace the main thread")(error))
        })?;
        Ok(Self { process, deadline: Instant::now() + TIMEOUT })
    }

    /// Makes the main thread execute a call that returns a descriptor. Afterwards the thread is stopped at
    /// the call's exit.
    fn call(&self, action: &'static str, call: impl Fn(u64) -> Call) -> Result<RawFd, AttachError> {
        let slot = code_cave::find(self.process)?;
        let result = loop {
            self.interrupt()?;
            match self.attempt(slot, call(slot))? {
                Attempt::Returned(result) => break result,
                Attempt::Interrupted => {}
            }
        };
        let pid = self.process.number();
        let refused =
            || AttachError::Refused { pid, action, source: io::Error::from_raw_os_error(-result as i32) };
        RawFd::try_from(result).ok().filter(|fd| *fd >= 0).ok_or_else(refused)
    }

    /// Stops the thread by an interrupt, passing on signals that come before it.
    fn interrupt(&self) -> Result<(), AttachError> {
        let id = self.process.id();
        self.check(ptrace::interrupt(id))?;
        loop {
            match self.wait()? {
                Stop::Interrupt => return Ok(()),
                Stop::Syscall => self.check(ptrace::resume(id, 0))?,
                Stop::Signal(signal) => self.check(ptrace::resume(id, signal))?,
                Stop::Group => return Err(AttachError::Stopped { pid: self.process.number() }),
            }
        }
    }

    fn attempt(&self, slot: u64, call: Call) -> Result<Attempt, AttachError> {
        let id = self.process.id();
        let original = self.check(ptrace::registers(id))?;
        let foreign = |_| AttachError::ForeignMode { pid: self.process.number() };
        let SyscallStub { code, start, returned } =
            arch::build_stub(&original, slot, call).map_err(foreign)?;
        self.check(ptrace::write_code(id, slot, &code))?;
        self.check(ptrace::set_registers(id, &start))?;
        let mut signal = 0;
        loop {
            self.check(ptrace::resume_to_syscall(id, signal))?;
            signal = 0;
            match self.wait()? {
                Stop::Syscall => {
                    if let Some(result) = self.check(ptrace::syscall_result(id, returned))? {
                        return Ok(Attempt::Returned(result));
                    }
                }
                Stop::Signal(number) if self.is_at(slot)? => {
                    self.check(ptrace::set_registers(id, &original))?;
                    self.check(ptrace::resume(id, number))?;
                    return Ok(Attempt::Interrupted);
                }
                Stop::Signal(number) => signal = number,
                Stop::Interrupt => {}
                Stop::Group => return Err(AttachError::Stopped { pid: self.process.number() }),
            }
        }
    }

    fn is_at(&self, address: u64) -> Result<bool, AttachError> {
        self.check(ptrace::registers(self.process.id())).map(|regs| arch::program_counter(&regs) == address)
    }

    /// Waits for the next stop, at most until the deadline.
    fn wait(&self) -> Result<Stop, AttachError> {
        for turn in 0_u32.. {
            if let Some(stop) = self.check(ptrace::stop(self.process.id()))? {
                return Ok(stop);
            }
            self.process.alive()?;
            if Instant::now() > self.deadline {
                break;
            }
            if turn < SPINS { thread::yield_now() } else { thread::sleep(NAP) }
        }
        Err(AttachError::TimedOut { pid: self.process.number(), waited: TIMEOUT })
    }

    fn check<T>(&self, result: io::Result<T>) -> Result<T, AttachError> {
        result.map_err(AttachError::io(self.process.number(), "control the main thread"))
    }
}

/// Rejects a target that cannot be stopped, with the reason.
fn check_state(process: &Process) -> Result<(), AttachError> {
    let pid = process.number();
    match process.state()? {
        (_, Some(by)) => Err(AttachError::Traced { pid, by }),
        ('T' | 't', None) => Err(AttachError::Stopped { pid }),
        ('Z' | 'X', None) => Err(AttachError::Gone { pid }),
        _ => Ok(()),
    }
}
