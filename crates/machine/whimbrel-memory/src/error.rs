//! Errors of attaching to a process.

use std::{io, time::Duration};

/// Cause of a failed attach, adoption or arming. The target runs on as before in every case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The process does not exist, or has ended.
    #[error("process {pid} does not exist or has ended")]
    Gone {
        /// Process id of the target.
        pid: i32,
    },
    /// Job control has stopped the target (`SIGSTOP`), so no code can run in it.
    #[error("process {pid} is stopped by a signal")]
    Stopped {
        /// Process id of the target.
        pid: i32,
    },
    /// The target has another tracer, such as a debugger.
    #[error("process {pid} is traced by process {by} already")]
    Traced {
        /// Process id of the target.
        pid: i32,
        /// Process id of the tracer.
        by: i32,
    },
    /// Tracing the target is not permitted.
    #[error("no permission to trace process {pid}")]
    Denied {
        /// Process id of the target.
        pid: i32,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The target's main thread did not stop, or did not reach its next system call, in time.
    #[error("the main thread of process {pid} did not answer within {waited:?}")]
    TimedOut {
        /// Process id of the target.
        pid: i32,
        /// Time waited for it.
        waited: Duration,
    },
    /// The target runs in a mode that this build does not support, such as 32-bit code.
    #[error("process {pid} does not run 64-bit code of this processor")]
    ForeignMode {
        /// Process id of the target.
        pid: i32,
    },
    /// None of the target's programs and libraries has unused bytes after its code.
    #[error("process {pid} has no unused space for {bytes} bytes of code")]
    NoRoom {
        /// Process id of the target.
        pid: i32,
        /// Number of bytes needed.
        bytes: usize,
    },
    /// The kernel or a sandbox refused the call that was injected into the target.
    #[error("process {pid} may not {action}")]
    Refused {
        /// Process id of the target.
        pid: i32,
        /// Verb of the call: `create a userfaultfd`, …
        action: &'static str,
        /// Error number that the call returned.
        source: io::Error,
    },
    /// The target does not map the requested memory.
    #[error("process {pid} does not map the memory")]
    NoMapping {
        /// Process id of the target.
        pid: i32,
    },
    /// The range is empty, not in whole pages, or too large.
    #[error("{start:#x}..+{bytes:#x} is not a range of whole pages")]
    BadRange {
        /// First address of the range.
        start: u64,
        /// Length of the range.
        bytes: u64,
    },
    /// Lazy pages need memory that is mapped from a file.
    #[error("lazy pages need memory mapped from a file, and that of process {pid} is not")]
    LazyNeedsFile {
        /// Process id of the target.
        pid: i32,
    },
    /// The memory was attached with [`Mode::Lazy`](crate::Mode::Lazy); without a pager its threads would wait
    /// for ever.
    #[error("the memory of process {pid} is filled lazily and must be adopted as such")]
    Lazy {
        /// Process id of the target.
        pid: i32,
    },
    /// The range is registered already; [`adopt`](crate::Attachment::adopt) can use the registration.
    #[error("the memory of process {pid} is attached already")]
    Attached {
        /// Process id of the target.
        pid: i32,
    },
    /// The target has no userfaultfd to adopt.
    #[error("process {pid} has no userfaultfd to adopt")]
    NothingToAdopt {
        /// Process id of the target.
        pid: i32,
    },
    /// Another operation on the target failed.
    #[error("cannot {action} of process {pid}")]
    Io {
        /// Process id of the target.
        pid: i32,
        /// Verb of the operation: `read the mappings`, …
        action: &'static str,
        /// Cause reported by the kernel.
        source: io::Error,
    },
}

impl AttachError {
    pub(crate) fn io(pid: i32, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.raw_os_error() {
            Some(libc::ESRCH | libc::ENOENT) => Self::Gone { pid },
            Some(libc::EPERM | libc::EACCES) => Self::Denied { pid, source },
            _ => Self::Io { pid, action, source },
        }
    }
}
