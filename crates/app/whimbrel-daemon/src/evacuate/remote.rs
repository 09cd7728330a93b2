//! Emptying a host on the word of another one: one small call, said again and again
//! (docs/protocols/migrate.md).
//!
//! The evacuation is an operation of the host that is emptied, by its own trust and its own ways to others.
//! Whoever ordered it has an operation that follows it, shows the same and passes on a wish to stop. What it
//! means to lose each other: the evacuation goes on, and who ordered it asks for a minute and then says so.
//! The order has an id, so that the word to begin may be repeated.
//!
//! Rights: what moves is for who is emptied to say (`Host::may_move`). The id, drawn at random, is the right
//! to look and to stop.

use crate::{
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};
use whimbrel_api::{
    ApiError, ErrorCode, EvacuateRequest, Operation, OperationId, OperationKind, OperationResult,
    OperationState,
};
use whimbrel_core::HostName;
use whimbrel_transfer::{LinkError, WireLink, call};
use whimbrel_wire::{Call, Connection, PeerIdentity, range};

/// An answer waits so long for news: a wish to stop waits no longer than that.
const NEWS: Duration = Duration::from_millis(250);
/// How long a host that was told to empty itself is looked for, and how often.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(500);
/// Longest request and longest answer, in JSON. A report is 200 bytes a machine.
const JSON_MAX: usize = 1 << 20;

/// Empty yourself, say how that goes, or stop.
pub(crate) struct EvacuateHost;

/// Tells one order from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EvacuationId([u8; 16]);

/// What is said of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemoteEvacuation {
    id: EvacuationId,
    word: Word,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Word {
    /// The payload is an `EvacuateRequest` in JSON. Said twice, it begins once.
    Begin,
    Look,
    Stop,
}

/// Payload of every answer, in JSON.
type Said = Result<Operation, ApiError>;

impl Call for EvacuateHost {
    const KIND: u16 = range::MIGRATE + 0x62;
    type Header = RemoteEvacuation;
    type Reply = ();
}

/// The host that is emptied.
impl Daemon {
    /// Answers a host that wants this one emptied.
    pub(crate) fn answer_order(
        self: &Arc<Self>,
        by: &PeerIdentity,
        order: &RemoteEvacuation,
        request: &[u8],
    ) -> Vec<u8> {
        let said: Said = self.watch_remote(by, order, request).map_err(|error| error.to_api());
        serde_json::to_vec(&said).unwrap_or_default()
    }

    fn watch_remote(
        self: &Arc<Self>,
        by: &PeerIdentity,
        order: &RemoteEvacuation,
        request: &[u8],
    ) -> Result<Operation, DaemonError> {
        let mut ordered = self.evacuating.ordered.lock().unwrap_or_else(PoisonError::into_inner);
        let known = ordered.filter(|(id, _)| *id == order.id).map(|(_, operation)| operation);
        match (order.word, known) {
            (Word::Begin, None) => {
                let begun = self.evacuate_here(request_of(request)?, Some(by.clone()))?;
                *ordered = Some((order.id, begun.id));
                Ok(begun)
            }
            (_, None) => Err(DaemonError::NotFound { what: "evacuation", name: "of this order".to_owned() }),
            (Word::Stop, Some(id)) => self.operations().cancel(id),
            (Word::Begin | Word::Look, Some(id)) => {
                drop(ordered);
                self.news(id)
            }
        }
    }

    /// An operation as it is once something has changed, or after a moment.
    fn news(&self, id: OperationId) -> Result<Operation, DaemonError> {
        let mut watch = self.operations().watch(id)?;
        if !watch.borrow().state.is_ended() {
            let changed = async { tokio::time::timeout(NEWS, watch.changed()).await };
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
    // An order is for who hears it.
    Ok(EvacuateRequest { host: None, ..request })
}

/// The host that orders.
impl Daemon {
    /// Has another host empty itself. `request` names no host.
    pub(super) fn order_evacuation(
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
                Errand { host: &host, at: &at, id: EvacuationId(rand::random()), connection: None };
            errand.see_through(json.into(), reporter)
        }))
    }
}

