//! Applies one layer to a tree: a tar archive with the files that it adds, and marks of those that it removes
//! (image-spec, `layer.md`).

use crate::{
    ContainerError,
    attributes::{FOLDER, FileAttributes, TreeAttributes, can_be_named, capability_file},
    compression::decompressed,
    image::digest_text,
    tree::{Tree, TreePlace},
};
use aws_lc_rs::digest;
use rustix::{
    fs::{Timespec, Timestamps},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read, Write},
    path::Path,
};
use tar::{Entry, EntryType};

/// Folder with the tree, beside which the attributes are.
pub const TREE: &str = "tree";
const KNOWN: &str = "attributes.json";
/// File with the commands of debugfs(8) that set the attributes.
pub const COMMANDS: &str = "attributes";
/// Marks of what a layer removes: a name, and all that was in a folder.
const WHITEOUT: &str = ".wh.";
const OPAQUE: &str = ".wh..wh..opq";
/// Most parts of a path.
const DEPTH_MAX: usize = 200;
/// Most files of an image.
const FILES_MAX: usize = 2_000_000;
/// Longest value of an extended attribute that is taken.
const CAPABILITY_MAX: usize = 64;
const CAPABILITY: &str = "SCHILY.xattr.security.capability";

/// What a layer may be.
#[derive(Debug, Clone)]
pub struct LayerLimits {
    /// Length of the layer as it is read, in bytes.
    pub length: u64,
    /// Most bytes of all files of all layers.
    pub bytes: u64,
    /// Digest of the layer before compression.
    pub diff_id: String,
}

/// What all layers up to one have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// Bytes of all files that were written.
    pub bytes: u64,
    /// Files, folders and links in the tree.
    pub files: u64,
    /// Devices and other things that a machine makes itself, which were left out.
    pub left_out: u64,
}

/// Applies a layer to the tree in the folder `place`, which it makes if there is none.
pub fn apply_layer(place: &Path, layer: impl Read, limits: &LayerLimits) -> Result<Applied, ContainerError> {
    let tree = place.join(TREE);
    let unpack = |source| ContainerError::Unpack { source };
    match fs::create_dir(&tree) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(unpack(error)),
        _ => {}
    }
    let known = match fs::read(place.join(KNOWN)) {
        Ok(text) => serde_json::from_slice(&text).map_err(|error| ContainerError::invalid(KNOWN, error))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => TreeAttributes::default(),
        Err(error) => return Err(unpack(error)),
    };
    let tree = Tree::open(&tree).map_err(unpack)?;
    let mut unpacking = Unpacking { tree, known, added: BTreeSet::new(), limit: limits.bytes };
    let mut plain = Digested::new(decompressed(layer.take(limits.length)).map_err(unpack)?);
    unpacking.apply(&mut plain)?;
    io::copy(&mut plain, &mut io::sink()).map_err(unpack)?;
    let found = plain.digest();
    if found != limits.diff_id {
        return Err(ContainerError::Checksum { expected: limits.diff_id.clone(), found });
    }
    unpacking.save(place).map_err(unpack)
}

/// Hashes what is read.
struct Digested<R> {
    from: R,
    context: digest::Context,
}

impl<R: Read> Digested<R> {
    fn new(from: R) -> Self {
        Self { from, context: digest::Context::new(&digest::SHA256) }
    }

    fn digest(self) -> String {
        digest_text(&self.context.finish())
    }
}

impl<R: Read> Read for Digested<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.context.update(&buffer[..count]);
        Ok(count)
    }
}

/// A tree while a layer is applied to it.
struct Unpacking {
    tree: Tree,
    known: TreeAttributes,
    /// Paths of this layer, which its own marks do not remove.
    added: BTreeSet<String>,
    limit: u64,
}

