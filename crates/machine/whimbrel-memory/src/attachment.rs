//! Attachment to a range of a process's memory: new, adopted from an earlier process of the daemon, or
//! passed on by a process that still lives ([`crate::parts`]).
//!
//! The userfaultfd stays open in the target as well. So when the daemon dies, the registration and the marks
//! of written pages survive; threads of the target that wait for an absent page wait until
//! [`Attachment::adopt`] and a new [`Pager`](crate::Pager) serve them.

use crate::{
    AttachError, GuestRam, pagemap,
    process::{Mapping, Process},
    residency::LazyMemoryCell,
    scan_order::ScanOrder,
    syscall_injection, template_guard,
    tracked_blocks::TrackedBlocks,
    userfaultfd::{FEATURES, Span, Userfaultfd},
};
use rustix::fs::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Arc, Mutex, atomic::AtomicBool},
};
use whimbrel_core::{PAGE_SIZE, PageSet};

/// Most bytes that can be attached: 16 TiB, so that a set of pages has an acceptable size.
const MAX_BYTES: u64 = 16 << 40;

/// Memory range of the target.
#[derive(Debug)]
pub enum RamTarget {
    /// Complete mapping of the file at this path, which must be valid in this process too.
    Path(PathBuf),
    /// Mapping of this open file, found by device and inode.
    File(File),
    /// Range of addresses: start, bytes. It must be whole pages of anonymous memory.
    Range(u64, u64),
}

/// Purpose of an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Tracks writes of memory that is all present. Costs some 10 ms a GiB once, for arming.
    Track,
    /// Tracks writes, and lets a [`Pager`](crate::Pager) fill pages when they are touched. Costs nothing a
    /// page. A file mapped shared is emptied first. One mapped privately is a memory template that the pager
    /// fills for all processes that map it; the target's descriptors of it are replaced by those of an empty
    /// file, so that the target cannot change it.
    Lazy,
}

/// Storage of the target's pages, which determines how they are read.
#[derive(Debug)]
pub(crate) enum Backing {
    /// The file has the pages, from this byte on.
    Shared(File, u64),
    /// The file (from this byte on) has the pages that the target has not written.
    Template(File, u64),
    /// Only the target has the pages.
    Anonymous,
}

/// Attachment to a range of another process's memory.
#[derive(Debug)]
pub struct Attachment {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) process: Process,
    pub(crate) span: Span,
    pub(crate) backing: Backing,
    pub(crate) mode: Mode,
    pub(crate) uffd: Userfaultfd,
    /// Page map of the target.
    pub(crate) pagemap: File,
    /// Memory of the target by its own addresses, if the RAM file does not have all of it.
    pub(crate) memory: Option<File>,
    pub(crate) lazy: LazyMemoryCell,
    /// Pages that were present under an earlier pager, in another process.
    pub(crate) filled_before: Mutex<Option<PageSet>>,
    /// Whether a pager runs.
    pub(crate) has_pager: AtomicBool,
}

impl Attachment {
    /// Adopts an earlier attachment of the same memory, or creates one, with [`Mode::Track`]. Not for lazy
    /// memory, which a new attachment would empty.
    pub fn open(pid: i32, target: RamTarget) -> Result<Self, AttachError> {
        let found = TargetRange::find(pid, target, Mode::Track)?;
        match found.registered()? {
            Some(uffd) => found.attachment(uffd),
            None => found.attach(),
        }
    }

    /// Creates an attachment: injects a userfaultfd into the target, then registers and arms its memory. With
    /// [`Mode::Track`], dirty sets have the pages written from now on.
    ///
    /// If the target is a child of this process, nothing may wait for it (`waitpid`, `Child::try_wait`)
    /// during the call: such a wait would see the stops and could take one for the end.
    pub fn attach(pid: i32, target: RamTarget, mode: Mode) -> Result<Self, AttachError> {
        let found = TargetRange::find(pid, target, mode)?;
        if found.registered()?.is_some() {
            return Err(AttachError::Attached { pid });
        }
        found.attach()
    }

    /// Adopts the attachment of an earlier process of the daemon. The content of its last dirty set is
    /// unknown, so a caller in doubt must treat every page as written. Memory attached with [`Mode::Lazy`]
    /// must be adopted with it, and a pager started, even if all its pages are present: zero pages are still
    /// absent.
    pub fn adopt(pid: i32, target: RamTarget, mode: Mode) -> Result<Self, AttachError> {
        let found = TargetRange::find(pid, target, mode)?;
        let uffd = found.registered()?.ok_or(AttachError::NothingToAdopt { pid })?;
        found.attachment(uffd)
    }

