//! Samples of protections for metrics, read without the percentiles that users get.

use super::{Protections, primary::handle::EpochTotals};
use std::time::Duration;
use whimbrel_api::{ProtectRole, ProtectState};
use whimbrel_core::{MachineName, lock};

/// One protection, as one of its sides sees it.
pub(crate) struct ProtectionSample {
    pub(crate) machine: MachineName,
    pub(crate) role: ProtectRole,
    pub(crate) state: ProtectState,
    /// Time since the standby got the last epoch.
    pub(crate) lag: Duration,
    /// Lease of the protection, on the primary.
    pub(crate) lease: Option<Duration>,
    pub(crate) witness_answers: Option<bool>,
    /// Totals of its epochs, on the primary.
    pub(crate) totals: Option<EpochTotals>,
}

impl Protections {
    /// All protections of machines of this host, and all standbys on it.
    pub(crate) fn samples(&self) -> Vec<ProtectionSample> {
        let handles: Vec<_> = lock(&self.handles).values().cloned().collect();
        let standbys: Vec<_> = lock(&self.standbys).values().cloned().collect();
        let primaries = handles.iter().map(|handle| {
            let (state, lag, witness_answers) = handle.standing();
            ProtectionSample {
                machine: handle.name.clone(),
                role: ProtectRole::Primary,
                state,
                lag,
                lease: Some(handle.settings().term),
                witness_answers,
                totals: Some(handle.totals()),
            }
        });
        let standbys = standbys.iter().map(|standby| {
            let info = standby.info();
            ProtectionSample {
                machine: standby.name().clone(),
                role: info.role,
                state: info.state,
                lag: Duration::from_millis(info.lag_ms),
                lease: None,
                witness_answers: info.witness_answers,
                totals: None,
            }
        });
        let mut all: Vec<_> = primaries.chain(standbys).collect();
        all.sort_by(|a, b| a.machine.cmp(&b.machine));
        all
    }
}
