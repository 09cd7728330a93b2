//! Exports: served directories, and resolution of names beneath them.
//!
//! The kernel resolves names (`RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS`) from a
//! descriptor that was opened once, so neither a symlink nor a directory moved meanwhile leads out of the
//! export. A file is first examined through a descriptor that cannot read (`O_PATH`), so a device is never
//! opened.

use super::{quota::Quota, refuse, stale};
use crate::proto::{Attr, DeviceNumber, FileRef, Ident, Kind, Name, RelPath, Time};
use bytes::Bytes;
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat2, statx},
    io::Errno,
};
use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
};
use whimbrel_core::Digest;
use whimbrel_wire::{PeerIdentity, PublicKey, Refusal};

/// The bits that run a program with the rights of its owner or group.
pub(super) const RUNS_AS: u16 = 0o6000;
/// Attempts of a resolution that conflicts with a rename (`EAGAIN`, openat2(2)).
const TRIES: usize = 16;
/// Longest path in bytes that is resolved at once, below `PATH_MAX`; a longer one is resolved in stretches.
const STRETCH: usize = 3500;

/// A use of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExportAccess {
    /// Read files and names.
    Read,
    /// Change them, too.
    Write,
}

/// A directory that clients may open, with everything below it.
#[derive(Debug)]
pub struct Export {
    path: PathBuf,
    dir: OwnedFd,
    /// Clients by key; none if the transport admits the right ones only.
    clients: Option<Vec<(PublicKey, ExportAccess)>>,
    quota: Option<Arc<Quota>>,
}

/// A directory cannot be exported.
#[derive(Debug, thiserror::Error)]
#[error("cannot export {}", path.display())]
pub struct ExportError {
    /// Path of the directory.
    pub path: PathBuf,
    /// Cause reported by the system.
    pub source: io::Error,
}

impl Export {
    /// Exports the directory `path`; a symlink to it is followed now and never again.
    pub fn new(path: &Path) -> Result<Self, ExportError> {
        let failed = |source| ExportError { path: path.to_owned(), source };
        let canonical = path.canonicalize().map_err(failed)?;
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(CWD, &canonical, flags, Mode::empty());
        Ok(Self {
            dir: dir.map_err(|errno| failed(errno.into()))?,
            path: canonical,
            clients: None,
            quota: None,
        })
    }

    /// Limits the export to the holders of these keys.
    pub fn only_for(self, clients: Vec<(PublicKey, ExportAccess)>) -> Self {
        Self { clients: Some(clients), ..self }
    }

    /// Limits the space of all files of the export to `limit` bytes, as `du` counts it. They are counted in
    /// the background; until that is done once, nothing is refused.
    pub fn with_quota(self, limit: u64) -> Result<Self, ExportError> {
        let dir = self.dir.try_clone().and_then(|dir| Quota::new(dir, limit));
        match dir {
            Ok(quota) => Ok(Self { quota: Some(quota), ..self }),
            Err(source) => Err(ExportError { path: self.path, source }),
        }
    }

    /// How the peer may use this export, if at all. Of several entries the last one counts.
    pub(super) fn access(&self, peer: &PeerIdentity) -> Option<ExportAccess> {
        match (&self.clients, peer) {
            (None, _) => Some(ExportAccess::Write),
            (Some(clients), PeerIdentity::Key(key)) => {
                clients.iter().rfind(|(known, _)| known == key).map(|(_, access)| *access)
            }
            (Some(_), PeerIdentity::Ssh(_) | PeerIdentity::Stdio) => None,
        }
    }

    /// Path of the exported directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of `wanted` below this export, if it is there.
    pub(super) fn below(&self, wanted: &[u8]) -> Option<RelPath> {
        let own = self.path.as_os_str().as_bytes();
        let own = own.strip_suffix(b"/").unwrap_or(own);
        let rest = wanted.strip_prefix(own)?;
        if !rest.is_empty() && !rest.starts_with(b"/") {
            return None;
        }
        let names: Vec<&[u8]> = rest.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).collect();
        RelPath::new(&names.join(&b'/')).ok()
    }

    /// Opens the directory `path` as the root of a session.
    pub(super) fn tree(&self, path: &RelPath, ownership: bool) -> Result<ExportTree, Refusal> {
        let root = self.dir.try_clone().map_err(|_| refuse("duplicate a descriptor")(Errno::MFILE))?;
        let whole = ExportTree { root, ownership, quota: self.quota.clone() };
        Ok(ExportTree { root: whole.dir(path)?, ..whole })
    }
}