    pub(crate) fn new(
        process: Process,
        span: Span,
        backing: Backing,
        mode: Mode,
        opened: AttachmentFiles,
    ) -> Self {
        let AttachmentFiles { uffd, pagemap, memory } = opened;
        let (lazy, filled_before, has_pager) = Default::default();
        let inner =
            Inner { process, span, backing, mode, uffd, pagemap, memory, lazy, filled_before, has_pager };
        Self { inner: Arc::new(inner) }
    }

    /// Memory of the target as a page array named `memory`. Only one consumer at a time: a dirty page is
    /// reported once. Dirty pages are looked for before they are taken if the target has a virtual machine of
    /// KVM.
    pub fn ram(&self) -> Result<GuestRam, AttachError> {
        let order = match self.inner.process.has_kvm()? {
            true => ScanOrder::LookFirst,
            false => ScanOrder::TakeAtOnce,
        };
        self.ram_in_order(order)
    }

    /// Like [`ram`](Self::ram), with the order of scans chosen by the caller. Both are right for every
    /// target; they differ in what they cost.
    pub fn ram_in_order(&self, order: ScanOrder) -> Result<GuestRam, AttachError> {
        GuestRam::new(self.inner.clone(), order)
    }

    /// Process id of the target.
    pub fn pid(&self) -> i32 {
        self.inner.process.number()
    }

    /// Length in pages.
    pub fn page_count(&self) -> u64 {
        self.inner.page_count()
    }

    /// Ends tracking and lazy filling: absent pages then read as zeros. The idle descriptor stays in the
    /// target and is used by the next [`open`](Self::open).
    pub fn release(self) -> Result<(), AttachError> {
        let pid = self.pid();
        self.inner.uffd.unregister(self.inner.span).map_err(AttachError::io(pid, "release the memory"))
    }
}

impl Inner {
    pub(crate) fn page_count(&self) -> u64 {
        self.span.bytes / PAGE_SIZE as u64
    }
}

/// Memory range that was found and checked, and not changed yet.
struct TargetRange {
    process: Process,
    span: Span,
    backing: Backing,
    mode: Mode,
}

impl TargetRange {
    fn find(pid: i32, target: RamTarget, mode: Mode) -> Result<Self, AttachError> {
        let process = Process::open(pid)?;
        let open = |path: PathBuf| File::options().read(true).write(true).open(path);
        let (span, backing) = match target {
            RamTarget::Range(start, bytes) => (Span { start, bytes }, Backing::Anonymous),
            RamTarget::File(file) => mapped(&process, file)?,
            RamTarget::Path(path) => mapped(
                &process,
                open(path).map_err(|source| AttachError::Io { pid, action: "open the RAM file", source })?,
            )?,
        };
        check_range(span)?;
        if mode == Mode::Lazy && matches!(backing, Backing::Anonymous) {
            return Err(AttachError::LazyNeedsFile { pid });
        }
        Ok(Self { process, span, backing, mode })
    }

