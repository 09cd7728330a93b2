//! Destination of captured pages, and the errors of a capture.

use crate::{CaptureSource, StopReason};
use std::error::Error;
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::{MachineError, PageError};

/// Neighbouring pages of one array with their current content.
#[derive(Debug)]
pub struct PageBatch<'a> {
    /// Index of the array among the dirty logs of the source.
    pub array: usize,
    /// Range of the pages.
    pub run: PageRun,
    /// Content of the pages, `run.bytes()` long.
    pub data: &'a [u8],
    /// Pages known to be written again already, which will be sent once more.
    pub hot: Option<&'a PageSet>,
}

/// Destination of pages. The latest content of a page wins.
pub trait Sink {
    /// Accepts a batch; may block while the sink is full.
    fn write(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError>;

    /// Limits the sink to this many bytes a second from now on; `None` removes the limit.
    fn limit_rate(&mut self, _rate: Option<u64>) {}

    /// Whether to send a page even if it was written again already, because its next version is cheap to send
    /// to a destination that has this one.
    fn wants_first_versions(&self) -> bool {
        false
    }

    /// Passes on the dirty pages just collected, by array. A sink that learns of writes in another way
    /// removes here what it does not need in a round.
    fn collected(&mut self, found: &mut [PageSet]) {
        let _ = found;
    }

    /// Announces the pages that are read next for [`Sink::write`].
    fn about_to_read(&mut self, array: usize, run: PageRun) {
        let _ = (array, run);
    }

    /// Whether a page of the array that was written again already may wait for a later round.
    fn hot_may_wait(&self, array: usize) -> bool {
        let _ = array;
        true
    }

    /// Called in the pause: `left` are the undelivered pages, `fresh` those of them found last. Pages that
    /// the sink removes from `left` are not delivered; the sink is responsible for them from now on.
    fn defer_pages(&mut self, left: &mut [PageSet], fresh: &[PageSet], why: StopReason) {
        let _ = (left, fresh, why);
    }

    /// Called between two batches while the machine runs, with the source of the capture. The sink may serve
    /// another consumer of the dirty logs then; it leaves the source as it was, and the machine running.
    fn between_batches(&mut self, source: &mut CaptureSource<'_>) -> Result<(), SinkError> {
        let _ = source;
        Ok(())
    }

    /// Waits until the sink has nothing left to do with the pages that it has accepted. Called before a pause
    /// after which the machine runs on.
    fn wait_idle(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    /// Sends what is buffered without waiting for its arrival.
    fn flush(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    /// Ends the round, once all its pages were accepted.
    fn end_round(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    /// Encoded bytes that the sink has sent so far.
    fn bytes_out(&self) -> u64;
}

/// Error of a sink that could not accept pages.
#[derive(Debug, thiserror::Error)]
#[error("cannot deliver pages to {destination}")]
pub struct SinkError {
    /// Name of the destination: the store, a host, …
    pub destination: String,
    /// Cause reported by the sink.
    pub source: Box<dyn Error + Send + Sync>,
}

/// Error of a capture. The machine is as it was before, and no dirty page is lost.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// Pages could not be read or scanned.
    #[error(transparent)]
    Pages(#[from] PageError),
    /// The machine could not be paused or described.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// Pages could not be delivered to the sink.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The machine writes faster than the sink takes pages.
    #[error("the machine writes faster than it can be copied: {pages} pages are left, too many for a pause")]
    TooMuchLeft {
        /// Pages that are left.
        pages: u64,
    },
    /// The caller cancelled the capture.
    #[error("cancelled")]
    Cancelled,
}