impl Unpacking {
    fn apply(&mut self, layer: &mut impl Read) -> Result<(), ContainerError> {
        let unpack = |source| ContainerError::Unpack { source };
        let mut archive = tar::Archive::new(layer);
        for entry in archive.entries().map_err(unpack)? {
            let mut entry = entry.map_err(unpack)?;
            let path = path_of(&entry.path_bytes())?;
            let name = path.rsplit('/').next().unwrap_or_default().to_owned();
            let folder = path.strip_suffix(&name).unwrap_or_default();
            let result = match name.strip_prefix(WHITEOUT) {
                _ if name == OPAQUE => self.remove(folder, true),
                Some("" | "." | "..") => {
                    Err(ContainerError::Entry { path: path.clone(), reason: "removes no file" })
                }
                Some(removed) => self.remove(&format!("{folder}{removed}"), false),
                None => self.add(&path, &mut entry),
            };
            result.map_err(|error| match error {
                ContainerError::Unpack { source } if is_of_the_layer(&source) => {
                    ContainerError::Entry { path, reason: "cannot be where the layer puts it" }
                }
                error => error,
            })?;
            if self.known.files.len() > FILES_MAX {
                return Err(ContainerError::TooMany { limit: FILES_MAX });
            }
        }
        Ok(())
    }

    /// Removes what layers below this one have at `path`, or only what is in it.
    fn remove(&mut self, path: &str, only_below: bool) -> Result<(), ContainerError> {
        let unpack = |source| ContainerError::Unpack { source };
        let path = path.trim_end_matches('/');
        let place = self.place(path).map_err(unpack)?;
        if !only_below {
            place.remove_all_but(&self.added).map_err(unpack)?;
        } else if path.is_empty() || place.exists().map_err(unpack)? {
            place.remove_below(&self.added).map_err(unpack)?;
        }
        let own = only_below.then(|| self.known.files.get(&place.path).cloned()).flatten();
        self.known.forget_all_but(&place.path, &self.added);
        if let Some(own) = own {
            self.known.files.insert(place.path, own);
        }
        Ok(())
    }

    /// The place of a path. Folders that were missing get usual attributes.
    fn place(&mut self, path: &str) -> io::Result<TreePlace> {
        let mut made = Vec::new();
        let place = self.tree.place(path, &mut made)?;
        for folder in made {
            self.known.files.insert(folder, FileAttributes { mode: FOLDER, ..FileAttributes::default() });
        }
        Ok(place)
    }

    fn add<R: Read>(&mut self, path: &str, entry: &mut Entry<'_, R>) -> Result<(), ContainerError> {
        let unpack = |source| ContainerError::Unpack { source };
        let kind = entry.header().entry_type();
        let mut attributes = attributes_of(entry).map_err(unpack)?;
        if path.is_empty() {
            // The root itself.
            self.known
                .files
                .insert(String::new(), FileAttributes { mode: FOLDER | attributes.mode, ..attributes });
            return Ok(());
        }
        let place = self.place(path).map_err(unpack)?;
        if kind != EntryType::Directory {
            self.known.forget_all_but(&place.path, &BTreeSet::new());
        }
        let time = entry.header().mtime().unwrap_or(0);
        let mode = match kind {
            EntryType::Directory => {
                place.make_folder().map_err(unpack)?;
                0o040_000
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.write(&place, entry, time)?;
                0o100_000
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default();
                place.make_link(&target).map_err(unpack)?;
                // Permissions of a link mean nothing, and Linux shows these.
                attributes.mode = 0o777;
                0o120_000
            }
            EntryType::Link => {
                let target = path_of(&entry.link_name_bytes().unwrap_or_default())?;
                let other = self.place(&target).map_err(unpack)?;
                place.make_hard_link(&other).map_err(unpack)?;
                if let Some(known) = self.known.files.get(&other.path).cloned() {
                    self.known.files.insert(place.path.clone(), known);
                }
                self.added.insert(place.path);
                return Ok(());
            }
            EntryType::Fifo => {
                place.make_fifo().map_err(unpack)?;
                0o010_000
            }
            _ => {
                self.known.left_out += 1;
                return Ok(());
            }
        };
        attributes.mode |= mode;
        self.added.insert(place.path.clone());
        self.known.files.insert(place.path, attributes);
        Ok(())
    }

