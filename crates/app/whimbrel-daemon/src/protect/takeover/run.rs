//! Takeover of a machine: records it, loads it, runs it, and protects it again.
//!
//! `standby::hosted` decides before whether to take over. Nobody is told of a takeover before the machine is
//! loaded and that is recorded; then it belongs to this host whatever happens here.

use crate::protect::standby::hosted::{HostedStandby, standby_error, unknown};
use crate::{
    core::error::DaemonError,
    protect::records::{ProtectionRecord, ProtectionSide},
};
use std::{
    sync::{MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_api::EventKind;
use whimbrel_core::{error_chain, lock};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::{clock::BootTime, lease::StandbyLeaseAction, standby::EpochReceiver};

/// Cause of a takeover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::protect) enum TakeoverCause {
    /// The primary yielded the machine.
    Yielded,
    /// The primary is silent, and the witness said yes.
    Silent,
    /// A person declared the primary dead.
    ByHand,
}

/// A takeover in progress.
pub(in crate::protect) struct Takeover<'s> {
    standby: &'s HostedStandby,
    cause: TakeoverCause,
    begun: Instant,
    loaded_ms: f64,
    /// The epoch that was loaded.
    from: Option<u64>,
    /// Held from the load until the machine runs.
    receiver: Option<MutexGuard<'s, Option<EpochReceiver>>>,
}

impl<'s> Takeover<'s> {
    pub(in crate::protect) fn new(standby: &'s HostedStandby, cause: TakeoverCause) -> Self {
        Self { standby, cause, begun: Instant::now(), loaded_ms: 0.0, from: None, receiver: None }
    }

    /// Loads the last epoch. If that fails, the copy stays for another attempt, or until the primary takes
    /// the machine back.
    pub(in crate::protect) fn load(&mut self) -> StandbyLeaseAction {
        let standby = self.standby;
        let mut held = lock(&standby.receiver);
        self.from = self.from.or(standby.committed.epoch().0);
        let loaded = held.as_mut().ok_or_else(|| unknown(standby.id));
        let loaded = loaded.and_then(|receiver| receiver.take_over().map_err(standby_error));
        self.loaded_ms = self.begun.elapsed().as_secs_f64() * 1e3;
        if let Err(error) = &loaded {
            let error = error as &dyn std::error::Error;
            tracing::error!(machine = %standby.name, from = %standby.primary, error, "cannot load a machine that is to run here; its copy is kept");
        }
        *lock(&standby.failure) = loaded.as_ref().err().map(|error| error_chain(error));
        let action = lock(&standby.lease).handle_loaded(loaded.is_ok(), BootTime::now());
        self.receiver = Some(held).filter(|_| loaded.is_ok());
        action
    }

    /// Records the takeover. Retried until it succeeds: nobody is told before.
    pub(in crate::protect) fn record(&self) -> Result<StandbyLeaseAction, DaemonError> {
        let standby = self.standby;
        let side = ProtectionSide::TookOver { from: standby.primary.clone(), at_ms: crate::now_ms() };
        let note = ProtectionRecord::new(standby.id, &standby.name, standby.handover, side);
        while let Err(error) = standby.host.protections.put_takeover_record(note.clone()) {
            let text = error_chain(&error);
            tracing::error!(machine = %standby.name, error = text, "cannot record a takeover; trying again");
            if !standby.host.sleep_unless_closing(Duration::from_secs(1)) {
                return Err(error);
            }
        }
        Ok(lock(&standby.lease).handle_recorded())
    }

    /// Runs the machine, which belongs to this host whatever happens from here on.
    pub(in crate::protect) fn run(mut self) -> Result<(), DaemonError> {
        let (standby, why) = (self.standby, self.cause.text());
        standby.host.arrivals().adopt_arrived(standby.handover);
        let run = standby.replay(self.from).and_then(|()| {
            let receiver = self.receiver.as_mut().and_then(|held| held.as_mut());
            receiver.ok_or_else(|| unknown(standby.id))?.run().map_err(standby_error)
        });
        standby.over.store(true, Ordering::SeqCst);
        standby.host.protections.remove_standby(standby.id);
        match &run {
            Ok(()) => {
                standby.host.counts.took_over();
                let from = format!("from {}: {why}", standby.primary);
                standby.host.events.add(EventKind::Takeover, &standby.name, &from);
                let (loaded_ms, total_ms) = (self.loaded_ms, self.begun.elapsed().as_secs_f64() * 1e3);
                tracing::warn!(machine = %standby.name, from = %standby.primary, why, loaded_ms, total_ms, "took a machine over");
                standby.protect_next();
            }
            Err(error) => {
                let error = error as &dyn std::error::Error;
                tracing::error!(machine = %standby.name, from = %standby.primary, why, error, "cannot run a machine that was taken over");
            }
        }
        run
    }
}

impl HostedStandby {
    /// Protects the machine again, if the primary had named the next standby. Retried until it succeeds or a
    /// user ends it.
    fn protect_next(&self) {
        let Some(settings) = self.next_settings.clone() else { return };
        let to = settings.request.host.clone();
        let begun = self.host.machines.get(&self.name).and_then(|machine| {
            self.host.start_protection(&machine, settings, HandoverId(rand::random()), true).map(drop)
        });
        match begun {
            Ok(()) => tracing::info!(machine = %self.name, standby = %to, "protecting the machine again"),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(machine = %self.name, error, "a machine that was taken over runs unprotected");
            }
        }
    }
}

impl TakeoverCause {
    fn text(self) -> &'static str {
        match self {
            Self::Yielded => "yielded by the primary",
            Self::Silent => "the primary is silent and its lease has run out",
            Self::ByHand => "a person declared the primary dead",
        }
    }
}
