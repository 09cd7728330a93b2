//! Parts of an attachment: its descriptors and the little that they do not say, for another process.
//!
//! A userfaultfd acts on the address space in which it was made, and a page map and a memory file on that
//! which they were opened for, from whichever process. So one that gets them needs no right to trace the
//! target, and need not be related to it. The marks of written pages are the kernel's and do not move.
//!
//! Both processes have the descriptors then. Only one may use the attachment: a page that one of them takes
//! as written is not reported to the other.

use crate::{
    AttachError, Attachment, Mode,
    attachment::{AttachmentFiles, Backing, check_range},
    pagemap,
    process::Process,
    userfaultfd::{Span, Userfaultfd},
};
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::PoisonError,
};
use whimbrel_core::{PageSet, lock};

/// Descriptors of an attachment, good in any process.
#[derive(Debug)]
pub struct AttachmentDescriptors {
    /// Descriptor of the target process.
    pub pidfd: OwnedFd,
    /// Userfaultfd with which the memory is registered.
    pub userfaultfd: OwnedFd,
    /// Page map of the target.
    pub pagemap: OwnedFd,
    /// RAM file; none for anonymous memory.
    pub ram_file: Option<OwnedFd>,
    /// Memory of the target by its addresses; none if the RAM file has all pages.
    pub memory: Option<OwnedFd>,
}

/// State of an attachment that its descriptors do not say, in plain types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentState {
    /// Process id of the target.
    pub pid: i32,
    /// Address of the memory in the target.
    pub start: u64,
    /// Length of the memory.
    pub bytes: u64,
    /// Where the pages are.
    pub sharing: RamSharing,
    /// Purpose of the attachment.
    pub mode: Mode,
}

/// Place of the target's pages; an offset is that of the memory in the RAM file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RamSharing {
    /// The file has all of them.
    Shared {
        /// Offset in the file.
        offset: u64,
    },
    /// The file has those that the target has not written.
    Template {
        /// Offset in the file.
        offset: u64,
    },
    /// Only the target has them.
    Anonymous,
}

impl Attachment {
    /// Copies of the descriptors, for another process. This attachment stays usable.
    pub fn descriptors(&self) -> io::Result<AttachmentDescriptors> {
        let inner = &self.inner;
        let copy = |file: Option<&File>| file.map(|file| file.as_fd().try_clone_to_owned()).transpose();
        let ram_file = match &inner.backing {
            Backing::Shared(file, _) | Backing::Template(file, _) => Some(file),
            Backing::Anonymous => None,
        };
        Ok(AttachmentDescriptors {
            pidfd: inner.process.pidfd().try_clone_to_owned()?,
            userfaultfd: inner.uffd.as_fd().try_clone_to_owned()?,
            pagemap: inner.pagemap.as_fd().try_clone_to_owned()?,
            ram_file: copy(ram_file)?,
            memory: copy(inner.memory.as_ref())?,
        })
    }

    /// State that goes with the descriptors.
    pub fn state(&self) -> AttachmentState {
        let inner = &self.inner;
        let sharing = match &inner.backing {
            Backing::Shared(_, offset) => RamSharing::Shared { offset: *offset },
            Backing::Template(_, offset) => RamSharing::Template { offset: *offset },
            Backing::Anonymous => RamSharing::Anonymous,
        };
        let Span { start, bytes } = inner.span;
        AttachmentState { pid: inner.process.number(), start, bytes, sharing, mode: inner.mode }
    }

    /// Attachment of which another process has passed the parts.
    ///
    /// # Errors
    /// If the target has ended, a descriptor is missing, or the memory is not registered with this
    /// userfaultfd.
    pub fn from_parts(
        descriptors: AttachmentDescriptors,
        state: &AttachmentState,
    ) -> Result<Self, AttachError> {
        let AttachmentDescriptors { pidfd, userfaultfd, pagemap, ram_file, memory } = descriptors;
        let &AttachmentState { pid, start, bytes, sharing, mode } = state;
        let span = Span { start, bytes };
        check_range(span)?;
        let process = Process::passed(pid, pidfd)?;
        let lacks = || AttachError::io(pid, "use the descriptors")(io::ErrorKind::InvalidInput.into());
        let file = ram_file.map(File::from).ok_or_else(lacks);
        let backing = match sharing {
            RamSharing::Shared { offset } => Backing::Shared(file?, offset),
            RamSharing::Template { offset } => Backing::Template(file?, offset),
            RamSharing::Anonymous => Backing::Anonymous,
        };
        if memory.is_none() && !matches!(backing, Backing::Shared(..)) {
            return Err(lacks());
        }
        let opened = AttachmentFiles {
            uffd: Userfaultfd::new(userfaultfd),
            pagemap: pagemap.into(),
            memory: memory.map(File::from),
        };
        let inspected = pagemap::is_tracked(&opened.pagemap, span);
        if !inspected.map_err(AttachError::io(pid, "inspect the memory"))? {
            return Err(AttachError::NothingToAdopt { pid });
        }
        // Without effect on memory that is registered with this descriptor; refused if it is with another.
        opened
            .uffd
            .register(span, mode == Mode::Lazy)
            .map_err(AttachError::io(pid, "find the registration"))?;
        Ok(Self::new(process, span, backing, mode, opened))
    }

    /// Pages of lazy memory that are or were present. Exact once its pager has stopped; none before the
    /// first.
    pub fn filled(&self) -> Option<PageSet> {
        let lazy = self.inner.lazy.read().unwrap_or_else(PoisonError::into_inner);
        lazy.as_ref().map(|lazy| lazy.filled()).or_else(|| lock(&self.inner.filled_before).clone())
    }

    /// Tells the next pager which pages were present under the last one, as [`Attachment::filled`] gave
    /// them. False, and without effect, if they are those of another memory.
    #[must_use]
    pub fn set_filled(&self, filled: PageSet) -> bool {
        let fits = filled.len() == self.page_count();
        if fits {
            *lock(&self.inner.filled_before) = Some(filled);
        }
        fits
    }
}
