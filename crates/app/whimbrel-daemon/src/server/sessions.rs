//! Sessions that root has mounted on this host, for people. Each is a process of its own, with a control
//! socket in a folder beside that of the API.

use std::{path::Path, thread, time::Duration};
use whimbrel_api::SessionInfo;
use whimbrel_session::client::{ControlResponse, ask_status, sockets};

/// Longest wait for a session that does not answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Events that are shown of each.
const EVENTS: usize = 20;

/// The sessions that answer, of those with a control socket in this folder.
pub(super) fn list(folder: &Path) -> Vec<SessionInfo> {
    thread::scope(|scope| {
        let asked: Vec<_> = sockets(folder)
            .into_iter()
            .map(|path| {
                scope.spawn(move || {
                    let name = path.file_stem()?.to_string_lossy().into_owned();
                    // One that does not answer has died, and the next mount removes its socket, or hangs.
                    Some(info(name, ask_status(&path, PATIENCE).ok()?))
                })
            })
            .collect();
        asked.into_iter().filter_map(|info| info.join().ok().flatten()).collect()
    })
}

fn info(name: String, response: ControlResponse) -> SessionInfo {
    let status = response.status;
    let skipped = status.events.len().saturating_sub(EVENTS);
    SessionInfo {
        name,
        mount: response.mount,
        server: status.server,
        directory: status.directory,
        connected: status.connected,
        round_trip_ms: status.round_trip_ms,
        broken: status.broken,
        cache_capacity: status.capacity,
        cache_used: status.used,
        hit_ratio: status.hit_ratio,
        unsent_bytes: status.dirty,
        unsent_files: status.dirty_files,
        unsent_names: status.queued,
        events: status.events.into_iter().skip(skipped).map(|event| event.text).collect(),
    }
}
