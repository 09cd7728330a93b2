//! Many directories in one answer, so that who is far away learns a tree in a few round trips.
//!
//! The directories asked for come first, then those below them, level by level, until there is enough for one
//! answer. A directory that cannot be read is passed over: who needs it asks for it alone and hears why. What
//! is mounted in the tree is not walked into.

use super::{
    exports::{ExportTree, attr_of},
    listing::Listing,
    refuse,
};
use crate::proto::{DirPacker, Kind, ListTree, RelPath, Walked, WalkedDir};
use rustix::io::Errno;
use std::collections::VecDeque;
use whimbrel_wire::Refusal;

/// Most directories asked for by one request, and looked at for one answer.
const DIRS: usize = 1000;
/// Most names of one answer, and of one directory that comes with its names.
const NAMES: (u32, u32) = (16 << 10, 4 << 10);

/// Directories, packed.
pub(super) fn walk(tree: &ExportTree, wanted: &ListTree) -> Result<(Walked, Vec<u8>), Refusal> {
    if wanted.dirs.len() > DIRS {
        return Err(refuse("walk through so many directories at once")(Errno::TOOBIG));
    }
    let (budget, most) = (wanted.names.min(NAMES.0) as usize, wanted.most.min(NAMES.1) as usize);
    let mut queue: VecDeque<RelPath> = wanted.dirs.iter().cloned().collect();
    let (mut looked, mut names) = (0, 0);
    let mut packer = DirPacker::default();
    while let Some(path) = queue.pop_front() {
        let found = directory(tree, &path, most);
        names += found.iter().filter_map(|found| found.entries.as_ref()).map(Vec::len).sum::<usize>();
        if found.as_ref().is_some_and(|found| !packer.add(found)) {
            break;
        }
        looked += 1;
        if names >= budget || looked >= DIRS {
            break;
        }
        if let Some(found) = found.as_ref().filter(|_| wanted.below) {
            let below = found.entries.iter().flatten();
            let dirs =
                below.filter(|entry| entry.attr.kind == Kind::Dir && entry.attr.ident.dev == found.ident.dev);
            queue.extend(dirs.filter_map(|entry| path.join(&entry.name).ok()));
        }
    }
    let packed = packer.finish().map_err(|_| refuse("pack directories")(Errno::NOMEM))?;
    Ok((Walked { reached: looked.min(wanted.dirs.len()) as u32 }, packed))
}

/// A directory and its names, unless it has more than `most`; none if it cannot be read.
fn directory(tree: &ExportTree, path: &RelPath, most: usize) -> Option<WalkedDir> {
    let dir = tree.dir(path).ok()?;
    let ident = attr_of(&dir).ok()?.ident;
    let listing = Listing::read(dir, most).ok()?;
    let entries = listing.map(|listing| listing.all()).transpose().ok()?;
    Some(WalkedDir { ident, entries })
}
