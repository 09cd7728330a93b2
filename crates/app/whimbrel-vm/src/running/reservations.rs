//! Reservations: memory and disk space that machines of this host were promised and have not taken yet.
//!
//! Memory files and disks are sparse, so the free space of a file system tells nothing of what the machines
//! on it may still take. A guest whose memory file finds a full tmpfs is killed by SIGBUS, so a machine
//! starts, and an offer is accepted, only if everything promised fits. A reservation counts the bytes that
//! its file has not taken, and ends when dropped. It is not stored: a new daemon reserves again for the
//! machines that it adopts.

use std::{
    collections::BTreeMap,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use whimbrel_core::lock;

/// Reservations on one file system.
#[derive(Debug)]
pub struct Reservations {
    /// A folder of the file system.
    folder: PathBuf,
    promised: Mutex<Promises>,
}

#[derive(Debug, Default)]
struct Promises {
    next: u64,
    all: BTreeMap<u64, Promise>,
}

#[derive(Debug)]
struct Promise {
    bytes: u64,
    /// File, or folder of files, that takes what was promised.
    taker: Option<PathBuf>,
}

/// Bytes that are promised to one machine.
#[derive(Debug)]
pub struct Reservation {
    of: Arc<Reservations>,
    id: u64,
}

impl Reservations {
    /// No reservations yet, on the file system of `folder`.
    pub fn new(folder: &Path) -> Arc<Self> {
        Arc::new(Self { folder: folder.to_owned(), promised: Mutex::default() })
    }

    /// Reserves `bytes` if they are there; the error is how many are.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> io::Result<Result<Reservation, u64>> {
        self.reserve_of(bytes, || free_bytes(&self.folder))
    }

    fn reserve_of(
        self: &Arc<Self>,
        bytes: u64,
        free: impl FnOnce() -> io::Result<u64>,
    ) -> io::Result<Result<Reservation, u64>> {
        let mut promised = lock(&self.promised);
        // Promises are counted first: what is taken between the two counts twice rather than not at all.
        let outstanding = promised.outstanding();
        let spare = free()?.saturating_sub(outstanding);
        if bytes > spare {
            return Ok(Err(spare));
        }
        Ok(Ok(promised.add(self, bytes)))
    }

    /// Reserves for a machine that runs already, whether or not there is room.
    pub fn adopt(self: &Arc<Self>, bytes: u64) -> Reservation {
        lock(&self.promised).add(self, bytes)
    }

    /// Bytes that are free and promised to nobody.
    pub fn spare(&self) -> io::Result<u64> {
        let outstanding = lock(&self.promised).outstanding();
        Ok(free_bytes(&self.folder)?.saturating_sub(outstanding))
    }
}

impl Promises {
    fn add(&mut self, of: &Arc<Reservations>, bytes: u64) -> Reservation {
        self.next += 1;
        self.all.insert(self.next, Promise { bytes, taker: None });
        Reservation { of: of.clone(), id: self.next }
    }

    /// Bytes that were promised and are not taken.
    fn outstanding(&self) -> u64 {
        let outstanding = |promise: &Promise| {
            let taken = promise.taker.as_deref().map_or(0, taken_bytes);
            promise.bytes.saturating_sub(taken)
        };
        self.all.values().map(outstanding).sum()
    }
}

impl Reservation {
    /// Names the file, or the folder of files, that takes the bytes. Until then all of them are promised.
    pub fn taken_by(&self, path: PathBuf) {
        if let Some(promise) = lock(&self.of.promised).all.get_mut(&self.id) {
            promise.taker = Some(path);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock(&self.of.promised).all.remove(&self.id);
    }
}

/// Bytes that a file takes, or all files below a folder.
fn taken_bytes(path: &Path) -> u64 {
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_file() => meta.blocks() * 512,
        Ok(meta) if meta.is_dir() => {
            let files = std::fs::read_dir(path).into_iter().flatten().flatten();
            files.map(|file| taken_bytes(&file.path())).sum()
        }
        _ => 0,
    }
}

fn free_bytes(folder: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::FileExt;

    /// Reserves on a file system of 100 bytes.
    fn reserve(of: &Arc<Reservations>, bytes: u64) -> Result<Reservation, u64> {
        of.reserve_of(bytes, || Ok(100)).unwrap()
    }

    #[test]
    fn two_at_once_never_get_more_than_there_is() {
        let of = Reservations::new(Path::new("/"));
        let both: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2).map(|_| scope.spawn(|| reserve(&of, 60))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(both.iter().filter(|reserved| reserved.is_ok()).count(), 1, "{both:?}");
        assert_eq!(both.iter().find_map(|reserved| reserved.as_ref().err()), Some(&40));
        drop(both);
        assert!(reserve(&of, 100).is_ok());
    }

    #[test]
    fn what_a_file_has_taken_is_promised_no_longer_and_comes_back_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let of = Reservations::new(dir.path());
        let path = dir.path().join("ram");
        let held = of.adopt(1 << 20);
        let outstanding = || lock(&of.promised).outstanding();
        held.taken_by(path.clone());
        assert_eq!(outstanding(), 1 << 20, "there is no file yet");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(outstanding(), 1 << 20, "holes take nothing");
        file.write_all_at(&[1; 1 << 18], 0).unwrap();
        file.sync_all().unwrap();
        let left = outstanding();
        assert!((1..=(1 << 20) - (1 << 18)).contains(&left), "{left}");
        held.taken_by(dir.path().to_owned());
        assert_eq!(outstanding(), left, "the folder of that file");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(outstanding(), 1 << 20);
        drop(held);
        assert_eq!(outstanding(), 0);
    }

    proptest! {
        #[test]
        fn the_sum_of_what_is_held_never_exceeds_what_is_free(steps in prop::collection::vec((any::<bool>(), 0..80u64), 0..60)) {
            let of = Reservations::new(Path::new("/"));
            let mut held: Vec<(u64, Reservation)> = Vec::new();
            for (end, bytes) in steps {
                let sum: u64 = held.iter().map(|(bytes, _)| bytes).sum();
                match end {
                    true => drop(held.pop()),
                    false => match reserve(&of, bytes) {
                        Ok(reserved) => held.push((bytes, reserved)),
                        Err(spare) => prop_assert!(spare == 100 - sum && bytes > spare),
                    },
                }
                prop_assert!(held.iter().map(|(bytes, _)| bytes).sum::<u64>() <= 100);
            }
        }
    }
}
