//! The process that takes the machine.

use super::Knowledge;

/// Side of the process that gets the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NewSide {
    /// Nothing has come yet.
    Waiting,
    /// The descriptors came, and *ready* was said.
    Ready,
    /// The state came too, and *prepared* was said. None of it is used.
    Prepared,
    /// The machine is its own.
    Has,
    /// Without the machine, which the old process keeps.
    Over,
}

/// What the new process notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NewEvent {
    /// The descriptors came, and what can be prepared from them was.
    Offer,
    /// The state came, and all was built from it.
    State,
    /// The machine is given to it.
    Yours,
    /// What came cannot be used.
    Failed,
    /// The old process goes on with the machine.
    Withdrawn,
    /// The old process has ended for certain.
    PeerEnded,
}

/// What the new process does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NewAction {
    /// Says that it is *ready*.
    SendReady,
    /// Says that it is *prepared*.
    SendPrepared,
    /// Serves the disks, continues the guest, says *running*.
    TakeUp(Knowledge),
    /// Says why it refuses, and ends.
    Refuse,
    /// Ends without the machine.
    End,
}

impl NewSide {
    /// Takes an event and returns what to do. None if there is nothing to do but wait.
    pub fn on(&mut self, event: NewEvent) -> Option<NewAction> {
        use NewEvent::{Failed, Offer, PeerEnded, State, Withdrawn, Yours};
        let (next, action) = match (*self, event) {
            (Self::Waiting, Offer) => (Self::Ready, NewAction::SendReady),
            (Self::Ready, State) => (Self::Prepared, NewAction::SendPrepared),
            (Self::Prepared, Yours) => (Self::Has, NewAction::TakeUp(Knowledge::Complete)),
            // The guest stands still since the state was taken: the old one would have gone on only after
            // the end of this process.
            (Self::Prepared, PeerEnded) => (Self::Has, NewAction::TakeUp(Knowledge::Complete)),
            // The guest may have run until a moment ago.
            (Self::Ready, PeerEnded) => (Self::Has, NewAction::TakeUp(Knowledge::Lost)),
            (Self::Waiting, PeerEnded) | (Self::Waiting | Self::Ready | Self::Prepared, Withdrawn) => {
                (Self::Over, NewAction::End)
            }
            (Self::Waiting | Self::Ready | Self::Prepared, Failed | Offer | State | Yours) => {
                (Self::Over, NewAction::Refuse)
            }
            (Self::Has | Self::Over, _) => return None,
        };
        *self = next;
        Some(action)
    }

    /// Whether this process may act on the guest, its memory, its disks and its control connection.
    pub fn may_touch(self) -> bool {
        self == Self::Has
    }
}
