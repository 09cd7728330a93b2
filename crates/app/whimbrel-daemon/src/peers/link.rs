//! Peer links: connections to other hosts, over TLS or ssh, for engines on plain threads.

use super::ssh;
use crate::server::peer_rpc::{PROTOCOLS, Peers};
use crate::{core::error::DaemonError, core::state::Core, daemon::Daemon};
use bytes::Bytes;
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use whimbrel_core::{ByteSize, HostName};
use whimbrel_migrate::{
    link::{Answer, Link, LinkError},
    protocol::{PAGES, PROTOCOL, RETURN_VERSION},
};
use whimbrel_wire::{
    CallError, ConnectError, Connection, Endpoint, Pending, Request, Route, Service, connect_tls,
};

/// All messages of a migration are one stream: pages, then the end of them, then the commit.
const STREAM: u16 = 1;

impl Core {
    /// The route to a trusted host.
    pub(crate) fn route(&self, name: &HostName) -> Result<Route, DaemonError> {
        let peer =
            self.trust.named(name).map_err(|source| DaemonError::Identity { source: source.into() })?;
        let peer = peer.ok_or_else(|| DaemonError::Untrusted { host: name.clone() })?;
        let no_address =
            || DaemonError::invalid(format!("no address is known for {name}: add it with `whimbrel trust`"));
        peer.route().ok_or_else(no_address)
    }
}

/// The connections to another host for a migration. For plain threads.
///
/// All but pages goes over the first. Pages may overtake each other within a round, so they go over the
/// connection with the least in flight. Connections are added while the existing ones carry so much that
/// encryption takes most of a processor each. Under a rate limit there is one, to which the limit applies.
pub(crate) struct PeerLink {
    connection: Connection,
    bulk: Mutex<Bulk>,
    /// Opens another connection.
    open_another: Box<dyn Fn() -> Result<Connection, DaemonError> + Send + Sync>,
}

/// Connections for pages beside the first.
#[derive(Default)]
struct Bulk {
    more: Vec<Connection>,
    is_limited: bool,
    /// Time and count of bytes at the start of the rate measurement.
    since: Option<(Instant, u64)>,
}

/// Most connections of a link.
const CONNECTIONS_MAX: usize = 4;
/// Bytes a second over one connection from which another pays: TLS encrypts about 1 to 2 GB a second on one
/// processor, beside all else that a connection's two tasks do.
const BUSY_RATE: f64 = 300e6;
/// Time over which a rate is measured.
const RATE_WINDOW: Duration = Duration::from_millis(100);

/// Whether another connection pays where `have` connections carry this rate.
fn pays(rate: f64, have: usize) -> bool {
    have < CONNECTIONS_MAX && rate > BUSY_RATE * have as f64
}

/// Connects to a trusted host, whose calls over the connection `service` answers.
pub(crate) fn connect(
    host: &Daemon,
    name: &HostName,
    service: impl Service,
) -> Result<Connection, DaemonError> {
    let route = host.route(name)?;
    let endpoint = Endpoint::new(host.name.clone(), service);
    let endpoint = endpoint.with_trust(host.trust.clone()).with_protocols(PROTOCOLS);
    let connection = match route {
        Route::Tls { address, key } => host
            .runtime
            .block_on(connect_tls(&address, key, host.identity()?, &endpoint))
            .map_err(|source| tls_error(name, source)),
        Route::Ssh { destination } => host
            .runtime
            .block_on(ssh::connect(destination, endpoint))
            .map_err(|source| DaemonError::Ssh { host: name.clone(), source: Box::new(source) }),
    }?;
    let found = &connection.peer().name;
    if found != name {
        // Two entries with one ssh destination, or a list that was changed meanwhile.
        return Err(DaemonError::invalid(format!(
            "the address of {name} is that of {found} in the trust list"
        )));
    }
    Ok(connection)
}

impl PeerLink {
    pub(crate) fn connect(host: &Daemon, name: &HostName) -> Result<Self, DaemonError> {
        let connection = connect(host, name, Peers::separate(&host.me))?;
        let (me, to) = (host.me.clone(), name.clone());
        let another = move || {
            let host = me.upgrade().ok_or_else(|| DaemonError::invalid("the host is closing down"))?;
            connect(&host, &to, Peers::separate(&host.me))
        };
        Ok(Self { connection, bulk: Mutex::default(), open_another: Box::new(another) })
    }

