//! Machine folders: made before a machine starts, read when the daemon starts, removed through the trash.
//!
//! A new folder has a mark until its record is saved. A folder that is removed first moves to the trash as a
//! whole. So a folder with neither record nor mark has lost its record. Like one whose record cannot be read,
//! it is *unreadable*: its name stays taken, and nothing of it is removed before a user says so.

use crate::{
    core::{directories::Directories, error::DaemonError},
    machine::{
        commit_mark,
        record::{self, Record},
        rename,
    },
};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};
use whimbrel_block::{OverlayDir, OverlayError};
use whimbrel_core::{MachineName, error_chain};
use whimbrel_vm::remove_overlays;
use whimbrel_wire::atomic_file;

/// Mark of a folder whose record was not saved yet.
const STARTING: &str = "starting";

/// What the machine folders of a host contain.
#[derive(Debug, Default)]
pub(crate) struct FoundMachines {
    pub(crate) records: Vec<Record>,
    /// Machines without a readable record, and why it cannot be read.
    pub(crate) unreadable: BTreeMap<MachineName, String>,
}

/// Makes the folder of a machine that is about to start. A machine that is known already has one; overlays of
/// a start that failed are removed.
pub(crate) fn prepare(layout: &Directories, name: &MachineName) -> Result<(), DaemonError> {
    let folder = layout.machine(name);
    let failed = |source| DaemonError::io("create", &folder, source);
    if record::path(&folder).try_exists().map_err(failed)? {
        return Ok(());
    }
    match fs::create_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if !folder.join(STARTING).try_exists().map_err(failed)? {
                return Err(DaemonError::UnreadableRecord { name: name.clone(), reason: no_record(&folder) });
            }
            remove_overlays(&layout.live_bitmaps(), &folder);
        }
        made => made.map_err(failed)?,
    }
    fs::write(folder.join(STARTING), "").map_err(failed)
}

/// Removes the mark of a folder whose record is about to be saved. A folder without both is unreadable, which
/// loses nothing.
pub(super) fn unmark(folder: &Path) -> io::Result<()> {
    match fs::remove_file(folder.join(STARTING)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads every record on its own, once it is durable. Folders of interrupted starts are removed.
pub(crate) fn load_all(layout: &Directories) -> Result<FoundMachines, DaemonError> {
    let dir = layout.machines();
    let failed = |source| DaemonError::io("read", &dir, source);
    let mut found = FoundMachines::default();
    atomic_file::make_durable(&dir).map_err(|source| DaemonError::io("sync", &dir, source))?;
    for entry in fs::read_dir(&dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.parse::<MachineName>().ok());
        let Some(name) = name.filter(|_| path.is_dir()) else {
            tracing::warn!(path = %path.display(), "ignoring a file that belongs to no machine");
            continue;
        };
        let settled = atomic_file::make_durable(&path).and_then(|()| commit_mark::make_durable(&path));
        let record = settled.map_err(|error| format!("it cannot be made durable: {error}"));
        match record.and_then(|()| load(layout, &path, &name)) {
            Ok(record) => found.records.extend(record),
            Err(reason) => drop(found.unreadable.insert(name, reason)),
        }
    }
    Ok(found)
}

/// The record of a folder, none if it was left by an interrupted start, or why it cannot be read.
fn load(layout: &Directories, folder: &Path, name: &MachineName) -> Result<Option<Record>, String> {
    match Record::read(folder) {
        Ok(Some(record)) if record.name == *name => {
            unmark(folder).map_err(|error| error.to_string())?;
            Ok(Some(record))
        }
        Ok(Some(record)) if record.was.as_ref() == Some(name) => Ok(Some(not_renamed(layout, record, name))),
        Ok(Some(record)) => Err(format!("it is the record of {}", record.name)),
        Ok(None) if folder.join(STARTING).exists() => {
            tracing::info!(machine = %name, "removing what an interrupted start left");
            if let Err(error) = delete(layout, name) {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(machine = %name, error, "could not remove what an interrupted start left");
            }
            Ok(None)
        }
        Ok(None) => Err(no_record(folder)),
        Err(error) => Err(error_chain(&error)),
    }
}

/// The record of a machine whose rename was interrupted before it had its new name.
fn not_renamed(layout: &Directories, mut record: Record, name: &MachineName) -> Record {
    tracing::info!(machine = %name, to = %record.name, "a machine was not renamed after all");
    let renamed = layout.machine(&record.name);
    rename::relocate(&mut record, &renamed, &layout.machine(name));
    (record.name, record.was) = (name.clone(), None);
    record
}

/// Why the record in a machine's folder cannot be read, if it cannot. Changes nothing.
pub(crate) fn check(folder: &Path, name: &str) -> Result<(), DaemonError> {
    match Record::read(folder)? {
        Some(record) if record.name.as_str() == name => Ok(()),
        Some(record) if record.was.as_ref().is_some_and(|was| was.as_str() == name) => Ok(()),
        Some(record) => Err(DaemonError::invalid(format!("it is the record of {}", record.name))),
        None if folder.join(STARTING).exists() => Ok(()),
        None => Err(DaemonError::invalid(no_record(folder))),
    }
}

/// Overlays in a machine's folder of which a file is missing or damaged, each with that file. Their content
/// has no checksums.
pub(crate) fn check_disks(folder: &Path) -> Vec<(PathBuf, OverlayError)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let overlay = |dir: PathBuf| OverlayDir { dir, live_dir: PathBuf::new() };
    let overlays = entries.map(|entry| entry.path()).filter(|path| path.is_dir());
    overlays
        .filter_map(|dir| overlay(dir).check().err().map(|error| (error.path().to_owned(), error)))
        .collect()
}

fn no_record(folder: &Path) -> String {
    format!("{} is missing", record::path(folder).display())
}

/// Removes all files of a machine.
pub(crate) fn delete(layout: &Directories, name: &MachineName) -> Result<(), DaemonError> {
    match move_to_trash(layout, name) {
        Ok(folder) => erase(layout, &folder),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(DaemonError::io("remove", &layout.machine(name), source)),
    }
}

/// Removes the folder of a machine that was to start and has no record yet, if there is one; no other.
pub(crate) fn delete_marked(layout: &Directories, name: &MachineName) -> Result<(), DaemonError> {
    let folder = layout.machine(name);
    let has = |path: PathBuf| path.try_exists().map_err(|source| DaemonError::io("read", &path, source));
    if has(folder.join(STARTING))? && !has(record::path(&folder))? { delete(layout, name) } else { Ok(()) }
}

/// Moves the folder of a machine into the trash. Returns its new path.
pub(super) fn move_to_trash(layout: &Directories, name: &MachineName) -> io::Result<PathBuf> {
    let folder = layout.trash().join(format!("{name}-{:016x}", rand::random::<u64>()));
    fs::rename(layout.machine(name), &folder)?;
    Ok(folder)
}

/// Removes a folder that is in the trash, the record first: the rest is garbage without it.
pub(super) fn erase(layout: &Directories, folder: &Path) -> Result<(), DaemonError> {
    let failed = |source| DaemonError::io("remove", folder, source);
    // After a power failure the folder must not be back among the machines without its record.
    atomic_file::sync_dir(&layout.machines()).map_err(failed)?;
    match fs::remove_file(record::path(folder)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    remove_overlays(&layout.live_bitmaps(), folder);
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    }
}
