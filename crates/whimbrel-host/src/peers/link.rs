//! Connections to other hosts, by whichever carrier their entry names, as an engine on a plain thread sees them.

use super::ssh;
use crate::{error::HostError, host::Host};
use bytes::Bytes;
use whimbrel_core::{ByteSize, HostName};
use whimbrel_migrate::link::{Answer, Link, LinkError};
use whimbrel_wire::{
    CallError, ConnectError, Connection, Endpoint, Pending, Request, Route, Service, connect_tls,
};

/// All messages of a migration are one stream: pages, then the end of them, then the commit.
const STREAM: u16 = 1;

impl Host {
    /// The way to a trusted host.
    pub(crate) fn route(&self, name: &HostName) -> Result<Route, HostError> {
        let peer = self.trust.named(name).map_err(|source| HostError::Identity { source: source.into() })?;
        let peer = peer.ok_or_else(|| HostError::Untrusted { host: name.clone() })?;
        let no_address =
            || HostError::invalid(format!("no address is known for {name}: add it with `whimbrel trust`"));
        peer.route().ok_or_else(no_address)
    }
}

/// A connection to another host, as a migration sees it. For plain threads.
pub(crate) struct PeerLink {
    connection: Connection,
}

/// A new connection to a trusted host, whose calls over it `service` answers.
pub(crate) fn connect(host: &Host, name: &HostName, service: impl Service) -> Result<Connection, HostError> {
    let route = host.route(name)?;
    let endpoint = Endpoint::new(host.name.clone(), service);
    match route {
        Route::Tls { address, key } => host
            .runtime
            .block_on(connect_tls(&address, key, &host.identity, &endpoint))
            .map_err(|source| tls_error(name, source)),
        Route::Ssh { destination } => host
            .runtime
            .block_on(ssh::connect(destination, endpoint))
            .map_err(|source| HostError::Ssh { host: name.clone(), source: Box::new(source) }),
    }
}

impl PeerLink {
    pub(crate) fn connect(host: &Host, name: &HostName) -> Result<Self, HostError> {
        Ok(Self { connection: connect(host, name, ())? })
    }

    /// Limits what is sent, in bytes a second.
    pub(crate) fn limit(&self, rate: Option<ByteSize>) {
        self.connection.limit_rate(rate.map(|rate| rate.0));
    }

    pub(crate) fn bytes_both_ways(&self) -> u64 {
        let traffic = self.connection.traffic();
        traffic.sent + traffic.received
    }
}

impl Link for PeerLink {
    fn send(&self, kind: u16, header: Vec<u8>, payload: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        let request = Request::new(kind, header.into(), payload).ordered(STREAM);
        let pending = self.connection.send_blocking(request).map_err(link_error)?;
        Ok(Box::new(OnItsWay(pending)))
    }

    fn ask(&self, kind: u16, header: Vec<u8>) -> Result<Box<dyn Answer>, LinkError> {
        let request = Request::new(kind, header.into(), Bytes::new());
        let pending = self.connection.send_blocking(request).map_err(link_error)?;
        Ok(Box::new(OnItsWay(pending)))
    }

    fn limit_rate(&self, rate: Option<u64>) {
        self.connection.limit_rate(rate);
    }

    fn bytes_sent(&self) -> u64 {
        self.connection.traffic().sent
    }
}

fn tls_error(host: &HostName, source: ConnectError) -> HostError {
    let (host, source) = (host.clone(), Box::new(source));
    match *source {
        ConnectError::NotTrusted { .. } | ConnectError::WrongKey { .. } => {
            HostError::NotTrustedThere { host, source }
        }
        _ => HostError::Unreachable { host, source },
    }
}

struct OnItsWay(Pending);

impl Answer for OnItsWay {
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

/// No connection yet: the first attempt of a daemon that goes on with an older one's handover.
pub(crate) struct NoLink;

impl Link for NoLink {
    fn send(&self, _: u16, _: Vec<u8>, _: Bytes) -> Result<Box<dyn Answer>, LinkError> {
        Err(LinkError::Lost { source: "there is none yet".into() })
    }

    fn bytes_sent(&self) -> u64 {
        0
    }
}
