//! Audit log of the API: one JSON object a line in `DATA/audit/audit.jsonl`, bounded and rotated.
//!
//! Every request that may change something, opens a console or is refused is noted, with its outcome; reads
//! that succeed are not, since programs poll. A log that cannot be written does not stop the daemon: on a
//! full disk, `gc` must still work.

use serde::Serialize;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Mutex,
};
use whimbrel_core::lock;
use whimbrel_wire::private_dir;

/// Size at which a file is rotated, and how many older ones are retained.
const FILE_MAX: u64 = 4 << 20;
const OLD_FILES: u32 = 4;

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

pub(crate) struct AuditLog {
    path: PathBuf,
    /// The file and its length, once it could be opened.
    open: Mutex<Option<(File, u64)>>,
}

impl AuditLog {
    /// Opens the log. One that cannot be opened is tried again at each entry.
    pub(crate) fn open(dir: &Path) -> Self {
        let path = dir.join("audit.jsonl");
        let opened = private_dir::create(dir).map_err(io::Error::other).and_then(|()| open(&path));
        if let Err(error) = &opened {
            tracing::error!(path = %path.display(), %error, "cannot open the audit log");
        }
        Self { path, open: Mutex::new(opened.ok()) }
    }

    pub(crate) fn note(&self, entry: &Entry<'_>) {
        let mut line = serde_json::to_vec(entry).expect("an entry is always encodable");
        line.push(b'\n');
        if let Err(error) = self.append(&line) {
            tracing::error!(path = %self.path.display(), %error, "cannot write the audit log");
        }
    }

    fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut opened = lock(&self.open);
        let is_full = |length: u64| length > 0 && length + line.len() as u64 > FILE_MAX;
        if opened.as_ref().is_some_and(|(_, length)| is_full(*length)) {
            self.rotate()?;
            *opened = None;
        }
        let (file, length) = match &mut *opened {
            Some(opened) => opened,
            none => none.insert(open(&self.path)?),
        };
        file.write_all(line)?;
        *length += line.len() as u64;
        Ok(())
    }

    fn rotate(&self) -> io::Result<()> {
        let old = |number: u32| match number {
            0 => self.path.clone(),
            _ => self.path.with_extension(format!("jsonl.{number}")),
        };
        for number in (0..OLD_FILES).rev() {
            match fs::rename(old(number), old(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

fn open(path: &Path) -> io::Result<(File, u64)> {
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    let length = file.metadata()?.len();
    Ok((file, length))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(files.len(), 1 + OLD_FILES as usize);
        assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() <= FILE_MAX));
        let newest = fs::read_to_string(place.join("audit.jsonl")).unwrap();
        let last: serde_json::Value = serde_json::from_str(newest.lines().last().unwrap()).unwrap();
        assert_eq!((&last["time_ms"], &last["who"]), (&199.into(), &"token ci".into()));
    }
}
