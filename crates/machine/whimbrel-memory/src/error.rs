//! Why a process cannot be attached to.

use std::{io, time::Duration};

/// Attaching, adopting or arming failed. The target runs on as before in every case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// There is no such process, or it has ended.
    #[error("process {pid} does not exist or has ended")]
    Gone {
        /// The process.
        pid: i32,
    },
    /// Job control holds the target (`SIGSTOP`); nothing can run in it.
    #[error("process {pid} is stopped by a signal")]
    Stopped {
        /// The process.
        pid: i32,
    },
    /// A debugger holds the target.
    #[error("process {pid} is traced by process {by} already")]
    Traced {
        /// The process.
        pid: i32,
        /// Its tracer.
        by: i32,
    },
    /// We may not trace the target.
    #[error("no right to trace process {pid}")]
    Denied {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The target's main thread did not stop, or did not come to its next system call, in time.
    #[error("the main thread of process {pid} did not answer within {waited:?}")]
    TimedOut {
        /// The process.
        pid: i32,
        /// How long we waited.
        waited: Duration,
    },
    /// The target runs in a mode this build knows nothing of, like 32-bit code.
    #[error("process {pid} does not run 64-bit code of this processor")]
    ForeignMode {
        /// The process.
        pid: i32,
    },
    /// None of the target's programs and libraries has unused bytes behind its code.
    #[error("process {pid} has no room for {bytes} bytes of code")]
    NoRoom {
        /// The process.
        pid: i32,
        /// Bytes needed.
        bytes: usize,
    },
    /// The target's kernel or sandbox refused the call that was made inside it.
    #[error("process {pid} may not {action}")]
    Refused {
        /// The process.
        pid: i32,
        /// `create a userfaultfd`, …
        action: &'static str,
        /// What the call returned.
        #[source]
        source: io::Error,
    },
    /// The target does not map the memory that was named.
    #[error("process {pid} does not map the memory")]
    NoMapping {
        /// The process.
        pid: i32,
    },
    /// The range is empty, not in whole pages, or too large.
    #[error("{start:#x}..+{bytes:#x} is no range of whole pages")]
    BadRange {
        /// First address.
        start: u64,
        /// Length.
        bytes: u64,
    },
    /// Lazy pages need memory that is mapped from a file.
    #[error("lazy pages need memory mapped from a file, and that of process {pid} is not")]
    LazyNeedsFile {
        /// The process.
        pid: i32,
    },
    /// The memory was attached with [`Mode::Lazy`](crate::Mode::Lazy); without a pager its threads would wait
    /// for ever.
    #[error("the memory of process {pid} is filled lazily and must be adopted as such")]
    Lazy {
        /// The process.
        pid: i32,
    },
    /// The range is registered already; [`adopt`](crate::Attachment::adopt) takes it over.
    #[error("the memory of process {pid} is attached already")]
    Attached {
        /// The process.
        pid: i32,
    },
    /// The target holds no userfaultfd to adopt.
    #[error("process {pid} holds no userfaultfd of ours")]
    NothingToAdopt {
        /// The process.
        pid: i32,
    },
    /// An operation on the target failed in a way that has no name of its own.
    #[error("cannot {action} of process {pid}")]
    Io {
        /// The process.
        pid: i32,
        /// `read the mappings`, …
        action: &'static str,
        /// Why.
        #[source]
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
