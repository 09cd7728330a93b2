//! The running machine as the engines see it: its page arrays, a pause and its device state.
//!
//! The engines (capture, migrate, protect) know only these traits. `whimbrel-memory` and `whimbrel-block`
//! implement the arrays, `whimbrel-qemu` implements the machine, and test doubles implement all of them.

use std::{
    error::Error,
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet};

/// A flat array of pages that changes in place: guest memory or a disk.
///
/// Contract of the dirty set: a page written after `take_dirty` returned is in the next set; a page may be in
/// a set without having changed. A caller that could not use a set returns it with `put_back`. A read while
/// the machine runs may see a torn page; that page is in the next dirty set.
pub trait PageArray: Send {
    /// The array's name: `memory`, `disk0`, …
    fn name(&self) -> &str;

    /// Length in pages.
    fn page_count(&self) -> u64;

    /// Pages that may differ from the array's base (zeros for memory). A superset is allowed.
    fn populated(&mut self) -> Result<PageSet, PageError>;

    /// Pages written since the last call. Reading and clearing the set is one atomic step.
    fn take_dirty(&mut self) -> Result<PageSet, PageError>;

    /// Returns pages of `take_dirty` that were not used; the next set contains them again.
    fn put_back(&mut self, pages: &PageSet);

    /// Copies the pages of `run` into `out`, which is exactly `run.bytes()` long.
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError>;
}

/// An array whose bytes are grouped into other pages: the same bytes in the same order, perhaps more pages.
pub trait PageView: Send {
    /// Length in pages of the view.
    fn page_count(&self) -> u64;

    /// The pages of the view that share bytes with `pages` of the array.
    fn view_pages(&self, pages: &PageSet) -> PageSet;

    /// Copies the view's pages of `run`, as they are in the array now, into `out`, which is exactly
    /// `run.bytes()` long.
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError>;
}

/// A machine as the engines see it. Its page arrays are separate objects, so they can be read while it runs.
pub trait Machine: Send {
    /// An early copy of the device state, to be sent while the machine runs, as far as it is known. The final
    /// state may differ.
    fn early_device_state(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// Called right before a running machine is paused, for work that would otherwise prolong the pause.
    fn about_to_pause(&mut self) {}

    /// Like [`Machine::about_to_pause`], when [`Machine::pause_for_state`] follows at once.
    fn about_to_pause_for_state(&mut self) {
        self.about_to_pause();
    }

    /// Called when more rounds no longer shorten the downtime, `predicted` if paused now, so that the machine
    /// can be throttled. Returns whether more rounds may help. It is called again each time they do not, and
    /// returns true only a limited number of times.
    fn slow_down(&mut self, _predicted: Duration) -> bool {
        false
    }

    /// Stops the virtual CPUs and drains the disks. Afterwards no page changes. Idempotent.
    fn pause(&mut self) -> Result<(), MachineError>;

    /// Resumes the virtual CPUs. Idempotent.
    fn unpause(&mut self) -> Result<(), MachineError>;

    /// The device state as one blob, which the same kind of machine can load. Only while paused.
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError>;

    /// Like [`Machine::pause`], when the caller reads the device state next, so reading may start at once.
    /// [`Machine::unpause_with_state`] must follow.
    fn pause_for_state(&mut self) -> Result<(), MachineError> {
        self.pause()
    }

    /// Reads the device state and unpauses the machine as early as possible, even if reading fails.
    fn unpause_with_state(&mut self) -> UnpauseReport {
        state_then_unpause(self)
    }
}

/// Result of unpausing a machine.
#[derive(Debug)]
pub struct UnpauseReport {
    /// The device state during the pause. An error also if the machine could not be unpaused.
    pub device_state: Result<Vec<u8>, MachineError>,
    /// Time to read the device state.
    pub device_state_time: Duration,
    /// Time from then until the machine ran again.
    pub unpause_time: Duration,
}

/// Reads the device state of a paused machine, then unpauses it.
pub fn state_then_unpause<M: Machine + ?Sized>(machine: &mut M) -> UnpauseReport {
    let begun = Instant::now();
    let device_state = machine.device_state();
    let devices = begun.elapsed();
    let goes_on = machine.unpause();
    let device_state = device_state.and_then(|state| goes_on.map(|()| state));
    UnpauseReport { device_state, device_state_time: devices, unpause_time: begun.elapsed() - devices }
}

/// Failure of an operation on a page array.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} pages of {array}")]
pub struct PageError {
    /// The array's name.
    pub array: String,
    /// The operation: `scan`, `read`, …
    pub action: &'static str,
    /// Cause reported by the implementation.
    pub source: Box<dyn Error + Send + Sync>,
}

/// Failure of an operation on a machine.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the machine")]
pub struct MachineError {
    /// The operation: `pause`, `resume`, …
    pub action: &'static str,
    /// Cause reported by the implementation.
    pub source: Box<dyn Error + Send + Sync>,
}

impl PageError {
    /// An error of `array` during `action`.
    pub fn new(array: &str, action: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { array: array.to_owned(), action, source: source.into() }
    }
}

impl MachineError {
    /// An error during `action`.
    pub fn new(action: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { action, source: source.into() }
    }
}
