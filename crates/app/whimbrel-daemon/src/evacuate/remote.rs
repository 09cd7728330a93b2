//! Remote evacuation: a host evacuates at the request of another one, by one small call that is repeated
//! (docs/protocols/migrate.md).
//!
//! The evacuation is an operation of the evacuated host, with its own trust list and routes. The requester
//! has an operation that mirrors it and passes on a cancel. If the two lose contact the evacuation goes on;
//! the requester retries for a minute, then reports that. The evacuation has an id, so that the start may be
//! repeated.
//!
//! Rights: the evacuated host decides what moves (`Daemon::may_move`). The id, drawn at random, is the right
//! to poll and to cancel.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter, rights::Caller},
    daemon::Daemon,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use whimbrel_api::{
    ApiError, ErrorCode, EvacuateRequest, Operation, OperationId, OperationKind, OperationResult,
    OperationState,
};
use whimbrel_core::{HostName, lock};
use whimbrel_transfer::{LinkError, WireLink, call};
use whimbrel_wire::{Call, Connection, range};

/// Longest wait of an answer for news, and so of a cancel.
const NEWS_TIMEOUT: Duration = Duration::from_millis(250);
/// How long and how often a host that was asked to evacuate is retried.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(500);
/// Longest request and longest answer, in JSON. A report has 200 bytes for each machine.
const JSON_MAX: usize = 1 << 20;

/// Starts, polls or cancels an evacuation of the host that is called.
pub(crate) struct EvacuateHost;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EvacuationId([u8; 16]);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemoteEvacuation {
    id: EvacuationId,
    word: EvacuationAction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum EvacuationAction {
    /// The payload is an `EvacuateRequest` in JSON. A repeated message starts nothing.
    Begin,
    Look,
    Stop,
}

/// Payload of every answer, in JSON.
type EvacuationReply = Result<Operation, ApiError>;

impl Call for EvacuateHost {
    const KIND: u16 = range::MIGRATE + 0x62;
    type Header = RemoteEvacuation;
    type Reply = ();
}

/// The evacuated host's side.
impl Daemon {
    /// Handles a message about an evacuation of this host.
    pub(crate) fn answer_remote_evacuation(
        self: &Arc<Self>,
        by: &Caller,
        order: &RemoteEvacuation,
        request: &[u8],
    ) -> Vec<u8> {
        let said: EvacuationReply = self.watch_remote(by, order, request).map_err(|error| error.to_api());
        serde_json::to_vec(&said).unwrap_or_default()
    }

    fn watch_remote(
        self: &Arc<Self>,
        by: &Caller,
        order: &RemoteEvacuation,
        request: &[u8],
    ) -> Result<Operation, DaemonError> {
        let mut ordered = lock(&self.evacuation.requested);
        let known = ordered.filter(|(id, _)| *id == order.id).map(|(_, operation)| operation);
        match (order.word, known) {
            (EvacuationAction::Begin, None) => {
                let begun = self.evacuate_here(request_of(request)?, Some(by.clone()))?;
                *ordered = Some((order.id, begun.id));
                Ok(begun)
            }
            (_, None) => Err(DaemonError::NotFound { what: "evacuation", name: "with this id".to_owned() }),
            (EvacuationAction::Stop, Some(id)) => self.operations().cancel(id),
            (EvacuationAction::Begin | EvacuationAction::Look, Some(id)) => {
                drop(ordered);
                self.next_snapshot(id)
            }
        }
    }

    /// The operation after its next change, or after a moment.
    fn next_snapshot(&self, id: OperationId) -> Result<Operation, DaemonError> {
        let mut watch = self.operations().watch(id)?;
        if !watch.borrow().state.is_ended() {
            let changed = async { tokio::time::timeout(NEWS_TIMEOUT, watch.changed()).await };
            let _ = self.runtime.block_on(changed);
        }
        let operation = watch.borrow().clone();
        Ok(operation)
    }
}

fn request_of(json: &[u8]) -> Result<EvacuateRequest, DaemonError> {
    let why = |why: String| DaemonError::invalid(format!("the request cannot be read: {why}"));
    if json.len() > JSON_MAX {
        return Err(why(format!("{} bytes are too many", json.len())));
    }
    let request: EvacuateRequest = serde_json::from_slice(json).map_err(|error| why(error.to_string()))?;
    // The request is for this host.
    Ok(EvacuateRequest { host: None, ..request })
}

/// The requester's side.
impl Daemon {
    /// Evacuates another host. `request` names no host.
    pub(super) fn evacuate_remotely(
        self: &Arc<Self>,
        at: HostName,
        request: EvacuateRequest,
    ) -> Result<Operation, DaemonError> {
        let peer = self.trust.named(&at).map_err(|source| DaemonError::Identity { source: source.into() })?;
        peer.ok_or_else(|| DaemonError::Untrusted { host: at.clone() })?;
        let json = serde_json::to_vec(&request).map_err(|error| DaemonError::invalid(error.to_string()))?;
        let host = self.clone();
        let ordered = OperationKind::Evacuate;
        Ok(self.operations().start(ordered, at.to_string(), move |reporter| {
            let mut errand =
                RemoteRun { host: &host, at: &at, id: EvacuationId(rand::random()), connection: None };
            errand.run(json.into(), reporter)
        }))
    }
}

/// A remote evacuation, on the requester's side.
struct RemoteRun<'a> {
    host: &'a Arc<Daemon>,
    at: &'a HostName,
    id: EvacuationId,
    /// Used for nothing else: elsewhere answers may wait behind rate-limited pages.
    connection: Option<Connection>,
}

