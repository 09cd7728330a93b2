//! What an engine needs of a running machine: its page arrays, a pause, a small blob of device state.
//!
//! The engines (capture, migrate, protect) know only these traits; `whimbrel-memory` and `whimbrel-block`
//! implement the arrays, `whimbrel-qemu` the machine, and the tests' fakes all of it.

use std::{
    error::Error,
    time::{Duration, Instant},
};
use whimbrel_core::{PageRun, PageSet};

/// A flat array of pages that changes in place: guest memory or a disk.
///
/// Contract of the dirty set: a page written after `take_dirty` returned is in the next one; a page may be in
/// it without having changed. A caller that took a set and could not use it gives it back with `put_back`.
/// Reading while the machine runs may see a torn page; such a page is then in the next dirty set.
pub trait PageArray: Send {
    /// `memory`, `disk0`, …
    fn name(&self) -> &str;

    /// Length in pages.
    fn page_count(&self) -> u64;

    /// Pages that may hold something else than the array's base (zeros for memory). A superset is fine.
    fn populated(&mut self) -> Result<PageSet, PageError>;

    /// Pages written since the last call, re-armed atomically.
    fn take_dirty(&mut self) -> Result<PageSet, PageError>;

    /// Pages taken by `take_dirty` and not used: they will be in the next set again.
    fn put_back(&mut self, pages: &PageSet);

    /// Copies the pages of `run` into `out`, which is exactly `run.bytes()` long.
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError>;
}

/// An array as somebody sees it who cuts it into other pages: the same bytes in the same order, other pages,
/// maybe more of them.
pub trait PageView: Send {
    /// Length in pages of the view.
    fn page_count(&self) -> u64;

    /// The pages of the view that share bytes with the pages `pages` of the array.
    fn of_array(&self, pages: &PageSet) -> PageSet;

    /// Copies the view's pages of `run`, as they are in the array now, into `out`, which is exactly
    /// `run.bytes()` long.
    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError>;
}

/// A machine as the engines see it. Its arrays are handed out apart, so that they can be read while it runs.
pub trait Machine: Send {
    /// How its device state will begin, as far as that is known while the machine runs: to be sent ahead.
    /// What really comes may differ.
    fn device_state_ahead(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// Called while the machine still runs, right before it is paused: a chance to do ahead what would
    /// otherwise prolong the pause.
    fn about_to_pause(&mut self) {}

    /// Rounds of copying no longer help, and paused now it would stand still for `predicted`: a chance to
    /// have it write less. Whether rounds may help again; asked each time they do not, and says yes only so
    /// many times.
    fn slow_down(&mut self, _predicted: Duration) -> bool {
        false
    }

    /// Stops the virtual CPUs and drains its disks. Afterwards no page changes. Idempotent.
    fn pause(&mut self) -> Result<(), MachineError>;

    /// Lets the virtual CPUs run. Idempotent.
    fn unpause(&mut self) -> Result<(), MachineError>;

    /// The state of CPUs and devices, as one blob that the same kind of machine loads. Only while paused.
    fn device_state(&mut self) -> Result<Vec<u8>, MachineError>;

    /// As [`Machine::pause`], by someone who will take its state: a chance to begin with that at once.
    /// [`Machine::unpause_with_state`] is what comes next.
    fn pause_for_state(&mut self) -> Result<(), MachineError> {
        self.pause()
    }

    /// Takes the state and lets the machine go on, as soon as that may be. It is let go on also if its state
    /// cannot be taken.
    fn unpause_with_state(&mut self) -> UnpauseReport {
        state_then_unpause(self)
    }
}

/// How a machine went on.
#[derive(Debug)]
pub struct UnpauseReport {
    /// What it was when it stood. An error also if it does not go on.
    pub device_state: Result<Vec<u8>, MachineError>,
    /// How long it stood still for that.
    pub devices: Duration,
    /// How long until it went on then.
    pub go_on: Duration,
}

/// Takes the state of a machine that stands, then lets it go on: one after the other.
pub fn state_then_unpause<M: Machine + ?Sized>(machine: &mut M) -> UnpauseReport {
    let begun = Instant::now();
    let device_state = machine.device_state();
    let devices = begun.elapsed();
    let goes_on = machine.unpause();
    let device_state = device_state.and_then(|state| goes_on.map(|()| state));
    UnpauseReport { device_state, devices, go_on: begun.elapsed() - devices }
}

/// A page array could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} pages of {array}")]
pub struct PageError {
    /// The array's name.
    pub array: String,
    /// `scan`, `read`, …
    pub action: &'static str,
    /// Why.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}

/// A machine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the machine")]
pub struct MachineError {
    /// `pause`, `resume`, …
    pub action: &'static str,
    /// Why.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}

impl PageError {
    /// An error of `array` while it did `action`.
    pub fn new(array: &str, action: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { array: array.to_owned(), action, source: source.into() }
    }
}

impl MachineError {
    /// An error while doing `action`.
    pub fn new(action: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { action, source: source.into() }
    }
}
