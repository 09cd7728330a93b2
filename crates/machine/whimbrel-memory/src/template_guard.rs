//! Keeps a target from changing the template that it maps privately.
//!
//! A private mapping protects the file from writes through the mapping only. QEMU also keeps the file open
//! for writing, and answers a balloon or a free page report by punching a hole into the *file* first and
//! dropping its own page second (`ram_block_discard_range` in its physmem.c). So every descriptor of the
//! template that the target holds is replaced, under its number, by one of an empty memory file. The hole
//! then goes nowhere, the call succeeds, and the page that was the target's own goes back to the host; the
//! template shows again in its place.
//!
//! Sealing the template (`F_SEAL_FUTURE_WRITE`) would protect it too. But QEMU gives up when it cannot punch,
//! so no clone would ever give memory back; and a process that did not make the file could not fill it any
//! more.

use crate::{AttachError, process::Process, syscall_injection};
use std::{fs::File, os::unix::fs::MetadataExt};

/// Takes from the target every descriptor of `template` that it holds. It must not use one meanwhile.
pub(crate) fn take_from(process: &Process, template: &File) -> Result<(), AttachError> {
    let pid = process.number();
    let meta = template.metadata().map_err(AttachError::io(pid, "look at the RAM file"))?;
    let held = process.descriptors_of(meta.dev(), meta.ino())?;
    if held.is_empty() {
        return Ok(());
    }
    syscall_injection::replace_with_empty(process, &held)
}
