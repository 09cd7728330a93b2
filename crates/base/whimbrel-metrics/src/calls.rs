//! Durations of calls by name and outcome.

use crate::{Family, Histogram, bounds};
use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Durations of the calls that a daemon answers. Names and outcomes are constants of the program, so their
/// number is bounded whatever callers send.
#[derive(Debug, Default)]
pub struct CallDurations(Mutex<BTreeMap<(&'static str, &'static str), Histogram>>);

impl CallDurations {
    /// Counts a call.
    pub fn observe(&self, call: &'static str, outcome: &'static str, took: Duration) {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        calls.entry((call, outcome)).or_insert_with(|| Histogram::new(bounds::CALL)).observe_time(took);
    }

    /// Writes the calls so far; the labels of the metric are the call and the outcome.
    pub fn write(&self, mut family: Family<'_>) {
        let calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for ((call, outcome), durations) in &*calls {
            family.histogram(&[call, outcome], durations);
        }
    }
}
