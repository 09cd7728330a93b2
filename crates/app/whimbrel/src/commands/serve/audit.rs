//! Audit log of a server of sessions: one JSON object a line, bounded and rotated as that of the daemon.

use serde::Serialize;
use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};
use whimbrel_session::server::{ExportAccess, SessionEvent, SessionOutcome};
use whimbrel_wire::{LineLog, LogBounds, PeerIdentity};

const BOUNDS: LogBounds = LogBounds { file_max: 4 << 20, old_files: 4 };

/// What became of a session.
#[derive(Debug, Serialize)]
struct Entry<'a> {
    time_ms: u64,
    /// Public key of the client.
    who: String,
    directory: String,
    /// `read`, `write`, `refused` or `ended`.
    outcome: &'static str,
    /// Why it was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

pub(super) struct AuditLog(LineLog);

impl AuditLog {
    /// Opens the log in the folder `audit` beside the keys.
    pub(super) fn open(keys: &Path) -> Self {
        Self(LineLog::open(keys.join("audit/sessions.jsonl"), BOUNDS))
    }

    pub(super) fn note(&self, event: &SessionEvent<'_>) {
        let who = match event.peer {
            PeerIdentity::Key(key) => key.to_string(),
            PeerIdentity::Ssh(destination) => destination.clone(),
            PeerIdentity::Stdio => "ssh".to_owned(),
        };
        let (outcome, reason) = match event.outcome {
            SessionOutcome::Opened(ExportAccess::Read) => ("read", None),
            SessionOutcome::Opened(ExportAccess::Write) => ("write", None),
            SessionOutcome::Refused(reason) => ("refused", Some(reason)),
            SessionOutcome::Ended => ("ended", None),
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let directory = String::from_utf8_lossy(event.directory).into_owned();
        let time_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        self.0.add(&Entry { time_ms, who, directory, outcome, reason });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_says_who_wanted_what_and_what_became_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let log = AuditLog::open(dir.path());
        let key = whimbrel_wire::PublicKey([7; 32]);
        let peer = PeerIdentity::Key(key);
        for outcome in [SessionOutcome::Opened(ExportAccess::Read), SessionOutcome::Refused("why")] {
            log.note(&SessionEvent { peer: &peer, directory: b"/vms", outcome });
        }
        let text = std::fs::read_to_string(dir.path().join("audit/sessions.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["outcome"], &lines[0]["directory"]), (&"read".into(), &"/vms".into()));
        assert_eq!((&lines[1]["outcome"], &lines[1]["reason"]), (&"refused".into(), &"why".into()));
        assert!(lines.iter().all(|line| line["who"] == key.to_string()));
    }
}
