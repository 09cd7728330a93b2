//! Symbols for the clock, for random bytes and for the number of the process.

use crate::{
    raw,
    world::{baton, calls::enter, is_inside, me, with},
};
use libc::timespec;
use std::ffi::c_int;

/// Wall-clock time at which the simulation begins, in nanoseconds since 1970.
const EPOCH: i64 = 1_700_000_000_000_000_000;
/// Nanoseconds that reading a clock takes, so that a loop that only looks at it comes to an end.
const LOOK: u64 = 50;

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn getrandom(out: *mut u8, len: usize, flags: u32) -> isize {
    if !is_inside() {
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(libc::SYS_getrandom, [out as usize, len, flags as usize, 0, 0, 0]) };
    }
    // SAFETY: getrandom(2) demands a buffer of `len` bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(out, len) };
    with(|world| bytes.iter_mut().for_each(|byte| *byte = world.entropy.next() as u8));
    len as isize
}

/// Number of the process in the world. Names of temporary files have it.
#[unsafe(no_mangle)]
extern "C" fn getpid() -> c_int {
    if !is_inside() {
        // SAFETY: getpid(2) has no argument.
        return unsafe { raw::pass(libc::SYS_getpid, [0; 6]) } as c_int;
    }
    with(|world| world.process(me())) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: c_int, out: *mut timespec) -> c_int {
    if !is_inside() {
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(libc::SYS_clock_gettime, [clock as usize, out as usize, 0, 0, 0, 0]) }
            as c_int;
    }
    let time = with(|world| {
        world.schedule.now += LOOK;
        let host = world.processes.host(world.process(me()));
        let (drift, error) =
            host.map_or((0, 0), |host| (world.hosts[host].drift, world.hosts[host].wall_error));
        let now = world.schedule.now - world.schedule.now / 1024 * drift;
        if clock == libc::CLOCK_REALTIME { (now as i64 + EPOCH + error) as u64 } else { now }
    });
    let time = timespec { tv_sec: (time / 1_000_000_000) as i64, tv_nsec: (time % 1_000_000_000) as i64 };
    // SAFETY: clock_gettime(2) demands a place for a time.
    unsafe { *out = time };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn clock_nanosleep(
    clock: c_int,
    flags: c_int,
    time: *const timespec,
    left: *mut timespec,
) -> c_int {
    if !is_inside() {
        let arguments = [clock as usize, flags as usize, time as usize, left as usize, 0, 0];
        // SAFETY: the arguments are the caller's own.
        return -(unsafe { raw::call(libc::SYS_clock_nanosleep, arguments) } as c_int);
    }
    // SAFETY: clock_nanosleep(2) demands the address of a time.
    let time = nanoseconds(unsafe { &*time });
    enter("sleep", time);
    let now = with(|world| world.schedule.now);
    baton::sleep(if flags & libc::TIMER_ABSTIME != 0 { time.saturating_sub(now) } else { time });
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nanosleep(time: *const timespec, left: *mut timespec) -> c_int {
    if !is_inside() {
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(libc::SYS_nanosleep, [time as usize, left as usize, 0, 0, 0, 0]) }
            as c_int;
    }
    // SAFETY: nanosleep(2) demands the address of a time.
    let time = nanoseconds(unsafe { &*time });
    enter("sleep", time);
    baton::sleep(time);
    0
}

fn nanoseconds(time: &timespec) -> u64 {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
