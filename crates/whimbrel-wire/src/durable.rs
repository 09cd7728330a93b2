//! Files that appear whole or not at all, and stay: written beside their place, synced, put in place, and the
//! folder synced. A leftover of a crash is a file that begins with `.new-`, and harms nobody.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

static SERIAL: AtomicU32 = AtomicU32::new(0);

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn write_beside(path: &Path, content: &[u8]) -> io::Result<PathBuf> {
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let beside = folder(path).join(format!(".new-{}-{serial}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    if written.is_err() {
        // The file is of no use; that it stays behind when even this fails is told by its name.
        let _ = fs::remove_file(&beside);
    }
    written.map(|()| beside)
}

/// Puts `content` at `path`, over whatever was there. Mode 0600.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let beside = write_beside(path, content)?;
    fs::rename(&beside, path)?;
    File::open(folder(path))?.sync_all()
}

/// Puts `content` at `path`, which must not exist (`AlreadyExists` otherwise). Mode 0600.
pub fn create(path: &Path, content: &[u8]) -> io::Result<()> {
    let beside = write_beside(path, content)?;
    // A link, unlike a rename, refuses to take the place of a file that a rival made meanwhile.
    let linked = fs::hard_link(&beside, path);
    fs::remove_file(&beside)?;
    linked?;
    File::open(folder(path))?.sync_all()
}
