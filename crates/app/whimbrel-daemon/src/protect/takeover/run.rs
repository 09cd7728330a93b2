//! Takeover of a machine: records it, loads it, runs it, and protects it again.
//!
//! `standby::hosted` decides before whether to take over. A machine that was *taken* over belongs to this
//! host whatever happens here; one that was *yielded* and does not load is returned.

use crate::protect::standby::hosted::{HostedStandby, standby_error, unknown};
use crate::{
    core::error::DaemonError,
    protect::records::{ProtectionRecord, ProtectionSide},
};
use std::{
    sync::{MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_core::{error_chain, lock};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::standby::EpochReceiver;

/// Cause of a takeover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::protect) enum TakeoverCause {
    /// The primary yielded the machine, and still has it.
    Yielded,
    /// The primary is silent, and the witness said yes.
    Silent,
    /// A person declared the primary dead.
    ByHand,
}

impl HostedStandby {
    /// Takes the machine over: records it first, runs it second. A yielded machine that does not load is
    /// returned, since the primary still has all of it.
    pub(in crate::protect) fn take_over(&self, why: TakeoverCause) -> Result<(), DaemonError> {
        let begun = Instant::now();
        let mut held = lock(&self.receiver);
        let from = self.committed.epoch().0;
        let receiver = held.as_mut().ok_or_else(|| unknown(self.id))?;
        if why == TakeoverCause::Yielded
            && let Err(error) = self.record_loading()
        {
            self.return_machine(held, &error);
            return Ok(());
        }
        let (loaded, noted) = std::thread::scope(|scope| {
            // Loading has no visible effect, so the takeover is recorded meanwhile.
            let note = (why != TakeoverCause::Yielded).then(|| scope.spawn(|| self.record_takeover()));
            let loaded = receiver.take_over();
            let noted = note.map(|note| note.join().unwrap_or(Err(DaemonError::Panicked)));
            (loaded, noted)
        });
        let loaded_ms = begun.elapsed().as_secs_f64() * 1e3;
        if let (Err(error), TakeoverCause::Yielded) = (&loaded, why) {
            self.return_machine(held, error);
            return Ok(());
        }
        let noted = noted.unwrap_or_else(|| self.record_takeover());
        self.host.arrivals().adopt_arrived(self.handover);
        let run = noted
            .and_then(|()| loaded.map_err(standby_error))
            .and_then(|()| self.replay(from))
            .and_then(|()| receiver.run().map_err(standby_error));
        self.over.store(true, Ordering::SeqCst);
        self.host.protections.remove_standby(self.id);
        match &run {
            Ok(()) => {
                let total_ms = begun.elapsed().as_secs_f64() * 1e3;
                tracing::warn!(machine = %self.name, from = %self.primary, why = why.text(), loaded_ms, total_ms, "took a machine over");
                self.protect_next();
            }
            Err(error) => {
                let error = error as &dyn std::error::Error;
                tracing::error!(machine = %self.name, from = %self.primary, why = why.text(), error, "cannot run a machine that was taken over");
            }
        }
        run
    }

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

    /// Records that a yielded machine is being loaded, which is returned if this daemon ends meanwhile.
    fn record_loading(&self) -> Result<(), DaemonError> {
        let side = ProtectionSide::Loading { from: self.primary.clone() };
        self.host.protections.put_record(ProtectionRecord::new(self.id, &self.name, self.handover, side))
    }

    /// Returns a yielded machine that cannot run here to the primary.
    fn return_machine(
        &self,
        mut held: MutexGuard<'_, Option<EpochReceiver>>,
        error: &(dyn std::error::Error + 'static),
    ) {
        tracing::error!(machine = %self.name, from = %self.primary, error, "cannot load a yielded machine; returning it to its primary");
        held.iter_mut().for_each(EpochReceiver::release_pages);
        lock(&self.lease).returns_machine();
        drop(held);
        self.discard();
        self.host.protections.remove_record(self.id);
    }

    /// Records the takeover. Retried until it succeeds, because no other host may ever run the machine.
    fn record_takeover(&self) -> Result<(), DaemonError> {
        let side = ProtectionSide::TookOver { from: self.primary.clone(), at_ms: crate::now_ms() };
        let note = ProtectionRecord::new(self.id, &self.name, self.handover, side);
        while let Err(error) = self.host.protections.put_takeover_record(note.clone()) {
            let text = error_chain(&error);
            tracing::error!(machine = %self.name, error = text, "cannot record a takeover; trying again");
            if !self.host.sleep_unless_closing(Duration::from_secs(1)) {
                return Err(error);
            }
        }
        Ok(())
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
