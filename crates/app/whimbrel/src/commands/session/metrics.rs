//! Figures of sessions in the text format of Prometheus, with the unit at the end of each name.

use whimbrel_session::client::ControlResponse;

/// Formats the figures of all sessions, grouped by name as the format requires.
pub(super) fn metrics(sessions: &[(String, ControlResponse)]) -> String {
    type Number = fn(&ControlResponse) -> f64;
    let numbers: [(&str, &str, Number); 21] = [
        ("connected", "gauge", |session| f64::from(session.status.connected)),
        ("round_trip_seconds", "gauge", |session| session.status.round_trip_ms.unwrap_or(f64::NAN) / 1e3),
        ("call_seconds", "gauge", |session| session.status.call_ms / 1e3),
        ("calls_total", "counter", |session| session.status.calls as f64),
        ("waits_total", "counter", |session| session.status.waits as f64),
        ("waited_seconds_total", "counter", |session| session.status.waited_ms / 1e3),
        ("known_names", "gauge", |session| session.status.known as f64),
        ("zero_blocks_total", "counter", |session| session.status.zero_blocks as f64),
        ("hole_bytes", "gauge", |session| session.status.holes as f64),
        ("ahead_blocks_total", "counter", |session| session.status.ahead_blocks as f64),
        ("found_pages_total", "counter", |session| session.status.found_pages as f64),
        ("spared_pages_total", "counter", |session| session.status.spared_pages as f64),
        ("broken_total", "counter", |session| session.status.broken as f64),
        ("hit_ratio", "gauge", |session| session.status.hit_ratio.unwrap_or(f64::NAN)),
        ("cache_capacity_bytes", "gauge", |session| session.status.capacity as f64),
        ("cache_used_bytes", "gauge", |session| session.status.used as f64),
        ("dirty_bytes", "gauge", |session| session.status.dirty as f64),
        ("dirty_files", "gauge", |session| session.status.dirty_files as f64),
        ("queued_changes", "gauge", |session| session.status.queued as f64),
        ("damaged_pages_total", "counter", |session| session.status.damaged as f64),
        ("events", "gauge", |session| session.status.events.len() as f64),
    ];
    let mut out = String::new();
    for (name, kind, number) in numbers.into_iter().filter(|_| !sessions.is_empty()) {
        out += &format!("# TYPE whimbrel_session_{name} {kind}\n");
        for (session, response) in sessions {
            out += &format!("whimbrel_session_{name}{{session={session:?}}} {}\n", number(response));
        }
    }
    out + &requests(sessions)
}

/// Formats the counts of requests, with their kind as a label.
fn requests(sessions: &[(String, ControlResponse)]) -> String {
    let head = "# TYPE whimbrel_session_requests_total counter\n";
    let lines = sessions.iter().flat_map(|(session, response)| {
        response.status.requests.iter().map(move |(kind, count)| {
            format!("whimbrel_session_requests_total{{session={session:?},kind={kind:?}}} {count}\n")
        })
    });
    let lines: String = lines.collect();
    if lines.is_empty() { lines } else { format!("{head}{lines}") }
}
