//! Metrics of sessions and of their server.

use whimbrel_metrics::{CallDurations, Metric, Page};
use whimbrel_session::client::SessionStatus;

whimbrel_metrics::metrics! {
    /// Metrics of a session.
    SESSION_METRICS:
    CONNECTED = Gauge "whimbrel_session_connected" ["session"] "Whether there is a connection to the server.";
    ROUND_TRIP = Gauge "whimbrel_session_round_trip_seconds" ["session"] "Round trip to the server.";
    CALL = Gauge "whimbrel_session_call_seconds" ["session"] "Mean time of a call.";
    CALLS = Counter "whimbrel_session_calls_total" ["session"] "Calls to the server.";
    WAITS = Counter "whimbrel_session_waits_total" ["session"] "Times that a program waited for the server.";
    WAITED = Counter "whimbrel_session_waited_seconds_total" ["session"] "Total time of these waits.";
    NAMES = Gauge "whimbrel_session_known_names" ["session"] "Names of which attributes are cached.";
    ZERO_BLOCKS = Counter "whimbrel_session_zero_blocks_total" ["session"] "Blocks that were not requested as a hint says that they are zero.";
    HOLES = Gauge "whimbrel_session_hole_bytes" ["session"] "Bytes in holes of files, which are never requested.";
    AHEAD = Counter "whimbrel_session_ahead_blocks_total" ["session"] "Blocks that were fetched in advance.";
    FOUND = Counter "whimbrel_session_found_pages_total" ["session"] "Pages that were found on this host by their digest.";
    SPARED = Counter "whimbrel_session_spared_pages_total" ["session"] "Written pages that the server had already.";
    BROKEN = Counter "whimbrel_session_broken_total" ["session"] "Times that the connection broke.";
    HIT_RATIO = Gauge "whimbrel_session_hit_ratio" ["session"] "Part of the reads that the cache answered.";
    CAPACITY = Gauge "whimbrel_session_cache_capacity_bytes" ["session"] "Size of the cache.";
    USED = Gauge "whimbrel_session_cache_used_bytes" ["session"] "Bytes of the cache in use.";
    DIRTY = Gauge "whimbrel_session_dirty_bytes" ["session"] "Bytes that the server does not have yet.";
    DIRTY_FILES = Gauge "whimbrel_session_dirty_files" ["session"] "Files of which the server does not have all changes.";
    QUEUED = Gauge "whimbrel_session_queued_changes" ["session"] "Changes of names that the server has yet to make.";
    DAMAGED = Counter "whimbrel_session_damaged_pages_total" ["session"] "Damaged pages of the cache that were fetched again.";
    EVENTS = Gauge "whimbrel_session_events" ["session"] "Events that `whimbrel session show` lists.";
    REQUESTS = Counter "whimbrel_session_requests_total" ["session", "kind"] "Calls to the server by kind.";
}

whimbrel_metrics::metrics! {
    /// Metrics of a server of sessions.
    SERVER_METRICS:
    SESSIONS = Gauge "whimbrel_server_sessions" [] "Sessions that are open.";
    SERVED = Histogram "whimbrel_server_request_duration_seconds" ["call", "outcome"] "Requests of sessions until they were answered: done or refused.";
}

#[cfg(test)]
pub(super) fn client_metrics() -> Vec<Metric> {
    [whimbrel_metrics::PROCESS, SESSION_METRICS].concat()
}

#[cfg(test)]
pub(super) fn server_metrics() -> Vec<Metric> {
    [whimbrel_metrics::PROCESS, SERVER_METRICS].concat()
}

/// What `whimbrel session metrics` prints of these sessions.
pub(crate) fn session_page<'a>(sessions: impl Iterator<Item = (&'a str, &'a SessionStatus)>) -> String {
    let mut page = Page::new();
    write(&mut page, &sessions.collect::<Vec<_>>());
    page.into_text()
}

/// The page of the process of one session.
pub(crate) fn client_page(name: &str, status: &SessionStatus) -> String {
    let mut page = Page::new();
    whimbrel_metrics::own_process(&mut page, env!("CARGO_PKG_VERSION"));
    write(&mut page, &[(name, status)]);
    page.into_text()
}

/// The page of a server with so many sessions.
pub(crate) fn server_page(sessions: usize, calls: &CallDurations) -> String {
    let mut page = Page::new();
    whimbrel_metrics::own_process(&mut page, env!("CARGO_PKG_VERSION"));
    page.single(&SESSIONS, sessions as f64);
    calls.write(page.family(&SERVED));
    page.into_text()
}

fn write(page: &mut Page, sessions: &[(&str, &SessionStatus)]) {
    type Number = fn(&SessionStatus) -> f64;
    let numbers: [(&Metric, Number); 21] = [
        (&CONNECTED, |status| f64::from(status.connected)),
        (&ROUND_TRIP, |status| status.round_trip_ms.unwrap_or(f64::NAN) / 1e3),
        (&CALL, |status| status.call_ms / 1e3),
        (&CALLS, |status| status.calls as f64),
        (&WAITS, |status| status.waits as f64),
        (&WAITED, |status| status.waited_ms / 1e3),
        (&NAMES, |status| status.known as f64),
        (&ZERO_BLOCKS, |status| status.zero_blocks as f64),
        (&HOLES, |status| status.holes as f64),
        (&AHEAD, |status| status.ahead_blocks as f64),
        (&FOUND, |status| status.found_pages as f64),
        (&SPARED, |status| status.spared_pages as f64),
        (&BROKEN, |status| status.broken as f64),
        (&HIT_RATIO, |status| status.hit_ratio.unwrap_or(f64::NAN)),
        (&CAPACITY, |status| status.capacity as f64),
        (&USED, |status| status.used as f64),
        (&DIRTY, |status| status.dirty as f64),
        (&DIRTY_FILES, |status| status.dirty_files as f64),
        (&QUEUED, |status| status.queued as f64),
        (&DAMAGED, |status| status.damaged as f64),
        (&EVENTS, |status| status.events.len() as f64),
    ];
    for (metric, number) in numbers {
        let mut family = page.family(metric);
        sessions.iter().for_each(|(name, status)| family.sample(&[name], number(status)));
    }
    let mut family = page.family(&REQUESTS);
    for (name, status) in sessions {
        status.requests.iter().for_each(|(kind, count)| family.sample(&[name, kind], *count as f64));
    }
}
