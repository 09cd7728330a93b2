//! What is saved of a TPM: each state that it has written, one of two after a torn write, and a word if none
//! is left.

use super::*;
use std::{
    fs,
    time::{Duration, Instant},
};
use whimbrel_block::MemDevice;

struct Bench {
    device: Arc<dyn Device>,
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let device = Arc::new(MemDevice::new(vec![0; TPM_DISK.0 as usize]));
        Self { device, dir: tempfile::tempdir().unwrap() }
    }

    fn disk(&self) -> TpmDisk {
        TpmDisk::new(self.device.clone(), self.dir.path().to_owned())
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join(TPM_STATE)
    }

    /// Replaces the file as swtpm does.
    fn store(&self, state: &[u8]) {
        let part = self.dir.path().join("part");
        fs::write(&part, state).unwrap();
        fs::rename(&part, self.file()).unwrap();
    }

    fn saved(&self) -> Option<Vec<u8>> {
        newest(&*self.device).unwrap().map(|(_, state)| state)
    }
}

#[test]
fn a_state_is_kept_at_once_while_it_is_watched_and_a_boot_finds_the_newest() {
    let bench = Bench::new();
    let disk = bench.disk();
    disk.write_file(None).unwrap();
    assert!(!bench.file().exists(), "a new TPM makes its own state");
    disk.watch();
    for state in [&b"first"[..], b"second", &vec![7; STATE_MAX]] {
        bench.store(state);
        let deadline = Instant::now() + Duration::from_secs(30);
        while bench.saved().as_deref() != Some(state) {
            assert!(Instant::now() < deadline, "{} bytes are not kept", state.len());
            thread::sleep(Duration::from_millis(5));
        }
    }
    drop(disk);
    bench.store(b"unwatched");
    assert_ne!(bench.saved().unwrap(), b"unwatched");
    save_left(bench.device.clone(), bench.dir.path()).unwrap();
    fs::remove_file(bench.file()).unwrap();
    bench.disk().write_file(None).unwrap();
    assert_eq!(fs::read(bench.file()).unwrap(), b"unwatched");
}

#[test]
fn a_pause_keeps_what_is_new_and_never_reads_a_disk_that_may_be_elsewhere() {
    let bench = Bench::new();
    let disk = bench.disk();
    bench.store(b"one");
    disk.save_now();
    assert_eq!(bench.saved(), None, "the disk was read");
    disk.watch();
    disk.end_watch();
    assert_eq!(bench.saved().unwrap(), b"one");
    bench.store(b"two");
    disk.save_now();
    assert_eq!(bench.saved().unwrap(), b"two");
}

#[test]
fn a_torn_write_leaves_the_state_before_it_and_what_is_damaged_is_no_new_tpm() {
    let bench = Bench::new();
    for state in [b"one", b"two"] {
        bench.store(state);
        save_left(bench.device.clone(), bench.dir.path()).unwrap();
    }
    // The second record is in the first half.
    bench.device.write_at(STATE as u64, b"x").unwrap();
    assert_eq!(bench.saved().unwrap(), b"one");
    bench.device.write_at(HALF + STATE as u64, b"x").unwrap();
    fs::remove_file(bench.file()).unwrap();
    let refused = bench.disk().write_file(None);
    assert!(matches!(refused, Err(TpmStateError::Damaged)), "{refused:?}");
    assert!(!bench.file().exists());
    // A TPM that was loaded replaces what is damaged.
    bench.store(b"three");
    save_left(bench.device.clone(), bench.dir.path()).unwrap();
    assert_eq!(bench.saved().unwrap(), b"three");
}

#[test]
fn links_long_files_and_a_disk_of_another_size_are_refused() {
    let bench = Bench::new();
    let elsewhere = bench.dir.path().join("elsewhere");
    fs::write(&elsewhere, "secret").unwrap();
    std::os::unix::fs::symlink(&elsewhere, bench.file()).unwrap();
    assert!(save_left(bench.device.clone(), bench.dir.path()).is_err());
    fs::remove_file(bench.file()).unwrap();
    bench.store(&vec![1; STATE_MAX + 1]);
    assert!(save_left(bench.device.clone(), bench.dir.path()).is_err());
    assert_eq!(bench.saved(), None);
    assert!(matches!(newest(&MemDevice::new(vec![0; PAGE_SIZE])), Err(TpmStateError::Size)));
}
