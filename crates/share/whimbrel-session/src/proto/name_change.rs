//! Changes of names and attributes, and what a client knew of the file that it replaces.

use super::{Attr, DeviceNumber, Ident, Kind, RelPath, Time, Version};
use serde::{Deserialize, Serialize};

/// A change of names or attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Creates an empty file; its modification time is `stamp`, by which it is recognised.
    Create {
        /// Path of the file.
        path: RelPath,
        /// Permission bits of the file.
        mode: u16,
        /// Modification time to set.
        stamp: Time,
    },
    /// Creates a directory.
    Mkdir {
        /// Path of the directory.
        path: RelPath,
        /// Permission bits of the directory.
        mode: u16,
    },
    /// Creates a symlink.
    Symlink {
        /// Path of the symlink.
        path: RelPath,
        /// Target of the symlink, never resolved by the server.
        target: Vec<u8>,
    },
    /// Creates another name for a file.
    Link {
        /// Existing path of the file.
        from: RelPath,
        /// The new name.
        path: RelPath,
    },
    /// Removes a name, unless it leads to another file than expected.
    Unlink {
        /// Path to remove.
        path: RelPath,
        /// Identity of the file, if known.
        ident: Option<Ident>,
        /// Whether the client still uses the file, which then stays readable for it.
        keep: bool,
    },
    /// Removes an empty directory.
    Rmdir {
        /// Path of the directory.
        path: RelPath,
    },
    /// Renames a file or directory.
    Rename {
        /// Old path of the file.
        from: RelPath,
        /// New path of the file.
        path: RelPath,
        /// Whether to fail if the new path exists.
        no_replace: bool,
    },
    /// Changes attributes; those not given stay.
    SetAttr {
        /// Path of the file.
        path: RelPath,
        /// New permission bits.
        mode: Option<u16>,
        /// New owning user.
        uid: Option<u32>,
        /// New owning group.
        gid: Option<u32>,
        /// New modification time.
        mtime: Option<Time>,
    },
    /// Creates an empty file as `Create` does, atomically in place of a file that may have the name.
    Replace {
        /// Path of the file.
        path: RelPath,
        /// Permission bits of the file.
        mode: u16,
        /// Modification time to set.
        stamp: Time,
    },
    /// A change that may remove what another client has written: made only if the name leads to what this one
    /// knows, else refused as [`CONFLICT`](super::code::CONFLICT).
    If {
        /// The file that is replaced, removed or changed.
        known: Known,
        /// The change to make under that condition.
        change: Overwrite,
    },
    /// Creates a file of any type that belongs to the user who asked for it. A regular file gets the
    /// modification time `stamp`, as by `Create`.
    Make {
        /// Path of the file.
        path: RelPath,
        /// What to create.
        node: EntryKind,
        /// Permission bits of the file.
        mode: u16,
        /// Owner of the file; without one, what the server's system gives it.
        owner: Option<Owner>,
        /// Modification time of a regular file.
        stamp: Time,
    },
    /// Changes attributes as `SetAttr`, and the time of the last access, too.
    SetTimes {
        /// Path of the file.
        path: RelPath,
        /// The attributes to change; those not given stay.
        set: AttrChange,
        /// What the client knows of the file, as in `If`.
        known: Option<Known>,
    },
}

/// A user and a group, by the server's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The owning user.
    pub uid: u32,
    /// The owning group.
    pub gid: u32,
}

/// A file to create, without its name and attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    /// An empty regular file.
    File,
    /// An empty directory.
    Dir,
    /// A symlink with this target, which the server never resolves.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// A socket without a server.
    Socket,
    /// A character device with this number.
    Char(DeviceNumber),
    /// A block device with this number.
    Block(DeviceNumber),
}

impl EntryKind {
    /// Type of the file.
    pub fn kind(&self) -> Kind {
        match self {
            Self::File => Kind::File,
            Self::Dir => Kind::Dir,
            Self::Symlink(_) => Kind::Symlink,
            Self::Fifo => Kind::Fifo,
            Self::Socket => Kind::Socket,
            Self::Char(_) | Self::Block(_) => Kind::Device,
        }
    }
}

/// Changes of attributes; those not given stay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttrChange {
    /// New permission bits.
    pub mode: Option<u16>,
    /// New owning user.
    pub uid: Option<u32>,
    /// New owning group.
    pub gid: Option<u32>,
    /// New time of the last access.
    pub atime: Option<Time>,
    /// New modification time.
    pub mtime: Option<Time>,
}

/// A file as a client knows it before it changes, replaces or removes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Identity of the file; none while the client does not know it.
    pub ident: Option<Ident>,
    /// Modification times that the file may have; with none, it may have any.
    pub times: Vec<Time>,
}

/// The changes that may have a condition, as in [`Op`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of `Op`")]
pub enum Overwrite {
    /// Removes a name, as [`Op::Unlink`].
    Unlink { path: RelPath, ident: Option<Ident>, keep: bool },
    /// Renames over a file, as [`Op::Rename`].
    Rename { from: RelPath, path: RelPath, no_replace: bool },
    /// Changes attributes, as [`Op::SetAttr`].
    SetAttr { path: RelPath, mode: Option<u16>, uid: Option<u32>, gid: Option<u32>, mtime: Option<Time> },
    /// Creates a file in place of another, as [`Op::Replace`].
    Replace { path: RelPath, mode: u16, stamp: Time },
}

