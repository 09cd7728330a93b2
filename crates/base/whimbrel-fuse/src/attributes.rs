//! File attributes: those that a file system reports and those that a caller changes.

use std::time::{Duration, SystemTime};

/// The type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory (`S_IFDIR`).
    Directory,
    /// A symbolic link.
    Link,
    /// A named pipe.
    Pipe,
    /// A Unix socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl FileKind {
    /// The type in the upper bits of a mode.
    pub fn of_mode(mode: u32) -> Option<Self> {
        Some(match mode & libc::S_IFMT {
            libc::S_IFREG => Self::File,
            libc::S_IFDIR => Self::Directory,
            libc::S_IFLNK => Self::Link,
            libc::S_IFIFO => Self::Pipe,
            libc::S_IFSOCK => Self::Socket,
            libc::S_IFCHR => Self::CharDevice,
            libc::S_IFBLK => Self::BlockDevice,
            _ => return None,
        })
    }

    pub(crate) fn to_fuser(self) -> fuser::FileType {
        match self {
            Self::File => fuser::FileType::RegularFile,
            Self::Directory => fuser::FileType::Directory,
            Self::Link => fuser::FileType::Symlink,
            Self::Pipe => fuser::FileType::NamedPipe,
            Self::Socket => fuser::FileType::Socket,
            Self::CharDevice => fuser::FileType::CharDevice,
            Self::BlockDevice => fuser::FileType::BlockDevice,
        }
    }
}

/// Attributes of a file, as `stat` reports them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attributes {
    /// Number of the inode.
    pub inode: u64,
    /// Type of the file.
    pub kind: FileKind,
    /// Permission bits, without the type.
    pub mode: u16,
    /// Length in bytes.
    pub size: u64,
    /// Bytes allocated where the file is stored.
    pub allocated: u64,
    /// Number of hard links.
    pub links: u32,
    /// User that owns the file.
    pub uid: u32,
    /// Group that owns the file.
    pub gid: u32,
    /// Device number, for devices.
    pub device: u32,
    /// Preferred size of a read or write, in bytes.
    pub block_size: u32,
    /// Time of the last access.
    pub accessed: SystemTime,
    /// Last change of the content.
    pub modified: SystemTime,
    /// Last change of the content or attributes.
    pub changed: SystemTime,
}

impl Attributes {
    /// Attributes of a file of `kind` with `mode`; everything else is empty or zero.
    pub fn new(inode: u64, kind: FileKind, mode: u16) -> Self {
        let links = if kind == FileKind::Directory { 2 } else { 1 };
        let epoch = SystemTime::UNIX_EPOCH;
        let (accessed, modified, changed) = (epoch, epoch, epoch);
        let (size, allocated, uid, gid, device, block_size) = (0, 0, 0, 0, 0, 4096);
        Self {
            inode,
            kind,
            mode,
            size,
            allocated,
            links,
            uid,
            gid,
            device,
            block_size,
            accessed,
            modified,
            changed,
        }
    }

    pub(crate) fn to_fuser(&self) -> fuser::FileAttr {
        fuser::FileAttr {
            ino: fuser::INodeNo(self.inode),
            size: self.size,
            blocks: self.allocated.div_ceil(512),
            atime: self.accessed,
            mtime: self.modified,
            ctime: self.changed,
            crtime: SystemTime::UNIX_EPOCH,
            kind: self.kind.to_fuser(),
            perm: self.mode & 0o7777,
            nlink: self.links,
            uid: self.uid,
            gid: self.gid,
            rdev: self.device,
            blksize: self.block_size,
            flags: 0,
        }
    }
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The current time of the file system.
    Now,
    /// A given time.
    At(SystemTime),
}

impl SetTime {
    /// Resolves the time; `now` stands for [`SetTime::Now`].
    pub fn or_now(self, now: SystemTime) -> SystemTime {
        match self {
            Self::Now => now,
            Self::At(time) => time,
        }
    }

    pub(crate) fn from_fuser(time: fuser::TimeOrNow) -> Self {
        match time {
            fuser::TimeOrNow::Now => Self::Now,
            fuser::TimeOrNow::SpecificTime(time) => Self::At(time),
        }
    }
}

/// Attributes to change; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetAttributes {
    /// New permission bits.
    pub mode: Option<u32>,
    /// New owning user.
    pub uid: Option<u32>,
    /// New owning group.
    pub gid: Option<u32>,
    /// New length in bytes (`truncate`).
    pub size: Option<u64>,
    /// New time of the last access.
    pub accessed: Option<SetTime>,
    /// New time of the last change of content.
    pub modified: Option<SetTime>,
}

/// Default time for which the kernel may cache an answer.
pub(crate) const NO_TTL: Duration = Duration::ZERO;
