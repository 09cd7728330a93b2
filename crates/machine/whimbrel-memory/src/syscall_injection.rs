//! Makes system calls inside another process, in a way that survives our own death at any instant: one that
//! creates a userfaultfd, and those that replace descriptors.
//!
//! Of a userfaultfd only the call itself has to run inside: the descriptor remembers the address space it was
//! made in, so the handshake and the registration are done from outside on our copy of it.
//!
//! **The guarantee.** The code of a complete detour (call, restore, jump back; see [`crate::arch`]) is
//! written into unused bytes of the target first. Then one `PTRACE_SETREGSET` sends the stopped main thread
//! there. Before it, nothing the target can see has changed; after it, the target finds its way back alone.
//! So whenever we die, the kernel detaches us and the target goes on correctly. At worst it holds an idle
//! descriptor that nobody uses. What the detour avoids, and why:
//! - single steps with borrowed registers: our death would leave the thread in the middle, and its trap flag
//!   set;
//! - `rt_sigreturn` as the way back: it cancels the restart block, so an interrupted `nanosleep` or `poll`
//!   would return `EINTR`, and it would need the whole FPU state; a detour that touches neither has nothing
//!   to restore;
//! - the stack: none is used, so red zones, coroutine stacks and guard pages do not matter;
//! - `waitpid`: see [`crate::ptrace`].
//!
//! A signal that comes before the detour's first instruction is delivered to the original registers, so that
//! an interrupted call ends or restarts as without us. The used slot is left as it is, dead bytes in padding.
//! Not covered: a thread interrupted inside a restartable sequence (rseq) is not aborted as a preemption
//! would.

use crate::{
    AttachError,
    arch::{self, Call, SLOT, SyscallStub},
    code_cave,
    process::Process,
    ptrace::{self, Stop},
};
use std::{
    io,
    os::fd::RawFd,
    thread,
    time::{Duration, Instant},
};

/// How long the target may take to stop and to make the call. A healthy one takes under a millisecond.
const PATIENCE: Duration = Duration::from_secs(2);
/// Looks at the target without sleeping, before sleeping between looks.
const SPINS: u32 = 200;
const NAP: Duration = Duration::from_micros(50);

/// Makes `process` create a userfaultfd; returns the descriptor's number there.
pub(crate) fn create_userfaultfd(process: &Process) -> Result<RawFd, AttachError> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    in_tracer(process, |tracer| {
        tracer.call("create a userfaultfd", |_| call(libc::SYS_userfaultfd, [flags, 0, 0]))
    })
}

/// Makes `process` put an empty memory file of its own in the place of each descriptor of `fds`. Between two
/// of them our death leaves some replaced, and an idle descriptor of the empty file in any case.
pub(crate) fn replace_with_empty(process: &Process, fds: &[RawFd]) -> Result<(), AttachError> {
    in_tracer(process, |tracer| {
        // The name is empty: it is the zero byte that every slot keeps at its end.
        let create =
            |slot| call(libc::SYS_memfd_create, [slot + SLOT as u64 - 1, u64::from(libc::MFD_CLOEXEC), 0]);
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

/// Runs in a thread of its own: a tracer is a thread, and its end releases a target that could not be
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

/// How one attempt ended.
enum Attempt {
    /// The call returned this.
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
        Ok(Self { process, deadline: Instant::now() + PATIENCE })
    }

    /// Has the main thread make a call that returns a descriptor. It is stopped at the call's exit
    /// afterwards.
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

    /// Brings the thread to a stop that is ours, passing on signals that come before it.
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
        let SyscallStub { code, start, returned } = arch::detour(&original, slot, call).map_err(foreign)?;
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
        self.check(ptrace::registers(self.process.id())).map(|regs| arch::counter(&regs) == address)
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
        Err(AttachError::TimedOut { pid: self.process.number(), waited: PATIENCE })
    }

    fn check<T>(&self, result: io::Result<T>) -> Result<T, AttachError> {
        result.map_err(AttachError::io(self.process.number(), "control the main thread"))
    }
}

/// Refuses a target that cannot be stopped, by name.
fn check_state(process: &Process) -> Result<(), AttachError> {
    let pid = process.number();
    match process.state()? {
        (_, Some(by)) => Err(AttachError::Traced { pid, by }),
        ('T' | 't', None) => Err(AttachError::Stopped { pid }),
        ('Z' | 'X', None) => Err(AttachError::Gone { pid }),
        _ => Ok(()),
    }
}