    /// Writes a file. Its time is that of the layer, so that it does not differ from one import to the next.
    fn write<R: Read>(
        &mut self,
        place: &TreePlace,
        entry: &mut Entry<'_, R>,
        time: u64,
    ) -> Result<(), ContainerError> {
        let unpack = |source| ContainerError::Unpack { source };
        let mut file = place.make_file().map_err(unpack)?;
        let room = self.limit - self.known.bytes;
        let written = io::copy(&mut entry.take(room.saturating_add(1)), &mut file).map_err(unpack)?;
        if written > room {
            return Err(ContainerError::TooLarge { limit: self.limit });
        }
        self.known.bytes += written;
        let time = Timespec { tv_sec: time.min(i64::MAX as u64) as i64, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::futimens(&file, &times).map_err(|errno| unpack(errno.into()))
    }

    /// Writes what is known of the files, for the next layer and for debugfs.
    fn save(&self, place: &Path) -> io::Result<Applied> {
        let (commands, capabilities) = self.known.commands();
        fs::write(place.join(KNOWN), serde_json::to_vec(&self.known)?)?;
        fs::File::create(place.join(COMMANDS))?.write_all(commands.as_bytes())?;
        for (index, content) in capabilities.into_iter().enumerate() {
            fs::write(place.join(capability_file(index)), content)?;
        }
        let TreeAttributes { files, bytes, left_out } = &self.known;
        Ok(Applied { bytes: *bytes, files: files.len() as u64, left_out: *left_out })
    }
}

/// Whether an error comes from what the layer asks for, and not from the disk.
fn is_of_the_layer(error: &io::Error) -> bool {
    const OF_NAMES: [Errno; 8] = [
        Errno::EXIST,
        Errno::ISDIR,
        Errno::NOTDIR,
        Errno::NOENT,
        Errno::NOTEMPTY,
        Errno::LOOP,
        Errno::NAMETOOLONG,
        Errno::XDEV,
    ];
    Errno::from_io_error(error).is_some_and(|errno| OF_NAMES.contains(&errno))
}

/// A path of a layer, relative to its root.
fn path_of(bytes: &[u8]) -> Result<String, ContainerError> {
    let refuse = |reason| ContainerError::Entry {
        path: String::from_utf8_lossy(bytes).chars().take(200).collect(),
        reason,
    };
    let text = std::str::from_utf8(bytes).map_err(|_| refuse("is no UTF-8"))?;
    let parts: Vec<_> = text.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    match () {
        () if parts.contains(&"..") => Err(refuse("leads out of the layer")),
        () if parts.len() > DEPTH_MAX => Err(refuse("has too many parts")),
        () => {
            let path = parts.join("/");
            if can_be_named(&path) { Ok(path) } else { Err(refuse("has a line break in it or is too long")) }
        }
    }
}

/// Owner, permissions and capability of an entry, without the type.
fn attributes_of<R: Read>(entry: &mut Entry<'_, R>) -> io::Result<FileAttributes> {
    let number = |number: u64| u32::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
    let header = entry.header();
    let (mode, user, group) = (header.mode()? & 0o7777, number(header.uid()?)?, number(header.gid()?)?);
    let mut capability = Vec::new();
    for extension in entry.pax_extensions()?.into_iter().flatten() {
        let extension = extension?;
        if extension.key_bytes() == CAPABILITY.as_bytes() && extension.value_bytes().len() <= CAPABILITY_MAX {
            capability = extension.value_bytes().to_vec();
        }
    }
    Ok(FileAttributes { mode, user, group, capability })
}

#[cfg(test)]
#[path = "layer_tests.rs"]
mod tests;
