//! Tree listing: many directories in one reply, so that a distant client learns a tree in a few round trips.
//!
//! The requested directories come first, then those below them, level by level, until the reply is full. A
//! directory that cannot be read is skipped: a client that needs it requests it alone and gets the error.
//! Other file systems mounted in the tree are not entered.

use super::{exports::attr_of, leased_answers::Granting, listing::Listing, refuse, sessions::ServedSession};
use crate::proto::{DirPacker, Kind, ListTree, RelPath, Walked, WalkedDir};
use rustix::io::Errno;
use std::collections::VecDeque;
use whimbrel_wire::Refusal;

/// Most directories in one request, and listed in one reply.
const MAX_DIRS: usize = 1000;
/// Most names in one reply, and of one directory that is returned with its names.
const MAX_NAMES: (u32, u32) = (16 << 10, 4 << 10);

/// Lists directories for one request; returns them packed.
pub(super) fn walk(session: &ServedSession, wanted: &ListTree) -> Result<(Walked, Vec<u8>), Refusal> {
    if wanted.dirs.len() > MAX_DIRS {
        return Err(refuse("list so many directories at once")(Errno::TOOBIG));
    }
    let (budget, most) = (wanted.names.min(MAX_NAMES.0) as usize, wanted.most.min(MAX_NAMES.1) as usize);
    let mut queue: VecDeque<RelPath> = wanted.dirs.iter().cloned().collect();
    let (mut looked, mut names) = (0, 0);
    let (mut packer, mut granting) = (DirPacker::default(), session.granting());
    while let Some(path) = queue.pop_front() {
        let found = directory(session, &path, most, &mut granting);
        names += found.iter().filter_map(|found| found.entries.as_ref()).map(Vec::len).sum::<usize>();
        if found.as_ref().is_some_and(|found| !packer.add(found)) {
            break;
        }
        looked += 1;
        if names >= budget || looked >= MAX_DIRS {
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

/// A directory and its names, without them if there are more than `most`; none if it cannot be read, or if
/// somebody has changed it and not sent that yet.
fn directory(
    session: &ServedSession,
    path: &RelPath,
    most: usize,
    granting: &mut Granting,
) -> Option<WalkedDir> {
    let dir = session.tree.dir(path).ok()?;
    let ident = attr_of(&dir).ok()?.ident;
    session.before_read(&[ident]).ok()?;
    granting.dir(&dir).ok()?;
    let listing = Listing::read(dir, most).ok()?;
    let entries = listing.map(|listing| listing.all(granting)).transpose().ok()?;
    Some(WalkedDir { ident, entries })
}