impl RemoteRun<'_> {
    fn run(&mut self, request: Bytes, reporter: &ProgressReporter) -> Result<OperationResult, DaemonError> {
        let mut there = self.call(EvacuationAction::Begin, &request)?;
        let mut stopped = false;
        loop {
            match there.state {
                OperationState::Succeeded { result } => return Ok(result),
                OperationState::Failed { error } => return Err(self.not_evacuated(error)),
                OperationState::Cancelled { left } => return Err(DaemonError::Cancelled { left }),
                OperationState::Running => {}
            }
            let progress = &there.progress;
            reporter.progress(&progress.stage, progress.unit, progress.done, progress.total);
            let word = if reporter.is_cancelled() && !stopped {
                EvacuationAction::Stop
            } else {
                EvacuationAction::Look
            };
            there = self.call(word, &Bytes::new())?;
            stopped |= word == EvacuationAction::Stop;
        }
    }

    /// Repeats a message until it is answered. A host that was never reached is not retried.
    fn call(&mut self, word: EvacuationAction, request: &Bytes) -> Result<Operation, DaemonError> {
        let mut until = (word != EvacuationAction::Begin).then(|| Instant::now() + PATIENCE);
        loop {
            let lost: DaemonError = match self.connection() {
                Err(error) => error,
                Ok(connection) => {
                    let order = RemoteEvacuation { id: self.id, word };
                    match call::<EvacuateHost>(&WireLink(connection), &order, request.clone()) {
                        Ok(((), said)) => return self.decode_reply(&said),
                        Err(error @ LinkError::Lost { .. }) => {
                            // The host may have received the message.
                            self.connection = None;
                            until.get_or_insert_with(|| Instant::now() + PATIENCE);
                            crate::transfer::pull::transfer_error(self.at, error)
                        }
                        Err(error) => return Err(crate::transfer::pull::transfer_error(self.at, error)),
                    }
                }
            };
            match until {
                None => return Err(lost),
                Some(until) if Instant::now() < until && self.host.sleep_unless_closing(PAUSE) => {}
                Some(_) => {
                    return Err(DaemonError::LostContact { host: self.at.clone(), source: Box::new(lost) });
                }
            }
        }
    }

    /// A host without an address may have made a connection to this one.
    fn connection(&mut self) -> Result<Connection, DaemonError> {
        if let Some(connection) = self.connection.as_ref().filter(|known| known.close_reason().is_none()) {
            return Ok(connection.clone());
        }
        let made = match self.host.route(self.at) {
            Ok(_) => crate::server::peer_rpc::connect_separately(self.host, self.at)?,
            Err(_) => self.host.peer_connection(self.at)?,
        };
        Ok(self.connection.insert(made).clone())
    }

    fn decode_reply(&self, said: &[u8]) -> Result<Operation, DaemonError> {
        if said.len() > JSON_MAX {
            return Err(self.bad_reply(format!("{} bytes are too many", said.len())));
        }
        match serde_json::from_slice::<EvacuationReply>(said) {
            Ok(said) => said.map_err(|error| self.not_evacuated(error)),
            Err(error) => Err(self.bad_reply(error.to_string())),
        }
    }

    fn bad_reply(&self, why: String) -> DaemonError {
        let error = ApiError::new(ErrorCode::Internal, "cannot read the answer");
        self.not_evacuated(ApiError { causes: vec![why], ..error })
    }

    fn not_evacuated(&self, error: ApiError) -> DaemonError {
        DaemonError::NotEvacuated { host: self.at.clone(), source: Box::new(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_for_who_hears_it_and_is_read_in_bounds() {
        let to_another = br#"{"host":"gamma","to":["beta"],"parallel":2}"#;
        let request = request_of(to_another).unwrap();
        assert_eq!((request.host, request.parallel), (None, Some(2)));
        assert_eq!(request.to, ["beta".parse().unwrap()]);
        for bad in [&b"{\"to\":["[..], b"{\"form\":1}", &vec![b' '; JSON_MAX + 1]] {
            assert_eq!(request_of(bad).unwrap_err().code(), ErrorCode::Invalid);
        }
    }

    #[test]
    fn what_the_other_host_says_reaches_the_caller_with_its_code_its_causes_and_its_hint() {
        let error = ApiError::new(ErrorCode::Busy, "this host is being evacuated already").with_hint("wait");
        let error = ApiError { causes: vec!["deeper".to_owned()], ..error };
        let told =
            DaemonError::NotEvacuated { host: "gamma".parse().unwrap(), source: Box::new(error) }.to_api();
        assert_eq!((told.code, told.message.as_str()), (ErrorCode::Busy, "gamma was not evacuated"));
        assert_eq!(told.causes, ["this host is being evacuated already", "deeper"]);
        assert_eq!(told.hint.as_deref(), Some("wait"));
    }
}