/// An order to a host.
struct Errand<'a> {
    host: &'a Arc<Daemon>,
    at: &'a HostName,
    id: EvacuationId,
    /// Of its own: on others answers may wait behind pages that travel at a limit.
    connection: Option<Connection>,
}

impl Errand<'_> {
    fn see_through(
        &mut self,
        request: Bytes,
        reporter: &ProgressReporter,
    ) -> Result<OperationResult, DaemonError> {
        let mut there = self.call(Word::Begin, &request)?;
        let mut stopped = false;
        loop {
            match there.state {
                OperationState::Succeeded { result } => return Ok(result),
                OperationState::Failed { error } => return Err(self.not_emptied(error)),
                OperationState::Cancelled { left } => return Err(DaemonError::Cancelled { left }),
                OperationState::Running => {}
            }
            let progress = &there.progress;
            reporter.progress(&progress.stage, progress.unit, progress.done, progress.total);
            let word = if reporter.is_cancelled() && !stopped { Word::Stop } else { Word::Look };
            there = self.call(word, &Bytes::new())?;
            stopped |= word == Word::Stop;
        }
    }

    /// Says it until it is answered. A host that was never reached is not waited for.
    fn call(&mut self, word: Word, request: &Bytes) -> Result<Operation, DaemonError> {
        let mut until = (word != Word::Begin).then(|| Instant::now() + PATIENCE);
        loop {
            let lost: DaemonError = match self.connection() {
                Err(error) => error,
                Ok(connection) => {
                    let order = RemoteEvacuation { id: self.id, word };
                    match call::<EvacuateHost>(&WireLink(connection), &order, request.clone()) {
                        Ok(((), said)) => return self.understood(&said),
                        Err(error @ LinkError::Lost { .. }) => {
                            // It may have heard it.
                            self.connection = None;
                            until.get_or_insert_with(|| Instant::now() + PATIENCE);
                            crate::transfer::pull::sync_error(self.at, error)
                        }
                        Err(error) => return Err(crate::transfer::pull::sync_error(self.at, error)),
                    }
                }
            };
            match until {
                None => return Err(lost),
                Some(until) if Instant::now() < until && self.host.sleep_unless_closing(PAUSE) => {}
                Some(_) => {
                    return Err(DaemonError::OutOfReach { host: self.at.clone(), source: Box::new(lost) });
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
            Ok(_) => crate::server::peer_rpc::connect_apart(self.host, self.at)?,
            Err(_) => self.host.neighbour(self.at)?,
        };
        Ok(self.connection.insert(made).clone())
    }

    fn understood(&self, said: &[u8]) -> Result<Operation, DaemonError> {
        if said.len() > JSON_MAX {
            return Err(self.no_answer(format!("{} bytes are too many", said.len())));
        }
        match serde_json::from_slice::<Said>(said) {
            Ok(said) => said.map_err(|error| self.not_emptied(error)),
            Err(error) => Err(self.no_answer(error.to_string())),
        }
    }

    fn no_answer(&self, why: String) -> DaemonError {
        let error = ApiError::new(ErrorCode::Internal, "what it answered cannot be read");
        self.not_emptied(ApiError { causes: vec![why], ..error })
    }

    fn not_emptied(&self, error: ApiError) -> DaemonError {
        DaemonError::NotEmptied { host: self.at.clone(), source: Box::new(error) }
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
            DaemonError::NotEmptied { host: "gamma".parse().unwrap(), source: Box::new(error) }.to_api();
        assert_eq!((told.code, told.message.as_str()), (ErrorCode::Busy, "gamma was not emptied"));
        assert_eq!(told.causes, ["this host is being evacuated already", "deeper"]);
        assert_eq!(told.hint.as_deref(), Some("wait"));
    }
}
