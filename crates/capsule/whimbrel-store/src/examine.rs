//! Examination of a store's files without opening the store: what is missing, damaged or of a later version.
//!
//! Reads names, sizes and small files, and writes nothing, so it works beside a daemon, without a key, and on
//! a store that does not open. Content of packs is for [`Store::verify`](crate::Store::verify), which reads
//! all of it.

use crate::{
    file_names::{CONDEMNED, INDEX, KEYS, KEYS_COPY, MARKER, PACKS, PackId, REFS, read_checked},
    gc_lease::Condemned,
    index::Index,
    keys::KeyFile,
    layout::{Layout, is_wrong},
    os_vfs::OsVfs,
    refs,
    vfs::Vfs,
};
use std::{collections::BTreeMap, error::Error, io, path::Path};
use whimbrel_core::{RefName, error_chain};

/// One file of a store that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreFinding {
    /// Path in the directory of the store.
    pub file: String,
    /// Kind of the file.
    pub kind: FileKind,
    /// Reason, as a sentence without a subject.
    pub reason: String,
}

/// Kind of a store's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// Marker with the layout.
    Marker,
    /// Wrapped key, or its copy.
    Keys,
    /// Name of a capsule.
    Ref,
    /// Index of packs.
    Index,
    /// Pack with content.
    Pack,
    /// Generation of garbage collection.
    Condemned,
    /// Directory of the store that cannot be listed.
    Directory,
}

/// Examines the store in `dir`. None is found where there is no store.
pub fn examine(dir: &Path) -> Vec<StoreFinding> {
    let mut found = Found { files: &OsVfs::new(dir), findings: Vec::new() };
    if dir.exists() {
        found.marker_and_keys();
        found.refs();
        found.packs();
        let condemned = Condemned::read(found.files).map(drop);
        found.note(CONDEMNED, FileKind::Condemned, condemned.map_err(|error| error_chain(&error)));
    }
    found.findings
}

struct Found<'a> {
    files: &'a OsVfs,
    findings: Vec<StoreFinding>,
}

impl Found<'_> {
    fn note(&mut self, file: &str, kind: FileKind, checked: Result<(), String>) {
        if let Err(reason) = checked {
            self.findings.push(StoreFinding { file: file.to_owned(), kind, reason });
        }
    }

    /// Names in a directory; none if it cannot be listed, which is noted.
    fn names(&mut self, dir: &str) -> Vec<String> {
        let listed = self.files.list(dir);
        self.note(dir, FileKind::Directory, listed.as_ref().map(drop).map_err(ToString::to_string));
        listed.unwrap_or_default()
    }

    fn marker_and_keys(&mut self) {
        let layout = Layout::read(self.files);
        let marker = match &layout {
            Ok(Some(Layout::Encrypted(data))) if is_wrong(self.files, *data).unwrap_or(false) => {
                Err("it names another key than both copies of it".to_owned())
            }
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err("it is missing".to_owned()),
            Err(error) => Err(error_chain(error)),
        };
        self.note(MARKER, FileKind::Marker, marker);
        let is_encrypted = matches!(layout, Ok(Some(Layout::Encrypted(_))));
        for name in [KEYS, KEYS_COPY] {
            let keys = match read_checked(self.files, name) {
                Ok(None) if is_encrypted => Err("it is missing".to_owned()),
                Ok(None) => Ok(()),
                Ok(Some(text)) => {
                    KeyFile::parse(&text).map(drop).ok_or_else(|| "it is not understood".to_owned())
                }
                Err(error) => Err(error_chain(&error)),
            };
            self.note(name, FileKind::Keys, keys);
        }
    }

    fn refs(&mut self) {
        for name in self.names(REFS) {
            if name.parse::<RefName>().is_err() {
                continue;
            }
            let path = format!("{REFS}/{name}");
            let checked = match read_checked(self.files, &path) {
                Ok(text) => text.map_or(Ok(()), |text| {
                    refs::parse(&text).map(drop).ok_or_else(|| "it is not understood".to_owned())
                }),
                Err(error) => Err(error_chain(&error)),
            };
            self.note(&path, FileKind::Ref, checked);
        }
    }

    /// Compares the packs that indexes name with those that are there.
    fn packs(&mut self) {
        let mut indexed = BTreeMap::new();
        for name in self.names(INDEX).iter().filter(|name| name.ends_with(".idx")) {
            let path = format!("{INDEX}/{name}");
            let checked = match self.files.map(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                Err(error) => Err(error.to_string()),
                // Names of packs and the checksum of the body are readable without a key.
                Ok(map) => Index::open_without_keys(name, map).map_err(str::to_owned).and_then(|index| {
                    indexed.extend(index.packs().iter().copied());
                    index.body_is_intact().then_some(()).ok_or_else(|| "its content is damaged".to_owned())
                }),
            };
            self.note(&path, FileKind::Index, checked);
        }
        self.names(PACKS);
        for (pack, len) in indexed {
            let checked = self.pack(pack, len).map_err(|error| error.to_string());
            self.note(&pack.path(), FileKind::Pack, checked);
        }
    }

    fn pack(&self, pack: PackId, len: u32) -> Result<(), Box<dyn Error>> {
        let size = self.files.open(&pack.path())?.size()?;
        if size < u64::from(len) {
            return Err(format!("it has {size} of {len} bytes").into());
        }
        Ok(())
    }
}
