//! Record of a handover for tests.

use whimbrel_migrate::{HandoverRecord, handover::AbortedAction, source::BoxError};

/// Record whose commit is a closure; notes what else is done with it.
pub(crate) struct Record<F> {
    pub(crate) commit: F,
    /// Whether the machine's own record can be written again.
    pub(crate) reverts: bool,
    pub(crate) aborted: Vec<AbortedAction>,
}

impl<F: FnMut() -> Result<(), BoxError> + Send> Record<F> {
    pub(crate) fn new(commit: F) -> Self {
        Self { commit, reverts: true, aborted: Vec::new() }
    }
}

impl<F: FnMut() -> Result<(), BoxError> + Send> HandoverRecord for Record<F> {
    fn begin(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    fn commit(&mut self) -> Result<(), BoxError> {
        (self.commit)()
    }

    fn revert(&mut self) -> Result<(), BoxError> {
        if self.reverts { Ok(()) } else { Err("the disk is full".into()) }
    }

    fn aborted(&mut self, action: AbortedAction) {
        self.aborted.push(action);
    }
}
