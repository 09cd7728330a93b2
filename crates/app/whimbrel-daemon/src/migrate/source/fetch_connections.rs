//! Fetch connections of the source in postcopy: reopened whenever they are lost, until the target has every
//! page.
//!
//! The source opens the connections and the target sends requests over them, so the target needs no route to
//! the source. One is for pages that the guest waits for, one for all others.
//! `whimbrel_migrate::postcopy::PageServer` answers.

use crate::{core::error::DaemonError, daemon::Daemon, server::peer_rpc};
use bytes::Bytes;
use std::{sync::Arc, thread, time::Duration};
use whimbrel_core::{ByteSize, HostName, error_chain};
use whimbrel_migrate::postcopy::{
    PageServer,
    messages::{FetchPriority, OFFER_FETCH, OfferFetch, OfferFetchReply},
};
use whimbrel_wire::{Connection, Request};

/// Delays between attempts: the first and the longest.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];
/// Interval at which connections are polled for their end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Connects a page server to its target, from a thread of its own, until all pages are sent.
pub(crate) fn keep_connected(
    host: &Arc<Daemon>,
    giving: Arc<PageServer>,
    to: HostName,
    rate: Option<ByteSize>,
) {
    let host = host.clone();
    let serve = move || {
        let mut pause = RETRY_DELAYS[0];
        while !giving.is_finished() {
            match open_connections(&host, &giving, &to, rate) {
                Ok(Some(lanes)) => {
                    pause = RETRY_DELAYS[0];
                    giving.connected(true, None);
                    watch(&host, &giving, &lanes);
                    giving.connected(false, Some(format!("the connection to {to} was lost")));
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(%to, error = &error as &dyn std::error::Error, "cannot connect to the target of a postcopy migration");
                    giving.connected(false, Some(error_chain(&error)));
                }
            }
            if !host.sleep_unless_closing(pause) {
                return;
            }
            // Before the machine's pause the target may not know the handover yet, so retrying stays cheap.
            pause = if giving.is_open() { (pause * 2).min(RETRY_DELAYS[1]) } else { RETRY_DELAYS[0] };
        }
    };
    if let Err(error) = thread::Builder::new().name("giving".into()).spawn(serve) {
        tracing::error!(%error, "cannot start the thread of a page server");
    }
}

/// Opens new connections, if the target wants them now.
fn open_connections(
    host: &Arc<Daemon>,
    giving: &Arc<PageServer>,
    to: &HostName,
    rate: Option<ByteSize>,
) -> Result<Option<Vec<Connection>>, DaemonError> {
    let mut lanes = Vec::new();
    for lane in [FetchPriority::Urgent, FetchPriority::Bulk] {
        let connection = peer_rpc::open_fetch_connection(host, to, giving.clone())?;
        if lane == FetchPriority::Bulk {
            connection.limit_rate(rate.map(|rate| rate.0));
        }
        // A target that does not know the handover yet reports no missing pages either, so its answer counts
        // only after the pause.
        let counts = giving.is_open();
        let header = postcard::to_stdvec(&OfferFetch { handover: giving.handover(), lane });
        let header = header.map_err(|error| DaemonError::invalid(error.to_string()))?;
        let request = Request::new(OFFER_FETCH, header.into(), Bytes::new());
        let failed = |source: whimbrel_wire::CallError| DaemonError::Transfer {
            host: to.clone(),
            source: source.into(),
        };
        let reply = connection.call_blocking(request).map_err(failed)?;
        match postcard::from_bytes(&reply.header) {
            Ok(OfferFetchReply::Waiting) => lanes.push(connection),
            Ok(OfferFetchReply::Whole) if counts => {
                giving.mark_complete();
                return Ok(None);
            }
            Ok(OfferFetchReply::Whole) => return Ok(None),
            Err(error) => return Err(DaemonError::Transfer { host: to.clone(), source: error.into() }),
        }
    }
    Ok(Some(lanes))
}

/// Watches the connections until one ends, or until no more pages are needed.
fn watch(host: &Daemon, giving: &PageServer, lanes: &[Connection]) {
    let mut bytes = 0;
    while lanes.iter().all(|lane| lane.close_reason().is_none()) && !giving.wait_finished(POLL_INTERVAL) {
        let now: u64 = lanes.iter().map(|lane| lane.traffic().sent + lane.traffic().received).sum();
        giving.add_bytes(now - bytes);
        bytes = now;
        if !host.is_open() {
            break;
        }
    }
    lanes.iter().for_each(Connection::close);
}
