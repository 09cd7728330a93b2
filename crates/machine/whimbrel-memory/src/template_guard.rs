//! Template guard: prevents a target from changing the memory template that it maps privately.
//!
//! A private mapping protects the file only from writes through the mapping. QEMU also has the file open for
//! writing, and for a balloon or a free page report it first punches a hole into the *file* and then drops
//! its own page (`ram_block_discard_range` in its physmem.c). So every descriptor of the template in the
//! target is replaced, under its number, by one of an empty memory file. The hole then has no effect, the
//! call succeeds, and the target's private page is released to the host; the template's page is visible
//! again.
//!
//! Sealing the template (`F_SEAL_FUTURE_WRITE`) would protect it too. But QEMU gives up when it cannot punch,
//! so no clone would ever release memory; and a process that did not create the file could not fill it any
//! more.

use crate::{AttachError, process::Process, syscall_injection};
use std::{fs::File, os::unix::fs::MetadataExt};

/// Replaces every descriptor of `template` in the target, which must not use one meanwhile.
pub(crate) fn replace_descriptors(process: &Process, template: &File) -> Result<(), AttachError> {
    let pid = process.number();
    let meta = template.metadata().map_err(AttachError::io(pid, "inspect the RAM file"))?;
    let held = process.descriptors_of(meta.dev(), meta.ino())?;
    if held.is_empty() {
        return Ok(());
    }
    syscall_injection::replace_with_empty(process, &held)
}
