//! A machine that was handed over: kept here until the target confirms that it runs there, then freed.

use super::{backup_host, late_frames};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::{InheritedProtectionRecord, Phase},
    },
    migrate::resolution,
    server::peer_rpc::PeerLink,
};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use whimbrel_core::HostName;
use whimbrel_migrate::{
    CommittedHost, Confirmed, PendingCommit, confirm, handover::AbortedAction, link::Link,
    postcopy::PageServer, protocol::HandoverId, source::BoxError,
};

/// A paused machine that belongs to the target.
pub(super) struct CommittedMachine<'a> {
    pub(super) daemon: &'a Arc<Daemon>,
    pub(super) machine: &'a Arc<Machine>,
    /// Lock of the machine, until it is freed.
    pub(super) turn: Option<MachineLock<'a>>,
    pub(super) handover: HandoverId,
    pub(super) to: &'a HostName,
    pub(super) inherited: Option<InheritedProtectionRecord>,
    /// Present if pages may be missing on the target.
    pub(super) page_server: Option<Arc<PageServer>>,
    /// Connection of the migration, for frames that still arrive here.
    pub(super) link: Option<&'a PeerLink>,
    /// Whether its network moves with it, so that its tunnel ends.
    pub(super) leaves_home: bool,
}

impl CommittedMachine<'_> {
    /// Notifies the target until it confirms that the machine runs there. Returns since when it runs.
    pub(super) fn confirm(&mut self, commit: PendingCommit) -> Result<Instant, DaemonError> {
        let name = self.machine.name().clone();
        match confirm(self.handover, commit, self) {
            Confirmed::Runs(since) => return Ok(since),
            Confirmed::Returned => {
                self.daemon.notify_aborted();
                return Err(DaemonError::GivenBack { name, host: self.to.clone() });
            }
            Confirmed::Open => {}
        }
        match self.inherited.as_ref().filter(|_| self.is_at_backup()) {
            Some(inherited) => {
                let taken_over = backup_host::taken_over_error(&name, inherited);
                if let Some(turn) = self.turn.take() {
                    self.daemon.clean_up(self.machine, turn, self.handover);
                }
                Err(taken_over)
            }
            None => Err(DaemonError::Unconfirmed { name, host: self.to.clone() }),
        }
    }

    fn is_at_backup(&self) -> bool {
        self.daemon.protections.backup_has_machine(self.inherited.as_ref())
    }
}

impl CommittedHost for CommittedMachine<'_> {
    fn connect(&self) -> Result<Box<dyn Link>, BoxError> {
        Ok(Box::new(PeerLink::connect(self.daemon, self.to)?))
    }

    fn wait(&self, pause: Duration) -> bool {
        self.daemon.sleep_unless_closing(pause) && !self.is_at_backup() && !self.machine.is_resolving()
    }

    fn free_machine(&mut self) {
        let Some(mut turn) = self.turn.take() else { return };
        if self.leaves_home {
            self.daemon.leave_home(&mut turn.record);
        }
        if let Some(link) = self.link {
            send_late_frames(link, self.handover, &turn);
        }
        match self.page_server.clone() {
            None => self.daemon.clean_up(self.machine, turn, self.handover),
            Some(server) => {
                drop(turn);
                let inherited = self.inherited.clone();
                self.daemon.serve_until_complete(self.machine, server, self.handover, inherited);
            }
        }
    }

    fn record_ours(&mut self) -> Result<(), BoxError> {
        let turn = self.turn.as_mut().ok_or("the machine was freed")?;
        Ok(resolution::take_back(self.daemon, turn)?)
    }

    fn resume_here(&mut self) {
        let Some(turn) = &mut self.turn else { return };
        let name = self.machine.name();
        tracing::warn!(%name, host = %self.to, "a machine that was handed over came back: it never ran there");
        if let Err(error) = resolution::run_again(self.daemon, self.machine, turn) {
            tracing::error!(%name, error = &error as &dyn std::error::Error, "a machine that came back stays paused");
        }
    }

    fn aborted(&mut self, action: AbortedAction) {
        match action {
            AbortedAction::SendAbort => self.daemon.handovers.abort(self.handover),
            AbortedAction::RemoveRecord => self.daemon.handovers.end(self.handover),
        }
    }
}

impl Daemon {
    /// Continues a handover that an earlier daemon has committed.
    pub(crate) fn finish_handover(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        handover: HandoverId,
        to: HostName,
    ) {
        let (host, machine) = (self.clone(), machine.clone());
        let finish = move || match host.finish_committed(&machine, handover, &to) {
            Ok(()) | Err(DaemonError::RunsOnBackupHost { .. } | DaemonError::GivenBack { .. }) => {}
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "a handover is still unconfirmed");
            }
        };
        if let Err(error) = thread::Builder::new().name("handover".into()).spawn(finish) {
            tracing::error!(%error, "cannot start the thread that finishes a handover");
        }
    }

    fn finish_committed(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        handover: HandoverId,
        to: &HostName,
    ) -> Result<(), DaemonError> {
        let mut turn = machine.lock("migrate");
        // The mark that an earlier daemon read may be in the page cache only, after a failed sync.
        turn.record.save(&self.directories)?;
        let keeps = matches!(turn.record.phase, Phase::HandedOver { keeps: true, .. });
        // Set first, so that a machine that waits for pages while it starts gets them.
        let page_server = keeps.then(|| self.resume_serving(&mut turn, handover, to)).transpose()?;
        if let (Some(live), Some(server)) = (&mut turn.running, &page_server) {
            live.page_server = Some(server.clone());
        }
        turn.publish();
        let inherited = turn.record.inherited.clone();
        let turn = Some(turn);
        let mut committed = CommittedMachine {
            daemon: self,
            machine,
            turn,
            handover,
            to,
            inherited,
            page_server,
            link: None,
            leaves_home: false,
        };
        committed.confirm(PendingCommit::unsent()).map(drop)
    }
}

/// Sends late frames to the target before the machine's ports here are removed.
fn send_late_frames(link: &PeerLink, handover: HandoverId, turn: &MachineLock<'_>) {
    let last = turn.running.iter().flat_map(|live| late_frames::take_last(&live.ports)).collect::<Vec<_>>();
    let sent = whimbrel_migrate::late_frames::send(link, handover, &last);
    let heard = sent.and_then(|answers| answers.into_iter().try_for_each(|answer| answer.wait().map(drop)));
    if let Err(unheard) = heard {
        tracing::debug!(%handover, %unheard, "late frames of a migrated machine are lost");
    }
}
