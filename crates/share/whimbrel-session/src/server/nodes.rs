//! New files of any type, with the owner that the client gives them.
//!
//! A file gets its owner before the mode that others use it by: a program that runs as its owner never
//! belongs to the server's user for a moment. Devices, and owners other than the server's user, need
//! [`Limits::ownership`](super::Limits::ownership).

use super::{
    exports::{attr_of, fd_path},
    name_changes::{bits, create, symlink},
    refuse,
    sessions::ServedSession,
    stale,
};
use crate::proto::{EntryKind, Kind, Name, Owner, RelPath, Time};
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, chownat, mkdirat, mknodat, openat},
    io::Errno,
};
use std::os::fd::OwnedFd;
use whimbrel_wire::Refusal;

/// Creates a file of any type.
pub(super) fn make(
    session: &ServedSession,
    path: &RelPath,
    node: &EntryKind,
    (mode, owner): (u16, Option<Owner>),
    stamp: Time,
) -> Result<(), Refusal> {
    if owner.is_some() && !session.tree.ownership {
        return Err(refuse("set the owner")(Errno::PERM));
    }
    let special = |kind, device: (u32, u32)| {
        let device = rustix::fs::makedev(device.0, device.1);
        make_special(session, path, (kind, device), bits(session, mode, node.kind())?, owner)
    };
    match node {
        EntryKind::File => create(session, path, mode, owner, stamp),
        EntryKind::Dir => make_dir(session, path, bits(session, mode, Kind::Dir)?, owner),
        EntryKind::Symlink(target) => {
            symlink(session, path, target)?;
            let (dir, name) = session.tree.parent(path)?;
            owner.map_or(Ok(()), |owner| own(&opened(&dir, &name, Kind::Symlink)?, owner))
        }
        EntryKind::Fifo => special(FileType::Fifo, (0, 0)),
        EntryKind::Socket => special(FileType::Socket, (0, 0)),
        EntryKind::Char(_) | EntryKind::Block(_) if !session.tree.ownership => {
            Err(refuse("make a device")(Errno::PERM))
        }
        EntryKind::Char(number) => special(FileType::CharacterDevice, number.parts()),
        EntryKind::Block(number) => special(FileType::BlockDevice, number.parts()),
    }
}

/// Opens a new file for its attributes alone, if it is what was just made.
fn opened(dir: &OwnedFd, name: &Name, kind: Kind) -> Result<OwnedFd, Refusal> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = openat(dir, name.as_os(), flags, Mode::empty()).map_err(refuse("find the new file"))?;
    if attr_of(&made)?.kind == kind { Ok(made) } else { Err(stale()) }
}

/// Gives an open file to a user and a group.
pub(super) fn set_owner(file: &OwnedFd, owner: Owner) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    chownat(file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
}

fn own(file: &OwnedFd, owner: Owner) -> Result<(), Refusal> {
    set_owner(file, owner).map_err(refuse("set the owner"))
}

/// Gives a new file its owner, then its mode, whatever this process's umask is.
fn finish(made: &OwnedFd, mode: Mode, owner: Option<Owner>) -> Result<(), Refusal> {
    owner.map_or(Ok(()), |owner| own(made, owner))?;
    rustix::fs::chmod(fd_path(made), mode).map_err(refuse("set the mode"))
}

fn make_dir(
    session: &ServedSession,
    path: &RelPath,
    mode: Mode,
    owner: Option<Owner>,
) -> Result<(), Refusal> {
    let (dir, name) = session.tree.parent(path)?;
    // A directory of another owner is closed to everybody until it has that owner.
    let first = if owner.is_some() { Mode::RWXU } else { mode | Mode::RWXU };
    mkdirat(&dir, name.as_os(), first).map_err(refuse("make the directory"))?;
    finish(&opened(&dir, &name, Kind::Dir)?, mode, owner)
}

fn make_special(
    session: &ServedSession,
    path: &RelPath,
    (kind, device): (FileType, u64),
    mode: Mode,
    owner: Option<Owner>,
) -> Result<(), Refusal> {
    let (dir, name) = session.tree.parent(path)?;
    mknodat(&dir, name.as_os(), kind, Mode::RUSR | Mode::WUSR, device).map_err(refuse("create the file"))?;
    let kind = match kind {
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        _ => Kind::Device,
    };
    finish(&opened(&dir, &name, kind)?, mode, owner)
}
