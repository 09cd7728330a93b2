//! Memory templates: memory that the clones of one capsule share on this host.
//!
//! A template is the memory file of an image. Every clone has a hard link to it in its runtime directory and
//! maps it privately; the pager of each fills it for all. So a page is fetched once and is in memory once
//! until a clone writes to it. The file ends with its last link, whoever removes that, so a crash cannot
//! falsify a count. [`Templates`] only remembers where the next clone finds it.

use super::{Reservation, RunningError};
use rustix::fs::{AtFlags, CWD, linkat};
use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
    sync::{Arc, Mutex, Weak},
};
use whimbrel_core::{ByteSize, Digest, lock};

/// Content of a template: the root of an image (none for an empty one) and its size.
pub type TemplateKey = (Option<Digest>, ByteSize);

/// Templates of this host by their content.
#[derive(Debug, Default)]
pub struct Templates {
    known: Mutex<BTreeMap<TemplateKey, Weak<Template>>>,
}

/// The memory file of a template, and the memory that was promised to it.
#[derive(Debug)]
pub struct Template {
    file: File,
    _memory: Reservation,
}

impl Template {
    fn new(file: File, memory: Reservation) -> Self {
        memory.taken_by(open_path(&file).into());
        Self { file, _memory: memory }
    }
}

impl Templates {
    /// Links the template of `content` as `path`: the one that other clones use, or a new one, for which
    /// memory is reserved.
    pub fn link<E: From<RunningError>>(
        &self,
        content: TemplateKey,
        path: &Path,
        reserve: impl FnOnce() -> Result<Reservation, E>,
    ) -> Result<Arc<Template>, E> {
        let failed = |source| RunningError::io("share the memory of clones in", path, source);
        let mut known = lock(&self.known);
        if let Some(template) = known.get(&content).and_then(Weak::upgrade) {
            match link_file(&template.file, path) {
                Ok(()) => return Ok(template),
                // The last link was removed just now.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(error).into()),
            }
        }
        let memory = reserve()?;
        let template = Arc::new(Template::new(create(content.1, path).map_err(failed)?, memory));
        known.retain(|_, template| template.strong_count() > 0);
        known.insert(content, Arc::downgrade(&template));
        Ok(template)
    }

    /// The template that a clone of an earlier daemon has as `path`.
    pub fn adopt(
        &self,
        content: TemplateKey,
        path: &Path,
        memory: Reservation,
    ) -> Result<Arc<Template>, RunningError> {
        let failed = |source| RunningError::io("open", path, source);
        let file = File::options().read(true).write(true).open(path).map_err(failed)?;
        let mut known = lock(&self.known);
        match known.get(&content).and_then(Weak::upgrade) {
            Some(other) if is_same(&other.file, &file).map_err(failed)? => Ok(other),
            // Two templates of one content: a crash came between the last link of one and the next clone.
            Some(_) => Ok(Arc::new(Template::new(file, memory))),
            None => {
                let template = Arc::new(Template::new(file, memory));
                known.insert(content, Arc::downgrade(&template));
                Ok(template)
            }
        }
    }
}

/// Creates a file of holes that QEMU need not grow.
fn create(size: ByteSize, path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(size.0)?;
    Ok(file)
}

fn link_file(file: &File, path: &Path) -> io::Result<()> {
    Ok(linkat(CWD, open_path(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// A path that leads to an open file, whatever its names are.
fn open_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::running::Reservations;

    const CONTENT: TemplateKey = (None, ByteSize(1 << 20));

    fn memory() -> Reservation {
        Reservations::new(Path::new("/")).adopt(0)
    }

    fn reserved() -> Result<Reservation, RunningError> {
        Ok(memory())
    }

    fn inode(path: &Path) -> u64 {
        std::fs::metadata(path).expect("a file").ino()
    }

    #[test]
    fn clones_of_one_capsule_share_a_file_and_others_do_not() {
        let (dir, templates) = (tempfile::tempdir().expect("a directory"), Templates::default());
        let path = |name: &str| dir.path().join(name);
        let _first = templates.link(CONTENT, &path("a"), reserved).expect("a template");
        let _second = templates.link(CONTENT, &path("b"), reserved).expect("a template");
        let _other = templates.link((None, ByteSize(2 << 20)), &path("c"), reserved).expect("a template");
        assert_eq!(inode(&path("a")), inode(&path("b")));
        assert_ne!(inode(&path("a")), inode(&path("c")));
        assert_eq!(std::fs::metadata(path("c")).expect("a file").len(), 2 << 20);
    }

    #[test]
    fn a_template_whose_last_name_went_away_under_a_new_clone_is_made_anew() {
        let (dir, templates) = (tempfile::tempdir().expect("a directory"), Templates::default());
        let path = |name: &str| dir.path().join(name);
        let _held = templates.link(CONTENT, &path("a"), reserved).expect("a template");
        std::fs::remove_file(path("a")).expect("the only name");
        let _next = templates.link(CONTENT, &path("b"), reserved).expect("a new template");
        assert!(path("b").exists());
    }

    #[test]
    fn the_next_daemon_gives_new_clones_the_template_of_the_old_ones() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        drop(Templates::default().link(CONTENT, &path("a"), reserved).expect("a template"));
        let templates = Templates::default();
        let _adopted = templates.adopt(CONTENT, &path("a"), memory()).expect("the same template");
        let _next = templates.link(CONTENT, &path("b"), reserved).expect("the same template");
        assert_eq!(inode(&path("a")), inode(&path("b")));
    }
}
