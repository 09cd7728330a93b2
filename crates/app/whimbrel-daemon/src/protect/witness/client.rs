//! Witness client: queries the witness of a protection, which is another host or an etcd.

use super::etcd::Etcd;
use crate::daemon::Daemon;
use crate::protect::link::ControlLink;
use std::{sync::Arc, time::Duration};
use whimbrel_core::WitnessAddress;
use whimbrel_protect::{
    lease::{WitnessQuery, WitnessReply},
    protocol::{self, ProtectionId, WitnessRequest},
};

/// Interval at which the connection to a witness host is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Longest interval of renewals at an etcd while the standby answers; usually ten terms. Each renewal is a
/// write to the disks of most members, and stays in the history.
const RENEWAL_MAX: Duration = Duration::from_secs(2);

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

    /// Sends a query; none if no reply arrived within `patience`.
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

    /// Interval of renewals. While the standby answers, its promise is enough, and a write to an etcd is
    /// expensive.
    pub(in crate::protect) fn renewal_interval(&self, standby_answers: bool) -> Duration {
        match &self.kind {
            Kind::Etcd(_) if standby_answers => (self.term * 10).min(RENEWAL_MAX).max(self.term / 4),
            Kind::Etcd(_) | Kind::Host(_) => self.term / 4,
        }
    }

    /// Prepares for an urgent query, so that it is answered at once. Must be called again after the returned
    /// time.
    pub(in crate::protect) fn prepare(&self) -> Duration {
        match &self.kind {
            Kind::Host(line) => {
                line.preconnect();
                CHECK_INTERVAL
            }
            Kind::Etcd(etcd) => {
                etcd.poll(self.term);
                self.term / 4
            }
        }
    }

    /// Closes and deletes the protection once both hosts know the outcome.
    pub(in crate::protect) fn forget(&self) {
        let patience = Duration::from_millis(500);
        let _ = self.ask(&WitnessQuery::Close, patience);
        let _ = self.ask(&WitnessQuery::Forget, patience);
    }
}
