//! Epoch buffer of the standby: the pages of the epoch in flight, beside the machine that they will change.
//!
//! The first part of the content is in memory, the rest in a file. Nothing is written to the machine before
//! the epoch is complete, so the epoch before stays whole. Fails if the file cannot be written, or if an
//! epoch has more pages than are accepted.

use super::{EpochSnapshots, devices_page};
use crate::{
    error::{BoxError, StandbyError},
    protocol::{DEVICES, EPOCH_BYTES_MAX, EPOCH_PAGES_MAX},
};
use std::{collections::BTreeMap, fs::File, os::unix::fs::FileExt};
use whimbrel_core::{PAGE_SIZE, PageRun};
use whimbrel_migrate::{protocol::DEVICE_STATE_MAX, target::IncomingMachine};

/// Largest content that is held in memory.
const MEMORY_MAX: usize = EPOCH_BYTES_MAX + DEVICE_STATE_MAX;
/// Most pages of an epoch. Zero pages count too, for each has an entry.
const PAGES_MAX: usize = EPOCH_PAGES_MAX + DEVICE_STATE_MAX / PAGE_SIZE;

/// Buffered pages of the epoch in flight.
pub(super) struct BufferedEpoch {
    /// Offset of each page in the content, none for a zero page.
    pages: BTreeMap<(u32, u64), Option<usize>>,
    memory: Vec<u8>,
    memory_max: usize,
    /// Content beyond the part in memory.
    file: Option<File>,
    len: usize,
}

impl Default for BufferedEpoch {
    fn default() -> Self {
        Self::with_memory(MEMORY_MAX)
    }
}

impl BufferedEpoch {
    fn with_memory(memory_max: usize) -> Self {
        Self { pages: BTreeMap::new(), memory: Vec::new(), memory_max, file: None, len: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.pages.clear();
        self.memory.clear();
        // Memory of a large epoch is freed, and so is the file.
        self.memory.shrink_to(32 << 20);
        (self.file, self.len) = (None, 0);
    }

    pub(super) fn contains(&self, key: (u32, u64)) -> bool {
        self.pages.contains_key(&key)
    }

    /// Stores a page, none for one of zeros. `spill` makes the file when memory is used up.
    pub(super) fn insert(
        &mut self,
        key: (u32, u64),
        content: Option<&[u8]>,
        spill: &dyn Fn() -> Result<File, BoxError>,
    ) -> Result<(), StandbyError> {
        let before = self.pages.get(&key).copied();
        if before.is_none() && self.pages.len() >= PAGES_MAX {
            return Err(StandbyError::Invalid { what: "more pages than an epoch may have" });
        }
        let Some(content) = content else {
            self.pages.insert(key, None);
            return Ok(());
        };
        let at = before.flatten().unwrap_or(self.len);
        match at.checked_sub(self.memory_max) {
            None => {
                let len = self.memory.len();
                match at < len {
                    true => self.memory[at..][..PAGE_SIZE].copy_from_slice(content),
                    false => self.memory.extend_from_slice(content),
                }
            }
            Some(offset) => {
                if self.file.is_none() {
                    self.file = Some(spill().map_err(StandbyError::Write)?);
                }
                let file = self.file.as_ref().expect("made above");
                file.write_all_at(content, offset as u64)
                    .map_err(|error| StandbyError::Write(error.into()))?;
            }
        }
        self.len = self.len.max(at + PAGE_SIZE);
        self.pages.insert(key, Some(at));
        Ok(())
    }

    /// Reads a page. Returns whether it is buffered.
    pub(super) fn read(&self, key: (u32, u64), out: &mut [u8]) -> Result<bool, StandbyError> {
        let Some(at) = self.pages.get(&key) else { return Ok(false) };
        self.content(*at, out).map_err(StandbyError::Write)?;
        Ok(true)
    }

    fn content(&self, at: Option<usize>, out: &mut [u8]) -> Result<(), BoxError> {
        match (at, &self.file) {
            (None, _) => out.fill(0),
            (Some(at), Some(file)) if at >= self.memory_max => {
                file.read_exact_at(out, (at - self.memory_max) as u64)?;
            }
            (Some(at), _) => out.copy_from_slice(&self.memory[at..][..PAGE_SIZE]),
        }
        Ok(())
    }

    /// Assembles the device state of the epoch; pages that were not sent are as in `before`.
    pub(super) fn devices(&self, len: usize, before: &[u8]) -> Result<Vec<u8>, StandbyError> {
        let mut state = vec![0; len.next_multiple_of(PAGE_SIZE)];
        for (page, out) in (0..).zip(state.chunks_exact_mut(PAGE_SIZE)) {
            if self.read((DEVICES, page), out)? {
                continue;
            }
            if page as usize * PAGE_SIZE >= before.len() {
                return Err(StandbyError::Invalid { what: "a device state with missing pages" });
            }
            devices_page(before, page, out);
        }
        state.truncate(len);
        Ok(state)
    }

    /// Writes all pages to the machine.
    pub(super) fn apply(
        &self,
        machine: &mut dyn IncomingMachine,
        mut snapshots: Option<&mut EpochSnapshots>,
    ) -> Result<(), BoxError> {
        let mut content = vec![0; PAGE_SIZE];
        for ((array, page), at) in self.pages.iter().filter(|((array, _), _)| *array != DEVICES) {
            snapshots.iter_mut().for_each(|snapshots| snapshots.about_to_write(machine, *array, *page));
            let run = PageRun::new(*page, 1);
            match at {
                Some(_) => {
                    self.content(*at, &mut content)?;
                    machine.write(*array as usize, run, &content)?;
                }
                None => machine.zero(*array as usize, run)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_memory_does_not_hold_is_in_a_file_and_a_page_that_comes_again_takes_no_more_room() {
        let mut buffer = BufferedEpoch::with_memory(2 * PAGE_SIZE);
        let files = std::cell::Cell::new(0);
        let spill = || -> Result<File, BoxError> {
            files.set(files.get() + 1);
            Ok(tempfile::tempfile()?)
        };
        for round in 0..3u8 {
            for page in 0..5u64 {
                let content = vec![round * 10 + page as u8 + 1; PAGE_SIZE];
                buffer.insert((1, page), Some(&content), &spill).unwrap();
            }
        }
        buffer.insert((1, 4), None, &spill).unwrap();
        let mut out = vec![9; PAGE_SIZE];
        for page in 0..5u64 {
            assert!(buffer.read((1, page), &mut out).unwrap());
            let expected = if page == 4 { 0 } else { 21 + page as u8 };
            assert!(out.iter().all(|byte| *byte == expected), "page {page}");
        }
        assert!(!buffer.read((0, 1), &mut out).unwrap());
        assert_eq!((files.get(), buffer.len), (1, 5 * PAGE_SIZE));
        let none = || -> Result<File, BoxError> { Err("no room".into()) };
        buffer.clear();
        buffer.insert((0, 0), Some(&out), &none).unwrap();
        buffer.insert((0, 1), Some(&out), &none).unwrap();
        assert!(matches!(buffer.insert((0, 2), Some(&out), &none), Err(StandbyError::Write(_))));
    }
}
