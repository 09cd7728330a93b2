//! Links of a protection: a connection for pages, and control links for messages that must not wait behind
//! them.
//!
//! Every wait here has a limit, and a link can be closed from another thread: a host that was unplugged in
//! the middle of a transfer stays silent for a long time.

use crate::{core::error::DaemonError, daemon::Daemon, server::peer_rpc};
use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::watch;
use whimbrel_core::{HostName, error_chain};
use whimbrel_migrate::link::{Answer, Link, LinkError};
use whimbrel_protect::protocol::{self, ProtectionId, StandbyOutcome};
use whimbrel_wire::{CallError, Connection, Request};

/// Stream number: all pages of a protection are one ordered stream.
const STREAM: u16 = 3;

/// The connection for pages.
pub(in crate::protect) struct PageLink {
    connection: Connection,
    runtime: tokio::runtime::Handle,
    closed: watch::Sender<bool>,
    /// Limit in bytes a second, which later limits can only lower.
    rate_max: Option<u64>,
}

impl PageLink {
    pub(in crate::protect) fn connect(
        host: &Daemon,
        to: &HostName,
        rate_max: Option<u64>,
    ) -> Result<Self, DaemonError> {
        let (connection, runtime) = (peer_rpc::connect_separately(host, to)?, host.runtime.clone());
        let link = Self { connection, runtime, closed: watch::Sender::new(false), rate_max };
        link.limit_rate(None);
        Ok(link)
    }

    pub(in crate::protect) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Closes the link; all waiting calls fail at once.
    pub(in crate::protect) fn close(&self) {
        self.closed.send_replace(true);
        self.connection.close();
    }

    pub(in crate::protect) fn bytes_both_ways(&self) -> u64 {
        let traffic = self.connection.traffic();
        traffic.sent + traffic.received
    }
}

impl Link for PageLink {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        let request = Request::new(kind, header.into(), payload).ordered(STREAM);
        let mut cut = self.closed.subscribe();
        let pending = self.runtime.block_on(async {
            tokio::select! {
                biased;
                _ = cut.wait_for(|cut| *cut) => Err(closed_error()),
                pending = self.connection.start(request) => pending.map_err(link_error),
            }
        })?;
        Ok(Box::new(PendingAnswer { pending, closed: cut, runtime: self.runtime.clone() }))
    }

    fn limit_rate(&self, rate: Option<u64>) {
        self.connection.limit_rate(lower_limit(self.rate_max, rate));
    }

    fn bytes_sent(&self) -> u64 {
        self.connection.traffic().sent
    }
}

/// The lower of two optional limits.
fn lower_limit(most: Option<u64>, rate: Option<u64>) -> Option<u64> {
    most.into_iter().chain(rate).min()
}

struct PendingAnswer {
    pending: whimbrel_wire::Pending,
    closed: watch::Receiver<bool>,
    runtime: tokio::runtime::Handle,
}

impl Answer for PendingAnswer {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        let Self { pending, closed: mut cut, runtime } = *self;
        runtime.block_on(async {
            tokio::select! {
                biased;
                reply = pending => reply.map(|reply| reply.header).map_err(link_error),
                _ = cut.wait_for(|cut| *cut) => Err(closed_error()),
            }
        })
    }
}

fn closed_error() -> LinkError {
    LinkError::Lost { source: "the standby was silent for too long".into() }
}

fn link_error(error: CallError) -> LinkError {
    match error {
        CallError::Refused { source } => LinkError::Refused { reason: source.text },
        error => LinkError::Lost { source: error.into() },
    }
}

/// A control link to another host: connects on demand, and again after a failure.
pub(in crate::protect) struct ControlLink {
    host: Arc<Daemon>,
    to: HostName,
    connection: Mutex<Option<Connection>>,
}

impl ControlLink {
    pub(in crate::protect) fn new(host: &Arc<Daemon>, to: &HostName) -> Self {
        Self { host: host.clone(), to: to.clone(), connection: Mutex::new(None) }
    }

