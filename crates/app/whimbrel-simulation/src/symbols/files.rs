//! Symbols for files.

use super::{done, is_simulated, place, result};
use crate::{raw, world::files};
use libc::{iovec, mode_t, off64_t, ssize_t};
use std::ffi::{c_char, c_int};

#[unsafe(no_mangle)]
unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the arguments are the caller's own.
    unsafe { openat64(libc::AT_FDCWD, path, flags, mode) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the arguments are the caller's own.
    unsafe { openat64(libc::AT_FDCWD, path, flags, mode) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn openat(dirfd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the arguments are the caller's own.
    unsafe { openat64(dirfd, path, flags, mode) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn openat64(dirfd: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: openat(2) demands a string that ends in zero.
    match unsafe { place(dirfd, path) } {
        Some(place) => result(files::open(&place, flags)) as c_int,
        None => {
            let arguments = [dirfd as usize, path as usize, flags as usize, mode as usize, 0, 0];
            // SAFETY: the arguments are the caller's own.
            unsafe { raw::pass(libc::SYS_openat, arguments) as c_int }
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn close(fd: c_int) -> c_int {
    if is_simulated(fd) {
        files::close(fd);
        return 0;
    }
    // SAFETY: the descriptor is the caller's own.
    unsafe { raw::pass(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) as c_int }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn read(fd: c_int, out: *mut u8, len: usize) -> ssize_t {
    if !is_simulated(fd) {
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(libc::SYS_read, [fd as usize, out as usize, len, 0, 0, 0]) };
    }
    // SAFETY: read(2) demands a buffer of `len` bytes.
    result(files::read(fd, unsafe { std::slice::from_raw_parts_mut(out, len) }, None))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pread64(fd: c_int, out: *mut u8, len: usize, at: off64_t) -> ssize_t {
    if !is_simulated(fd) {
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(libc::SYS_pread64, [fd as usize, out as usize, len, at as usize, 0, 0]) };
    }
    // SAFETY: pread(2) demands a buffer of `len` bytes.
    result(files::read(fd, unsafe { std::slice::from_raw_parts_mut(out, len) }, Some(at as u64)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, bytes: *const u8, len: usize) -> ssize_t {
    if !is_simulated(fd) {
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(libc::SYS_write, [fd as usize, bytes as usize, len, 0, 0, 0]) };
    }
    // SAFETY: write(2) demands `len` bytes.
    result(files::write(fd, unsafe { std::slice::from_raw_parts(bytes, len) }, None))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pwrite64(fd: c_int, bytes: *const u8, len: usize, at: off64_t) -> ssize_t {
    if !is_simulated(fd) {
        let arguments = [fd as usize, bytes as usize, len, at as usize, 0, 0];
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(libc::SYS_pwrite64, arguments) };
    }
    // SAFETY: pwrite(2) demands `len` bytes.
    result(files::write(fd, unsafe { std::slice::from_raw_parts(bytes, len) }, Some(at as u64)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    if !is_simulated(fd) {
        // SAFETY: the arguments are the caller's own.
        return unsafe {
            raw::pass(libc::SYS_writev, [fd as usize, parts as usize, count as usize, 0, 0, 0])
        };
    }
    // SAFETY: writev(2) demands `count` parts.
    let parts = unsafe { std::slice::from_raw_parts(parts, count as usize) };
    let bytes: Vec<u8> = parts
        .iter()
        // SAFETY: each part is a buffer of its length.
        .flat_map(|part| unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) })
        .copied()
        .collect();
    result(files::write(fd, &bytes, None))
}

#[unsafe(no_mangle)]
extern "C" fn fsync(fd: c_int) -> c_int {
    if is_simulated(fd) {
        return done(files::sync(fd));
    }
    // SAFETY: the descriptor is the caller's own.
    unsafe { raw::pass(libc::SYS_fsync, [fd as usize, 0, 0, 0, 0, 0]) as c_int }
}

#[unsafe(no_mangle)]
extern "C" fn fdatasync(fd: c_int) -> c_int {
    fsync(fd)
}

#[unsafe(no_mangle)]
extern "C" fn ftruncate64(fd: c_int, length: off64_t) -> c_int {
    if is_simulated(fd) {
        return done(files::truncate(fd, length as u64));
    }
    // SAFETY: the descriptor is the caller's own.
    unsafe { raw::pass(libc::SYS_ftruncate, [fd as usize, length as usize, 0, 0, 0, 0]) as c_int }
}

#[unsafe(no_mangle)]
extern "C" fn lseek64(fd: c_int, offset: off64_t, whence: c_int) -> off64_t {
    if is_simulated(fd) {
        return result(files::seek(fd, offset, whence)) as off64_t;
    }
    // SAFETY: the descriptor is the caller's own.
    unsafe { raw::pass(libc::SYS_lseek, [fd as usize, offset as usize, whence as usize, 0, 0, 0]) as off64_t }
}

#[unsafe(no_mangle)]
extern "C" fn flock(fd: c_int, operation: c_int) -> c_int {
    if is_simulated(fd) {
        return done(files::lock(fd, operation));
    }
    // SAFETY: the descriptor is the caller's own.
    unsafe { raw::pass(libc::SYS_flock, [fd as usize, operation as usize, 0, 0, 0, 0]) as c_int }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    if !is_simulated(fd) {
        // SAFETY: the arguments are the caller's own.
        return unsafe {
            raw::pass(libc::SYS_fcntl, [fd as usize, command as usize, argument, 0, 0, 0]) as c_int
        };
    }
    match command {
        libc::F_DUPFD_CLOEXEC | libc::F_DUPFD => result(files::duplicate(fd)) as c_int,
        libc::F_GETFD | libc::F_SETFD => 0,
        other => panic!("the program makes fcntl call {other}, which is not simulated"),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: the arguments are the caller's own.
    unsafe { fcntl(fd, command, argument) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn statx(
    dirfd: c_int,
    path: *const c_char,
    flags: c_int,
    mask: u32,
    out: *mut libc::statx,
) -> c_int {
    // SAFETY: statx(2) demands a string that ends in zero.
    let Some(place) = (unsafe { place(dirfd, path) }) else {
        let arguments = [dirfd as usize, path as usize, flags as usize, mask as usize, out as usize, 0];
        // SAFETY: the arguments are the caller's own.
        return unsafe { raw::pass(libc::SYS_statx, arguments) as c_int };
    };
    let status = files::status(&place).map(|(inode, size, is_folder)| {
        let mode = if is_folder { libc::S_IFDIR | 0o755 } else { libc::S_IFREG | 0o644 };
        // SAFETY: statx(2) demands a place for a `statx`, of which any bytes are valid.
        let status = unsafe {
            std::ptr::write_bytes(out, 0, 1);
            &mut *out
        };
        status.stx_mask = libc::STATX_BASIC_STATS;
        (status.stx_mode, status.stx_nlink, status.stx_blksize) = (mode as u16, 1, 4096);
        (status.stx_ino, status.stx_size, status.stx_blocks) = (inode, size, size.div_ceil(512));
    });
    done(status)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rename(from: *const c_char, to: *const c_char) -> c_int {
    // SAFETY: rename(2) demands strings that end in zero.
    match unsafe { (place(-1, from), place(-1, to)) } {
        (Some(from), Some(to)) => done(files::rename(&from, &to)),
        _ => {
            let here = libc::AT_FDCWD as usize;
            // SAFETY: the arguments are the caller's own.
            unsafe { raw::pass(libc::SYS_renameat2, [here, from as usize, here, to as usize, 0, 0]) as c_int }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn unlink(path: *const c_char) -> c_int {
    // SAFETY: the arguments are the caller's own.
    unsafe { unlinkat(libc::AT_FDCWD, path, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rmdir(path: *const c_char) -> c_int {
    // SAFETY: the arguments are the caller's own.
    unsafe { unlinkat(libc::AT_FDCWD, path, libc::AT_REMOVEDIR) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn unlinkat(dirfd: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: unlinkat(2) demands a string that ends in zero.
    match unsafe { place(dirfd, path) } {
        Some(place) => done(files::remove(&place)),
        None => {
            let arguments = [dirfd as usize, path as usize, flags as usize, 0, 0, 0];
            // SAFETY: the arguments are the caller's own.
            unsafe { raw::pass(libc::SYS_unlinkat, arguments) as c_int }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mkdir(path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: mkdir(2) demands a string that ends in zero.
    match unsafe { place(-1, path) } {
        Some(place) => done(files::make_folder(&place)),
        None => {
            let arguments = [libc::AT_FDCWD as usize, path as usize, mode as usize, 0, 0, 0];
            // SAFETY: the arguments are the caller's own.
            unsafe { raw::pass(libc::SYS_mkdirat, arguments) as c_int }
        }
    }
}
