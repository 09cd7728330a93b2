//! Memory of a running process: attachment, dirty sets, lazy pages.
//!
//! The crate knows nothing of QEMU: any process and range will do. An [`Attachment`] puts a userfaultfd
//! into the target, its [`GuestRam`] reports written pages and copies pages, and a [`Pager`] fills pages
//! when the target touches them. [`Attachment::descriptors`] passes an attachment to another process. A
//! [`Throttle`] lets threads of a process run for a part of the time. [`probe()`] reports whether the host
//! supports all that.
//!
//! Invariants: the target continues correctly if this process fails at any time, except that its threads wait
//! for absent pages while there is no pager. A write is in exactly one dirty set after it, except sets that
//! were put back. There is no reference into guest memory. All ptrace and userfaultfd code of the project is
//! here, with its `unsafe` in `ptrace`, `userfaultfd`, `pagemap` and `page_cache`. Linux 6.7 or later.

mod arch;
mod attachment;
mod code_cave;
mod cpu_throttle;
mod error;
mod guest_ram;
mod page_cache;
mod page_source;
mod pagemap;
mod pager;
mod parts;
mod process;
mod ptrace;
mod requirements;
mod residency;
mod scan_order;
mod syscall_injection;
mod template_guard;
mod tracked_blocks;
mod userfaultfd;

pub use attachment::{Attachment, Mode, RamTarget};
pub use cpu_throttle::{CpuShare, Throttle};
pub use error::AttachError;
pub use guest_ram::GuestRam;
pub use page_source::PageSource;
pub use pager::{PAGE_WAITS, Pager, PagerEnd, PagerState, Prefetch, StartError};
pub use parts::{AttachmentDescriptors, AttachmentState, RamSharing};
pub use requirements::{Finding, Requirement, probe};
pub use scan_order::ScanOrder;
