//! Files of a folder as a map, so that a folder can be copied and compared.

use std::{collections::BTreeMap, fs, io, io::Write, os::unix::fs::OpenOptionsExt, path::Path};

/// Content of files, by their paths in the folder.
pub(super) type Files = BTreeMap<String, Vec<u8>>;

/// The largest files, which are made again: the hash cache, and room that is set aside.
const NEEDLESS: [&str; 2] = ["page-cache", "store/reserve"];

/// All files in a folder, needless ones without content. A symbolic link that leads nowhere is empty, and so
/// is a folder, whose path ends with a slash.
pub(super) fn files(folder: &Path) -> Files {
    let mut found = BTreeMap::new();
    walk(folder, folder, &mut found).expect("the folder");
    found
}

fn walk(root: &Path, dir: &Path, found: &mut Files) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        match path.is_dir() {
            true => {
                found.insert(format!("{}/", name(root, &path)), Vec::new());
                walk(root, &path, found)?;
            }
            false => {
                let name = name(root, &path);
                let content = match NEEDLESS.iter().any(|needless| name.starts_with(needless)) {
                    true => Vec::new(),
                    false => fs::read(&path).unwrap_or_default(),
                };
                found.insert(name, content);
            }
        }
    }
    Ok(())
}

fn name(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).expect("a path below").to_string_lossy().into_owned()
}

/// Writes a file that only its owner may read, as the daemon does.
pub(super) fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).open(path)?.write_all(content)
}

/// Writes all files below a folder.
pub(super) fn copy(files: &Files, to: &Path) {
    for (name, content) in files {
        let path = to.join(name);
        let folder = if name.ends_with('/') { &path } else { path.parent().expect("a folder") };
        fs::create_dir_all(folder).expect("a folder");
        if !name.ends_with('/') && !NEEDLESS.iter().any(|needless| name.starts_with(needless)) {
            put(&path, content).expect("a copy");
        }
    }
}
