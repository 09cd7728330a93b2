//! Changes by other processes of the server's host, as fanotify(7) reports them.
//!
//! Every directory that is leased is marked, with what lies in it, and so is every file with several names.
//! An event names files by handles of their file system; what a handle stands for is remembered when a lease
//! is granted. Events of this process itself are left out: its changes recall leases before they are made.
//! No privilege is needed. File systems whose files may be changed without an event, those of other hosts and
//! of other programs, are not covered.

use super::{
    fanotify_events::{FileHandle, OutsideEvent, parse},
    file_handle::handle_of,
    leases::Leases,
};
use crate::proto::{Attr, Ident, Kind};
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use std::{
    collections::{HashMap, HashSet},
    ffi::{CString, OsStr},
    os::{fd::BorrowedFd, unix::ffi::OsStrExt},
    sync::{Arc, Mutex, Weak},
};
use whimbrel_core::lock;

/// `FAN_REPORT_FID | FAN_REPORT_DIR_FID | FAN_REPORT_NAME | FAN_REPORT_TARGET_FID` of fanotify_init(2), since
/// Linux 5.17.
const REPORT_HANDLES: InitFlags = InitFlags::from_bits_retain(0x200 | 0x400 | 0x800 | 0x1000);
/// What is reported. A writer that has mapped a file is noticed when it closes it.
const EVENTS: MaskFlags = MaskFlags::FAN_MODIFY
    .union(MaskFlags::FAN_ATTRIB)
    .union(MaskFlags::FAN_CLOSE_WRITE)
    .union(MaskFlags::FAN_MOVE)
    .union(MaskFlags::FAN_CREATE)
    .union(MaskFlags::FAN_DELETE)
    .union(MaskFlags::FAN_EVENT_ON_CHILD)
    .union(MaskFlags::FAN_ONDIR);
/// Events of one file with several names.
const FILE_EVENTS: MaskFlags =
    MaskFlags::FAN_MODIFY.union(MaskFlags::FAN_ATTRIB).union(MaskFlags::FAN_CLOSE_WRITE);
/// Most marks; each holds an inode in the kernel's memory.
const MAX_MARKS: usize = 1 << 16;
/// Handles after which those without a lease are dropped for the first time.
const FIRST_PRUNE: usize = 1 << 14;
/// Bytes of events that are read at once.
const BUFFER: usize = 1 << 16;
/// File systems that only processes of this host change, by their kernel: ext4, XFS, btrfs, tmpfs, ZFS, F2FS,
/// bcachefs (statfs(2)).
const COVERED: [u64; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x2fc1_2fc1, 0xf2f5_2010, 0xca45_1a4e];

#[derive(Default)]
struct Seen {
    handles: HashMap<FileHandle, Ident>,
    marked: HashSet<Ident>,
    /// Name in events of each device that is covered.
    filesystems: HashMap<u64, Result<[u8; 8], Errno>>,
    prune_at: usize,
}

/// The marks, and the thread that reads their events until the leases are dropped.
pub(super) struct OutsideChanges {
    group: Arc<Fanotify>,
    seen: Mutex<Seen>,
}

fn errno_of(errno: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(errno as i32)
}

impl OutsideChanges {
    pub(super) fn start(leases: &Arc<Leases>) -> Result<Self, Errno> {
        let flags = InitFlags::FAN_CLASS_NOTIF | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
        let group = Fanotify::init(flags | REPORT_HANDLES, EventFFlags::O_RDONLY).map_err(errno_of)?;
        let (group, leases) = (Arc::new(group), Arc::downgrade(leases));
        let events = group.clone();
        let reading = std::thread::Builder::new().name("outside-changes".to_owned());
        reading.spawn(move || read_events(&events, &leases)).map_err(|_| Errno::AGAIN)?;
        Ok(Self { group, seen: Mutex::new(Seen { prune_at: FIRST_PRUNE, ..Seen::default() }) })
    }

    /// Marks a directory; true if it was not marked before.
    pub(super) fn cover_dir(&self, dir: BorrowedFd<'_>, ident: &Ident) -> Result<bool, Errno> {
        let mut seen = lock(&self.seen);
        if seen.marked.contains(ident) {
            return Ok(false);
        }
        let filesystem = seen.filesystem(dir, ident)?;
        seen.mark(&self.group, EVENTS, (dir, None), *ident)?;
        seen.remember(filesystem, (dir, OsStr::new("")), *ident)?;
        Ok(true)
    }

