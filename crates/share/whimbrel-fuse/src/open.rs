//! Opening files: what the caller wants, and what the kernel shall do with what is opened.

/// What an open file is for, out of the flags of `open`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The flags as they came.
    pub flags: i32,
}

impl Access {
    /// Whether it may be read.
    pub fn reads(self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_WRONLY
    }

    /// Whether it may be written.
    pub fn writes(self) -> bool {
        matches!(self.flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR)
    }

    /// Whether it begins empty.
    pub fn truncates(self) -> bool {
        self.flags & libc::O_TRUNC != 0
    }

    /// Whether every write goes to the end.
    pub fn appends(self) -> bool {
        self.flags & libc::O_APPEND != 0
    }

    /// Whether the file must not exist yet.
    pub fn exclusive(self) -> bool {
        self.flags & libc::O_EXCL != 0
    }
}

/// An open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Opened {
    /// What later calls on it carry.
    pub handle: u64,
    /// No page cache: every read and write comes here as it is. The fastest way for bulk.
    pub direct: bool,
    /// With `direct`: writes of different callers may come at once.
    pub parallel_writes: bool,
    /// What the page cache has from an earlier opening still holds.
    pub keep_cache: bool,
    /// No `flush` when a descriptor is closed.
    pub no_flush: bool,
}

impl Opened {
    /// A file whose reads and writes do not go through the page cache.
    pub fn direct(handle: u64) -> Self {
        Self { handle, direct: true, ..Self::default() }
    }

    pub(crate) fn flags(self) -> fuser::FopenFlags {
        let flags = [
            (self.direct, fuser::FopenFlags::FOPEN_DIRECT_IO),
            (self.parallel_writes, fuser::FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES),
            (self.keep_cache, fuser::FopenFlags::FOPEN_KEEP_CACHE),
            (self.no_flush, fuser::FopenFlags::FOPEN_NOFLUSH),
        ];
        flags.into_iter().filter(|(on, _)| *on).map(|(_, flag)| flag).collect()
    }
}
