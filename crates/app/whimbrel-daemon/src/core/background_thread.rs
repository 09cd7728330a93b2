//! Background threads: they compute when others leave them time, and let go of a processor at once.
//!
//! A low priority is a small share of the time, and no promise to those who wake: a thread that runs may
//! keep its processor until its slice ends, in 1.4 ms or more (Linux, `kernel/sched/fair.c`,
//! `RUN_TO_PARITY`). A slice of 0.1 ms, the shortest that Linux 6.12 and later give, is over by then. Earlier
//! ones ignore it.
//!
//! `SCHED_IDLE` would let go sooner still. But a thread that holds a lock of the store would then stand still
//! for as long as guests compute, and all who wait for the lock with it.

use std::io;

const NICE: i32 = 10;
/// Length of a slice, in nanoseconds (sched_setattr(2), `sched_runtime`).
const SLICE: u64 = 100_000;

/// Makes this thread one in the background, and all that it starts from now on.
pub(crate) fn begin() -> io::Result<()> {
    let wanted = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER.cast_unsigned(),
        sched_flags: 0,
        sched_nice: NICE,
        sched_priority: 0,
        sched_runtime: SLICE,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: `wanted` has the layout of `struct sched_attr`, says its size, and outlives the call, which
    // reads it. The thread is the caller.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    /// Field of `/proc/thread-self/stat` (proc_pid_stat(5)).
    const NICE_FIELD: usize = 19;

    fn nice() -> i32 {
        let stat = fs::read_to_string("/proc/thread-self/stat").expect("the state of the thread");
        let after_name = &stat[stat.rfind(')').expect("a name")..];
        after_name.split_whitespace().nth(NICE_FIELD - 2).expect("a niceness").parse().expect("a number")
    }

    #[test]
    fn a_background_thread_passes_its_priority_on_and_leaves_its_creator_alone() {
        let before = nice();
        let thread = thread::spawn(|| {
            super::begin().expect("a lower priority");
            let child = thread::spawn(nice).join().expect("a child");
            (nice(), child)
        });
        assert_eq!(thread.join().expect("a thread"), (super::NICE, super::NICE));
        assert_eq!(nice(), before);
    }
}
