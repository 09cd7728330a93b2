//! Where captured pages go, and how a capture fails.

use crate::StopReason;
use std::error::Error;
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::{MachineError, PageError};

/// Neighbouring pages of one array with their content as of just now.
#[derive(Debug)]
pub struct PageBatch<'a> {
    /// Which array, as an index into the subject's ledgers.
    pub array: usize,
    /// Which pages.
    pub run: PageRun,
    /// Their content, `run.bytes()` long.
    pub data: &'a [u8],
    /// Pages known to be written again already: worth remembering, they will come once more.
    pub hot: Option<&'a PageSet>,
}

/// Takes pages. The latest content given for a page wins.
pub trait Sink {
    /// Takes a batch; may block while the sink is full.
    fn pages(&mut self, batch: PageBatch<'_>) -> Result<(), SinkError>;

    /// From now on at most so many bytes a second are to leave; none is as fast as they can.
    fn limit_rate(&mut self, _rate: Option<u64>) {}

    /// Whether a page that is written again already is worth taking all the same, because its next version is
    /// cheap to deliver to whom has this one.
    fn wants_first_versions(&self) -> bool {
        false
    }

    /// What was found written since the last look, by array. A sink that hears of writes otherwise says here
    /// what a round must still have of them.
    fn collected(&mut self, found: &mut [PageSet]) {
        let _ = found;
    }

    /// These pages are read next, for [`Sink::pages`].
    fn about_to_read(&mut self, array: usize, run: PageRun) {
        let _ = (array, run);
    }

    /// Whether a page of the array that is written again already may be left for a later round.
    fn hot_may_wait(&self, array: usize) -> bool {
        let _ = array;
        true
    }

    /// The machine is paused, and `left` is what was not delivered, of it `fresh` written last: what the sink
    /// takes out of `left` is not delivered, and is its business from now on.
    fn divide(&mut self, left: &mut [PageSet], fresh: &[PageSet], why: StopReason) {
        let _ = (left, fresh, why);
    }

    /// Lets go of what was only gathered so far, without waiting for it to arrive.
    fn push_out(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    /// The round is over.
    fn end_round(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    /// Bytes that have left towards the sink's destination so far, encoded.
    fn bytes_out(&self) -> u64;
}

/// A sink could not take what it was given.
#[derive(Debug, thiserror::Error)]
#[error("cannot deliver pages to {destination}")]
pub struct SinkError {
    /// The store, a host, …
    pub destination: String,
    /// Why.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}

/// Why a capture failed. The machine is as it was before, and no dirty page is forgotten.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// Pages could not be read or scanned.
    #[error(transparent)]
    Pages(#[from] PageError),
    /// The machine could not be paused or described.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The destination failed.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}
