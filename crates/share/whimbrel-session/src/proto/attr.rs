//! What a file is, as the server sees it, and what tells one content of it from another.

use serde::{Deserialize, Serialize};

/// A moment, in seconds and nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Time {
    /// Whole seconds, negative before 1970.
    pub seconds: i64,
    /// Nanoseconds on top.
    pub nanos: u32,
}

impl Time {
    /// This moment, by the clock of this host.
    pub fn now() -> Self {
        match std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH) {
            Ok(since) => Self { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() },
            Err(_) => Self::default(),
        }
    }
}

/// What a file is on the server, however it is called: device, inode, and when the inode was born, since
/// numbers of inodes are used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Ident {
    /// Device.
    pub dev: u64,
    /// Inode.
    pub ino: u64,
    /// Nanoseconds since 1970 when it was made; zero where the file system does not say.
    pub birth: i64,
}

/// Kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Bytes.
    File,
    /// Names.
    Dir,
    /// A path that the client follows, on its own side.
    Symlink,
    /// Shown, never opened by the server.
    Fifo,
    /// Shown, never opened by the server.
    Socket,
    /// Shown, never opened by the server.
    Device,
}

/// Tells one content of a file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
pub struct Version {
    /// Bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode, which nobody can set.
    pub ctime: Time,
}

/// Attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// Which file it is.
    pub ident: Ident,
    /// What it is.
    pub kind: Kind,
    /// Permission bits, 12 of them.
    pub mode: u16,
    /// Hard links.
    pub links: u32,
    /// Owner; numbers of the server.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes on the server's disk.
    pub blocks: u64,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
}

impl Attr {
    /// What tells this content from another.
    pub fn version(&self) -> Version {
        Version { size: self.size, mtime: self.mtime, ctime: self.ctime }
    }
}
