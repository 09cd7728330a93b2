//! The process that has the machine and passes it on.

use super::Knowledge;

/// Side of the process that has the machine at first. It has offered it when the value is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OldSide {
    /// The guest runs, the new process prepares.
    Offered,
    /// The guest stands still. The state is being taken, or was sent.
    Stopped,
    /// *Yours* was said.
    Gave,
    /// *Withdrawn* is being said.
    Withdrawing {
        /// Whether the guest was stopped.
        stopped: bool,
    },
    /// The new process was killed, and this one waits for its end. The guest stands still from `Stopped` on.
    Ending {
        /// Whether the new process was given the machine before.
        gave: bool,
        /// Whether the guest was stopped.
        stopped: bool,
    },
    /// Owner of the machine again, with nobody else to wait for.
    Kept,
    /// The machine is the new process's.
    Gone,
}

/// What the old process notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OldEvent {
    /// The new process has prepared what it could.
    Ready,
    /// The new process has built all from the state.
    Prepared,
    /// The new process goes on with the machine.
    Running,
    /// The new process refuses, and touches nothing.
    Refused,
    /// The new process sends something else.
    Wrong,
    /// What was due did not come in time.
    Late,
    /// An action of its own failed; what it did so far is undone by going on.
    Failed,
    /// *Withdrawn* is sent: the new process reads it before anything else that could give it the machine.
    Withdrew,
    /// The new process has ended for certain.
    PeerEnded,
}

/// What the old process does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OldAction {
    /// Stops the guest, drains, scans, and sends the state.
    StopAndSend,
    /// Says *yours*. From here on it touches nothing.
    SendYours,
    /// Says *withdrawn*, after which the new process never takes the machine.
    Withdraw,
    /// Kills the new process.
    KillPeer,
    /// Goes on with the machine, which never stopped if `stopped` is false.
    GoOn {
        /// Whether disks and control connection have to be taken up again, and the guest continued.
        stopped: bool,
        /// What it knows of the pages written.
        knowledge: Knowledge,
    },
    /// Ends, without a further word to the machine.
    End,
}

impl OldSide {
    /// Takes an event and returns what to do. None if there is nothing to do but wait.
    pub fn on(&mut self, event: OldEvent) -> Option<OldAction> {
        use OldEvent::{Failed, Late, PeerEnded, Prepared, Ready, Refused, Running, Withdrew, Wrong};
        let (next, action) = match (*self, event) {
            (Self::Offered, Ready) => (Self::Stopped, OldAction::StopAndSend),
            (Self::Stopped, Prepared) => (Self::Gave, OldAction::SendYours),
            (Self::Gave, Running) => (Self::Gone, OldAction::End),
            (
                Self::Offered | Self::Stopped | Self::Gave | Self::Withdrawing { .. } | Self::Ending { .. },
                PeerEnded,
            )
            | (Self::Offered | Self::Stopped | Self::Withdrawing { .. }, Refused)
            | (Self::Withdrawing { .. }, Withdrew) => (Self::Kept, self.reclaim()),
            (Self::Offered | Self::Stopped, Late | Failed) => {
                (Self::Withdrawing { stopped: *self == Self::Stopped }, OldAction::Withdraw)
            }
            // A word out of turn is that of a process that is not in its right mind.
            (Self::Offered | Self::Stopped | Self::Gave, _) | (Self::Withdrawing { .. }, Failed) => {
                (self.ending(), OldAction::KillPeer)
            }
            (Self::Withdrawing { .. }, Ready | Prepared | Running | Late | Wrong)
            | (Self::Ending { .. } | Self::Kept | Self::Gone, _) => return None,
        };
        *self = next;
        Some(action)
    }

    /// Whether this process may act on the guest, its memory, its disks and its control connection.
    pub fn may_touch(self) -> bool {
        match self {
            Self::Offered | Self::Stopped | Self::Withdrawing { .. } | Self::Kept => true,
            // The new one touches nothing that it was not given.
            Self::Ending { gave, .. } => !gave,
            Self::Gave | Self::Gone => false,
        }
    }

    fn ending(self) -> Self {
        Self::Ending { gave: self == Self::Gave, stopped: self.has_stopped() }
    }

    fn reclaim(self) -> OldAction {
        let gave = matches!(self, Self::Gave | Self::Ending { gave: true, .. });
        let knowledge = if gave { Knowledge::Lost } else { Knowledge::Complete };
        OldAction::GoOn { stopped: self.has_stopped(), knowledge }
    }

    fn has_stopped(self) -> bool {
        match self {
            Self::Ending { stopped, .. } | Self::Withdrawing { stopped } => stopped,
            other => other != Self::Offered,
        }
    }
}
