//! The witness of a protection, whoever that is: another host, or an etcd.

use super::{etcd::Etcd, link::Line};
use crate::host::Host;
use std::{sync::Arc, time::Duration};
use whimbrel_core::WitnessName;
use whimbrel_protect::{
    lease::{Question, Verdict},
    protocol::{self, Asked, ProtectionId},
};

/// How often a connection to a host that is a witness is looked after.
const LOOK_AFTER: Duration = Duration::from_secs(1);
/// Time between renewals at an etcd while the standby answers: ten terms, this at most. Each is a write to the disks of most of its
/// members, and part of its history.
const SELDOM: Duration = Duration::from_secs(2);

/// The witness of one protection.
pub(super) struct Arbiter {
    name: WitnessName,
    id: ProtectionId,
    term: Duration,
    kind: Kind,
}

enum Kind {
    Host(Line),
    Etcd(Box<Etcd>),
}

impl Arbiter {
    pub(super) fn new(host: &Arc<Host>, name: &WitnessName, id: ProtectionId, term: Duration) -> Self {
        let kind = match name {
            WitnessName::Host(to) => Kind::Host(Line::new(host, to)),
            WitnessName::Etcd(endpoints) => {
                Kind::Etcd(Box::new(Etcd::new(host, endpoints.clone(), id, term)))
            }
        };
        Self { name: name.clone(), id, term, kind }
    }

    pub(super) fn name(&self) -> &WitnessName {
        &self.name
    }

    /// Asks; none if no answer came within `patience`.
    pub(super) fn ask(&self, question: &Question, patience: Duration) -> Option<Verdict> {
        match &self.kind {
            Kind::Host(line) => {
                line.ask(protocol::WITNESS, &Asked { id: self.id, question: question.clone() }, patience)
            }
            Kind::Etcd(etcd) => etcd.ask(question, patience),
        }
    }

    /// Time between two renewals. The standby's promise is enough for as long as it answers, and a write to an etcd is dear.
    pub(super) fn renewed_every(&self, standby_answers: bool) -> Duration {
        match &self.kind {
            Kind::Etcd(_) if standby_answers => (self.term * 10).min(SELDOM).max(self.term / 4),
            Kind::Etcd(_) | Kind::Host(_) => self.term / 4,
        }
    }

    /// Sees to it that a question that is urgent can be answered at once; to be called again after so long.
    pub(super) fn look_after(&self) -> Duration {
        match &self.kind {
            Kind::Host(line) => {
                line.warm();
                LOOK_AFTER
            }
            Kind::Etcd(etcd) => {
                etcd.look(self.term);
                self.term / 4
            }
        }
    }

    /// All who take part know how it ended.
    pub(super) fn forget(&self) {
        let patience = Duration::from_millis(500);
        let _ = self.ask(&Question::Close, patience);
        let _ = self.ask(&Question::Forget, patience);
    }
}
