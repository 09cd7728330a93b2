//! Changes of names and attributes on the server.
//!
//! Each change affects one name in a directory that was resolved beneath the export. A change that was
//! already made (because its reply was lost) is recognised by its result, and reported as done.

use super::{
    exports::{RUNS_AS, attr_in, attr_of, fd_path},
    nodes,
    open_files::timespec,
    refuse,
    sessions::ServedSession,
    stale,
};
use crate::proto::{
    Attr, AttrChange, FileRef, Ident, Kind, Known, Name, Op, OpDone, Owner, RelPath, Time, code,
};
use bytes::Bytes;
use rustix::{
    fs::{
        AtFlags, CWD, Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_OMIT, fchmod, futimens, linkat,
        mkdirat, openat, renameat_with, symlinkat, unlinkat, utimensat,
    },
    io::Errno,
};
use std::{
    os::{
        fd::OwnedFd,
        unix::ffi::{OsStrExt, OsStringExt},
    },
    sync::PoisonError,
};
use whimbrel_wire::Refusal;

pub(super) fn apply(session: &ServedSession, op: Op) -> Result<OpDone, Refusal> {
    let (op, known) = op.split();
    let known = known.as_ref();
    match &op {
        Op::Create { path, mode, stamp } => create(session, path, *mode, None, *stamp)?,
        Op::Mkdir { path, mode } => mkdir(session, path, *mode)?,
        Op::Symlink { path, target } => symlink(session, path, target)?,
        Op::Link { from, path } => link(session, from, path)?,
        Op::Unlink { path, ident, keep } => unlink(session, path, ident.as_ref(), *keep, known)?,
        Op::Rmdir { path } => rmdir(session, path)?,
        Op::Rename { from, path, no_replace } => rename(session, from, path, *no_replace, known)?,
        Op::SetAttr { path, .. } | Op::SetTimes { path, .. } => {
            set_attr(session, path, &op.attr_change().unwrap_or_default(), known)?;
        }
        Op::Make { path, node, mode, owner, stamp } => {
            nodes::make(session, path, node, (*mode, *owner), *stamp)?;
        }
        Op::Replace { path, mode, stamp } => replace(session, path, *mode, *stamp, known)?,
        // The condition was split off above.
        Op::If { .. } => return Err(stale()),
    }
    Ok(OpDone { attr: session.tree.attr(op.path())? })
}

/// Refuses a change of a file that is not as the client knows it. What another client of this server writes
/// while `change` runs waits; a writer outside of it may still come in between.
fn if_known(
    session: &ServedSession,
    there: &Attr,
    known: Option<&Known>,
    change: impl FnOnce() -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let Some(known) = known else { return change() };
    let order = session.files.write_lock(there.ident);
    let _order = order.write().unwrap_or_else(PoisonError::into_inner);
    let same = known.ident.is_none_or(|ident| ident == there.ident);
    let unchanged = known.times.is_empty() || known.times.iter().any(|time| time.is_stored_as(there.mtime));
    if !same || !unchanged {
        return Err(Refusal::new(code::CONFLICT, "the file there was changed by somebody else"));
    }
    change()
}

/// The version of the file before a change that leaves its content as it is, for the payload of the reply.
/// The client must not take content that somebody else wrote for its own, because the change sets the inode's
/// time.
pub(super) fn version_before(session: &ServedSession, op: &Op) -> Bytes {
    let path = match op.plain() {
        Op::SetAttr { path, .. }
        | Op::SetTimes { path, .. }
        | Op::Rename { from: path, .. }
        | Op::Link { from: path, .. } => path,
        _ => return Bytes::new(),
    };
    version_of(session, &path)
}

/// The version of a regular file, for the payload of a reply.
pub(super) fn version_of(session: &ServedSession, path: &RelPath) -> Bytes {
    let file = session.tree.attr(path).ok().flatten().filter(|attr| attr.kind == Kind::File);
    let version = file.and_then(|attr| postcard::to_stdvec(&attr.version()).ok());
    version.map(Bytes::from).unwrap_or_default()
}

