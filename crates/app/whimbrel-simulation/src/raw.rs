//! Raw system calls, and the C library's functions behind those that this program defines. One of the
//! modules with `unsafe`: nothing here knows of the simulation.

use std::{
    arch::asm,
    ffi::{CStr, c_int, c_long, c_void},
    sync::atomic::AtomicU32,
};

/// Makes a system call past the C library.
///
/// # Safety
///
/// The arguments must be what the call demands.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn call(number: c_long, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the registers are those of the ABI of Linux, and the caller vouches for the arguments.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// Makes a system call past the C library.
///
/// # Safety
///
/// The arguments must be what the call demands.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn call(number: c_long, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the registers are those of the ABI of Linux, and the caller vouches for the arguments.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a as isize => result, in("x1") b, in("x2") c,
            in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    result
}

/// Result of a system call as the C library returns it: -1, and the error in `errno`.
pub(crate) fn answer(result: isize) -> isize {
    if !(-4095..0).contains(&result) {
        return result;
    }
    // SAFETY: the C library returns the address of this thread's own error number.
    unsafe { *libc::__errno_location() = -result as c_int };
    -1
}

/// Makes a system call and returns its result as the C library does.
///
/// # Safety
///
/// The arguments must be what the call demands.
pub(crate) unsafe fn pass(number: c_long, arguments: [usize; 6]) -> isize {
    // SAFETY: the caller vouches for the arguments.
    answer(unsafe { call(number, arguments) })
}

/// The C library's own function of this name, behind the one that this program defines.
///
/// # Safety
///
/// `T` must be the type of that function.
pub(crate) unsafe fn next<T: Copy>(name: &CStr) -> T {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    // SAFETY: the name is a string that ends in zero.
    let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    assert!(!address.is_null(), "the C library lacks {name:?}");
    // SAFETY: the caller vouches for the type, which has the size of a pointer.
    unsafe { std::mem::transmute_copy::<*mut c_void, T>(&address) }
}

/// Sleeps until the word is woken, if it is 0.
pub(crate) fn wait_while_zero(word: &AtomicU32) {
    let operation = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the word lives as long as the call.
    unsafe { call(libc::SYS_futex, [word.as_ptr() as usize, operation, 0, 0, 0, 0]) };
}

/// Wakes the thread that waits for the word.
pub(crate) fn wake(word: &AtomicU32) {
    let operation = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the word lives as long as the call.
    unsafe { call(libc::SYS_futex, [word.as_ptr() as usize, operation, 1, 0, 0, 0]) };
}

/// Writes all bytes to a real descriptor.
pub(crate) fn write_all(fd: c_int, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the bytes live as long as the call.
        let n =
            unsafe { call(libc::SYS_write, [fd as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0]) };
        match n {
            n if n > 0 => bytes = &bytes[n as usize..],
            n if n == -(libc::EINTR as isize) => {}
            _ => return,
        }
    }
}

/// Ends this process at once: no destructor runs.
pub(crate) fn exit(code: c_int) -> ! {
    loop {
        // SAFETY: the call takes a number and does not return.
        unsafe { call(libc::SYS_exit_group, [code as usize, 0, 0, 0, 0, 0]) };
    }
}