    /// A link of its own to the same host.
    pub(in crate::protect) fn another(&self) -> Self {
        Self::new(&self.host, &self.to)
    }

    pub(in crate::protect) fn to(&self) -> &HostName {
        &self.to
    }

    /// Sends a request; none if no reply arrived within `patience`.
    pub(in crate::protect) fn ask<H: Serialize, R: DeserializeOwned>(
        &self,
        kind: u16,
        header: &H,
        patience: Duration,
    ) -> Option<R> {
        self.ask_with(kind, header, Bytes::new(), patience)
    }

    /// Sends a request with a payload.
    pub(in crate::protect) fn ask_with<H: Serialize, R: DeserializeOwned>(
        &self,
        kind: u16,
        header: &H,
        payload: Bytes,
        patience: Duration,
    ) -> Option<R> {
        let begun = Instant::now();
        let connection = self.connection(patience)?;
        let header = postcard::to_stdvec(header).expect("a header is always encodable");
        let request = Request::new(kind, header.into(), payload);
        let left = patience.saturating_sub(begun.elapsed()).max(Duration::from_millis(1));
        let reply = self.host.runtime.block_on(async {
            tokio::time::timeout(left, connection.call(request)).await.map_err(|_| "timed out".to_owned())
        });
        let reply = reply.and_then(|reply| reply.map_err(|error| error_chain(&error)));
        match reply {
            Ok(reply) => postcard::from_bytes(&reply.header).ok(),
            Err(error) => {
                tracing::debug!(host = %self.to, error, "no reply on a control link");
                // A silent connection may be dead without knowing it.
                *self.lock() = None;
                connection.close();
                None
            }
        }
    }

    /// Connects in advance, so that an urgent request does not wait for that. Returns whether there is a
    /// connection.
    pub(in crate::protect) fn preconnect(&self) -> bool {
        self.connection(Duration::from_secs(1)).is_some()
    }

    fn connection(&self, patience: Duration) -> Option<Connection> {
        let known = self.lock().clone().filter(|connection| connection.close_reason().is_none());
        if known.is_some() {
            return known;
        }
        // A host that is gone would block the call longer than any caller may wait.
        let (host, to) = (self.host.clone(), self.to.clone());
        let (told, hears) = std::sync::mpsc::channel();
        let dial = move || {
            let _ = told.send(peer_rpc::connect_separately(&host, &to));
        };
        std::thread::Builder::new().name("dial".into()).spawn(dial).ok()?;
        match hears.recv_timeout(patience) {
            Ok(Ok(connection)) => {
                *self.lock() = Some(connection.clone());
                Some(connection)
            }
            Ok(Err(error)) => {
                tracing::debug!(host = %self.to, error = &error as &dyn std::error::Error, "cannot connect a control link");
                None
            }
            Err(_) => None,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Connection>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the standby that the protection ends. It may retain its pages for another one.
    pub(in crate::protect) fn end(
        &self,
        id: ProtectionId,
        keep: bool,
        patience: Duration,
    ) -> Option<StandbyOutcome> {
        self.ask(protocol::END, &protocol::EndProtection { id, keep }, patience)
    }

    /// Tells the standby that it owns the machine.
    pub(in crate::protect) fn yield_to_standby(
        &self,
        id: ProtectionId,
        patience: Duration,
    ) -> Option<StandbyOutcome> {
        self.ask(protocol::YIELD, &id, patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_its_own_holds_whatever_else_is_asked() {
        assert_eq!(lower_limit(Some(5), None), Some(5), "as between the rounds of a copy, and for epochs");
        assert_eq!(lower_limit(Some(5), Some(9)), Some(5));
        assert_eq!((lower_limit(Some(5), Some(2)), lower_limit(None, Some(2))), (Some(2), Some(2)));
        assert_eq!(lower_limit(None, None), None);
    }
}