#[derive(Debug)]
pub(super) struct ExportTree {
    root: OwnedFd,
    /// Whether clients may do what only owners and root may, see [`Limits`](super::Limits).
    pub(super) ownership: bool,
    /// Quota of the export.
    pub(super) quota: Option<Arc<Quota>>,
}

impl ExportTree {
    fn open(&self, path: &RelPath, flags: OFlags) -> Result<OwnedFd, Refusal> {
        let mut rest = path.as_bytes();
        let mut above: Option<OwnedFd> = None;
        while rest.len() > STRETCH {
            // A name is much shorter than a stretch.
            let Some(cut) = rest[..STRETCH].iter().rposition(|byte| *byte == b'/') else {
                return Err(stale());
            };
            let from = above.as_ref().unwrap_or(&self.root);
            above = Some(beneath(from, &rest[..cut], OFlags::PATH | OFlags::DIRECTORY)?);
            rest = &rest[cut + 1..];
        }
        beneath(above.as_ref().unwrap_or(&self.root), rest, flags)
    }

    /// Names this boot of the system and this mount of the file system: while it stays, nothing that was
    /// written is lost, synced or not. A digest, because the numbers are nobody else's business.
    pub(super) fn incarnation(&self) -> Option<Bytes> {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
        // Linux before 6.8 does not have it; a remount is overlooked there.
        let mount = statx(&self.root, "", AtFlags::EMPTY_PATH, MOUNT_ID).map_or(0, |found| found.stx_mnt_id);
        let said = [&boot[..], &mount.to_le_bytes()].concat();
        Some(Bytes::copy_from_slice(&Digest::of(&said).0[..16]))
    }

    /// Opens a directory for listing and changing its names.
    pub(super) fn dir(&self, path: &RelPath) -> Result<OwnedFd, Refusal> {
        self.open(path, OFlags::DIRECTORY | OFlags::RDONLY)
    }

    /// Opens a descriptor for attributes only, without following a symlink at the end.
    pub(super) fn lookup(&self, path: &RelPath) -> Result<(OwnedFd, Attr), Refusal> {
        let Some((parent, name)) = path.split() else {
            let root = self.open(path, OFlags::PATH)?;
            let attr = attr_of(&root)?;
            return Ok((root, attr));
        };
        let parent = self.open(&parent, OFlags::DIRECTORY | OFlags::PATH)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = rustix::fs::openat(&parent, name.as_os(), flags, Mode::empty());
        let found = found.map_err(refuse("find the file"))?;
        let attr = attr_of(&found)?;
        Ok((found, attr))
    }

