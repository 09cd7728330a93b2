//! The witness's part: which of two hosts may run a machine.

use super::{WitnessQuery, WitnessReply};
use crate::clock::BootTime;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use whimbrel_core::loss::{Loss, is_back};

/// State of a protection at the witness. Durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WitnessState {
    /// Undecided: either host may still get the machine.
    Open,
    /// The standby has the machine for good.
    Taken,
    /// The primary has the machine for good.
    Closed,
}

/// What a witness must do about a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WitnessAction {
    /// Reply; nothing durable changes.
    Reply(WitnessReply),
    /// Record this state durably, then reply with yes.
    Record(WitnessState),
    /// Delete the protection, then reply with yes.
    Delete,
}

impl WitnessAction {
    /// The reply that follows.
    pub fn reply(self) -> WitnessReply {
        match self {
            Self::Reply(reply) => reply,
            Self::Record(_) | Self::Delete => WitnessReply::Yes,
        }
    }
}

/// One protection at the witness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WitnessLease {
    state: WitnessState,
    term: Duration,
    expires: BootTime,
}

impl WitnessLease {
    /// A new protection, or one that a restarted witness has loaded. It does not know which leases it granted
    /// before the restart, but all of them have expired a term from now.
    pub fn new(state: WitnessState, term: Duration, now: BootTime) -> Self {
        let lease = if is_back(Loss::LeasesForgotten) { Duration::ZERO } else { term };
        Self { state, term, expires: now.after(lease) }
    }

    /// The state. A change must be durable before its reply is sent.
    pub fn state(&self) -> WitnessState {
        self.state
    }

    /// The one transition function, for queries of hosts that may ask them.
    pub fn step(&mut self, query: &WitnessQuery, now: BootTime) -> WitnessAction {
        use WitnessAction::{Delete, Record, Reply};
        match (self.state, query) {
            (WitnessState::Open, WitnessQuery::Renew) => {
                self.expires = now.after(self.term);
                Reply(WitnessReply::Yes)
            }
            (WitnessState::Open, WitnessQuery::TakeOver { yielded }) if *yielded || now >= self.expires => {
                self.state = WitnessState::Taken;
                Record(WitnessState::Taken)
            }
            (WitnessState::Open, WitnessQuery::TakeOver { .. }) => Reply(WitnessReply::Held),
            (WitnessState::Open, WitnessQuery::Close) => {
                self.state = WitnessState::Closed;
                Record(WitnessState::Closed)
            }
            // Repeated: the reply to an earlier one was lost. An undecided protection is not deleted.
            (WitnessState::Open, WitnessQuery::Register { .. } | WitnessQuery::Forget)
            | (WitnessState::Taken, WitnessQuery::TakeOver { .. })
            | (WitnessState::Closed, WitnessQuery::Close) => Reply(WitnessReply::Yes),
            (WitnessState::Taken | WitnessState::Closed, WitnessQuery::Forget) => Delete,
            (WitnessState::Taken | WitnessState::Closed, WitnessQuery::Register { .. }) => {
                Reply(WitnessReply::Unknown)
            }
            (WitnessState::Taken, WitnessQuery::Renew | WitnessQuery::Close) => Reply(WitnessReply::Taken),
            (WitnessState::Closed, WitnessQuery::Renew | WitnessQuery::TakeOver { .. }) => {
                Reply(WitnessReply::Closed)
            }
        }
    }
}
