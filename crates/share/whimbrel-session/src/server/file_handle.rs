//! File handles (name_to_handle_at(2)), by which the kernel names files in events. The only `unsafe` of this
//! crate.

use rustix::io::Errno;
use std::{
    ffi::CStr,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Longest handle of any file system (`MAX_HANDLE_SZ` in include/linux/exportfs.h).
const MAX_HANDLE: usize = 128;

/// A `struct file_handle` with its bytes.
#[repr(C)]
struct Buffer {
    bytes: libc::c_uint,
    kind: libc::c_int,
    handle: [u8; MAX_HANDLE],
}

/// Kind and bytes of the handle of a name in a directory, or of the directory itself if the name is empty.
pub(super) fn handle_of(dir: BorrowedFd<'_>, name: &CStr) -> Result<(i32, Box<[u8]>), Errno> {
    let mut buffer = Buffer { bytes: MAX_HANDLE as u32, kind: 0, handle: [0; MAX_HANDLE] };
    let mut mount: libc::c_int = 0;
    let flags = if name.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    // SAFETY: the name ends with a zero; `Buffer` has the layout of `struct file_handle` with as many bytes
    // as it says, and the kernel writes no more than these and `mount`.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            dir.as_raw_fd(),
            name.as_ptr(),
            &raw mut buffer,
            &raw mut mount,
            flags,
        )
    };
    if failed != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok((buffer.kind, buffer.handle[..(buffer.bytes as usize).min(MAX_HANDLE)].into()))
}
