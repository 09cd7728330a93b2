//! Push: copies of a capsule to another host, and the handoff of a suspended machine.

use super::pull::{PATIENCE, STATUS_INTERVAL, name_by_id, not_found, stop_if_cancelled, transfer_error};
use crate::{
    capsule::checkpoint::CheckpointOptions,
    core::{
        error::DaemonError,
        operations::ProgressReporter,
        refs,
        rights::{self, Access, Caller},
    },
    daemon::Daemon,
    machine::record::Phase,
    server::peer_rpc::{GrantMachine, HandoffSubject, PrepareHandoff},
    transfer::upload::UploadTarget,
};
use bytes::Bytes;
use std::{
    fmt::Display,
    sync::{Arc, mpsc},
    thread,
    time::Instant,
};
use whimbrel_api::{
    CapsuleRef, Operation, OperationKind, OperationResult, PushRequest, TransferReport, Unit, is_bucket,
};
use whimbrel_core::{CapsuleId, HostName, MachineName, RefName, error_chain};
use whimbrel_transfer::{
    Access as _, LinkError, WireLink, call,
    protocol::{RemotePull, RemotePullReply, RemotePullRequest, RemotePullStatus},
};
use whimbrel_wire::Connection;

impl Daemon {
    /// Starts the operation that pushes a machine or a capsule to another host.
    pub(crate) fn push(self: &Arc<Self>, request: PushRequest) -> Result<Operation, DaemonError> {
        self.push_as(request, None)
    }

    /// Starts the same with a tag for the copy of a capsule that has no name.
    pub(crate) fn push_as(
        self: &Arc<Self>,
        request: PushRequest,
        tag: Option<RefName>,
    ) -> Result<Operation, DaemonError> {
        if let Some(bucket) = request.pool.as_deref().filter(|place| is_bucket(place)) {
            return self.push_to_bucket(bucket, &request, tag);
        }
        if let Some(pool) = &request.pool {
            return self.push_to_pool(pool, &request);
        }
        let machine = match &request.subject {
            CapsuleRef::Name(name) => {
                name.as_str().parse().ok().and_then(|name| self.machines.get(&name).ok())
            }
            CapsuleRef::Id(_) | CapsuleRef::Past(_) => None,
        };
        if request.follow || request.unfollow {
            let host = if request.follow { Some(self.other_host(request.host)?) } else { None };
            return self.start_upload(&request.subject, host.map(UploadTarget::Host));
        }
        let to = self.other_host(request.host.clone())?;
        let capsule = match machine {
            Some(_) => None,
            None => Some(self.find(&request.subject)?.0),
        };
        let (host, subject) = (self.clone(), request.subject.to_string());
        Ok(self.operations().start(OperationKind::Push, subject, move |reporter| {
            let begun = Instant::now();
            let connection = host.peer_connection(&to)?;
            let mut given = None;
            let capsule = match (machine, capsule) {
                (Some(machine), _) => {
                    // A machine that was handed over to a host that cannot fetch it would be nowhere.
                    host.check_machine_readable(machine.name(), &to)?;
                    let capsule = host.suspend_for_handoff(&machine, &to, &request, reporter)?;
                    host.hand_off(&machine, &to, &connection, capsule)?;
                    given = Some(machine.name().clone());
                    capsule
                }
                (None, Some(capsule)) => {
                    host.check_readable(&request.subject, &to, |caller| {
                        host.capsule_access(caller).allowed(&capsule)
                    })?;
                    capsule
                }
                (None, None) => return Err(not_found(&request.subject)),
            };
            let names = match &tag {
                Some(tag) => vec![tag.clone()],
                None => host.names_to_send(&request.subject, given.as_ref(), &capsule),
            };
            let (wire_bytes, pages) = host.send(&to, capsule, names, reporter)?;
            let total_ms = begun.elapsed().as_secs_f64() * 1e3;
            let host = to.to_string();
            let report = TransferReport { capsule, host, wire_bytes, pages, whole: true, total_ms };
            Ok(OperationResult::Push { report, machine: given })
        }))
    }

    /// Refuses a machine whose capsules the other host may not read here.
    pub(crate) fn check_machine_readable(
        &self,
        name: &MachineName,
        to: &HostName,
    ) -> Result<(), DaemonError> {
        let newest = refs::machine_ref(name);
        self.check_readable(name, to, |caller| rights::may_use(caller, Access::Read, &newest))
    }

    /// Refuses to push what the other host may not read here, before anything is done for it.
    fn check_readable(
        &self,
        what: &dyn Display,
        to: &HostName,
        may_read: impl FnOnce(&Caller) -> bool,
    ) -> Result<(), DaemonError> {
        let caller = self.trust.named(to).ok().flatten().map_or(Caller::Stranger, Caller::Peer);
        match may_read(&caller) {
            true => Ok(()),
            false => Err(DaemonError::invalid(format!(
                "{to} may not read {what} here: `whimbrel trust set {to} --read PATTERN` changes that"
            ))),
        }
    }

