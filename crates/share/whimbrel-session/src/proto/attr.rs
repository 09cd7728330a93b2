//! File attributes and identity as the server reports them.

use serde::{Deserialize, Serialize};

/// A time, in seconds and nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Time {
    /// Whole seconds, negative before 1970.
    pub seconds: i64,
    /// Nanoseconds after the second.
    pub nanos: u32,
}

/// Units in which file systems store times, in nanoseconds: NTFS and SMB 100, others a microsecond or
/// millisecond, exFAT ten milliseconds, ext3 and HFS+ a second, FAT two.
const UNITS: [i128; 7] = [1, 100, 1_000, 1_000_000, 10_000_000, 1_000_000_000, 2_000_000_000];

impl Time {
    /// Whether a file that was given this time may have `found`: file systems cut off what they cannot store.
    pub fn is_stored_as(self, found: Time) -> bool {
        let (given, found) = (self.nanoseconds(), found.nanoseconds());
        UNITS.iter().any(|unit| given - given.rem_euclid(*unit) == found)
    }

    fn nanoseconds(self) -> i128 {
        i128::from(self.seconds) * 1_000_000_000 + i128::from(self.nanos)
    }

    /// The current time of this host's clock.
    pub fn now() -> Self {
        match std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH) {
            Ok(since) => Self { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() },
            Err(_) => Self::default(),
        }
    }
}

/// Identity of a file on the server, whatever its name: device, inode, and birth time, because inode numbers
/// are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Ident {
    /// Number of the device.
    pub dev: u64,
    /// Number of the inode.
    pub ino: u64,
    /// Time of creation in nanoseconds since 1970; zero if the file system does not record it.
    pub birth: i64,
}

/// Type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory (list of names).
    Dir,
    /// A symlink, which the client follows on its own side.
    Symlink,
    /// A named pipe: listed, never opened by the server.
    Fifo,
    /// A socket: listed, never opened by the server.
    Socket,
    /// A device: listed, never opened by the server.
    Device,
}

/// Distinguishes successive contents of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
pub struct Version {
    /// Size in bytes.
    pub size: u64,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode, which nobody can set.
    pub ctime: Time,
}

/// Attributes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// Identity of the file.
    pub ident: Ident,
    /// Type of the file.
    pub kind: Kind,
    /// Permission bits, 12 of them.
    pub mode: u16,
    /// Number of hard links.
    pub links: u32,
    /// Owning user, by the server's number.
    pub uid: u32,
    /// Owning group, by the server's number.
    pub gid: u32,
    /// Size in bytes; of a device, its [`DeviceNumber`].
    pub size: u64,
    /// Allocated units of 512 bytes on the server's disk; of a device, 1 if it is a block device.
    pub blocks: u64,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
}

/// Number of a device in the 32 bits that the kernel uses between file systems: major number in bits 8 to 19,
/// the low byte of the minor number in bits 0 to 7, and the rest of that above (`new_encode_dev` in
/// include/linux/kdev_t.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceNumber(pub u32);

impl DeviceNumber {
    /// The number with these parts.
    pub fn of(major: u32, minor: u32) -> Self {
        Self((minor & 0xff) | (major & 0xfff) << 8 | (minor & 0xf_ff00) << 12)
    }

    /// Major and minor number.
    pub fn parts(self) -> (u32, u32) {
        (self.0 >> 8 & 0xfff, (self.0 & 0xff) | (self.0 >> 12 & 0xf_ff00))
    }
}

impl Attr {
    /// The version of the content.
    pub fn version(&self) -> Version {
        Version { size: self.size, mtime: self.mtime, ctime: self.ctime }
    }

    /// Number of a device, and whether it is a block device; none for any other file. A server before
    /// [`FIRST_WITH_NODES`](super::FIRST_WITH_NODES) reports number 0.
    pub fn device(&self) -> Option<(DeviceNumber, bool)> {
        (self.kind == Kind::Device)
            .then(|| (DeviceNumber(u32::try_from(self.size).unwrap_or_default()), self.blocks == 1))
    }
}
