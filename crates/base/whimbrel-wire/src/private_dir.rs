//! Private directories: made for this user alone, and refused where another user could put a directory of
//! their own in their place.
//!
//! A directory that another user made first, or a symbolic link, would let that user read what is written
//! there and plant what is read there. The checks follow names, which is safe here: once no other user may
//! change any part of a path, what was checked stays as it is. Without that, nothing is used at all.

use rustix::fs::Mode;
use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

/// Permissions to change the entries of a directory, for others than its owner.
const OTHERS_WRITE: u32 = 0o022;
/// Permission for everybody to do so. Directories of a group are common above a private one (`/var/local` of
/// Debian).
const ALL_WRITE: u32 = 0o002;
/// Entries may only be replaced by their owners (`/tmp`, `/dev/shm`).
const STICKY: u32 = 0o1000;

/// A directory that cannot be used as a private one.
#[derive(Debug, thiserror::Error)]
pub enum PrivateDirError {
    /// The directory could not be created or examined.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried: `create`, `examine` or `restrict`.
        action: &'static str,
        /// Path of the directory.
        path: PathBuf,
        /// Cause reported by the kernel.
        #[source]
        source: io::Error,
    },
    /// The directory, a part of its path or an entry in it belongs to another user.
    #[error("{} belongs to user {owner}, who could read or replace what is there", path.display())]
    Foreign {
        /// The directory, the part of its path, or the entry.
        path: PathBuf,
        /// Number of the user.
        owner: u32,
    },
    /// Other users may write in it, or in a part of its path that is not sticky.
    #[error("other users may write in {}", path.display())]
    Shared {
        /// The directory, or the part of its path.
        path: PathBuf,
    },
}

/// Creates `dir` with mode 0700 if it is missing, and refuses it if other users may replace it or write in
/// it. They may still be able to read an older one, see [`restrict`].
pub fn create(dir: &Path) -> Result<(), PrivateDirError> {
    let (real, found) = create_own(dir)?;
    match found.mode() & OTHERS_WRITE {
        0 => Ok(()),
        _ => Err(PrivateDirError::Shared { path: real }),
    }
}

/// Creates `dir` with mode 0700 if it is missing, and takes all permissions of others from one that exists:
/// nothing below it can be reached by them any more, whatever its mode. One that has entries of other users
/// is refused, since they are not what this program put there.
pub fn restrict(dir: &Path) -> Result<(), PrivateDirError> {
    let (real, _) = create_own(dir)?;
    fs::set_permissions(&real, fs::Permissions::from_mode(0o700)).map_err(io_error("restrict", dir))?;
    // Nobody can add entries any more.
    for entry in fs::read_dir(&real).map_err(io_error("examine", dir))? {
        let path = entry.map_err(io_error("examine", dir))?.path();
        match fs::symlink_metadata(&path) {
            // Another process of this user has just removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => check_owner(&path, &found.map_err(io_error("examine", &path))?, false)?,
        }
    }
    Ok(())
}

/// A directory of this user that no other user may replace, with its real path.
fn create_own(dir: &Path) -> Result<(PathBuf, fs::Metadata), PrivateDirError> {
    let whole = std::path::absolute(dir).map_err(io_error("resolve", dir))?;
    // A part of the path that others may change is refused before anything is made in it.
    check_parents(&whole)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&whole).map_err(io_error("create", dir))?;
    check_parents(&whole)?;
    let real = whole.canonicalize().map_err(io_error("examine", dir))?;
    check_parents(&real)?;
    let found = fs::metadata(&real).map_err(io_error("examine", dir))?;
    check_owner(&real, &found, false)?;
    Ok((real, found))
}

fn check_owner(path: &Path, found: &fs::Metadata, or_root: bool) -> Result<(), PrivateDirError> {
    let owner = found.uid();
    if owner == rustix::process::geteuid().as_raw() || (or_root && owner == 0) {
        return Ok(());
    }
    Err(PrivateDirError::Foreign { path: path.to_owned(), owner })
}

