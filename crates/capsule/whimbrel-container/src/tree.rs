//! A tree of files below a folder, into which layers are unpacked: no name and no link leads out of it.
//!
//! Each path is walked part by part, without following a link, and the target of a link is walked from the
//! root of the tree. So an absolute link of an image leads to where it will lead in the machine. openat2(2)
//! could do that by itself, but services that may make no set-user-id files have no such call
//! (`RestrictSUIDSGID=` of systemd). Nobody else changes the tree meanwhile.

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, FileType, Mode, OFlags},
    io::Errno,
};
use std::{collections::BTreeSet, ffi::OsStr, fs::File, io, os::unix::ffi::OsStrExt, path::Path};

/// Rights of files and folders here; those of the image are set in the finished file system.
const FILE: Mode = Mode::from_raw_mode(0o600);
const FOLDER: Mode = Mode::from_raw_mode(0o700);
const PATH_ONLY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Most links in one path, as Linux has it (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// The folder with the tree.
#[derive(Debug)]
pub(crate) struct Tree {
    root: OwnedFd,
}

/// A folder of the tree, and its path from the root without links.
struct Folder {
    open: OwnedFd,
    parts: Vec<String>,
}

/// A name in a folder of the tree.
#[derive(Debug)]
pub(crate) struct TreePlace {
    folder: OwnedFd,
    name: String,
    /// Path from the root of the tree, without links.
    pub(crate) path: String,
}

impl Tree {
    /// The tree below the folder `path`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { root: rustix::fs::open(path, PATH_ONLY, Mode::empty())? })
    }

    /// The place of a relative path without `.` and `..`. Missing folders are made, and named in `made`.
    pub(crate) fn place(&self, path: &str, made: &mut Vec<String>) -> io::Result<TreePlace> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let Folder { open, mut parts } = self.folder(folder, made)?;
        parts.push(name.to_owned());
        Ok(TreePlace { folder: open, name: name.to_owned(), path: parts.join("/") })
    }

    fn folder(&self, path: &str, made: &mut Vec<String>) -> io::Result<Folder> {
        match self.open_folder(path) {
            Err(Errno::NOENT) => {}
            found => return Ok(found?),
        }
        let parent = self.place(path, made)?;
        rustix::fs::mkdirat(&parent.folder, &*parent.name, FOLDER)?;
        made.push(parent.path);
        Ok(self.open_folder(path)?)
    }

    /// Opens the folder that a path leads to in the tree.
    fn open_folder(&self, path: &str) -> Result<Folder, Errno> {
        let mut here = Folder { open: rustix::io::dup(&self.root)?, parts: Vec::new() };
        let (mut left, mut links) = (reversed(path), 0);
        while let Some(part) = left.pop() {
            match &*part {
                "" | "." => continue,
                ".." => {
                    here.parts.pop();
                    here.open = self.open_parts(&here.parts)?;
                    continue;
                }
                _ => {}
            }
            match rustix::fs::openat(&here.open, &*part, PATH_ONLY, Mode::empty()) {
                Ok(open) => {
                    here.open = open;
                    here.parts.push(part);
                }
                // A link, or something else that is no folder.
                Err(Errno::NOTDIR) => {
                    let target = rustix::fs::readlinkat(&here.open, &*part, Vec::new());
                    let target = target.map_err(|_| Errno::NOTDIR)?;
                    let target = target.to_str().map_err(|_| Errno::ILSEQ)?;
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(Errno::LOOP);
                    }
                    if target.starts_with('/') {
                        here = Folder { open: rustix::io::dup(&self.root)?, parts: Vec::new() };
                    }
                    left.extend(reversed(target));
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(here)
    }

    /// Opens the folder at a path without links.
    fn open_parts(&self, parts: &[String]) -> Result<OwnedFd, Errno> {
        let open =
            |open: OwnedFd, part: &String| rustix::fs::openat(&open, &**part, PATH_ONLY, Mode::empty());
        parts.iter().try_fold(rustix::io::dup(&self.root)?, open)
    }
}

/// Parts of a path, the last one first.
fn reversed(path: &str) -> Vec<String> {
    path.rsplit('/').map(str::to_owned).collect()
}

impl TreePlace {
    fn kind(&self) -> Result<Option<FileType>, Errno> {
        match rustix::fs::statat(&self.folder, &*self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(Some(FileType::from_raw_mode(found.st_mode))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Whether there is something.
    pub(crate) fn exists(&self) -> io::Result<bool> {
        Ok(self.kind()?.is_some())
    }

    /// Makes a folder; one that is there stays.
    pub(crate) fn make_folder(&self) -> io::Result<()> {
        if self.kind()? == Some(FileType::Directory) {
            return Ok(());
        }
        self.clear()?;
        Ok(rustix::fs::mkdirat(&self.folder, &*self.name, FOLDER)?)
    }

    /// Makes an empty file in place of what is there.
    pub(crate) fn make_file(&self) -> io::Result<File> {
        self.clear()?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.folder, &*self.name, flags, FILE)?.into())
    }

    /// Makes a symbolic link in place of what is there.
    pub(crate) fn make_link(&self, target: &[u8]) -> io::Result<()> {
        self.clear()?;
        Ok(rustix::fs::symlinkat(OsStr::from_bytes(target), &self.folder, &*self.name)?)
    }

    /// Makes another name of the file at `other` in place of what is there.
    pub(crate) fn make_hard_link(&self, other: &Self) -> io::Result<()> {
        if other.path == self.path {
            return Ok(());
        }
        self.clear()?;
        let none = AtFlags::empty();
        Ok(rustix::fs::linkat(&other.folder, &*other.name, &self.folder, &*self.name, none)?)
    }

    /// Makes a fifo in place of what is there.
    pub(crate) fn make_fifo(&self) -> io::Result<()> {
        self.clear()?;
        Ok(rustix::fs::mknodat(&self.folder, &*self.name, FileType::Fifo, FILE, 0)?)
    }

    fn clear(&self) -> io::Result<()> {
        self.remove_all_but(&BTreeSet::new())
    }

    /// Removes what is there and below it, but for these paths and the folders that lead to them.
    pub(crate) fn remove_all_but(&self, kept: &BTreeSet<String>) -> io::Result<()> {
        match self.kind()? {
            None => Ok(()),
            Some(FileType::Directory) => {
                self.remove_below(kept)?;
                match leads_to(kept, &self.path) {
                    true => Ok(()),
                    false => Ok(rustix::fs::unlinkat(&self.folder, &*self.name, AtFlags::REMOVEDIR)?),
                }
            }
            Some(_) if kept.contains(&self.path) => Ok(()),
            Some(_) => Ok(rustix::fs::unlinkat(&self.folder, &*self.name, AtFlags::empty())?),
        }
    }

    /// Removes what is below this folder, but for these paths and the folders that lead to them.
    pub(crate) fn remove_below(&self, kept: &BTreeSet<String>) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let name = if self.name.is_empty() { "." } else { &*self.name };
        let folder = rustix::fs::openat(&self.folder, name, flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&folder)? {
            let name = entry?.file_name().to_str().map_err(|_| Errno::ILSEQ)?.to_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        for name in names {
            let path = if self.path.is_empty() { name.clone() } else { format!("{}/{name}", self.path) };
            Self { folder: rustix::io::dup(&folder)?, name, path }.remove_all_but(kept)?;
        }
        Ok(())
    }
}

/// Whether `path` or something below it is kept.
fn leads_to(kept: &BTreeSet<String>, path: &str) -> bool {
    let below = format!("{path}/");
    kept.contains(path) || kept.range(below.clone()..).next().is_some_and(|next| next.starts_with(&below))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, io::Write, os::unix::fs::symlink};

    #[test]
    fn links_lead_to_places_in_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("tree");
        fs::create_dir_all(root.join("usr/lib")).unwrap();
        symlink("/usr/lib", root.join("lib")).unwrap();
        symlink("../../../../../usr/lib", root.join("up")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        symlink(dir.path().join("outside"), root.join("out")).unwrap();
        let (tree, mut made) = (Tree::open(&root).unwrap(), Vec::new());
        for (path, real) in [("lib/a", "usr/lib/a"), ("up/b", "usr/lib/b"), ("usr/lib/c", "usr/lib/c")] {
            let place = tree.place(path, &mut made).unwrap();
            assert_eq!(place.path, real);
            place.make_file().unwrap().write_all(b"x").unwrap();
            assert!(root.join(real).is_file());
        }
        assert!(made.is_empty());
        // The folder is outside, so it is not there; and a link is in its place.
        symlink("round", root.join("round")).unwrap();
        tree.place("round/x", &mut made).unwrap_err();
        fs::write(root.join("plain"), "").unwrap();
        tree.place("plain/x", &mut made).unwrap_err();
        tree.place("out/d", &mut made).unwrap_err();
        assert_eq!(fs::read_dir(dir.path().join("outside")).unwrap().count(), 0);
        tree.place("x/y/z", &mut made).unwrap().make_file().unwrap();
        assert_eq!(made, ["x", "x/y"]);
    }

    #[test]
    fn what_is_written_replaces_a_link_and_does_not_follow_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("tree");
        fs::create_dir(&root).unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        symlink(dir.path().join("secret"), root.join("file")).unwrap();
        let tree = Tree::open(&root).unwrap();
        tree.place("file", &mut Vec::new()).unwrap().make_file().unwrap().write_all(b"mine").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("secret")).unwrap(), "secret");
        assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "mine");
    }

    #[test]
    fn what_is_kept_stays_with_the_folders_above_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b/c")).unwrap();
        for file in ["a/1", "a/b/2", "a/b/c/3", "a/bb"] {
            fs::write(dir.path().join(file), "").unwrap();
        }
        symlink("/", dir.path().join("a/b/root")).unwrap();
        let tree = Tree::open(dir.path()).unwrap();
        let kept = BTreeSet::from(["a/b/c".to_owned(), "a/b/c/3".to_owned()]);
        tree.place("a", &mut Vec::new()).unwrap().remove_all_but(&kept).unwrap();
        assert!(dir.path().join("a/b/c/3").is_file());
        assert!(!dir.path().join("a/1").exists() && !dir.path().join("a/bb").exists());
        assert_eq!(fs::read_dir(dir.path().join("a/b")).unwrap().count(), 1);
        tree.place("a", &mut Vec::new()).unwrap().clear().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