    fn bulk(&self) -> MutexGuard<'_, Bulk> {
        self.bulk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection for the next pages.
    fn for_pages(&self) -> Connection {
        let mut bulk = self.bulk();
        if bulk.is_limited {
            return self.connection.clone();
        }
        let sent = self.sent(&bulk);
        let (since, before) = *bulk.since.get_or_insert_with(|| (Instant::now(), sent));
        let took = since.elapsed();
        if took > RATE_WINDOW {
            bulk.since = Some((Instant::now(), sent));
            if pays((sent - before) as f64 / took.as_secs_f64(), bulk.more.len() + 1) {
                // Another connection helps but is not needed.
                bulk.more.extend((self.open_another)().inspect_err(|error| {
                    tracing::debug!(error = error as &dyn std::error::Error, "could not add a connection");
                }));
            }
        }
        let all = std::iter::once(&self.connection).chain(&bulk.more);
        let least = all.min_by_key(|connection| connection.traffic().in_flight);
        least.unwrap_or(&self.connection).clone()
    }

    fn sent(&self, bulk: &Bulk) -> u64 {
        let all = std::iter::once(&self.connection).chain(&bulk.more);
        all.map(|connection| connection.traffic().sent).sum()
    }

    /// The first connection, for what its peer can do.
    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Limits the rate of sending, in bytes a second.
    pub(crate) fn limit(&self, rate: Option<ByteSize>) {
        self.limit_rate(rate.map(|rate| rate.0));
    }

    pub(crate) fn bytes_both_ways(&self) -> u64 {
        let bulk = self.bulk();
        let all = std::iter::once(&self.connection).chain(&bulk.more);
        all.map(|connection| connection.traffic()).map(|traffic| traffic.sent + traffic.received).sum()
    }
}

impl Link for PeerLink {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        let request = Request::new(kind, header.into(), payload).ordered(STREAM);
        let connection = if kind == PAGES { self.for_pages() } else { self.connection.clone() };
        let pending = connection.send_blocking(request).map_err(link_error)?;
        Ok(Box::new(PendingAnswer(pending)))
    }

    fn ask(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        let request = Request::new(kind, header.into(), payload);
        let pending = self.connection.send_blocking(request).map_err(link_error)?;
        Ok(Box::new(PendingAnswer(pending)))
    }

    fn limit_rate(&self, rate: Option<u64>) {
        self.connection.limit_rate(rate);
        self.bulk().is_limited = rate.is_some();
    }

    fn bytes_sent(&self) -> u64 {
        self.sent(&self.bulk())
    }

    fn gives_back(&self) -> bool {
        self.connection.peer().version_of(&PROTOCOL).is_some_and(|version| version >= RETURN_VERSION)
    }

    fn close(&self) {
        std::iter::once(&self.connection).chain(&self.bulk().more).for_each(Connection::abort);
    }
}

fn tls_error(host: &HostName, source: ConnectError) -> DaemonError {
    let (host, source) = (host.clone(), Box::new(source));
    match *source {
        ConnectError::NotTrusted { .. } | ConnectError::WrongKey { .. } => {
            DaemonError::NotTrustedThere { host, source }
        }
        _ => DaemonError::Unreachable { host, source },
    }
}

struct PendingAnswer(Pending);

impl Answer for PendingAnswer {
    fn wait(self: Box<Self>) -> Result<Bytes, LinkError> {
        self.0.wait().map(|reply| reply.header).map_err(link_error)
    }
}

fn link_error(error: CallError) -> LinkError {
    match error {
        CallError::Refused { source } => LinkError::Refused { reason: source.text },
        error => LinkError::Lost { source: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_one_connection_fills_gets_no_other() {
        assert!(!pays(125e6, 1), "a Gbit/s");
        assert!(pays(400e6, 1) && !pays(400e6, 2));
        assert!(pays(1.2e9, 3) && !pays(1.2e9, 4) && !pays(9e9, CONNECTIONS_MAX));
    }
}
