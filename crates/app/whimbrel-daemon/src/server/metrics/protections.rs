//! Metrics of protections: whether a standby could take over, how far it is behind, and the epochs.

use crate::{daemon::Daemon, protect::sample::ProtectionSample};
use whimbrel_api::{ProtectRole, ProtectState};
use whimbrel_metrics::Page;

whimbrel_metrics::metrics! {
    /// Metrics of protections.
    pub(super) PROTECTION_METRICS:
    STATE = Gauge "whimbrel_machine_protection_state" ["machine", "role", "state"] "Always 1; the labels have the side of this host and the present state.";
    PROTECTED = Gauge "whimbrel_machine_protected" ["machine"] "Whether the standby has the complete machine, of machines that are to be protected.";
    LAG = Gauge "whimbrel_machine_protection_lag_seconds" ["machine", "role"] "Time since the standby got the last epoch.";
    LEASE = Gauge "whimbrel_machine_protection_lease_seconds" ["machine"] "Silence of the primary after which the standby may take over.";
    WITNESS = Gauge "whimbrel_machine_protection_witness_answers" ["machine"] "Whether the witness answers.";
    EPOCHS = Counter "whimbrel_machine_epochs_total" ["machine"] "Epochs that the standby has.";
    LATE = Counter "whimbrel_machine_epochs_late_total" ["machine"] "Epochs that began late because the one before was still being sent.";
    SENT = Counter "whimbrel_machine_epoch_sent_bytes_total" ["machine"] "Bytes that were sent to the standby.";
}

pub(super) fn write(page: &mut Page, host: &Daemon) {
    let samples = host.protections.samples();
    let mut state = page.family(&STATE);
    samples.iter().for_each(|one| state.sample(&[one.machine.as_str(), role(one), name(&one.state)], 1.0));
    let primaries: Vec<&ProtectionSample> =
        samples.iter().filter(|one| one.role == ProtectRole::Primary).collect();
    let mut protected = page.family(&PROTECTED);
    for one in &primaries {
        protected.sample(&[one.machine.as_str()], f64::from(one.state == ProtectState::Protected));
    }
    let mut lag = page.family(&LAG);
    samples.iter().for_each(|one| lag.sample(&[one.machine.as_str(), role(one)], one.lag.as_secs_f64()));
    type Number = fn(&ProtectionSample) -> Option<f64>;
    let numbers: [(_, Number); 5] = [
        (&LEASE, |one| one.lease.map(|lease| lease.as_secs_f64())),
        (&WITNESS, |one| one.witness_answers.map(f64::from)),
        (&EPOCHS, |one| one.totals.map(|totals| totals.epochs as f64)),
        (&LATE, |one| one.totals.map(|totals| totals.late as f64)),
        (&SENT, |one| one.totals.map(|totals| totals.sent_bytes as f64)),
    ];
    for (metric, number) in numbers {
        let mut family = page.family(metric);
        for one in &primaries {
            if let Some(value) = number(one) {
                family.sample(&[one.machine.as_str()], value);
            }
        }
    }
}

fn role(one: &ProtectionSample) -> &'static str {
    match one.role {
        ProtectRole::Primary => "primary",
        ProtectRole::Standby => "standby",
    }
}

fn name(state: &ProtectState) -> &'static str {
    match state {
        ProtectState::Seeding => "seeding",
        ProtectState::Protected => "protected",
        ProtectState::Unprotected { .. } => "unprotected",
        ProtectState::Fenced { .. } => "fenced",
    }
}