    pub(super) fn attr(&self, path: &RelPath) -> Result<Option<Attr>, Refusal> {
        match self.lookup(path) {
            Ok((_, attr)) => Ok(Some(attr)),
            Err(refusal) if is_absent(&refusal) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// Finds a file where it is said to be, which must have the wanted identity.
    pub(super) fn find(&self, wanted: &FileRef) -> Result<(OwnedFd, Attr), Refusal> {
        let (found, attr) = self.lookup(&wanted.path)?;
        if attr.ident == wanted.ident { Ok((found, attr)) } else { Err(stale()) }
    }

    /// Opens a regular file, which must have the wanted identity.
    pub(super) fn file(&self, wanted: &FileRef, write: bool) -> Result<File, Refusal> {
        let (found, attr) = self.find(wanted)?;
        if attr.kind != Kind::File {
            return Err(refuse("open a file that is not regular")(Errno::PERM));
        }
        if write && attr.mode & RUNS_AS != 0 && !self.ownership {
            // The kernel takes these bits away when a file is written, but not from root.
            return Err(refuse("write a program that runs as its owner or group")(Errno::PERM));
        }
        let flags = if write { OFlags::RDWR } else { OFlags::RDONLY } | OFlags::CLOEXEC | OFlags::NOCTTY;
        // The descriptor above is reopened by number, so no name is resolved again.
        let opened = rustix::fs::openat(CWD, fd_path(&found), flags, Mode::empty());
        opened.map(File::from).map_err(refuse("open the file"))
    }

    /// Opens the parent directory of `path`; also returns the last name.
    pub(super) fn parent(&self, path: &RelPath) -> Result<(OwnedFd, Name), Refusal> {
        let (parent, name) = path.split().ok_or_else(|| refuse("change the export itself")(Errno::BUSY))?;
        Ok((self.dir(&parent)?, name))
    }
}

/// Opens `path` beneath the directory `from`, without following symlinks.
fn beneath(from: &OwnedFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Refusal> {
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let name = if path.is_empty() { b"." } else { path };
    for _ in 0..TRIES {
        match openat2(from, OsStr::from_bytes(name), flags | OFlags::CLOEXEC, Mode::empty(), how) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            // A symlink in the path: the client resolves those itself, so its path is outdated.
            Err(Errno::LOOP | Errno::XDEV) => return Err(stale()),
            opened => return opened.map_err(refuse("find the file")),
        }
    }
    Err(refuse("find the file")(Errno::BUSY))
}

/// A path to the open file `fd`, whatever its name.
pub(super) fn fd_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Whether a refusal means that the name does not exist.
pub(super) fn is_absent(refusal: &Refusal) -> bool {
    let absent = [Errno::NOENT, Errno::NOTDIR].map(|errno| errno.raw_os_error());
    crate::proto::errno(refusal).is_some_and(|number| absent.contains(&number))
}

/// `STATX_MNT_ID_UNIQUE` of statx(2): a number that no other mount gets before the next boot.
const MOUNT_ID: StatxFlags = StatxFlags::from_bits_retain(0x4000);
const STATX_MASK: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

pub(super) fn attr_of(fd: impl AsFd) -> Result<Attr, Refusal> {
    let found = statx(fd, "", AtFlags::EMPTY_PATH, STATX_MASK).map_err(refuse("examine the file"))?;
    Ok(from_statx(&found))
}

pub(super) fn attr_in(dir: impl AsFd, name: &Name) -> Result<Attr, Errno> {
    statx(dir, name.as_os(), AtFlags::SYMLINK_NOFOLLOW, STATX_MASK).map(|found| from_statx(&found))
}

fn from_statx(found: &Statx) -> Attr {
    let time = |at: rustix::fs::StatxTimestamp| Time { seconds: at.tv_sec, nanos: at.tv_nsec };
    let kind = match rustix::fs::FileType::from_raw_mode(u32::from(found.stx_mode)) {
        rustix::fs::FileType::RegularFile => Kind::File,
        rustix::fs::FileType::Directory => Kind::Dir,
        rustix::fs::FileType::Symlink => Kind::Symlink,
        rustix::fs::FileType::Fifo => Kind::Fifo,
        rustix::fs::FileType::Socket => Kind::Socket,
        _ => Kind::Device,
    };
    let device = match rustix::fs::FileType::from_raw_mode(u32::from(found.stx_mode)) {
        rustix::fs::FileType::CharacterDevice => Some(0),
        rustix::fs::FileType::BlockDevice => Some(1),
        _ => None,
    };
    let number = DeviceNumber::of(found.stx_rdev_major, found.stx_rdev_minor);
    let born = found.stx_btime;
    let has_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
    let birth = born.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(i64::from(born.tv_nsec));
    Attr {
        ident: Ident {
            dev: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
            ino: found.stx_ino,
            birth: if has_birth { birth } else { 0 },
        },
        kind,
        mode: found.stx_mode & 0o7777,
        links: found.stx_nlink,
        uid: found.stx_uid,
        gid: found.stx_gid,
        size: if device.is_some() { u64::from(number.0) } else { found.stx_size },
        blocks: device.unwrap_or(found.stx_blocks),
        mtime: time(found.stx_mtime),
        ctime: time(found.stx_ctime),
    }
}