/// Takes all permissions of others from every file that this process makes from now on, and those that it
/// starts. Not for a process that makes files on behalf of others, with the modes that they ask for.
pub fn restrict_new_files() {
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
}

/// Refuses a path of which another user may change a part above its last one, or to which a symbolic link of
/// another user leads.
fn check_parents(whole: &Path) -> Result<(), PrivateDirError> {
    for (depth, part) in whole.ancestors().enumerate() {
        let found = match fs::symlink_metadata(part) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found.map_err(io_error("examine", part))?,
        };
        check_owner(part, &found, true)?;
        let shared = found.is_dir() && found.mode() & ALL_WRITE != 0 && found.mode() & STICKY == 0;
        if depth > 0 && shared {
            return Err(PrivateDirError::Shared { path: part.to_owned() });
        }
    }
    Ok(())
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PrivateDirError {
    let path = path.to_owned();
    move |source| PrivateDirError::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, symlink};

    fn mode_of(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_folder_below_one_where_others_write_is_not_used() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("sessions");
        let may = |mode| {
            set_mode(top.path(), mode);
            create(&dir).is_ok()
        };
        assert_eq!([0o755, 0o777, 0o1777].map(may), [true, false, true]);
        assert_eq!(mode_of(&dir), 0o700);
    }

    #[test]
    fn nothing_is_made_where_others_could_take_it_away() {
        let top = tempfile::tempdir().unwrap();
        set_mode(top.path(), 0o777);
        let refused = create(&top.path().join("new/data")).unwrap_err();
        assert!(matches!(&refused, PrivateDirError::Shared { path } if path == top.path()), "{refused:?}");
        assert!(!top.path().join("new").exists());
    }

    #[test]
    fn a_directory_that_others_could_enter_is_closed_and_their_entries_are_refused() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("data");
        restrict(&dir).unwrap();
        // As that of an earlier version, and the top of a new file system.
        for mode in [0o755, 0o1777] {
            set_mode(&dir, mode);
            assert_eq!(create(&dir).is_ok(), mode == 0o755);
            assert_eq!(mode_of(&dir), mode, "only examined");
            restrict(&dir).unwrap();
            assert_eq!(mode_of(&dir), 0o700);
        }
        let planted = dir.join("slots");
        fs::create_dir(&planted).unwrap();
        restrict(&dir).unwrap();
        if rustix::process::geteuid().is_root() {
            chown(&planted, Some(65_534), None).unwrap();
            for _ in 0..2 {
                let refused = restrict(&dir).unwrap_err();
                assert!(matches!(refused, PrivateDirError::Foreign { path, .. } if path.ends_with("slots")));
            }
        }
    }

    #[test]
    fn a_directory_or_link_that_another_user_made_first_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let stranger = 65_534;
        let top = tempfile::tempdir().unwrap();
        set_mode(top.path(), 0o1777);
        let dir = top.path().join("squatted");
        fs::create_dir(&dir).unwrap();
        chown(&dir, Some(stranger), None).unwrap();
        let is_theirs = |refused: Result<(), PrivateDirError>| {
            matches!(refused, Err(PrivateDirError::Foreign { owner: 65_534, .. }))
        };
        assert!(is_theirs(restrict(&dir)));
        assert!(is_theirs(restrict(&dir.join("below"))));
        assert!(!dir.join("below").exists());

        let ours = top.path().join("ours");
        fs::create_dir(&ours).unwrap();
        let link = top.path().join("link");
        symlink(&ours, &link).unwrap();
        restrict(&link).unwrap();
        std::os::unix::fs::lchown(&link, Some(stranger), None).unwrap();
        assert!(is_theirs(restrict(&link)), "their link leads to a directory of ours");
        assert!(is_theirs(restrict(&link.join("below"))));
    }
}
