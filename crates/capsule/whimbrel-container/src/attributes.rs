//! Owners, modes and extended attributes of the files of a tree, as the layers name them.
//!
//! The process that unpacks layers has no right to set them. They are kept beside the tree, from one layer to
//! the next, and become commands of debugfs(8) on the finished file system.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt::Write};

/// Longest command that debugfs reads as one line (its buffer has 8,192 bytes).
const COMMAND_MAX: usize = 8000;
/// Mode of the root and of folders that no layer names.
pub(crate) const FOLDER: u32 = 0o040_755;

/// FileAttributes of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileAttributes {
    /// Type and permissions, as in stat(2).
    pub(crate) mode: u32,
    pub(crate) user: u32,
    pub(crate) group: u32,
    /// Content of `security.capability` (capabilities(7)).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) capability: Vec<u8>,
}

/// FileAttributes of a root that no layer names.
static ROOT: FileAttributes = FileAttributes { mode: FOLDER, user: 0, group: 0, capability: Vec::new() };

/// FileAttributes of the files of a tree, by their paths from its root; and what the tree has in all.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct TreeAttributes {
    pub(crate) files: BTreeMap<String, FileAttributes>,
    /// Bytes of all files that were written.
    pub(crate) bytes: u64,
    /// Devices and other things that a machine makes itself, which were left out.
    pub(crate) left_out: u64,
}

impl TreeAttributes {
    /// Forgets `path`, but for these.
    pub(crate) fn forget_all_but(&mut self, path: &str, kept: &std::collections::BTreeSet<String>) {
        let below = format!("{path}/");
        let gone = |file: &String| {
            (path.is_empty() || file == path || file.starts_with(&below)) && !kept.contains(file)
        };
        let last = format!("{path}0");
        let range = match path.is_empty() {
            true => self.files.range::<String, _>(..),
            // `0` follows `/`, so all that is below the path is before it.
            false => self.files.range(path.to_owned()..last),
        };
        let gone: Vec<String> = range.map(|(file, _)| file).filter(|file| gone(file)).cloned().collect();
        gone.iter().for_each(|file| drop(self.files.remove(file)));
    }

    /// Commands of debugfs(8) that set all attributes, and the contents of the files that they read: the
    /// index of each is in its name.
    pub(crate) fn commands(&self) -> (String, Vec<&[u8]>) {
        let (mut commands, mut contents) = (String::new(), Vec::new());
        let named = self.files.iter().map(|(path, attributes)| (&**path, attributes));
        let root = (!self.files.contains_key("")).then_some(("", &ROOT));
        for (path, attributes) in root.into_iter().chain(named) {
            let path = quoted(path);
            let fields = [("uid", attributes.user), ("gid", attributes.group)];
            // Writing to a `String` cannot fail.
            let _ = writeln!(commands, "sif {path} mode 0{:o}", attributes.mode);
            for (field, value) in fields {
                let _ = writeln!(commands, "sif {path} {field} {value}");
            }
            if !attributes.capability.is_empty() {
                let file = capability_file(contents.len());
                let _ = writeln!(commands, "ea_set -f {file} {path} security.capability");
                contents.push(&*attributes.capability);
            }
        }
        (commands, contents)
    }
}

/// Name of the file with a capability.
pub(crate) fn capability_file(index: usize) -> String {
    format!("capability-{index}")
}

/// Whether debugfs can be told of a file with this path.
pub(crate) fn can_be_named(path: &str) -> bool {
    !path.contains(['\n', '\r', '\0']) && quoted(path).len() < COMMAND_MAX
}

/// A path as a word of debugfs, which has quotation marks twice in words of quotation marks.
fn quoted(path: &str) -> String {
    format!("\"/{}\"", path.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_path_is_forgotten_with_what_is_below_it_and_nothing_beside_it() {
        let mut known = TreeAttributes::default();
        for path in ["a", "a/b", "a/b/c", "a-b", "a.b", "a0", "ab", "b"] {
            known.files.insert(path.to_owned(), FileAttributes::default());
        }
        known.forget_all_but("a", &BTreeSet::from(["a/b/c".to_owned()]));
        assert_eq!(known.files.keys().collect::<Vec<_>>(), ["a-b", "a.b", "a/b/c", "a0", "ab", "b"]);
        known.forget_all_but("", &BTreeSet::from(["b".to_owned()]));
        assert_eq!(known.files.keys().collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn names_are_words_of_debugfs_or_refused() {
        let odd = FileAttributes { mode: 0o104_755, user: 100_000, group: 7, capability: vec![1] };
        let known =
            TreeAttributes { files: [("a b/\"c\"".to_owned(), odd)].into(), ..TreeAttributes::default() };
        let (commands, contents) = known.commands();
        let lines: Vec<_> = commands.lines().collect();
        assert_eq!(lines[0], "sif \"/\" mode 040755");
        assert_eq!(
            lines[3..],
            [
                "sif \"/a b/\"\"c\"\"\" mode 0104755",
                "sif \"/a b/\"\"c\"\"\" uid 100000",
                "sif \"/a b/\"\"c\"\"\" gid 7",
                "ea_set -f capability-0 \"/a b/\"\"c\"\"\" security.capability",
            ]
        );
        assert_eq!(contents, [&[1]]);
        assert!(!can_be_named("a\nquit") && !can_be_named(&"a/".repeat(4096)) && can_be_named("ä\t\\"));
    }
}