    /// Remembers what lies in a marked directory, and marks it if the mark of the directory does not say all;
    /// true if it was not marked before.
    pub(super) fn cover(
        &self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        attr: &Attr,
        is_held: impl Fn(&Ident) -> bool,
    ) -> Result<bool, Errno> {
        let mut seen = lock(&self.seen);
        let filesystem = seen.filesystem(dir, &attr.ident)?;
        let events = match attr.kind {
            Kind::Dir => Some(EVENTS),
            _ if attr.links > 1 => Some(FILE_EVENTS),
            _ => None,
        };
        let new = events.is_some() && !seen.marked.contains(&attr.ident);
        if let Some(events) = events.filter(|_| new) {
            seen.mark(&self.group, events, (dir, Some(name)), attr.ident)?;
        }
        if seen.handles.len() >= seen.prune_at {
            let Seen { handles, marked, prune_at, .. } = &mut *seen;
            handles.retain(|_, ident| marked.contains(ident) || is_held(ident));
            *prune_at = (2 * handles.len()).max(FIRST_PRUNE);
        }
        seen.remember(filesystem, (dir, name), attr.ident)?;
        Ok(new)
    }

    /// Files that handles stand for.
    fn named(&self, handles: &[FileHandle]) -> Vec<Ident> {
        let seen = lock(&self.seen);
        handles.iter().filter_map(|handle| seen.handles.get(handle).copied()).collect()
    }
}

impl Seen {
    /// Name of a file system in events, if all changes of its files are reported.
    fn filesystem(&mut self, dir: BorrowedFd<'_>, ident: &Ident) -> Result<[u8; 8], Errno> {
        let find = || {
            let found = rustix::fs::fstatfs(dir)?;
            if !COVERED.contains(&(found.f_type as u64 & 0xffff_ffff)) {
                return Err(Errno::OPNOTSUPP);
            }
            Ok(rustix::fs::fstatvfs(dir)?.f_fsid.to_ne_bytes())
        };
        *self.filesystems.entry(ident.dev).or_insert_with(find)
    }

    fn mark(
        &mut self,
        group: &Fanotify,
        events: MaskFlags,
        (dir, name): (BorrowedFd<'_>, Option<&OsStr>),
        ident: Ident,
    ) -> Result<(), Errno> {
        if self.marked.len() >= MAX_MARKS {
            return Err(Errno::NOSPC);
        }
        let flags = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_DONT_FOLLOW;
        group.mark(flags, events, dir, name).map_err(errno_of)?;
        self.marked.insert(ident);
        Ok(())
    }

    fn remember(
        &mut self,
        filesystem: [u8; 8],
        (dir, name): (BorrowedFd<'_>, &OsStr),
        ident: Ident,
    ) -> Result<(), Errno> {
        let name = CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)?;
        let (kind, bytes) = handle_of(dir, &name)?;
        self.handles.insert(FileHandle { filesystem, kind, bytes }, ident);
        Ok(())
    }
}

/// Reads events and recalls leases, until the leases are dropped.
fn read_events(group: &Fanotify, leases: &Weak<Leases>) {
    let own = std::process::id() as i32;
    let mut buffer = vec![0; BUFFER];
    let pause = Timespec { tv_sec: 1, tv_nsec: 0 };
    while leases.strong_count() > 0 {
        // A failure shows in the read.
        let _ = poll(&mut [PollFd::new(group, PollFlags::IN)], Some(&pause));
        let read = rustix::io::read(group, &mut buffer[..]);
        let Some(leases) = leases.upgrade() else { return };
        let len = match read {
            Ok(len) => len,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(errno) => return leases.uncover(errno),
        };
        for event in parse(&buffer[..len]) {
            match event {
                OutsideEvent::Changed(pid, _) if pid == own => {}
                OutsideEvent::Changed(_, handles) => leases.changed_outside(&handles),
                OutsideEvent::Lost => leases.start_all_anew(None),
            }
        }
    }
}

impl Leases {
    fn changed_outside(&self, handles: &[FileHandle]) {
        let files = self.outside_now().map(|outside| outside.named(handles)).unwrap_or_default();
        if !files.is_empty() {
            self.changed(None, &files);
        }
    }
}