/// The permission bits of a request. The bits that run a program with the rights of its owner or group need
/// [`Limits::ownership`](super::Limits::ownership); of a directory they only say who owns new files.
pub(super) fn bits(session: &ServedSession, mode: u16, kind: Kind) -> Result<Mode, Refusal> {
    match mode & RUNS_AS != 0 && kind != Kind::Dir && !session.tree.ownership {
        true => Err(refuse("set the user or group that a program runs as")(Errno::PERM)),
        false => Ok(Mode::from_raw_mode(u32::from(mode) & 0o7777)),
    }
}

pub(super) fn create(
    session: &ServedSession,
    path: &RelPath,
    mode: u16,
    owner: Option<Owner>,
    stamp: Time,
) -> Result<(), Refusal> {
    let mode = bits(session, mode, Kind::File)?;
    let (dir, name) = session.tree.parent(path)?;
    match create_stamped(&dir, &name, (mode, owner), stamp) {
        Err(Errno::EXIST) => {
            let there = attr_in(&dir, &name).map_err(refuse("examine the file"))?;
            if has_stamp(&there, stamp) { Ok(()) } else { Err(refuse("create the file")(Errno::EXIST)) }
        }
        created => created.map_err(refuse("create the file")),
    }
}

/// Whether a file is the one that was created with this stamp.
fn has_stamp(there: &Attr, stamp: Time) -> bool {
    there.kind == Kind::File && there.size == 0 && stamp.is_stored_as(there.mtime)
}

/// Replaces a file without a moment in which the name is absent: the new file is created under a temporary
/// name. That name depends on the stamp only, so a repeated request removes what a killed server left.
fn replace(
    session: &ServedSession,
    path: &RelPath,
    mode: u16,
    stamp: Time,
    known: Option<&Known>,
) -> Result<(), Refusal> {
    let mode = bits(session, mode, Kind::File)?;
    let (dir, name) = session.tree.parent(path)?;
    let first = format!(".whimbrel-{}-{}", stamp.seconds, stamp.nanos);
    let first = Name::new(first.as_bytes()).map_err(|_| stale())?;
    let take_away = || unlinkat(&dir, first.as_os(), AtFlags::empty());
    let put = || {
        // Usually there is none.
        let _ = take_away();
        create_stamped(&dir, &first, (mode, None), stamp).map_err(refuse("create the file"))?;
        let renamed = renameat_with(&dir, first.as_os(), &dir, name.as_os(), RenameFlags::empty());
        if renamed.is_err() {
            // The refusal is reported instead.
            let _ = take_away();
        }
        renamed.map_err(refuse("replace the file"))
    };
    match attr_in(&dir, &name) {
        Ok(there) if has_stamp(&there, stamp) => Ok(()),
        Ok(there) => {
            session.files.release(&there.ident);
            if_known(session, &there, known, put)
        }
        Err(Errno::NOENT) => put(),
        Err(errno) => Err(refuse("examine the file")(errno)),
    }
}

/// Creates a file that has its owner, mode and stamp before its name: it is recognised by the stamp.
fn create_stamped(
    dir: &OwnedFd,
    name: &Name,
    (mode, owner): (Mode, Option<Owner>),
    stamp: Time,
) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let times = Timestamps { last_access: timespec(stamp), last_modification: timespec(stamp) };
    // The client's kernel has applied its umask; the server's must not be added.
    let finish = |file: &OwnedFd| {
        if let Some(owner) = owner {
            nodes::set_owner(file, owner)?;
        }
        fchmod(file, mode).and_then(|()| futimens(file, &times))
    };
    match openat(dir, ".", flags | OFlags::TMPFILE, Mode::RUSR | Mode::WUSR) {
        Ok(file) => {
            finish(&file)?;
            linkat(CWD, fd_path(&file), dir, name.as_os(), AtFlags::SYMLINK_FOLLOW)
        }
        // The file system does not support `O_TMPFILE`.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => {
            let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            finish(&openat(dir, name.as_os(), flags, Mode::RUSR | Mode::WUSR)?)
        }
        Err(errno) => Err(errno),
    }
}

