//! Attach to the memory of a running process: mapping, dirty sets, lazy pages.
//!
//! Knows nothing of QEMU: any process and range will do. An [`Attachment`] puts a userfaultfd into the
//! target, its [`GuestRam`] tells what was written and copies pages out, and a [`Pager`] brings pages when
//! the target touches them. A [`Throttle`] has threads of a process run for a part of the time. [`probe()`]
//! says whether a machine can do all that.
//!
//! Invariants: whatever happens to us, the target runs on correctly, except that its threads wait while a
//! page they touched is not here and nobody serves it; a write is in exactly one dirty set after it, given
//! back ones aside; no reference into guest memory exists. All ptrace and userfaultfd of the project is here,
//! and its `unsafe` in `ptrace`, `uffd` and `pagemap`. Linux 6.7 or later.

mod arch;
mod attachment;
mod code_cave;
mod cpu_throttle;
mod error;
mod guest_ram;
mod page_source;
mod pagemap;
mod pager;
mod process;
mod ptrace;
mod requirements;
mod residency;
mod syscall_injection;
mod template_guard;
mod userfaultfd;

pub use attachment::{Attachment, Mode, RamTarget};
pub use cpu_throttle::{CpuShare, Throttle};
pub use error::AttachError;
pub use guest_ram::GuestRam;
pub use page_source::PageSource;
pub use pager::{Pager, PagerEnd, PagerState, Prefetch, StartError};
pub use requirements::{Finding, Requirement, probe};
