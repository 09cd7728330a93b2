//! Folders that cannot be written, one at a time, in a mount namespace of the test's own.

use super::{
    files::{copy, files},
    folder::{self, known},
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use std::{collections::BTreeSet, path::Path, thread};
use tokio::runtime::Runtime;

/// Lets nobody of this namespace write below a folder.
fn close(folder: &Path) {
    let nothing = None::<&str>;
    mount(Some(folder), folder, nothing, MsFlags::MS_BIND, nothing).expect("a bind mount");
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(nothing, folder, nothing, flags, nothing).expect("a mount that is read only");
}

/// Starts a daemon on a folder of which one part cannot be written. Returns what is wrong.
fn start_beside(dir: &Path, closed: &str, runtime: &Runtime) -> Result<(), String> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(|error| error.to_string())?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).map_err(|error| error.to_string())?;
    let folder = dir.join("data").join(closed);
    close(&folder);
    match folder::start(dir, runtime, None) {
        // A daemon that cannot write its lock or the store says so, and changes nothing.
        Err(error) if closed.is_empty() || closed.starts_with("store") => {
            let names_it = error.contains("data") || error.contains("store");
            names_it.then_some(()).ok_or(format!("the error names no place: {error}"))
        }
        Err(error) => Err(format!("the daemon does not start: {error}")),
        Ok(started) => {
            known(&started);
            Ok(())
        }
    }
}

#[test]
fn a_folder_that_cannot_be_written_loses_nothing() {
    let runtime = Runtime::new().expect("a runtime");
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
    folder::make(dir.path(), &runtime, None);
    let whole = files(&dir.path().join("data"));
    let before = known(&folder::start(dir.path(), &runtime, None).expect("the folder"));
    let mut folders = BTreeSet::from([String::new()]);
    folders.extend(whole.keys().filter_map(|name| name.strip_suffix('/').map(str::to_owned)));
    let mut failures = Vec::new();
    for closed in folders {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        copy(&whole, &dir.path().join("data"));
        // The namespace ends with the thread, and with it the mount.
        let tried = thread::scope(|scope| {
            scope.spawn(|| start_beside(dir.path(), &closed, &runtime)).join().expect("no panic")
        });
        failures.extend(tried.err().map(|error| format!("{closed:?}: {error}")));
        let after = folder::start(dir.path(), &runtime, None).map(|started| known(&started));
        match after {
            Err(error) => failures.push(format!("{closed:?}: it does not start once it can write: {error}")),
            Ok(after) => {
                let lost = before.iter().filter(|(name, text)| after.get(*name) != Some(text));
                failures.extend(lost.map(|(name, text)| format!("{closed:?}: {name} was {text}")));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