    /// Userfaultfd of the target with which the memory is registered; this call registers it again in the
    /// requested mode.
    ///
    /// Registering with the descriptor that has the range succeeds; the others return `EBUSY`.
    fn registered(&self) -> Result<Option<Userfaultfd>, AttachError> {
        let pid = self.process.number();
        let pagemap = self.process.file("pagemap")?;
        if !pagemap::is_tracked(&pagemap, self.span).map_err(AttachError::io(pid, "inspect the memory"))? {
            return Ok(None);
        }
        if self.mode == Mode::Track && self.process.has_missing_pages(self.span.start)? {
            return Err(AttachError::Lazy { pid });
        }
        for uffd in self.own_userfaultfds()? {
            match self.register(&uffd) {
                Ok(()) => return Ok(Some(uffd)),
                Err(AttachError::Attached { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(AttachError::Attached { pid })
    }

    /// Userfaultfds of the target with all required features in their handshake. Those of the target itself
    /// have other features.
    fn own_userfaultfds(&self) -> Result<Vec<Userfaultfd>, AttachError> {
        let mut found = Vec::new();
        for fd in self.process.userfaultfds()? {
            let info = io::read_to_string(self.process.file(&format!("fdinfo/{fd}"))?)
                .map_err(AttachError::io(self.process.number(), "read the descriptors"))?;
            if features(&info) & FEATURES == FEATURES {
                found.push(Userfaultfd::new(self.process.descriptor(fd)?));
            }
        }
        Ok(found)
    }

    fn register(&self, uffd: &Userfaultfd) -> Result<(), AttachError> {
        let pid = self.process.number();
        uffd.register(self.span, self.mode == Mode::Lazy).map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => AttachError::Attached { pid },
            _ => AttachError::io(pid, "register the memory")(error),
        })
    }

    /// Registers memory that is not registered, with an idle descriptor or a new one.
    fn attach(self) -> Result<Attachment, AttachError> {
        let pid = self.process.number();
        let uffd = match self.own_userfaultfds()?.pop() {
            Some(idle) => idle,
            None => self.inject()?,
        };
        match self.mode {
            // A private mapping needs no arming: its scan finds private copies, which only a write creates.
            Mode::Track if matches!(self.backing, Backing::Template(..)) => self.register(&uffd)?,
            Mode::Track => {
                self.register(&uffd)?;
                self.arm(&uffd).map_err(AttachError::io(pid, "arm the memory"))?;
            }
            Mode::Lazy => {
                if let Backing::Template(file, _) = &self.backing {
                    template_guard::replace_descriptors(&self.process, file)?;
                }
                // Emptied before, so that a crash after the registration leaves no data that would pass for
                // filled pages; and after, because the target may have touched some in between.
                self.empty()?;
                self.register(&uffd)?;
                self.empty()?;
            }
        }
        self.attachment(uffd)
    }

    /// Marks what is in memory as not written. A page that the target touches later is found without a mark.
    fn arm(&self, uffd: &Userfaultfd) -> io::Result<()> {
        let Backing::Shared(file, offset) = &self.backing else { return uffd.protect(self.span) };
        let pages = self.span.bytes / PAGE_SIZE as u64;
        for run in TrackedBlocks::none(pages).find_new(file, *offset)? {
            uffd.protect(Span { start: self.span.start + run.offset(), bytes: run.bytes() as u64 })?;
        }
        Ok(())
    }

    fn inject(&self) -> Result<Userfaultfd, AttachError> {
        let pid = self.process.number();
        let fd = syscall_injection::create_userfaultfd(&self.process)?;
        let uffd = Userfaultfd::new(self.process.descriptor(fd)?);
        uffd.handshake(FEATURES).map_err(AttachError::io(pid, "open the userfaultfd"))?;
        Ok(uffd)
    }

    fn empty(&self) -> Result<(), AttachError> {
        let Backing::Shared(file, offset) = &self.backing else { return Ok(()) };
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, punch, *offset, self.span.bytes)
            .map_err(|error| AttachError::io(self.process.number(), "empty the RAM file")(error.into()))
    }

    fn attachment(self, uffd: Userfaultfd) -> Result<Attachment, AttachError> {
        let Self { process, span, backing, mode } = self;
        let pagemap = process.file("pagemap")?;
        let memory = match backing {
            Backing::Shared(..) => None,
            Backing::Template(..) | Backing::Anonymous => Some(process.file("mem")?),
        };
        Ok(Attachment::new(process, span, backing, mode, AttachmentFiles { uffd, pagemap, memory }))
    }
}

/// Descriptors by which an attachment acts on its target.
pub(crate) struct AttachmentFiles {
    pub(crate) uffd: Userfaultfd,
    pub(crate) pagemap: File,
    pub(crate) memory: Option<File>,
}

/// Refuses a range that is not whole pages, or larger than any memory.
pub(crate) fn check_range(Span { start, bytes }: Span) -> Result<(), AttachError> {
    let whole = (start | bytes) % PAGE_SIZE as u64 == 0 && start.checked_add(bytes).is_some();
    if !whole || bytes == 0 || bytes > MAX_BYTES {
        return Err(AttachError::BadRange { start, bytes });
    }
    Ok(())
}

/// Finds the mapping of `file` in the target; adjacent mappings that continue each other in the file count as
/// one.
fn mapped(process: &Process, file: File) -> Result<(Span, Backing), AttachError> {
    let pid = process.number();
    let meta = file.metadata().map_err(AttachError::io(pid, "inspect the RAM file"))?;
    let mappings = process.mappings()?;
    let mut pieces = mappings.iter().filter(|m| m.device == meta.dev() && m.inode == meta.ino());
    let first = pieces.next().ok_or(AttachError::NoMapping { pid })?;
    let joins =
        |end: u64, next: &Mapping| next.start == end && next.offset == first.offset + (end - first.start);
    let end = pieces.fold(first.end, |end, next| if joins(end, next) { next.end } else { end });
    let span = Span { start: first.start, bytes: end - first.start };
    let backing = if first.shared { Backing::Shared } else { Backing::Template };
    Ok((span, backing(file, first.offset)))
}

/// Features of the handshake, from `/proc/PID/fdinfo/FD`: `API:` protocol, features, ioctls, in hexadecimal.
fn features(info: &str) -> u32 {
    let api = info.lines().find_map(|line| line.strip_prefix("API:"));
    let field = api.and_then(|api| api.trim().split(':').nth(1));
    field.and_then(|field| u32::from_str_radix(field, 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_without_a_handshake_is_not_taken_for_ours() {
        assert_eq!(features("pending:\t0\ntotal:\t0\nAPI:\taa:8000a020:1ff\n") & FEATURES, FEATURES);
        assert_eq!(features("pending:\t0\ntotal:\t0\nAPI:\taa:0:1ff\n"), 0);
        assert_eq!(features("garbage"), 0);
    }
}
