//! Data directories of earlier formats, as they were written: each opens, and everything in it is known.
//!
//! `tests/folders/DATE` has one of each format, with what a daemon of its time knew of it in `known.json`. A
//! change of any format adds one: `WHIMBREL_RENEW=DATE cargo test -p whimbrel-daemon --lib folders_of` writes
//! it. None is ever changed.

use super::{
    files::{Files, copy, files},
    folder::{self, known},
};
use std::{collections::BTreeMap, env, fs, path::Path};
use tokio::runtime::Runtime;

/// File beside the folder with what was known.
const KNOWN: &str = "known.json";

/// Caches, and files without content.
fn is_needless(name: &str) -> bool {
    name.ends_with("lock")
        || ["page-cache", "store/reserve", "store/tmp"].iter().any(|it| name.starts_with(it))
}

fn write(folders: &Path, date: &str, runtime: &Runtime) {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
    folder::make(dir.path(), runtime, None);
    let mut whole: Files = files(&dir.path().join("data"));
    let now = known(&folder::start(dir.path(), runtime, None).expect("the folder"));
    whole.retain(|name, _| !is_needless(name));
    let to = folders.join(date);
    copy(&whole, &to.join("data"));
    fs::write(to.join(KNOWN), serde_json::to_string_pretty(&now).expect("text")).expect("a file");
}

#[test]
fn folders_of_every_earlier_format_open_with_everything_in_them() {
    let runtime = Runtime::new().expect("a runtime");
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/folders");
    if let Ok(date) = env::var("WHIMBREL_RENEW") {
        write(&folders, &date, &runtime);
    }
    let mut opened = 0;
    for entry in fs::read_dir(&folders).expect("folders") {
        let kept = entry.expect("a folder").path();
        let text = fs::read(kept.join(KNOWN)).expect("what was known");
        let before: BTreeMap<String, String> = serde_json::from_slice(&text).expect("what was known");
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        copy(&files(&kept.join("data")), &dir.path().join("data"));
        let now = known(&folder::start(dir.path(), &runtime, None).expect("it opens"));
        for (name, text) in before {
            assert_eq!(now.get(&name), Some(&text), "{name} in {}", kept.display());
        }
        opened += 1;
    }
    assert!(opened >= 2, "{opened} folders");
}
