//! Duplicate of a userfaultfd of another process (`userfaultfd(2)`, `ioctl_userfaultfd(2)`).
//!
//! The descriptor acts on the address space it was created in, from any process; every address here is one of
//! the target.

use linux_raw_sys::{general as sys, ioctl};
use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

/// Range of the target's addresses in whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

/// Kernel features that tracking and lazy pages need.
pub(crate) const FEATURES: u32 =
    sys::UFFD_FEATURE_WP_ASYNC | sys::UFFD_FEATURE_WP_UNPOPULATED | sys::UFFD_FEATURE_MISSING_SHMEM;

/// Flags of a new userfaultfd.
pub(crate) const FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
/// Request of [`DEVICE`] for a userfaultfd (`_IO(0xAA, 0)` of linux/userfaultfd.h).
pub(crate) const USERFAULTFD_IOC_NEW: u64 = 0xaa00;
/// Device that makes a userfaultfd for whoever may open it.
pub(crate) const DEVICE: &str = "/dev/userfaultfd";

/// Result of a fill attempt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    /// Number of bytes copied from the start; fewer than all if a later page was present.
    Bytes(usize),
    /// The first page is present already.
    Present,
    /// The address space is being changed (a fork, an unmap): retry.
    Again,
}

#[derive(Debug)]
pub(crate) struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Runs the handshake, which makes the descriptor usable. Once only.
    pub(crate) fn handshake(&self, features: u32) -> io::Result<()> {
        let mut api = sys::uffdio_api { api: sys::UFFD_API.into(), features: features.into(), ioctls: 0 };
        // SAFETY: UFFDIO_API reads and writes one `uffdio_api`.
        unsafe { self.call(ioctl::UFFDIO_API, &mut api) }
    }

    /// Registers `span` for write tracking, and for missing pages if `missing`. No effect if it is registered
    /// here already; `EBUSY` if it is registered with another userfaultfd.
    pub(crate) fn register(&self, span: Span, missing: bool) -> io::Result<()> {
        let missing = if missing { sys::UFFDIO_REGISTER_MODE_MISSING } else { 0 };
        let mode = u64::from(sys::UFFDIO_REGISTER_MODE_WP | missing);
        let mut register = sys::uffdio_register { range: span.into(), mode, ioctls: 0 };
        // SAFETY: UFFDIO_REGISTER reads and writes one `uffdio_register`.
        unsafe { self.call(ioctl::UFFDIO_REGISTER, &mut register) }
    }

    /// Ends the registration of `span`; the kernel retries every fault that waits in it.
    pub(crate) fn unregister(&self, span: Span) -> io::Result<()> {
        // SAFETY: UFFDIO_UNREGISTER reads one `uffdio_range`.
        unsafe { self.call(ioctl::UFFDIO_UNREGISTER, &mut sys::uffdio_range::from(span)) }
    }

    /// Lets every thread that waits for a page of `span` retry.
    pub(crate) fn wake(&self, span: Span) -> io::Result<()> {
        // SAFETY: UFFDIO_WAKE reads one `uffdio_range`.
        unsafe { self.call(ioctl::UFFDIO_WAKE, &mut sys::uffdio_range::from(span)) }
    }

    /// Marks every page of `span`, present or absent, as not written.
    pub(crate) fn protect(&self, span: Span) -> io::Result<()> {
        const MODE_WP: u64 = 1; // UFFDIO_WRITEPROTECT_MODE_WP of linux/userfaultfd.h
        let mut protect = sys::uffdio_writeprotect { range: span.into(), mode: MODE_WP };
        // SAFETY: UFFDIO_WRITEPROTECT reads one `uffdio_writeprotect`.
        unsafe { self.call(ioctl::UFFDIO_WRITEPROTECT, &mut protect) }
    }

    /// Copies `content` to absent pages at address `at`, marks them as not written, and wakes waiting
    /// threads.
    pub(crate) fn copy(&self, at: u64, content: &[u8]) -> io::Result<Filled> {
        let mut copy = sys::uffdio_copy {
            dst: at,
            src: content.as_ptr() as u64,
            len: content.len() as u64,
            mode: sys::UFFDIO_COPY_MODE_WP.into(),
            copy: 0,
        };
        // SAFETY: UFFDIO_COPY reads and writes one `uffdio_copy`, and reads `len` bytes at `src`, which is
        // `content`.
        match unsafe { self.call(ioctl::UFFDIO_COPY, &mut copy) } {
            Ok(()) => Ok(Filled::Bytes(content.len())),
            Err(_) if copy.copy > 0 => Ok(Filled::Bytes(copy.copy as usize)),
            Err(error) => match error.raw_os_error() {
                Some(libc::EEXIST) => Ok(Filled::Present),
                Some(libc::EAGAIN) => Ok(Filled::Again),
                _ => Err(error),
            },
        }
    }

    /// Appends the addresses of waiting faults to `out`, as many as one read returns. Does not block.
    pub(crate) fn faults(&self, out: &mut Vec<u64>) -> io::Result<()> {
        const BATCH: usize = 64;
        // SAFETY: the structure has only integers and a union of them, for which zero is valid.
        let mut messages: [sys::uffd_msg; BATCH] = unsafe { std::mem::zeroed() };
        let bytes = size_of_val(&messages);
        // SAFETY: the pointer and length are those of `messages`, for which any bytes are valid.
        let got = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut messages).cast(), bytes) };
        if got < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(()) } else { Err(error) };
        }
        let whole = got as usize / size_of::<sys::uffd_msg>();
        let faults = messages[..whole].iter().filter(|m| u32::from(m.event) == sys::UFFD_EVENT_PAGEFAULT);
        // SAFETY: the event tells that the kernel filled this member of the union.
        out.extend(faults.map(|m| unsafe { m.arg.pagefault.address }));
        Ok(())
    }

    /// Makes an ioctl request.
    ///
    /// # Safety
    /// `request` must be one that reads and writes at most a `T`, apart from memory to which the fields of
    /// `T` point, and those must be valid for it.
    unsafe fn call<T>(&self, request: u32, argument: &mut T) -> io::Result<()> {
        // SAFETY: the caller guarantees that the request fits the argument, which is live and exclusively
        // borrowed.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request as libc::Ioctl, &raw mut *argument) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Whether any process may create a userfaultfd.
fn is_open_to_all() -> bool {
    fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|value| value.trim() == "1")
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Span> for sys::uffdio_range {
    fn from(span: Span) -> Self {
        Self { start: span.start, len: span.bytes }
    }
}

/// Features that the kernel offers, from a userfaultfd of this process, made as a process without
/// capabilities has it made.
pub(crate) fn kernel_features() -> io::Result<u64> {
    let fd = match File::options().read(true).write(true).open(DEVICE) {
        Ok(device) => {
            let request = USERFAULTFD_IOC_NEW as libc::Ioctl;
            // SAFETY: the request takes flags and no pointers.
            unsafe { libc::ioctl(device.as_raw_fd(), request, FLAGS) }.into()
        }
        Err(error) if !is_open_to_all() => return Err(error),
        // SAFETY: the call takes flags and no pointers.
        Err(_) => unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) },
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just returned this descriptor, and nothing else owns it.
    let own = Userfaultfd(unsafe { std::os::fd::FromRawFd::from_raw_fd(fd as i32) });
    let mut api = sys::uffdio_api { api: sys::UFFD_API.into(), features: 0, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `uffdio_api`.
    unsafe { own.call(ioctl::UFFDIO_API, &mut api) }?;
    Ok(api.features)
}
