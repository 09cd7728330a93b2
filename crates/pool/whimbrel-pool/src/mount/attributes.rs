//! File attributes (`stat`) of nodes, versions and files being written.

use super::inode::Inode;
use crate::protocol::{Node, VersionInfo};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use whimbrel_fuse::{Attributes, FileKind};

/// Time for which the kernel may cache answers of the manager.
pub(super) const TTL: Duration = Duration::from_secs(1);
/// Preferred size of writes.
const BLOCK: u32 = 1 << 20;

pub(super) fn time(nanoseconds: i64) -> SystemTime {
    let since = Duration::from_nanos(nanoseconds.unsigned_abs());
    if nanoseconds < 0 { UNIX_EPOCH - since } else { UNIX_EPOCH + since }
}

pub(super) fn nanoseconds(time: SystemTime) -> i64 {
    let saturated = |nanos: u128| i64::try_from(nanos).unwrap_or(i64::MAX);
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => saturated(since.as_nanos()),
        Err(before) => -saturated(before.duration().as_nanos()),
    }
}

pub(super) fn of_node(node: &Node) -> Attributes {
    let kind = if node.folder { FileKind::Directory } else { FileKind::File };
    Attributes {
        size: node.size,
        allocated: node.size,
        uid: node.uid,
        gid: node.gid,
        block_size: BLOCK,
        accessed: time(node.modified),
        modified: time(node.modified),
        changed: time(node.changed),
        ..Attributes::new(Inode::Node(node.id).number(), kind, node.mode as u16)
    }
}

/// Attributes of a version: those of its file, but read-only.
pub(super) fn of_version(version: &VersionInfo, node: &Node) -> Attributes {
    let written = time(version.created);
    Attributes {
        inode: Inode::Version(version.id).number(),
        size: version.size,
        allocated: version.size,
        mode: node.mode as u16 & 0o444,
        accessed: written,
        modified: written,
        changed: written,
        ..of_node(node)
    }
}

/// Attributes of a virtual folder: those of `node`, but read-only.
pub(super) fn of_folder(inode: Inode, node: &Node) -> Attributes {
    let mode = (node.mode as u16 & 0o444) | 0o111;
    Attributes {
        kind: FileKind::Directory,
        mode,
        size: 0,
        allocated: 0,
        links: 2,
        inode: inode.number(),
        ..of_node(node)
    }
}
