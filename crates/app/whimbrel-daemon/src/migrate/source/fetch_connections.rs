//! The source's connections in post-copy: made again whenever they are lost, until the target lacks nothing.
//!
//! The target asks over the connections that the source makes, so it needs no way to the source. One is for
//! what somebody waits for, one for all the rest. What is answered is `whimbrel_migrate::postcopy::Giving`.

use crate::{core::error::DaemonError, daemon::Daemon, server::peer_rpc};
use bytes::Bytes;
use std::{sync::Arc, thread, time::Duration};
use whimbrel_core::{ByteSize, HostName};
use whimbrel_migrate::postcopy::{
    PageServer,
    messages::{FetchPriority, OFFER_FETCH, OfferFetch, OfferFetchReply},
};
use whimbrel_wire::{Connection, Request};

/// Pauses between attempts: the first and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];
/// How often is looked whether a connection has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Serves `giving` to the target on a thread of its own, from now on and until it is over.
pub(crate) fn keep_connected(
    host: &Arc<Daemon>,
    giving: Arc<PageServer>,
    to: HostName,
    rate: Option<ByteSize>,
) {
    let host = host.clone();
    let serve = move || {
        let mut pause = PAUSES[0];
        while !giving.is_over() {
            match attend(&host, &giving, &to, rate) {
                Ok(Some(lanes)) => {
                    pause = PAUSES[0];
                    giving.connected(true, None);
                    watch(&host, &giving, &lanes);
                    giving.connected(false, Some(format!("the connection to {to} was lost")));
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(%to, error = &error as &dyn std::error::Error, "no pages can be given");
                    giving.connected(false, Some(peer_rpc::chain(&error)));
                }
            }
            if !host.sleep_unless_closing(pause) {
                return;
            }
            // Before the pause of the machine the target may not have heard of it yet: that takes no time to
            // ask again.
            pause = if giving.is_open() { (pause * 2).min(PAUSES[1]) } else { PAUSES[0] };
        }
    };
    if let Err(error) = thread::Builder::new().name("giving".into()).spawn(serve) {
        tracing::error!(%error, "no thread to give pages");
    }
}

/// New connections, if the target wants them now.
fn attend(
    host: &Arc<Daemon>,
    giving: &Arc<PageServer>,
    to: &HostName,
    rate: Option<ByteSize>,
) -> Result<Option<Vec<Connection>>, DaemonError> {
    let mut lanes = Vec::new();
    for lane in [FetchPriority::Urgent, FetchPriority::Bulk] {
        let connection = peer_rpc::connect_giving(host, to, giving.clone())?;
        if lane == FetchPriority::Bulk {
            connection.limit_rate(rate.map(|rate| rate.0));
        }
        // A target that has not heard of the handover yet has nothing either, so its word counts only from
        // the pause on.
        let counts = giving.is_open();
        let header = postcard::to_stdvec(&OfferFetch { handover: giving.handover(), lane });
        let header = header.map_err(|error| DaemonError::invalid(error.to_string()))?;
        let request = Request::new(OFFER_FETCH, header.into(), Bytes::new());
        let failed =
            |source: whimbrel_wire::CallError| DaemonError::Sync { host: to.clone(), source: source.into() };
        let reply = connection.call_blocking(request).map_err(failed)?;
        match postcard::from_bytes(&reply.header) {
            Ok(OfferFetchReply::Waiting) => lanes.push(connection),
            Ok(OfferFetchReply::Whole) if counts => {
                giving.whole();
                return Ok(None);
            }
            Ok(OfferFetchReply::Whole) => return Ok(None),
            Err(error) => return Err(DaemonError::Sync { host: to.clone(), source: error.into() }),
        }
    }
    Ok(Some(lanes))
}

/// Returns when a connection has ended, or when nothing more is to be given.
fn watch(host: &Daemon, giving: &PageServer, lanes: &[Connection]) {
    let mut bytes = 0;
    while lanes.iter().all(|lane| lane.close_reason().is_none()) && !giving.wait_over(LOOK) {
        let now: u64 = lanes.iter().map(|lane| lane.traffic().sent + lane.traffic().received).sum();
        giving.carried(now - bytes);
        bytes = now;
        if !host.is_open() {
            break;
        }
    }
    lanes.iter().for_each(Connection::close);
}