impl From<Overwrite> for Op {
    fn from(change: Overwrite) -> Self {
        match change {
            Overwrite::Unlink { path, ident, keep } => Op::Unlink { path, ident, keep },
            Overwrite::Rename { from, path, no_replace } => Op::Rename { from, path, no_replace },
            Overwrite::SetAttr { path, mode, uid, gid, mtime } => Op::SetAttr { path, mode, uid, gid, mtime },
            Overwrite::Replace { path, mode, stamp } => Op::Replace { path, mode, stamp },
        }
    }
}

impl Op {
    /// The change with a condition, if it can have one and there is one.
    pub fn if_known(self, known: Option<Known>) -> Self {
        let Some(known) = known.filter(|known| known.ident.is_some() || !known.times.is_empty()) else {
            return self;
        };
        let change = match self {
            Op::Unlink { path, ident, keep } => Overwrite::Unlink { path, ident, keep },
            Op::Rename { from, path, no_replace } => Overwrite::Rename { from, path, no_replace },
            Op::SetAttr { path, mode, uid, gid, mtime } => Overwrite::SetAttr { path, mode, uid, gid, mtime },
            Op::Replace { path, mode, stamp } => Overwrite::Replace { path, mode, stamp },
            Op::SetTimes { path, set, .. } => return Op::SetTimes { path, set, known: Some(known) },
            other => return other,
        };
        Op::If { known, change }
    }

    /// The change without its condition, and that condition.
    pub fn split(self) -> (Self, Option<Known>) {
        match self {
            Op::If { known, change } => (change.into(), Some(known)),
            Op::SetTimes { path, set, known } => (Op::SetTimes { path, set, known: None }, known),
            op => (op, None),
        }
    }

    /// The change without its condition.
    pub fn plain(&self) -> Self {
        self.clone().split().0
    }

    /// The attributes that the change sets, if it sets any.
    pub fn attr_change(&self) -> Option<AttrChange> {
        match self {
            Op::SetAttr { mode, uid, gid, mtime, .. }
            | Op::If { change: Overwrite::SetAttr { mode, uid, gid, mtime, .. }, .. } => {
                Some(AttrChange { mode: *mode, uid: *uid, gid: *gid, atime: None, mtime: *mtime })
            }
            Op::SetTimes { set, .. } => Some(*set),
            _ => None,
        }
    }

    /// The closest change that a server before [`FIRST_WITH_NODES`](super::FIRST_WITH_NODES) knows: it sets
    /// no owner of a new file and no time of access. Other types of files it does not know at all.
    pub fn without_nodes(self) -> Self {
        match self {
            Op::Make { path, node: EntryKind::File, mode, stamp, .. } => Op::Create { path, mode, stamp },
            Op::Make { path, node: EntryKind::Dir, mode, .. } => Op::Mkdir { path, mode },
            Op::Make { path, node: EntryKind::Symlink(target), .. } => Op::Symlink { path, target },
            Op::SetTimes { path, set: AttrChange { mode, uid, gid, mtime, .. }, known } => {
                Op::SetAttr { path, mode, uid, gid, mtime }.if_known(known)
            }
            op => op,
        }
    }

    /// The path that the change creates, removes or affects.
    pub fn path(&self) -> &RelPath {
        match self {
            Op::Create { path, .. }
            | Op::Mkdir { path, .. }
            | Op::Symlink { path, .. }
            | Op::Link { path, .. }
            | Op::Unlink { path, .. }
            | Op::Rmdir { path }
            | Op::Rename { path, .. }
            | Op::SetAttr { path, .. }
            | Op::Replace { path, .. }
            | Op::Make { path, .. }
            | Op::SetTimes { path, .. } => path,
            Op::If { change, .. } => match change {
                Overwrite::Unlink { path, .. }
                | Overwrite::Rename { path, .. }
                | Overwrite::SetAttr { path, .. }
                | Overwrite::Replace { path, .. } => path,
            },
        }
    }

    /// Path at which a renamed or linked file was before.
    pub fn from_path(&self) -> Option<&RelPath> {
        match self {
            Op::Rename { from, .. } | Op::Link { from, .. } => Some(from),
            Op::If { change: Overwrite::Rename { from, .. }, .. } => Some(from),
            _ => None,
        }
    }

    /// Whether it is a rename.
    pub fn is_rename(&self) -> bool {
        matches!(self, Op::Rename { .. } | Op::If { change: Overwrite::Rename { .. }, .. })
    }

    /// What the change does, for messages.
    pub fn verb(&self) -> &'static str {
        match self {
            Op::Create { .. } | Op::Make { .. } => "create",
            Op::Mkdir { .. } => "make the directory",
            Op::Symlink { .. } => "make the symlink",
            Op::Link { .. } => "link",
            Op::Unlink { .. } => "remove",
            Op::Rmdir { .. } => "remove the directory",
            Op::Rename { .. } => "rename to",
            Op::SetAttr { .. } | Op::SetTimes { .. } => "change the attributes of",
            Op::Replace { .. } => "replace",
            Op::If { change, .. } => Op::from(change.clone()).verb(),
        }
    }
}

/// Result of a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpDone {
    /// Attributes of the file that the path names now, if any.
    pub attr: Option<Attr>,
}

/// The version of a file before a change, in the payload of the reply to an [`OpCall`](super::OpCall). An
/// older server sends none.
pub fn version_before(payload: &[u8]) -> Option<Version> {
    postcard::from_bytes(payload).ok()
}
