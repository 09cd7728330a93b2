//! Small files that are whole or absent, also after a power loss.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

/// Replaces `path` with `content`: written beside it, synced, renamed over it, the directory synced. When this
/// returns the new content is durable; when it fails the old one may or may not still be there.
pub(crate) fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().ok_or_else(|| io::Error::other("a file needs a directory"))?;
    let beside = path.with_extension("new");
    let mut file = File::create(&beside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    sync_dir(dir)
}

/// Makes the names in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
