//! Storage markers: files beside the base files of a disk by which the target recognises shared storage.
//!
//! A marker has a random name and random content, and exists while the migration runs. If one cannot be
//! written, the file counts as private to this host, and the disk is copied.

use crate::{
    machine::record::{DiskBase, Record},
    migrate::target::baseline::changed_ns,
};
use std::{
    fs::OpenOptions,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};
use whimbrel_migrate::protocol::{Offer, SharedFile};

/// Written markers; dropping the value removes them.
pub(super) struct StorageMarkers(Vec<PathBuf>);

impl Drop for StorageMarkers {
    fn drop(&mut self) {
        for path in &self.0 {
            if let Err(error) = std::fs::remove_file(path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove a storage marker");
            }
        }
    }
}

/// Writes a marker beside every file under a disk, and lists them in the offer.
pub(super) fn write_markers(record: &Record, offer: &mut Offer) -> StorageMarkers {
    let mut marks = StorageMarkers(Vec::new());
    for (disk, base) in (0..).zip(&record.bases) {
        let DiskBase::File { path } = base else { continue };
        match write_marker(disk, path) {
            Ok((file, mark)) => {
                offer.files.push(file);
                marks.0.push(mark);
            }
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "cannot write a storage marker; a shared disk would be copied");
            }
        }
    }
    marks
}

fn write_marker(disk: u32, path: &Path) -> io::Result<(SharedFile, PathBuf)> {
    let path = path.canonicalize()?;
    let text = path.to_str().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
    let folder = path.parent().ok_or(io::ErrorKind::InvalidFilename)?;
    let secret: [u8; 32] = rand::random();
    let name = format!("whimbrel-{:016x}.mark", rand::random::<u64>());
    let mark = folder.join(&name);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&mark)?;
    let meta = file.write_all(&secret).and_then(|()| file.sync_data()).and_then(|()| path.metadata());
    let meta = meta.inspect_err(|_| drop(std::fs::remove_file(&mark)))?;
    let (len, changed) = (meta.len(), changed_ns(&meta));
    Ok((SharedFile { disk, path: text, len, changed, mark: name, secret }, mark))
}
