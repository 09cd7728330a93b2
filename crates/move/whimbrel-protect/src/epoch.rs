//! Epochs: the two pure state machines of the epoch commit.
//!
//! ```text
//!   primary                              standby
//!                                         Filling    (seeding: no one instant, nothing to take over from)
//!            -- epoch end 0 -----------> Standing 0 (a complete machine as of one instant)
//!   Waiting 1 -- pages of epoch 1 -----> buffered
//!            -- epoch end 1 -----------> Standing 1 (all received and checked: applied, then acknowledged)
//!   output of 1 leaves <- committed 1
//! ```
//!
//! One epoch is in flight at a time; meanwhile the machine runs and its output is buffered. Whatever is lost,
//! repeated or late, the standby's machine is that of a complete epoch that covers all output that has left.
//! `tests/it/epoch_model.rs` checks that against every order of messages, losses, repetitions and takeovers.

/// Epoch state of the primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryEpochs {
    /// No epoch is in flight. Output after the committed one is buffered.
    Idle {
        /// The last epoch that was acknowledged.
        committed: u64,
    },
    /// An epoch was captured and is being sent.
    Waiting {
        /// Number of the epoch.
        epoch: u64,
    },
    /// The standby is lost. None of its replies releases output any more.
    Lost,
}

/// Events of the primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryEvent {
    /// The next epoch is due.
    Due,
    /// The standby has committed this epoch.
    Committed(u64),
    /// The standby cannot be reached, or refused something.
    Failed,
}

/// Actions of the primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrimaryAction {
    /// Pause, copy the changes, unpause, send them, end the epoch.
    CaptureAndSend(u64),
    /// Release the output that was produced up to the capture of this epoch.
    Release(u64),
}

impl PrimaryEpochs {
    /// The state after seeding, which ends with epoch 0.
    pub fn initial() -> Self {
        Self::Idle { committed: 0 }
    }

    /// The one transition function.
    pub fn step(self, event: PrimaryEvent) -> (Self, Option<PrimaryAction>) {
        match (self, event) {
            (Self::Idle { committed }, PrimaryEvent::Due) => {
                let epoch = committed + 1;
                (Self::Waiting { epoch }, Some(PrimaryAction::CaptureAndSend(epoch)))
            }
            (Self::Waiting { epoch }, PrimaryEvent::Committed(which)) if which == epoch => {
                (Self::Idle { committed: epoch }, Some(PrimaryAction::Release(epoch)))
            }
            (_, PrimaryEvent::Failed) => (Self::Lost, None),
            // Late or repeated replies change nothing, and a capture waits for the epoch in flight.
            (state, _) => (state, None),
        }
    }
}

/// Epoch state of the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyEpochs {
    /// Seeding: pages are written on arrival and are of no one instant.
    Seeding,
    /// A complete machine as of an epoch is here.
    Complete {
        /// Number of the committed epoch.
        committed: u64,
        /// Buffered pages of the next epoch.
        buffered: u64,
    },
    /// The standby has taken over, or has ended.
    Over {
        /// The epoch from which it took over; none if it ended.
        from: Option<u64>,
    },
}

/// Events of the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyEvent {
    /// A page outside any epoch, during seeding.
    SeedPage,
    /// A page of an epoch.
    Page {
        /// Number of the epoch.
        epoch: u64,
        /// Whether this page is not buffered yet.
        new: bool,
    },
    /// The end of an epoch.
    EpochEnd {
        /// Number of the epoch.
        epoch: u64,
        /// Number of its pages.
        pages: u64,
    },
    /// The standby is to run the machine.
    TakeOver,
    /// The protection ends.
    End,
}

/// Actions of the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StandbyEpochAction {
    /// Write the page to the machine and drop the buffered epoch.
    Write,
    /// Buffer the page.
    Buffer,
    /// Write all buffered pages to the machine, store the device state, then acknowledge.
    Apply,
    /// Repeat the acknowledgement.
    Acknowledge,
    /// Drop buffered pages and run the machine as of the last committed epoch.
    Run,
    /// Delete the machine here.
    Discard,
    /// Refuse a message that does not fit the state.
    Refuse,
}

impl StandbyEpochs {
    /// The last committed epoch, if there is one.
    pub fn committed(self) -> Option<u64> {
        match self {
            Self::Complete { committed, .. } => Some(committed),
            Self::Seeding | Self::Over { .. } => None,
        }
    }

    /// The one transition function.
    pub fn step(self, event: StandbyEvent) -> (Self, StandbyEpochAction) {
        use StandbyEpochAction::{Acknowledge, Apply, Buffer, Discard, Refuse, Run, Write};
        match (self, event) {
            (Self::Over { .. }, _) => (self, Refuse),
            (Self::Seeding | Self::Complete { .. }, StandbyEvent::SeedPage) => (Self::Seeding, Write),
            (Self::Seeding, StandbyEvent::EpochEnd { epoch, pages: 0 }) => {
                (Self::Complete { committed: epoch, buffered: 0 }, Apply)
            }
            (Self::Complete { committed, buffered: held }, StandbyEvent::Page { epoch, new })
                if epoch == committed + 1 =>
            {
                (Self::Complete { committed, buffered: held + u64::from(new) }, Buffer)
            }
            (Self::Complete { committed, buffered: held }, StandbyEvent::EpochEnd { epoch, pages })
                if epoch == committed + 1 && pages == held =>
            {
                (Self::Complete { committed: epoch, buffered: 0 }, Apply)
            }
            (Self::Complete { committed, .. }, StandbyEvent::EpochEnd { epoch, .. })
                if epoch == committed =>
            {
                (self, Acknowledge)
            }
            (Self::Complete { committed, .. }, StandbyEvent::TakeOver) => {
                (Self::Over { from: Some(committed) }, Run)
            }
            (_, StandbyEvent::End) => (Self::Over { from: None }, Discard),
            (state, _) => (state, Refuse),
        }
    }
}
