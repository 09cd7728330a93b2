//! Checks before a user starts a stopped or crashed machine that was protected without a witness.
//!
//! Its standby may not have heard that the protection ended, and a person may have switched the machine over
//! there. So the standby is asked to end it. One that does not answer stops the start, until it answers or a
//! user says by `resolve` that it does not run the machine. The question goes on in any case
//! (`takeover::recovery`).

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    protect::{link::ControlLink, records::ProtectionSide},
};
use std::{sync::Arc, time::Duration};
use whimbrel_core::{HostName, MachineName};
use whimbrel_protect::protocol::StandbyOutcome;

/// How long a standby may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

impl Daemon {
    /// Ends each protection of a machine whose standby has not heard of its end.
    ///
    /// # Errors
    /// If a standby has the machine, or does not answer.
    pub(crate) fn end_at_standbys(self: &Arc<Self>, name: &MachineName) -> Result<(), DaemonError> {
        for record in self.protections.undecided_records(name) {
            let ProtectionSide::Primary { request, .. } = &record.side else { continue };
            match ControlLink::new(self, &request.host).end(record.id, false, PATIENCE) {
                Some(StandbyOutcome::Ended) => self.protection_has_ended(record.id, request.witness.as_ref()),
                Some(StandbyOutcome::TakenOver) => {
                    return Err(DaemonError::TakenOver { name: name.clone(), host: request.host.clone() });
                }
                Some(StandbyOutcome::Standing | StandbyOutcome::Asking) | None => {
                    return Err(DaemonError::Unresolved {
                        name: name.clone(),
                        known: known_of(&request.host),
                    });
                }
            }
        }
        Ok(())
    }

    /// Decides that a machine may start although a standby has not answered, or says what is known if the
    /// user decides nothing. One that has taken the machine over decides by itself.
    pub(crate) fn decide_start(
        self: &Arc<Self>,
        name: &MachineName,
        is_decided: bool,
    ) -> Result<(), DaemonError> {
        match self.end_at_standbys(name) {
            Err(DaemonError::Unresolved { .. }) if is_decided => {
                let records = self.protections.undecided_records(name);
                records.iter().for_each(|record| self.protections.notify_later(record.id));
                Ok(())
            }
            asked => asked,
        }
    }

    /// Whether a standby of a machine has not heard that its protection ended.
    pub(crate) fn has_unheard_standby(&self, name: &MachineName) -> bool {
        !self.protections.undecided_records(name).is_empty()
    }
}

fn known_of(standby: &HostName) -> String {
    format!(
        "its standby {standby} does not answer: it has not heard that the protection ended, and a person may have \
         switched the machine over there; here it would start from its disks"
    )
}
