//! The numbers of sessions in the text format of Prometheus: a unit at the end of each name, the session as label.

use whimbrel_session::client::ControlResponse;

/// All numbers of these sessions, those of one name together as the format wants it.
pub(super) fn metrics(sessions: &[(String, ControlResponse)]) -> String {
    type Number = fn(&ControlResponse) -> f64;
    let numbers: [(&str, &str, Number); 13] = [
        ("connected", "gauge", |session| f64::from(session.status.connected)),
        ("round_trip_seconds", "gauge", |session| session.status.round_trip_ms.unwrap_or(f64::NAN) / 1e3),
        ("call_seconds", "gauge", |session| session.status.call_ms / 1e3),
        ("calls_total", "counter", |session| session.status.calls as f64),
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
    out
}
