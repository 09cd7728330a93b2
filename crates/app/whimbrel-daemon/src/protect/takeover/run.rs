//! Taking a machine over: written down, loaded, run, and protected anew.
//!
//! Whether it may be taken over is decided before, by the rules in `standing.rs`. A machine that was *taken*
//! is this host's whatever happens here; one that was *yielded* and does not load is given back.

use crate::protect::standby::hosted::{HostedStandby, lock, standby_error, unknown};
use crate::{
    core::error::DaemonError,
    protect::records::{ProtectionRecord, ProtectionSide},
};
use std::{
    sync::{MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_protect::standby::EpochReceiver;

/// Why a machine is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::protect) enum TakeoverCause {
    /// Its host gave it up, and still has it.
    Yielded,
    /// Its host is silent, and the witness said yes.
    Silent,
    /// A person said that its host is dead.
    ByHand,
}

impl HostedStandby {
    /// The machine is this host's. Written down first, run second. One that was yielded and does not load is
    /// given back: its host still has all of it.
    pub(in crate::protect) fn take_over(&self, why: TakeoverCause) -> Result<(), DaemonError> {
        let begun = Instant::now();
        let mut held = lock(&self.receiver);
        let from = self.current.epoch().0;
        let receiver = held.as_mut().ok_or_else(|| unknown(self.id))?;
        if why == TakeoverCause::Yielded
            && let Err(error) = self.note_loading()
        {
            self.return_machine(held, &error);
            return Ok(());
        }
        let (loaded, noted) = std::thread::scope(|scope| {
            // Loading shows nothing to anybody: what is decided is written down meanwhile.
            let note = (why != TakeoverCause::Yielded).then(|| scope.spawn(|| self.note_taken()));
            let loaded = receiver.take_over();
            let noted = note.map(|note| note.join().unwrap_or(Err(DaemonError::Panicked)));
            (loaded, noted)
        });
        let loaded_ms = begun.elapsed().as_secs_f64() * 1e3;
        if let (Err(error), TakeoverCause::Yielded) = (&loaded, why) {
            self.return_machine(held, error);
            return Ok(());
        }
        let noted = noted.unwrap_or_else(|| self.note_taken());
        self.host.arrivals().adopt_arrived(self.handover);
        let run = noted
            .and_then(|()| loaded.map_err(standby_error))
            .and_then(|()| self.replay(from))
            .and_then(|()| receiver.run().map_err(standby_error));
        self.over.store(true, Ordering::SeqCst);
        self.host.protecting.leave(self.id);
        match &run {
            Ok(()) => {
                let total_ms = begun.elapsed().as_secs_f64() * 1e3;
                tracing::warn!(machine = %self.name, from = %self.from, why = why.text(), loaded_ms, total_ms, "took a machine over");
                self.protect_next();
            }
            Err(error) => {
                let error = error as &dyn std::error::Error;
                tracing::error!(machine = %self.name, from = %self.from, why = why.text(), error, "a machine that is this host's does not run");
            }
        }
        run
    }

    /// Protects what was taken over, if its host had said where. Tried until it succeeds or somebody ends it.
    fn protect_next(&self) {
        let Some(settings) = self.then.clone() else { return };
        let to = settings.request.host.clone();
        let begun = self.host.machine(&self.name).and_then(|machine| {
            self.host.start_guard(&machine, settings, HandoverId(rand::random()), true).map(drop)
        });
        match begun {
            Ok(()) => tracing::info!(machine = %self.name, standby = %to, "it is to be protected again"),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(machine = %self.name, error, "a machine that was taken over runs unprotected");
            }
        }
    }

    /// Writes down that a machine is being loaded that its host gets back if this daemon ends meanwhile.
    fn note_loading(&self) -> Result<(), DaemonError> {
        let side = ProtectionSide::Loading { from: self.from.clone() };
        self.host.protecting.put_note(ProtectionRecord::new(self.id, &self.name, self.handover, side))
    }

    /// What was yielded cannot be run here: it is its host's again.
    fn return_machine(
        &self,
        mut held: MutexGuard<'_, Option<EpochReceiver>>,
        error: &(dyn std::error::Error + 'static),
    ) {
        tracing::error!(machine = %self.name, from = %self.from, error, "a machine does not load here and is given back");
        held.iter_mut().for_each(EpochReceiver::release_pages);
        lock(&self.rules).returns_machine();
        drop(held);
        self.discard();
        self.host.protecting.remove_note(self.id);
    }

    /// Writes down that the machine is this host's. Nobody else may ever run it, so this is tried until it is
    /// done.
    fn note_taken(&self) -> Result<(), DaemonError> {
        let side = ProtectionSide::TookOver { from: self.from.clone(), at_ms: crate::now_ms() };
        let note = ProtectionRecord::new(self.id, &self.name, self.handover, side);
        while let Err(error) = self.host.protecting.take_note(note.clone()) {
            let text = crate::server::peer_rpc::chain(&error);
            tracing::error!(machine = %self.name, error = text, "a takeover cannot be written down; tried again");
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
            Self::Yielded => "its host gave it up",
            Self::Silent => "its host is silent and its lease has run out",
            Self::ByHand => "a person said that its host is dead",
        }
    }
}
