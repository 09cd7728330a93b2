//! Console log: the end of a machine's serial output in a file of bounded length.
//!
//! The guest decides how much there is to write, so the file never grows past [`MAX`]: then its older half is
//! dropped, in place. A crash in between may lose the log, never more than that. Nothing here waits for
//! durability, and a failed write costs the log a piece, not the guest its console.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::PathBuf,
};

/// Greatest length of the file.
pub(super) const MAX: u64 = 2 << 20;
/// What is left of it when it is full.
const LEFT: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct ConsoleLog {
    path: PathBuf,
    /// Open from the first output on, with its length.
    open: Option<(File, u64)>,
    /// Whether the last write failed, so that a full disk is reported once.
    failed: bool,
}

impl ConsoleLog {
    /// The log at `path`, whose directory must exist by the first output; what the file has is continued.
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, open: None, failed: false }
    }

    /// Appends `output` and drops the older half of a full log.
    pub(super) fn append(&mut self, output: &[u8]) {
        let outcome = self.try_append(output);
        if let (Err(error), false) = (&outcome, self.failed) {
            tracing::warn!(path = %self.path.display(), %error, "cannot write a console log");
        }
        self.failed = outcome.is_err();
    }

    fn try_append(&mut self, output: &[u8]) -> io::Result<()> {
        let (mut file, mut length) = match self.open.take() {
            Some(open) => open,
            None => {
                let mut options = OpenOptions::new();
                let file = options.read(true).append(true).create(true).mode(0o600).open(&self.path)?;
                let length = file.metadata()?.len();
                (file, length)
            }
        };
        if length + output.len() as u64 > MAX {
            length = drop_older_half(&mut file, length)?;
        }
        // After a failure the file is opened again, with its true length.
        file.write_all(output)?;
        self.open = Some((file, length + output.len() as u64));
        Ok(())
    }
}

fn drop_older_half(file: &mut File, length: u64) -> io::Result<u64> {
    let left = LEFT.min(length as usize);
    let mut end = vec![0; left];
    file.read_exact_at(&mut end, length - left as u64)?;
    file.set_len(0)?;
    file.write_all(&end)?;
    Ok(left as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[test]
    fn a_guest_that_prints_for_ever_fills_no_disk_and_its_last_words_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = ConsoleLog::new(path.clone());
        for round in 0..200_u32 {
            log.append(&[b'x'; 40_000]);
            log.append(format!("line {round}\n").as_bytes());
            assert!(fs::metadata(&path).unwrap().len() <= MAX, "after {round} rounds");
        }
        let content = fs::read(&path).unwrap();
        assert!(content.ends_with(b"xline 199\n") && content.len() >= LEFT, "{} bytes", content.len());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn an_overlong_log_of_an_earlier_version_is_continued_and_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        fs::write(&path, vec![b'o'; 3 * MAX as usize]).unwrap();
        let mut log = ConsoleLog::new(path.clone());
        log.append(b"new");
        let content = fs::read(&path).unwrap();
        assert!(content.ends_with(b"onew") && content.len() == LEFT + 3, "{} bytes", content.len());
    }

    #[test]
    fn a_log_that_could_not_be_written_goes_on_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine/console.log");
        let mut log = ConsoleLog::new(path.clone());
        log.append(b"lost");
        fs::create_dir(dir.path().join("machine")).unwrap();
        log.append(b"kept");
        assert_eq!(fs::read(&path).unwrap(), b"kept");
    }
}
