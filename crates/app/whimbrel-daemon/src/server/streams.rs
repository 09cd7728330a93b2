//! Answers that go on: the states of an operation, the console log, and the events of the host.

use crate::{
    core::error::DaemonError,
    machine::console::end_of_log,
    server::{
        access::gate::Asker,
        http::{Answer, Asked, At, Failure, Shared, blocking, named},
    },
};
use axum::{
    Json,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use futures_util::StreamExt;
use serde::Deserialize;
use std::{convert::Infallible, time::Duration};
use tokio::sync::watch;
use whimbrel_api::{HostEvent, OperationId, OperationState, routes};
use whimbrel_core::MachineName;

/// Most bytes of a console log in one answer.
const LOG_MAX: u64 = 1 << 20;
/// Interval of comments in a silent stream of events, by which each side finds out that the other is gone.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Streams snapshots, one line each, until the operation has ended.
pub(super) async fn operation_events(
    State(host): Shared,
    At(id): At<OperationId>,
) -> Result<Response, Failure> {
    let watch = host.operations().watch(id)?;
    let snapshots = futures_util::stream::unfold(Some(watch), |watch| async move {
        let mut watch = watch?;
        let operation = watch.borrow_and_update().clone();
        let ended = operation.state != OperationState::Running;
        // The sender lives in the table; if it is dropped the last snapshot was the end.
        let more = !ended && watch.changed().await.is_ok();
        Some((operation, (more || !ended).then_some(watch)))
    });
    let lines = snapshots.map(|operation| {
        let mut line = serde_json::to_vec(&operation).expect("an operation is always encodable");
        line.push(b'\n');
        Ok::<_, Infallible>(Bytes::from(line))
    });
    Ok(([(header::CONTENT_TYPE, routes::NDJSON)], Body::from_stream(lines)).into_response())
}

#[derive(Deserialize)]
pub(super) struct LogQuery {
    bytes: Option<u64>,
    #[serde(default)]
    follow: bool,
}

/// The end of the console log; or its recent output, and what the machine prints from now on.
pub(super) async fn console_log(
    State(host): Shared,
    At(name): At<MachineName>,
    Asked(query): Asked<LogQuery>,
) -> Result<Response, Failure> {
    let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    if query.follow {
        let Json(serial) = blocking(host, move |host| host.machines.get(&name)?.console()).await?;
        let pieces = futures_util::stream::unfold(serial, |mut serial| async move {
            let piece = serial.output.recv().await?;
            Some((Ok::<_, Infallible>(Bytes::from(piece)), serial))
        });
        return Ok((kind, Body::from_stream(pieces)).into_response());
    }
    let bytes = query.bytes.unwrap_or(LOG_MAX).min(LOG_MAX);
    let Json(text) = blocking(host, move |host| {
        host.machines.get(&name)?;
        Ok(end_of_log(&host.directories.console_log(&name), bytes))
    })
    .await?;
    Ok((kind, text).into_response())
}

#[derive(Deserialize)]
pub(super) struct EventsQuery {
    since: Option<u64>,
    follow: Option<bool>,
}

/// Where a stream of events has come to.
struct EventsReader {
    host: Shared,
    asker: Asker,
    known: Option<u64>,
    news: Option<watch::Receiver<u64>>,
    begun: bool,
}

/// Streams the events that the caller may see, the retained ones first.
pub(super) async fn host_events(
    State(host): Shared,
    asker: Asker,
    headers: HeaderMap,
    Asked(query): Asked<EventsQuery>,
) -> Result<Response, Failure> {
    // A browser that reconnects says by itself what it has.
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let last: Option<u64> = last.map(named).transpose()?;
    let news = query.follow.unwrap_or(true).then(|| host.events.follow());
    let known = last.or(query.since);
    let reader = EventsReader { host: State(host), asker, known, news, begun: false };
    let pieces = futures_util::stream::unfold(reader, |mut reader| async move {
        let piece = reader.next().await?;
        Some((Ok::<_, Infallible>(piece), reader))
    });
    let head = [(header::CONTENT_TYPE, routes::EVENT_STREAM), (header::CACHE_CONTROL, "no-store")];
    Ok((head, Body::from_stream(pieces)).into_response())
}

impl EventsReader {
    /// The next events, or a comment after a silence. None at the end.
    async fn next(&mut self) -> Option<Bytes> {
        if std::mem::replace(&mut self.begun, true) {
            match tokio::time::timeout(KEEP_ALIVE, self.news.as_mut()?.changed()).await {
                Ok(changed) => changed.ok()?,
                Err(_) => return Some(Bytes::from_static(b":\n\n")),
            }
        }
        // Before the events are read, so that none is slept through.
        self.news.as_mut().map(|news| *news.borrow_and_update());
        let (State(host), asker, known) = (self.host.clone(), self.asker.clone(), self.known);
        let read = blocking(host, move |host| {
            let all = host.events.after(known);
            let last = all.last().map(|event| event.number);
            Ok::<_, DaemonError>((last, asker.events(host, all)))
        });
        let Ok(Json((last, events))): Answer<(Option<u64>, Vec<HostEvent>)> = read.await else { return None };
        self.known = last.or(self.known);
        Some(events.iter().map(line).collect::<String>().into())
    }
}

/// An event in the format of server-sent events.
fn line(event: &HostEvent) -> String {
    let text = serde_json::to_string(event).expect("an event is always encodable");
    format!("id: {}\ndata: {text}\n\n", event.number)
}
