//! Attributes of a file, as a file system gives them and as a caller changes them.

use std::time::{Duration, SystemTime};

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A named pipe.
    Pipe,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl FileKind {
    /// The kind in the upper bits of a mode.
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

/// What `stat` says of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attributes {
    /// Its inode.
    pub inode: u64,
    /// What it is.
    pub kind: FileKind,
    /// Permission bits, without the kind.
    pub mode: u16,
    /// Bytes.
    pub size: u64,
    /// Bytes it takes where it is stored.
    pub stored: u64,
    /// Hard links.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number, for devices.
    pub device: u32,
    /// Bytes a program should read or write at once.
    pub block: u32,
    /// Last access.
    pub accessed: SystemTime,
    /// Last change of content.
    pub modified: SystemTime,
    /// Last change of content or attributes.
    pub changed: SystemTime,
}

impl Attributes {
    /// A file of `kind` with `mode`, everything else empty or zero.
    pub fn new(inode: u64, kind: FileKind, mode: u16) -> Self {
        let links = if kind == FileKind::Directory { 2 } else { 1 };
        let epoch = SystemTime::UNIX_EPOCH;
        let (accessed, modified, changed) = (epoch, epoch, epoch);
        let (size, stored, uid, gid, device, block) = (0, 0, 0, 0, 0, 4096);
        Self { inode, kind, mode, size, stored, links, uid, gid, device, block, accessed, modified, changed }
    }

    pub(crate) fn to_fuser(&self) -> fuser::FileAttr {
        fuser::FileAttr {
            ino: fuser::INodeNo(self.inode),
            size: self.size,
            blocks: self.stored.div_ceil(512),
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
            blksize: self.block,
            flags: 0,
        }
    }
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The file system's own now.
    Now,
    /// This.
    At(SystemTime),
}

impl SetTime {
    /// The time it means, if now is `now`.
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

/// What to change of a file; what is none stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetAttributes {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Bytes: `truncate`.
    pub size: Option<u64>,
    /// Last access.
    pub accessed: Option<SetTime>,
    /// Last change of content.
    pub modified: Option<SetTime>,
}

/// How long the kernel may believe what it was told when nothing else is said.
pub(crate) const NO_TTL: Duration = Duration::ZERO;
