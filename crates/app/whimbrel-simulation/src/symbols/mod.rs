//! Symbols of the C library that this program defines, so that the standard library and all crates call the
//! world instead. These modules have `unsafe`.
//!
//! The static linker binds every call in this binary to them. A call of a thread outside the simulation, or
//! on something that is not simulated, goes to the real system. Variadic functions get a fixed signature,
//! which is right on both ABIs of Linux that Whimbrel supports.

mod files;
mod folders;
mod memory;
mod system;
mod threads;

use crate::{
    raw,
    world::{
        disk::Errno,
        files::{FIRST, Place, resolve},
        is_inside,
    },
};
use std::ffi::{CStr, c_char, c_int};

/// Folders of the real system that the program may read: what it finds there decides nothing.
const REAL: [&str; 4] = ["/proc/", "/sys/fs/cgroup", "/dev/null", "/etc/localtime"];

fn is_simulated(fd: c_int) -> bool {
    fd >= FIRST && is_inside()
}

/// Result of a call as the C library returns it.
fn result<T: TryInto<isize>>(result: Result<T, Errno>) -> isize {
    match result {
        Ok(value) => value.try_into().unwrap_or(0),
        Err(error) => raw::answer(-(error as isize)),
    }
}

/// Result of a call that returns nothing but success.
fn done(result: Result<(), Errno>) -> c_int {
    self::result(result.map(|()| 0isize)) as c_int
}

/// The simulated place that a path means; none if the call is for the real system.
///
/// # Safety
///
/// `path` must be a string that ends in zero.
unsafe fn place(dirfd: c_int, path: *const c_char) -> Option<Place> {
    if !is_inside() || path.is_null() {
        return None;
    }
    // SAFETY: the caller vouches for the string.
    let path = unsafe { CStr::from_ptr(path) }.to_str().ok()?;
    let place = resolve(dirfd, path);
    let is_real = path.is_empty() || REAL.iter().any(|real| path.starts_with(real));
    assert!(place.is_some() || is_real, "the program opens {path:?}, which is not simulated");
    place
}
