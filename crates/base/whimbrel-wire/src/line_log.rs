//! Log file of one JSON object a line, bounded: a full file is renamed, and the oldest is removed.
//!
//! A log that cannot be written stops nobody: on a full disk, `gc` of a daemon must still work.

use crate::private_dir;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Mutex,
};
use whimbrel_core::lock;

/// Bounds of a log.
#[derive(Debug, Clone, Copy)]
pub struct LogBounds {
    /// Bytes of a file, above which the next one begins.
    pub file_max: u64,
    /// Number of older files that are retained.
    pub old_files: u32,
}

/// Log of lines.
#[derive(Debug)]
pub struct LineLog {
    path: PathBuf,
    bounds: LogBounds,
    /// The file and its length, once it could be opened.
    open: Mutex<Option<(File, u64)>>,
}

impl LineLog {
    /// Opens the log `path`, in a folder of its own. One that cannot be opened is tried again at each line.
    pub fn open(path: PathBuf, bounds: LogBounds) -> Self {
        let folder = path.parent().unwrap_or(Path::new("."));
        let opened = private_dir::create(folder).map_err(io::Error::other).and_then(|()| open(&path));
        if let Err(error) = &opened {
            tracing::error!(path = %path.display(), %error, "cannot open a log");
        }
        Self { path, bounds, open: Mutex::new(opened.ok()) }
    }

    /// Appends an entry, not durably. A failure is only logged.
    pub fn add(&self, entry: &impl Serialize) {
        let mut line = serde_json::to_vec(entry).expect("an entry is always encodable");
        line.push(b'\n');
        if let Err(error) = self.append(&line) {
            tracing::error!(path = %self.path.display(), %error, "cannot write a log");
        }
    }

    /// The entries that are in the files, the oldest first. Lines that cannot be read are left out.
    pub fn entries<T: DeserializeOwned>(&self) -> Vec<T> {
        let files = (0..=self.bounds.old_files).rev().filter_map(|number| File::open(self.file(number)).ok());
        let lines = files.flat_map(|file| {
            let lines = BufReader::new(file.take(self.bounds.file_max)).split(b'\n');
            lines.map_while(Result::ok).collect::<Vec<_>>()
        });
        lines.filter_map(|line| serde_json::from_slice(&line).ok()).collect()
    }

    fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut opened = lock(&self.open);
        let is_full = |length: u64| length > 0 && length + line.len() as u64 > self.bounds.file_max;
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
        for number in (0..self.bounds.old_files).rev() {
            match fs::rename(self.file(number), self.file(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Path of the newest file, or of one that was the newest so many files ago.
    fn file(&self, number: u32) -> PathBuf {
        match number {
            0 => self.path.clone(),
            _ => self.path.with_extension(format!("jsonl.{number}")),
        }
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

    const BOUNDS: LogBounds = LogBounds { file_max: 1000, old_files: 3 };

    #[test]
    fn a_log_has_the_newest_lines_a_bounded_size_and_what_an_earlier_daemon_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log/lines.jsonl");
        for number in 0..500 {
            // As after a restart each time.
            LineLog::open(path.clone(), BOUNDS).add(&format!("line {number}"));
        }
        let files: Vec<_> = fs::read_dir(dir.path().join("log")).unwrap().map(|file| file.unwrap()).collect();
        assert_eq!(files.len(), 1 + BOUNDS.old_files as usize);
        assert!(files.iter().all(|file| file.metadata().unwrap().len() <= BOUNDS.file_max));
        let log = LineLog::open(path.clone(), BOUNDS);
        let found: Vec<String> = log.entries();
        let first = 500 - found.len();
        assert!(first > 0 && found.len() > 150, "{} lines", found.len());
        assert!(found.iter().enumerate().all(|(at, line)| *line == format!("line {}", first + at)));
    }

    #[test]
    fn damaged_lines_are_left_out_and_a_log_without_a_folder_does_not_stop_anybody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log/lines.jsonl");
        let log = LineLog::open(path.clone(), BOUNDS);
        log.add(&1);
        fs::write(&path, b"1\n{\xff\n\n\"two\"\n2").unwrap();
        assert_eq!(log.entries::<u32>(), [1, 2]);
        fs::write(dir.path().join("file"), "").unwrap();
        let nowhere = LineLog::open(dir.path().join("file/lines.jsonl"), BOUNDS);
        nowhere.add(&1);
        assert!(nowhere.entries::<u32>().is_empty());
    }
}
