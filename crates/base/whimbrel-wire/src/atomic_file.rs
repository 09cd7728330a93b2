//! Atomic, durable file writes: write a temporary file, sync it, move it into place, sync the folder. A crash
//! may leave a temporary file, named `.new-*`, which can be deleted.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};
use whimbrel_core::loss::{Loss, is_back};

static SERIAL: AtomicU32 = AtomicU32::new(0);

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn write_temporary(path: &Path, content: &[u8]) -> io::Result<PathBuf> {
    let (beside, mut file) = loop {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let beside = folder(path).join(format!(".new-{}-{serial}", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside) {
            // Left by a crashed process with the same id; in containers process ids repeat.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => break (beside, opened?),
        }
    };
    let written = file.write_all(content).and_then(|()| file.sync_all());
    if written.is_err() {
        // If this fails too, the name of the file shows that it is a leftover.
        let _ = fs::remove_file(&beside);
    }
    written.map(|()| beside)
}

/// Replaces the file at `path`, if any, with `content`. Mode 0600.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let beside = write_temporary(path, content)?;
    let placed = fs::rename(&beside, path);
    if placed.is_err() {
        let _ = fs::remove_file(&beside);
    }
    placed?;
    sync_dir(folder(path))
}

/// Makes the names in a folder durable.
pub fn sync_dir(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Makes durable what a process replaced in a folder and did not sync before it was killed. Whoever acts on
/// what such a file says does this first: a loss of power may bring the version before it back.
pub fn make_durable(folder: &Path) -> io::Result<()> {
    if is_back(Loss::RecordNotDurable) { Ok(()) } else { sync_dir(folder) }
}

/// Creates `path` with `content`; `AlreadyExists` if there is such a file. Mode 0600.
pub fn create(path: &Path, content: &[u8]) -> io::Result<()> {
    let beside = write_temporary(path, content)?;
    // A link, unlike a rename, does not replace a file that another process created meanwhile.
    let linked = fs::hard_link(&beside, path);
    fs::remove_file(&beside)?;
    linked?;
    sync_dir(folder(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_crash_of_a_process_of_the_same_number_left_is_in_nobodys_way() {
        let dir = tempfile::tempdir().unwrap();
        let next = SERIAL.load(Ordering::Relaxed);
        for serial in next..next + 100 {
            fs::write(dir.path().join(format!(".new-{}-{serial}", std::process::id())), "half").unwrap();
        }
        let path = dir.path().join("file");
        replace(&path, b"one").unwrap();
        assert_eq!(create(&path, b"two").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        replace(&path, b"three").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
    }

    #[test]
    fn what_cannot_be_put_in_place_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("folder");
        fs::create_dir(&path).unwrap();
        replace(&path, b"one").unwrap_err();
        create(&path, b"one").unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
