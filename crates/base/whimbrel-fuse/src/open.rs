//! Opening files: the access that the caller wants and the caching that the kernel may do.

/// The access that the flags of `open` ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Flags of `open`, unchanged.
    pub flags: i32,
}

impl Access {
    /// Whether the file is opened for reading.
    pub fn reads(self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_WRONLY
    }

    /// Whether the file is opened for writing.
    pub fn writes(self) -> bool {
        matches!(self.flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR)
    }

    /// Whether the file is truncated.
    pub fn truncates(self) -> bool {
        self.flags & libc::O_TRUNC != 0
    }

    /// Whether the file must not exist yet.
    pub fn exclusive(self) -> bool {
        self.flags & libc::O_EXCL != 0
    }
}

/// An open file and how the kernel caches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Opened {
    /// Handle that later calls carry.
    pub handle: u64,
    /// Bypass the page cache: every read and write reaches the file system unchanged. Fastest for bulk
    /// transfers.
    pub direct: bool,
    /// With `direct`: writes of different callers may be concurrent.
    pub parallel_writes: bool,
    /// Keep what the page cache holds from an earlier open.
    pub keep_cache: bool,
    /// Send no `flush` when a descriptor is closed.
    pub no_flush: bool,
}

impl Opened {
    /// A file that bypasses the page cache.
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
