//! The witness of a protection, whoever that is: another host, or an etcd.

use super::etcd::Etcd;
use crate::daemon::Daemon;
use crate::protect::link::ControlLink;
use std::{sync::Arc, time::Duration};
use whimbrel_core::WitnessAddress;
use whimbrel_protect::{
    lease::{WitnessQuery, WitnessReply},
    protocol::{self, ProtectionId, WitnessRequest},
};

/// How often a connection to a host that is a witness is looked after.
const LOOK_AFTER: Duration = Duration::from_secs(1);
/// Time between renewals at an etcd while the standby answers: ten terms, this at most. Each is a write to
/// the disks of most of its members, and part of its history.
const SELDOM: Duration = Duration::from_secs(2);

/// The witness of one protection.
pub(in crate::protect) struct WitnessClient {
    name: WitnessAddress,
    id: ProtectionId,
    term: Duration,
    kind: Kind,
}

enum Kind {
    Host(ControlLink),
    Etcd(Box<Etcd>),
}

impl WitnessClient {
    pub(in crate::protect) fn new(
        host: &Arc<Daemon>,
        name: &WitnessAddress,
        id: ProtectionId,
        term: Duration,
    ) -> Self {
        let kind = match name {
            WitnessAddress::Host(to) => Kind::Host(ControlLink::new(host, to)),
            WitnessAddress::Etcd(endpoints) => {
                Kind::Etcd(Box::new(Etcd::new(host, endpoints.clone(), id, term)))
            }
        };
        Self { name: name.clone(), id, term, kind }
    }

    pub(in crate::protect) fn name(&self) -> &WitnessAddress {
        &self.name
    }

    /// Asks; none if no answer came within `patience`.
    pub(in crate::protect) fn ask(
        &self,
        question: &WitnessQuery,
        patience: Duration,
    ) -> Option<WitnessReply> {
        match &self.kind {
            Kind::Host(line) => line.ask(
                protocol::WITNESS,
                &WitnessRequest { id: self.id, question: question.clone() },
                patience,
            ),
            Kind::Etcd(etcd) => etcd.ask(question, patience),
        }
    }

    /// Time between two renewals. The standby's promise is enough for as long as it answers, and a write to
    /// an etcd is dear.
    pub(in crate::protect) fn renewed_every(&self, standby_answers: bool) -> Duration {
        match &self.kind {
            Kind::Etcd(_) if standby_answers => (self.term * 10).min(SELDOM).max(self.term / 4),
            Kind::Etcd(_) | Kind::Host(_) => self.term / 4,
        }
    }

    /// Sees to it that a question that is urgent can be answered at once; to be called again after so long.
    pub(in crate::protect) fn look_after(&self) -> Duration {
        match &self.kind {
            Kind::Host(line) => {
                line.warm();
                LOOK_AFTER
            }
            Kind::Etcd(etcd) => {
                etcd.poll(self.term);
                self.term / 4
            }
        }
    }

    /// All who take part know how it ended.
    pub(in crate::protect) fn forget(&self) {
        let patience = Duration::from_millis(500);
        let _ = self.ask(&WitnessQuery::Close, patience);
        let _ = self.ask(&WitnessQuery::Forget, patience);
    }
}