    fn names_to_send(
        &self,
        subject: &CapsuleRef,
        machine: Option<&MachineName>,
        capsule: &CapsuleId,
    ) -> Vec<RefName> {
        match (machine, subject) {
            (Some(machine), _) => vec![refs::machine_ref(machine)],
            (None, CapsuleRef::Name(name)) if self.store.get_ref(name).is_ok_and(|id| id.is_some()) => {
                vec![name.clone()]
            }
            (None, _) => name_by_id("pushed", capsule).into_iter().collect(),
        }
    }

    /// Suspends a machine before its handoff; one that is suspended, or was handed off to the same host,
    /// stays so.
    fn suspend_for_handoff(
        self: &Arc<Self>,
        machine: &crate::machine::entry::Machine,
        to: &HostName,
        request: &PushRequest,
        reporter: &ProgressReporter,
    ) -> Result<CapsuleId, DaemonError> {
        let mut turn = machine.try_lock("push", Some(reporter.id))?;
        match turn.record.phase.clone() {
            Phase::Suspended { capsule } => Ok(capsule),
            Phase::Given { to: owner, capsule } if owner == *to => Ok(capsule),
            _ => {
                let wanted = CheckpointOptions::without_tag(request.balloon);
                Ok(self.suspend_in(&mut turn, &wanted, reporter)?.capsule)
            }
        }
    }

    /// Hands off a suspended machine; see `transfer::handoff` for the order.
    fn hand_off(
        &self,
        machine: &crate::machine::entry::Machine,
        to: &HostName,
        connection: &Connection,
        capsule: CapsuleId,
    ) -> Result<(), DaemonError> {
        let what = HandoffSubject { machine: machine.name().clone(), capsule };
        let link = WireLink(connection.clone());
        call::<PrepareHandoff>(&link, &what, Bytes::new()).map_err(|error| transfer_error(to, error))?;
        {
            let mut turn = machine.try_lock("push", None)?;
            match &turn.record.phase {
                Phase::Given { to: owner, .. } if owner == to => {}
                Phase::Suspended { capsule: now } if *now == capsule => {
                    self.record_handoff(&mut turn, to, capsule)?
                }
                _ => {
                    let (name, state) = (what.machine, turn.record.phase.name());
                    return Err(DaemonError::State { name, state, needed: "suspended" });
                }
            }
        }
        call::<GrantMachine>(&link, &what, Bytes::new()).map_err(|error| transfer_error(to, error))?;
        Ok(())
    }

    /// Asks the other host to fetch a capsule, and reports its progress. Waits for a link that was lost.
    pub(crate) fn send(
        &self,
        to: &HostName,
        capsule: CapsuleId,
        names: Vec<RefName>,
        reporter: &ProgressReporter,
    ) -> Result<(u64, u64), DaemonError> {
        let ask = RemotePullRequest { capsule, refs: names, bases: Vec::new() };
        let mut lost_since = None;
        loop {
            let sent = match self.peer_connection(to) {
                Ok(connection) => {
                    lost_since = None;
                    send_over(&Arc::new(WireLink(connection)), &ask, reporter)?
                }
                Err(error) => Err(LinkError::lost(error_chain(&error))),
            };
            let error = match sent {
                Ok(answer) => return Ok((answer.bytes, answer.pages)),
                Err(error @ LinkError::Lost { .. }) => error,
                Err(error) => return Err(transfer_error(to, error)),
            };
            if lost_since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                return Err(transfer_error(to, error));
            }
            reporter.progress("waiting for the link", Unit::Bytes, 0, None);
            thread::sleep(STATUS_INTERVAL);
            stop_if_cancelled(reporter)?;
        }
    }
}

/// Sends one remote pull request, as long as the connection lasts.
fn send_over(
    link: &Arc<WireLink>,
    ask: &RemotePullRequest,
    reporter: &ProgressReporter,
) -> Result<Result<RemotePullReply, LinkError>, DaemonError> {
    let (answered, answer) = mpsc::channel();
    let (there, pull) = (link.clone(), ask.clone());
    thread::spawn(move || answered.send(call::<RemotePull>(&*there, &pull, Bytes::new())));
    loop {
        if let Ok((Some(progress), _)) = call::<RemotePullStatus>(&**link, &ask.capsule, Bytes::new()) {
            let total = progress.received + progress.left;
            reporter.progress("sending", Unit::Bytes, progress.received, Some(total));
        }
        stop_if_cancelled(reporter)?;
        match answer.recv_timeout(STATUS_INTERVAL) {
            Ok(answer) => return Ok(answer.map(|(answer, _)| answer)),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(DaemonError::Panicked),
        }
    }
}
