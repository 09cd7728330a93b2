//! Symbols for mapping files. A mapping is a copy: the program maps only files that never change again.

use super::{is_simulated, result};
use crate::{raw, world::files};
use libc::off64_t;
use std::ffi::{c_int, c_void};

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    // SAFETY: the arguments are the caller's own.
    unsafe { mmap64(address, len, protection, flags, fd, offset) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    let pass = |arguments: [usize; 6]| {
        // SAFETY: the arguments are the caller's own, or ask for memory that nobody else has.
        unsafe { raw::pass(libc::SYS_mmap, arguments) as *mut c_void }
    };
    if !is_simulated(fd) {
        return pass([
            address as usize,
            len,
            protection as usize,
            flags as usize,
            fd as usize,
            offset as usize,
        ]);
    }
    assert!(protection & libc::PROT_WRITE == 0, "the program writes to a mapped file");
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    let memory = pass([0, len, protection, flags, usize::MAX, 0]);
    if memory == libc::MAP_FAILED {
        return memory;
    }
    // SAFETY: the call above has made `len` bytes that nobody else knows of.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.cast::<u8>(), len) };
    match files::copy_out(fd, offset as u64, bytes) {
        Ok(()) => memory,
        Err(error) => result::<isize>(Err(error)) as *mut c_void,
    }
}
