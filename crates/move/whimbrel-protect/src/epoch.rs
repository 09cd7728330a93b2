//! Epochs: the two pure state machines of their commitment.
//!
//! ```text
//!   primary                        standby
//!                                  Filling    (a first copy, no state of one instant: nothing to take over from)
//!            -- seal 0 ---------> Standing 0 (a whole machine as of one instant)
//!   Waiting 1 -- pieces of 1 ---->            held aside
//!            -- seal 1 ---------> Standing 1 (all of it here and checked: applied, then acknowledged)
//!   output of 1 leaves <- committed 1
//! ```
//!
//! One epoch is under way at a time; while it is, the machine runs on and its output waits. Whatever is lost,
//! repeated or late, the standby's machine is that of a whole epoch, and no output has left that it does not
//! account for. `tests/epoch_model.rs` checks that against every order of messages, losses, repetitions and
//! takeovers.

/// The primary's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryEpochs {
    /// The standby has this epoch. Output of later ones waits.
    Standing {
        /// The last epoch that was acknowledged.
        committed: u64,
    },
    /// An epoch was cut and is on its way.
    Waiting {
        /// Which.
        epoch: u64,
    },
    /// The standby does not follow any more. Nothing that it says releases anything.
    Lost,
}

/// What the primary hears or decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryEvent {
    /// It is time for the next epoch.
    Cut,
    /// The standby has all of this epoch.
    Committed(u64),
    /// The standby cannot be reached, or refused something.
    Failed,
}

/// What the primary must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryAction {
    /// Pause, take what changed, go on, send it, seal it.
    CutAndSend(u64),
    /// Let the output go that was produced up to the cut of this epoch.
    Release(u64),
}

impl PrimaryEpochs {
    /// The first copy was sealed, as epoch 0.
    pub fn initial() -> Self {
        Self::Standing { committed: 0 }
    }

    /// The one transition function.
    pub fn step(self, event: PrimaryEvent) -> (Self, Option<PrimaryAction>) {
        match (self, event) {
            (Self::Standing { committed }, PrimaryEvent::Cut) => {
                let epoch = committed + 1;
                (Self::Waiting { epoch }, Some(PrimaryAction::CutAndSend(epoch)))
            }
            (Self::Waiting { epoch }, PrimaryEvent::Committed(which)) if which == epoch => {
                (Self::Standing { committed: epoch }, Some(PrimaryAction::Release(epoch)))
            }
            (_, PrimaryEvent::Failed) => (Self::Lost, None),
            // Late or repeated news changes nothing, and a cut waits for the one before.
            (state, _) => (state, None),
        }
    }
}

/// The standby's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyEpochs {
    /// Pages arrive as they come; they are of no one instant.
    Filling,
    /// It has the machine as of the end of this epoch.
    Standing {
        /// Which.
        committed: u64,
        /// Pages of the next one that are held aside.
        held: u64,
    },
    /// It took the machine over as of this epoch, or has let it go.
    Over {
        /// The epoch it took over from.
        from: Option<u64>,
    },
}

/// What the standby hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyEvent {
    /// A page of the first copy, or of one that catches up.
    Fill,
    /// A page of an epoch.
    Page {
        /// Which epoch.
        epoch: u64,
        /// Whether it is not held aside already.
        new: bool,
    },
    /// All of an epoch was sent.
    Seal {
        /// Which.
        epoch: u64,
        /// Pages it has.
        pages: u64,
    },
    /// The machine is to run here.
    TakeOver,
    /// The protection ends.
    End,
}

/// What the standby must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyEpochAction {
    /// Write the page where it belongs; what is held aside is void.
    Write,
    /// Hold the page aside.
    Hold,
    /// Write all that is held aside where it belongs, keep the device state, then acknowledge.
    Apply,
    /// Acknowledge again.
    Acknowledge,
    /// Forget what is held aside and run the machine as of the last committed epoch.
    Run,
    /// Forget the machine.
    Discard,
    /// Refuse: it does not fit.
    Refuse,
}

impl StandbyEpochs {
    /// The last whole epoch that it has.
    pub fn committed(self) -> Option<u64> {
        match self {
            Self::Standing { committed, .. } => Some(committed),
            Self::Filling | Self::Over { .. } => None,
        }
    }

    /// The one transition function.
    pub fn step(self, event: StandbyEvent) -> (Self, StandbyEpochAction) {
        use StandbyEpochAction::{Acknowledge, Apply, Discard, Hold, Refuse, Run, Write};
        match (self, event) {
            (Self::Over { .. }, _) => (self, Refuse),
            (Self::Filling | Self::Standing { .. }, StandbyEvent::Fill) => (Self::Filling, Write),
            (Self::Filling, StandbyEvent::Seal { epoch, pages: 0 }) => {
                (Self::Standing { committed: epoch, held: 0 }, Apply)
            }
            (Self::Standing { committed, held }, StandbyEvent::Page { epoch, new })
                if epoch == committed + 1 =>
            {
                (Self::Standing { committed, held: held + u64::from(new) }, Hold)
            }
            (Self::Standing { committed, held }, StandbyEvent::Seal { epoch, pages })
                if epoch == committed + 1 && pages == held =>
            {
                (Self::Standing { committed: epoch, held: 0 }, Apply)
            }
            (Self::Standing { committed, .. }, StandbyEvent::Seal { epoch, .. }) if epoch == committed => {
                (self, Acknowledge)
            }
            (Self::Standing { committed, .. }, StandbyEvent::TakeOver) => {
                (Self::Over { from: Some(committed) }, Run)
            }
            (_, StandbyEvent::End) => (Self::Over { from: None }, Discard),
            (state, _) => (state, Refuse),
        }
    }
}
