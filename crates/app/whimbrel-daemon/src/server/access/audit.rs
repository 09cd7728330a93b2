//! Audit log of the API: one JSON object a line in `DATA/audit/audit.jsonl`, bounded and rotated.
//!
//! Every request that may change something, opens a console or is refused is noted, with its outcome; reads
//! that succeed are not, since programs poll.

use serde::Serialize;
use std::path::Path;
use whimbrel_wire::{LineLog, LogBounds};

const BOUNDS: LogBounds = LogBounds { file_max: 4 << 20, old_files: 4 };

/// One request and its outcome.
#[derive(Debug, Serialize)]
pub(crate) struct Entry<'a> {
    pub(crate) time_ms: u64,
    /// `token NAME` or `user NAME`; none if nobody was recognised.
    pub(crate) who: Option<&'a str>,
    /// The user of the socket, or the address.
    pub(crate) from: String,
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    /// What the request named: machines, capsules, files.
    pub(crate) objects: Vec<String>,
    /// `done`, `failed` or `refused`.
    pub(crate) outcome: &'static str,
    pub(crate) status: u16,
    pub(crate) ms: u64,
}

pub(crate) struct AuditLog(LineLog);

impl AuditLog {
    /// Opens the log in its folder.
    pub(crate) fn open(dir: &Path) -> Self {
        Self(LineLog::open(dir.join("audit.jsonl"), BOUNDS))
    }

    pub(crate) fn note(&self, entry: &Entry<'_>) {
        self.0.add(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_log_has_every_request_and_a_bounded_size() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("audit");
        let log = AuditLog::open(&place);
        let path = "/v1/".to_owned() + &"x\n".repeat(40_000);
        for number in 0..200 {
            log.note(&Entry {
                time_ms: number,
                who: Some("token ci"),
                from: "10.0.0.1".into(),
                method: "POST",
                path: &path,
                objects: vec![],
                outcome: "done",
                status: 200,
                ms: 1,
            });
        }
        let files: Vec<_> = fs::read_dir(&place).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 1 + BOUNDS.old_files as usize);
        assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() <= BOUNDS.file_max));
        let newest = fs::read_to_string(place.join("audit.jsonl")).unwrap();
        let last: serde_json::Value = serde_json::from_str(newest.lines().last().unwrap()).unwrap();
        assert_eq!((&last["time_ms"], &last["who"]), (&199.into(), &"token ci".into()));
    }
}
