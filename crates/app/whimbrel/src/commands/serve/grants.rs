//! Grants: which key may mount which directory, and whether it may change it, as `--allow` said now or
//! earlier.
//!
//! They are one JSON file beside the keys, replaced atomically under a lock. A server uses those of its own
//! directories only, so a key that one server allows opens nothing of another one.

use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};
use whimbrel_session::server::ExportAccess;
use whimbrel_wire::{PublicKey, atomic_file};

/// Larger than any list of grants.
const FILE_MAX: u64 = 4 << 20;

/// A key that may mount a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Grant {
    key: PublicKey,
    directory: PathBuf,
    write: bool,
}

/// All grants of one directory of keys.
#[derive(Debug)]
pub(super) struct Grants(Vec<Grant>);

impl Grants {
    /// Reads the grants in `keys` and adds those of `allow` for each of the `directories`.
    pub(super) fn load(
        keys: &Path,
        directories: &[PathBuf],
        allow: &[(PublicKey, ExportAccess)],
    ) -> io::Result<Self> {
        let path = keys.join("exports.json");
        let lock = File::options().create(true).append(true).open(path.with_extension("lock"))?;
        lock.lock()?;
        let before = read(&path)?;
        let mut grants = before.clone();
        for (directory, (key, access)) in directories.iter().flat_map(|d| allow.iter().map(move |a| (d, *a)))
        {
            grants.retain(|grant| (grant.key, &grant.directory) != (key, directory));
            grants.push(Grant { key, directory: directory.clone(), write: access == ExportAccess::Write });
        }
        if grants != before {
            atomic_file::replace(&path, &serde_json::to_vec_pretty(&grants)?)?;
        }
        Ok(Self(grants))
    }

    /// The keys that may mount a directory.
    pub(super) fn clients_of(&self, directory: &Path) -> Vec<(PublicKey, ExportAccess)> {
        let grants = self.0.iter().filter(|grant| grant.directory == directory);
        let access = |grant: &Grant| if grant.write { ExportAccess::Write } else { ExportAccess::Read };
        grants.map(|grant| (grant.key, access(grant))).collect()
    }
}

fn read(path: &Path) -> io::Result<Vec<Grant>> {
    let size = match fs::metadata(path) {
        Ok(meta) => meta.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    if size > FILE_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_one_server_allows_opens_nothing_of_another_one() {
        let keys = tempfile::tempdir().unwrap();
        let (mine, theirs) = (PathBuf::from("/mine"), PathBuf::from("/theirs"));
        let (first, second) = (PublicKey([1; 32]), PublicKey([2; 32]));
        let load = |directory: &PathBuf, allow: &[_]| {
            Grants::load(keys.path(), std::slice::from_ref(directory), allow).unwrap()
        };
        load(&mine, &[(first, ExportAccess::Write), (second, ExportAccess::Read)]);
        assert!(load(&theirs, &[]).clients_of(&theirs).is_empty());
        let again = load(&mine, &[]).clients_of(&mine);
        assert_eq!(again, [(first, ExportAccess::Write), (second, ExportAccess::Read)], "now and later");
        let less = load(&mine, &[(first, ExportAccess::Read)]).clients_of(&mine);
        assert_eq!(less, [(second, ExportAccess::Read), (first, ExportAccess::Read)]);
    }

    #[test]
    fn a_damaged_list_is_not_overwritten() {
        let keys = tempfile::tempdir().unwrap();
        fs::write(keys.path().join("exports.json"), "[{").unwrap();
        let allow = [(PublicKey([1; 32]), ExportAccess::Write)];
        assert!(Grants::load(keys.path(), &["/mine".into()], &allow).is_err());
        assert_eq!(fs::read(keys.path().join("exports.json")).unwrap(), b"[{");
    }
}
