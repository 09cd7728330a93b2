//! Attach to the memory of a running process: mapping, dirty sets, lazy pages.
//!
//! Knows nothing of QEMU: any process and range will do. An [`Attachment`] puts a userfaultfd into the target, its
//! [`GuestRam`] tells what was written and copies pages out, and a [`Pager`] brings pages when the target
//! touches them. A [`Throttle`] has threads of a process run for a part of the time. [`probe()`] says whether a machine can do all that.
//!
//! Invariants: whatever happens to us, the target runs on correctly, except that its threads wait while a page they
//! touched is not here and nobody serves it; a write is in exactly one dirty set after it, given back ones aside;
//! no reference into guest memory exists. All ptrace and userfaultfd of the project is here, and its `unsafe`
//! in `ptrace`, `uffd` and `pagemap`. Linux 6.7 or later.

mod arch;
mod attach;
mod cave;
mod error;
mod inject;
mod pagemap;
mod pager;
mod probe;
mod process;
mod ptrace;
mod ram;
mod residency;
mod source;
mod template;
mod throttle;
mod uffd;

pub use attach::{Attachment, Mode, RamTarget};
pub use error::AttachError;
pub use pager::{Pager, PagerEnd, PagerState, Prefetch, StartError};
pub use probe::{Finding, Need, probe};
pub use ram::GuestRam;
pub use source::PageSource;
pub use throttle::{Share, Throttle};