fn mkdir(session: &ServedSession, path: &RelPath, mode: u16) -> Result<(), Refusal> {
    let mode = bits(session, mode, Kind::Dir)?;
    let (dir, name) = session.tree.parent(path)?;
    // With the mode at once, as far as this umask permits, for a repeated request.
    mkdirat(&dir, name.as_os(), mode | Mode::RWXU).map_err(refuse("make the directory"))?;
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = openat(&dir, name.as_os(), flags, Mode::empty()).map_err(refuse("open the directory"))?;
    fchmod(&made, mode).map_err(refuse("set the mode"))
}

pub(super) fn symlink(session: &ServedSession, path: &RelPath, target: &[u8]) -> Result<(), Refusal> {
    let (dir, name) = session.tree.parent(path)?;
    match symlinkat(std::ffi::OsStr::from_bytes(target), &dir, name.as_os()) {
        Err(Errno::EXIST) if readlink(session, path).is_ok_and(|there| there == target) => Ok(()),
        made => made.map_err(refuse("make the symlink")),
    }
}

fn link(session: &ServedSession, from: &RelPath, path: &RelPath) -> Result<(), Refusal> {
    let (found, attr) = session.tree.lookup(from)?;
    if attr.kind == Kind::Dir || (attr.kind == Kind::Device && !session.tree.ownership) {
        return Err(refuse("link a file of this type")(Errno::PERM));
    }
    let (from_dir, from_name) = session.tree.parent(from)?;
    let (dir, name) = session.tree.parent(path)?;
    match linkat(&from_dir, from_name.as_os(), &dir, name.as_os(), AtFlags::empty()) {
        Err(Errno::EXIST) => {
            let there = attr_in(&dir, &name).map_err(refuse("examine the file"))?;
            let same = there.ident == attr_of(&found)?.ident;
            if same { Ok(()) } else { Err(refuse("link the file")(Errno::EXIST)) }
        }
        made => made.map_err(refuse("link the file")),
    }
}

fn unlink(
    session: &ServedSession,
    path: &RelPath,
    ident: Option<&Ident>,
    keep: bool,
    known: Option<&Known>,
) -> Result<(), Refusal> {
    let (dir, name) = session.tree.parent(path)?;
    let there = match attr_in(&dir, &name) {
        // The file is gone, as requested.
        Err(Errno::NOENT) if ident.is_some() => return Ok(()),
        there => there.map_err(refuse("examine the file"))?,
    };
    if ident.is_some_and(|ident| *ident != there.ident) {
        return Err(Refusal::new(code::CONFLICT, "the name leads to another file now"));
    }
    if_known(session, &there, known, || {
        if keep && there.kind == Kind::File {
            let file = FileRef { path: path.clone(), ident: there.ident };
            session.files.retain_removed(&session.tree, &file)?;
        }
        session.files.release(&there.ident);
        unlinkat(&dir, name.as_os(), AtFlags::empty()).map_err(refuse("remove the file"))
    })
}

fn rmdir(session: &ServedSession, path: &RelPath) -> Result<(), Refusal> {
    let (dir, name) = session.tree.parent(path)?;
    unlinkat(&dir, name.as_os(), AtFlags::REMOVEDIR).map_err(refuse("remove the directory"))
}

fn rename(
    session: &ServedSession,
    from: &RelPath,
    to: &RelPath,
    no_replace: bool,
    known: Option<&Known>,
) -> Result<(), Refusal> {
    let (from_dir, from_name) = session.tree.parent(from)?;
    let (dir, name) = session.tree.parent(to)?;
    let rename = |flags| renameat_with(&from_dir, from_name.as_os(), &dir, name.as_os(), flags);
    let put = || {
        let renamed = match no_replace {
            true => rename(RenameFlags::NOREPLACE),
            false => rename(RenameFlags::empty()),
        };
        match renamed {
            // The file system cannot check it.
            Err(Errno::INVAL) if no_replace => match attr_in(&dir, &name) {
                Err(Errno::NOENT) => rename(RenameFlags::empty()),
                there => there.and(Err(Errno::EXIST)),
            },
            renamed => renamed,
        }
        .map_err(refuse("rename the file"))
    };
    // If it was renamed before, the name leads to it already, and the client is told that nothing is there.
    match (known, attr_in(&from_dir, &from_name), attr_in(&dir, &name)) {
        (Some(_), Ok(_), Ok(there)) => if_known(session, &there, known, put),
        _ => put(),
    }
}

