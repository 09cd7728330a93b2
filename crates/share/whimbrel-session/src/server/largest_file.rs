//! Largest file: what size a file may have in a directory of the server.
//!
//! File systems differ (16 TiB on ext4, 8 EiB on XFS) and no call tells it, so it is found by trying on a
//! file without a name. A client can then refuse at once what the server would refuse after the write-back,
//! when no program is there any more to hear it.

use rustix::{
    fs::{Mode, OFlags, ftruncate, openat},
    io::Errno,
    process::{Resource, getrlimit},
};
use std::os::fd::AsFd;

/// Largest size of a file in `dir`, in bytes. None if it cannot be told: the file system has no files without
/// names, this user may create none, or the user's own limit is a lower one.
pub(super) fn largest_file(dir: impl AsFd) -> Option<u64> {
    // The kernel ends a process that goes past that limit.
    if getrlimit(Resource::Fsize).current.is_some() {
        return None;
    }
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = openat(dir, ".", flags, Mode::RUSR | Mode::WUSR).ok()?;
    largest(|size| match ftruncate(&file, size) {
        Ok(()) => Some(true),
        Err(Errno::FBIG | Errno::INVAL) => Some(false),
        Err(_) => None,
    })
}

/// Largest size that is possible; none if that is not known of one of them.
fn largest(possible: impl Fn(u64) -> Option<bool>) -> Option<u64> {
    let (mut small, mut large) = (0, i64::MAX as u64);
    if possible(large)? {
        return Some(large);
    }
    while large - small > 1 {
        let middle = small + (large - small) / 2;
        if possible(middle)? { small = middle } else { large = middle }
    }
    Some(small)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_size_is_found_wherever_it_is() {
        for limit in [0, 1, 4096, (1 << 44) - 4096, i64::MAX as u64 - 1, i64::MAX as u64] {
            assert_eq!(largest(|size| Some(size <= limit)), Some(limit));
        }
        assert_eq!(largest(|size| (size < 1 << 40).then_some(false)), None, "it could not be tried");
    }

    #[test]
    fn a_file_can_have_the_largest_size_and_none_larger() {
        let dir = tempfile::tempdir().unwrap();
        let size = largest_file(std::fs::File::open(dir.path()).unwrap()).expect("a size");
        let file = tempfile::tempfile_in(dir.path()).unwrap();
        file.set_len(size).unwrap();
        assert!(size == i64::MAX as u64 || file.set_len(size + 1).is_err());
    }
}
