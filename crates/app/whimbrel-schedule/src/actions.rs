//! The host, as schedules see it.

use crate::error::HostFailure;
use std::collections::BTreeMap;
use whimbrel_api::ScheduledWork;
use whimbrel_core::{CapsuleId, HostName, MachineName, RefName};

/// What schedules ask of their host.
pub trait ScheduledActions: Send + Sync {
    /// Time in milliseconds since 1970.
    fn now_ms(&self) -> u64;
    /// Name of this host.
    fn host(&self) -> HostName;
    /// The newest capsule of a machine.
    ///
    /// # Errors
    /// If it has none, or that cannot be read.
    fn newest(&self, machine: &MachineName) -> Result<CapsuleId, HostFailure>;
    /// Does the work and waits for its end. A checkpoint gets the tag; so does the copy of `copied`, which is
    /// chosen already for a push with a rule. Returns what was done.
    ///
    /// # Errors
    /// If it was not done, or not known to be.
    fn perform(
        &self,
        work: &ScheduledWork,
        tag: &RefName,
        copied: Option<CapsuleId>,
    ) -> Result<String, HostFailure>;
    /// All refs.
    ///
    /// # Errors
    /// If one is damaged.
    fn refs(&self) -> Result<BTreeMap<RefName, CapsuleId>, HostFailure>;
    /// The refs that can be read, to be shown.
    fn readable_refs(&self) -> BTreeMap<RefName, CapsuleId> {
        self.refs().unwrap_or_default()
    }
    /// Removes a ref if it still names the capsule.
    ///
    /// # Errors
    /// If it is there still.
    fn remove(&self, name: &RefName, capsule: CapsuleId) -> Result<(), HostFailure>;
    /// Says to users how a run of a schedule has ended.
    fn report_end(&self, schedule: &MachineName, outcome: &str);
}
