//! Record of a handover: what the source writes down of one attempt, and takes back if the machine stays.
//!
//! Begun before the target hears of the machine, with everything that the commit point needs except its mark.
//! Dropping it undoes what was begun and tells the target, unless the machine was handed over, or what the
//! disk says about that is unknown.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        commit_mark::CommitMark,
        record::{InheritedProtectionRecord, PendingHandover, Phase, Record},
    },
    migrate::source::join_scoped,
    server::peer_rpc::PeerLink,
};
use std::{sync::Arc, thread, time::Duration};
use whimbrel_core::HostName;
use whimbrel_migrate::{
    handover::AbortedAction,
    protocol::{HomeNetwork, Offer},
    source::BoxError,
};
use whimbrel_vm::Tunnel;

/// Delay between attempts to write the machine's record after a failed commit.
const REVERT_DELAY: Duration = Duration::from_secs(1);

/// The record of one attempt to hand over a machine.
pub(super) struct HandoverRecord<'a> {
    daemon: &'a Arc<Daemon>,
    /// Record of the machine, and as it was before the attempt.
    record: &'a mut Record,
    before: Record,
    offer: &'a Offer,
    to: &'a HostName,
    link: &'a PeerLink,
    inherited: Option<InheritedProtectionRecord>,
    /// End here of the tunnel to the machine's home.
    pub(super) away: Option<&'a dyn Tunnel>,
    owner: Owner,
}

/// Owner of the machine by the record.
enum Owner {
    /// The machine is this host's, and nothing was begun.
    Here,
    /// The machine is this host's until the mark is made.
    Pending(CommitMark),
    /// The machine was handed over.
    Target,
    /// The write of the mark failed, and nothing was written since.
    Unknown,
}

impl<'a> HandoverRecord<'a> {
    /// A record in which nothing was begun.
    pub(super) fn new(
        daemon: &'a Arc<Daemon>,
        record: &'a mut Record,
        (to, link): (&'a HostName, &'a PeerLink),
        offer: &'a Offer,
        inherited: Option<InheritedProtectionRecord>,
    ) -> Self {
        let before = record.clone();
        Self { daemon, record, before, offer, to, link, inherited, away: None, owner: Owner::Here }
    }

    fn pending(&self) -> PendingHandover {
        let keeps = self.offer.leaves.is_some();
        PendingHandover { handover: self.offer.handover, to: self.to.clone(), keeps }
    }

    /// Records that this host serves the machine's network, before the handover.
    fn start_home_network(&self) -> Result<(), DaemonError> {
        match &self.offer.tunnel {
            Some(tunnel) if tunnel.home == self.daemon.name => {
                let Record { name, config, .. } = &*self.record;
                self.daemon.tunnels.start_home(tunnel.id, name, config, self.to)
            }
            _ => Ok(()),
        }
    }
}

impl whimbrel_migrate::HandoverRecord for HandoverRecord<'_> {
    /// None of the three files means anything without the mark, so the list of handovers is written beside
    /// the others. The mark is durable before the record: a record that names a handover whose mark cannot be
    /// read is then that of a machine that may be elsewhere.
    fn begin(&mut self) -> Result<(), BoxError> {
        let (daemon, handover, to) = (self.daemon, self.offer.handover, self.to);
        self.record.inherited = self.inherited.clone();
        self.record.leaving = Some(self.pending());
        let (dir, record) = (daemon.directories.machine(&self.record.name), &*self.record);
        let (noted, mark) = thread::scope(|scope| {
            let noted = scope.spawn(|| daemon.handovers.start(handover, to));
            let mark = CommitMark::prepare(&dir).map_err(|source| DaemonError::io("write to", &dir, source));
            let mark = mark.and_then(|mark| record.save(&daemon.directories).map(|()| mark));
            (join_scoped(noted), mark)
        });
        self.owner = Owner::Pending(noted.and(mark)?);
        Ok(())
    }

    fn commit(&mut self) -> Result<(), BoxError> {
        let Owner::Pending(mark) = &self.owner else {
            return Err("the handover was not recorded before its commit".into());
        };
        self.start_home_network()?;
        let made = mark.make(self.offer.handover);
        self.owner = if made.is_ok() { Owner::Target } else { Owner::Unknown };
        made?;
        let PendingHandover { handover, to, keeps } = self.pending();
        self.record.phase = Phase::HandedOver { handover, to, keeps };
        // From here on the home end belongs to the target.
        self.away.into_iter().for_each(Tunnel::close);
        Ok(())
    }

    fn revert(&mut self) -> Result<(), BoxError> {
        *self.record = self.before.clone();
        while let Err(error) = self.record.save(&self.daemon.directories) {
            let name = &self.record.name;
            tracing::error!(%name, error = &error as &dyn std::error::Error, "who has the machine cannot be recorded: it stays paused until there is room for its record");
            if !self.daemon.sleep_unless_closing(REVERT_DELAY) {
                return Err(error.into());
            }
        }
        self.owner = Owner::Here;
        Ok(())
    }

    fn aborted(&mut self, action: AbortedAction) {
        match action {
            AbortedAction::SendAbort => self.daemon.handovers.abort(self.offer.handover),
            AbortedAction::RemoveRecord => self.daemon.handovers.end(self.offer.handover),
        }
    }
}

impl Drop for HandoverRecord<'_> {
    fn drop(&mut self) {
        match self.owner {
            Owner::Target | Owner::Unknown => {}
            Owner::Here | Owner::Pending(_) => {
                (self.record.leaving, self.record.inherited) = (None, None);
                let here = |tunnel: &&HomeNetwork| tunnel.home == self.daemon.name;
                let begun = self.offer.tunnel.as_ref().filter(here).filter(|_| self.record.tunnel.is_none());
                begun.into_iter().for_each(|tunnel| self.daemon.tunnels.end(tunnel.id));
                self.daemon.notify_aborted_over(self.to, self.link);
                self.daemon.notify_aborted();
            }
        }
    }
}