fn set_attr(
    session: &ServedSession,
    path: &RelPath,
    set: &AttrChange,
    known: Option<&Known>,
) -> Result<(), Refusal> {
    let (found, attr) = session.tree.lookup(path)?;
    // If it was set before, the client does not know yet.
    let known = known.filter(|_| !set.mtime.is_some_and(|time| time.is_stored_as(attr.mtime)));
    if_known(session, &attr, known, || set_attr_of(session, (&found, &attr), set))
}

fn set_attr_of(
    session: &ServedSession,
    (found, attr): (&OwnedFd, &Attr),
    set: &AttrChange,
) -> Result<(), Refusal> {
    // A request for what is so already changes nothing, and is no reason to refuse.
    let (uid, gid) = (set.uid.filter(|uid| *uid != attr.uid), set.gid.filter(|gid| *gid != attr.gid));
    if (uid.is_some() || gid.is_some()) && !session.tree.ownership {
        return Err(refuse("set the owner")(Errno::PERM));
    }
    if session.tree.ownership && (set.uid.is_some() || set.gid.is_some()) {
        let owner = (set.uid.map(rustix::fs::Uid::from_raw), set.gid.map(rustix::fs::Gid::from_raw));
        match rustix::fs::chownat(found, "", owner.0, owner.1, AtFlags::EMPTY_PATH) {
            Err(Errno::PERM) if uid.is_none() && gid.is_none() => {}
            // Given also to the same owner, since it sets the time of the inode.
            given => given.map_err(refuse("set the owner"))?,
        }
    }
    if let Some(mode) = set.mode {
        if attr.kind == Kind::Symlink {
            return Err(refuse("set the mode of a symlink")(Errno::OPNOTSUPP));
        }
        // Use the descriptor: the name could be a symlink by now, and chmod would follow it.
        rustix::fs::chmod(fd_path(found), bits(session, mode, attr.kind)?).map_err(refuse("set the mode"))?;
    }
    if set.atime.is_some() || set.mtime.is_some() {
        set_times(found, set.atime, set.mtime)?;
    }
    Ok(())
}

fn set_times(found: &OwnedFd, atime: Option<Time>, mtime: Option<Time>) -> Result<(), Refusal> {
    let given = |time: Option<Time>| time.map_or(Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT as _ }, timespec);
    let times = Timestamps { last_access: given(atime), last_modification: given(mtime) };
    utimensat(found, "", &times, AtFlags::EMPTY_PATH).map_err(refuse("set the times"))
}

pub(super) fn readlink(session: &ServedSession, path: &RelPath) -> Result<Vec<u8>, Refusal> {
    let (found, attr) = session.tree.lookup(path)?;
    if attr.kind != Kind::Symlink {
        return Err(stale());
    }
    let target = rustix::fs::readlinkat(&found, "", Vec::new()).map_err(refuse("read the symlink"))?;
    Ok(std::ffi::OsString::from_vec(target.into_bytes()).into_vec())
}

/// Syncs a file and its name, or the names in a directory, and returns the attributes after that.
pub(super) fn sync(session: &ServedSession, wanted: &FileRef) -> Result<Attr, Refusal> {
    if wanted.path.is_root()
        || session.tree.lookup(&wanted.path).is_ok_and(|(_, attr)| attr.kind == Kind::Dir)
    {
        let dir = session.tree.dir(&wanted.path)?;
        rustix::fs::fsync(&dir).map_err(refuse("sync the directory"))?;
        return attr_of(&dir);
    }
    let file = session.files.get(&session.tree, wanted, false)?;
    file.sync()?;
    if let Ok((dir, _)) = session.tree.parent(&wanted.path) {
        rustix::fs::fsync(&dir).map_err(refuse("sync the directory"))?;
    }
    session.files.release(&wanted.ident);
    file.attr()
}
