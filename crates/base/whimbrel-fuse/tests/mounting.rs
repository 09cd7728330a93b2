//! Mounts a small file system in memory: requests, panics and unmounting.

use bytes::Bytes;
use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{Read, Write},
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use whimbrel_fuse::{
    Access, Attributes, Caller, DirEntry, Entry, Errno, FileKind, FileSystem, MountOptions, Mounted, Opened,
    ROOT, Result, clear_stale,
};

/// Files by name; inode of the n-th is 2 + n.
#[derive(Default)]
struct Memory {
    files: Mutex<BTreeMap<OsString, Vec<u8>>>,
    /// Number of lookups of absent names.
    missed: Arc<AtomicUsize>,
}

impl Memory {
    fn attributes(inode: u64, len: usize) -> Attributes {
        Attributes { size: len as u64, ..Attributes::new(inode, FileKind::File, 0o644) }
    }

    fn with<T>(&self, inode: u64, act: impl FnOnce(&mut Vec<u8>) -> T) -> Result<T> {
        let mut files = self.files.lock().unwrap();
        files.values_mut().nth(inode as usize - 2).map(act).ok_or(Errno::ENOENT)
    }
}

impl FileSystem for Memory {
    fn lookup(&self, _caller: Caller, _parent: u64, name: &OsStr) -> Result<Entry> {
        assert_ne!(name, "panic", "told to");
        let files = self.files.lock().unwrap();
        let found = files.iter().enumerate().find(|(_, (known, _))| *known == name);
        let (at, (_, data)) = found.ok_or_else(|| {
            self.missed.fetch_add(1, Ordering::SeqCst);
            Errno::ENOENT
        })?;
        Ok(Entry::new(Self::attributes(at as u64 + 2, data.len())))
    }

    fn negative_ttl(&self, _parent: u64, name: &OsStr) -> Duration {
        if name == "never" { Duration::from_secs(3600) } else { Duration::ZERO }
    }

    fn getattr(&self, _caller: Caller, inode: u64, _handle: Option<u64>) -> Result<(Attributes, Duration)> {
        let attributes = match inode {
            ROOT => Attributes::new(ROOT, FileKind::Directory, 0o755),
            _ => self.with(inode, |data| Self::attributes(inode, data.len()))?,
        };
        Ok((attributes, Duration::ZERO))
    }

    fn create(
        &self,
        caller: Caller,
        parent: u64,
        name: &OsStr,
        _mode: u32,
        _access: Access,
    ) -> Result<(Entry, Opened)> {
        self.files.lock().unwrap().insert(name.to_owned(), Vec::new());
        Ok((self.lookup(caller, parent, name)?, Opened::direct(0)))
    }

    fn read(&self, inode: u64, _handle: u64, offset: u64, size: u32) -> Result<Bytes> {
        self.with(inode, |data| {
            let begin = data.len().min(offset as usize);
            Bytes::copy_from_slice(&data[begin..data.len().min(begin + size as usize)])
        })
    }

    fn write(&self, _caller: Caller, inode: u64, _handle: u64, offset: u64, bytes: &[u8]) -> Result<u32> {
        self.with(inode, |data| {
            let end = offset as usize + bytes.len();
            data.resize(data.len().max(end), 0);
            data[offset as usize..end].copy_from_slice(bytes);
            bytes.len() as u32
        })
    }

    fn readdir(
        &self,
        _inode: u64,
        _handle: u64,
        offset: u64,
        add: &mut dyn FnMut(DirEntry) -> bool,
    ) -> Result<()> {
        for (at, name) in self.files.lock().unwrap().keys().enumerate().skip(offset as usize) {
            let at = at as u64;
            let entry = DirEntry { inode: at + 2, kind: FileKind::File, name: name.clone(), next: at + 1 };
            if !add(entry) {
                break;
            }
        }
        Ok(())
    }

    fn getxattr(&self, _caller: Caller, _inode: u64, name: &OsStr) -> Result<Vec<u8>> {
        if name == "user.long" { Ok(vec![7; 300]) } else { Err(Errno::ENODATA) }
    }

    fn listxattr(&self, _caller: Caller, _inode: u64) -> Result<Vec<OsString>> {
        Ok(vec!["user.long".into()])
    }
}

fn options() -> MountOptions {
    MountOptions { threads: 4, ..MountOptions::new("memory, of a test", "whimbreltest") }
}

fn is_mounted(path: &Path) -> bool {
    let path = path.to_str().unwrap();
    fs::read_to_string("/proc/mounts").unwrap().lines().any(|line| line.split(' ').nth(1) == Some(path))
}

#[test]
fn what_is_written_is_read_back_and_listed_from_many_threads() {
    let dir = tempfile::tempdir().unwrap();
    let mut mounted = Mounted::new(Memory::default(), dir.path(), &options()).unwrap();
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    fs::write(dir.path().join("big"), &data).unwrap();
    let big = &dir.path().join("big");
    std::thread::scope(|scope| {
        for part in 0..8 {
            let data = &data;
            scope.spawn(move || {
                let mut piece = vec![0; 300_000];
                let file = File::open(big).unwrap();
                file.read_exact_at(&mut piece, part * 300_000).unwrap();
                assert!(piece == data[part as usize * 300_000..][..300_000], "part {part}");
            });
        }
    });
    (0..300).for_each(|n| drop(File::create(dir.path().join(format!("z-{n:0200}"))).unwrap()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 301, "a directory of several replies");
    mounted.unmount().unwrap();
    assert!(!is_mounted(dir.path()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the directory itself stayed empty");
}

#[test]
fn a_method_that_panics_is_an_io_error_of_one_request() {
    let dir = tempfile::tempdir().unwrap();
    let _mounted = Mounted::new(Memory::default(), dir.path(), &options()).unwrap();
    for _ in 0..8 {
        let failed = File::open(dir.path().join("panic")).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(Errno::EIO.number()));
    }
    fs::write(dir.path().join("lives"), "on").unwrap();
    assert_eq!(fs::read(dir.path().join("lives")).unwrap(), b"on");
}

#[test]
fn what_is_not_implemented_has_the_errno_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let _mounted = Mounted::new(Memory::default(), dir.path(), &options()).unwrap();
    let refused = |done: std::io::Result<()>| done.unwrap_err().raw_os_error().unwrap();
    assert_eq!(refused(fs::create_dir(dir.path().join("d"))), Errno::EPERM.number());
    assert_eq!(refused(std::os::unix::fs::symlink("a", dir.path().join("l"))), Errno::EPERM.number());
    assert_eq!(refused(File::open(dir.path().join("none")).map(drop)), Errno::ENOENT.number());
    let file = File::create(dir.path().join("f")).unwrap();
    assert_eq!(refused(file.set_len(3)), Errno::EPERM.number());
}

#[test]
fn an_extended_attribute_fits_or_is_refused_as_too_long() {
    let dir = tempfile::tempdir().unwrap();
    let _mounted = Mounted::new(Memory::default(), dir.path(), &options()).unwrap();
    let root = dir.path();
    assert_eq!(
        rustix::fs::getxattr(root, "user.long", &mut [0; 10]).unwrap_err().raw_os_error(),
        libc::ERANGE
    );
    let mut value = [0; 400];
    assert_eq!(rustix::fs::getxattr(root, "user.long", &mut value).unwrap(), 300);
    assert_eq!(value[..300], [7; 300]);
    assert_eq!(
        rustix::fs::getxattr(root, "user.none", &mut value).unwrap_err().raw_os_error(),
        libc::ENODATA
    );
}

#[test]
fn dropping_unmounts_though_a_file_is_open_and_a_busy_mount_is_not_unmounted_by_asking() {
    let dir = tempfile::tempdir().unwrap();
    let mut mounted = Mounted::new(Memory::default(), dir.path(), &options()).unwrap();
    let mut open = File::create(dir.path().join("open")).unwrap();
    open.write_all(b"before").unwrap();
    mounted.unmount().unwrap_err();
    assert!(is_mounted(dir.path()), "still there");
    assert!(!mounted.is_gone());
    drop(mounted);
    assert!(!is_mounted(dir.path()));
    let mut rest = Vec::new();
    let _ = open.read_to_end(&mut rest);
    drop(open);
    // The directory can be mounted on again at once.
    let mut again = Mounted::new(Memory::default(), dir.path(), &options()).unwrap();
    assert!(is_mounted(dir.path()));
    again.unmount().unwrap();
}

#[test]
fn a_mount_that_somebody_ended_leaves_the_next_one_at_its_path_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Mounted::new(Memory::default(), dir.path(), &options()).unwrap();
    assert!(std::process::Command::new("umount").arg(dir.path()).status().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(30);
    while !first.is_gone() {
        assert!(Instant::now() < deadline, "the mount does not notice its end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut second = Mounted::new(Memory::default(), dir.path(), &options()).unwrap();
    first.unmount().unwrap();
    assert!(is_mounted(dir.path()), "the mount of somebody else is gone");
    second.unmount().unwrap();
    assert!(!is_mounted(dir.path()));
}

/// A file system that reports when it is dropped.
fn told(files: &Memory) -> std::sync::Weak<AtomicUsize> {
    Arc::downgrade(&files.missed)
}

/// Whether nobody uses the file system any more. On a busy machine the last thread ends a moment after the
/// mount.
fn ends(files: &std::sync::Weak<AtomicUsize>) -> bool {
    let deadline = Instant::now() + Duration::from_secs(30);
    while files.strong_count() > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    files.strong_count() == 0
}

#[test]
fn a_mount_ends_though_a_namespace_has_a_copy_of_it_or_a_file_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let files = Memory::default();
    let alive = told(&files);
    let mounted = Mounted::new(files, dir.path(), &options()).unwrap();
    let copy = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", "echo; cat"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn();
    let mut copy = copy.unwrap();
    copy.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    drop(mounted);
    assert!(!is_mounted(dir.path()));
    assert!(ends(&alive), "threads still serve who has a copy");
    drop(copy.stdin.take());
    copy.wait().unwrap();

    let files = Memory::default();
    let alive = told(&files);
    let mounted = Mounted::new(files, dir.path(), &options()).unwrap();
    let open = File::create(dir.path().join("open")).unwrap();
    drop(mounted);
    assert!(ends(&alive), "threads still serve who has a file open");
    assert!(open.metadata().is_err() || open.sync_all().is_err(), "who has it open is told");
}

#[test]
fn only_a_directory_can_be_mounted_on() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [file.as_path(), &dir.path().join("none")] {
        assert!(Mounted::new(Memory::default(), path, &options()).is_err(), "{}", path.display());
        assert!(clear_stale(path).is_err());
    }
}

#[test]
fn a_name_that_is_not_there_is_asked_for_once_as_long_as_the_kernel_may_believe_it() {
    let dir = tempfile::tempdir().unwrap();
    let files = Memory::default();
    let missed = files.missed.clone();
    let mounted = Mounted::new(files, dir.path(), &options()).unwrap();
    let asked = |name: &str| {
        let before = missed.load(Ordering::SeqCst);
        (0..5).for_each(|_| assert!(!dir.path().join(name).exists()));
        missed.load(Ordering::SeqCst) - before
    };
    assert_eq!((asked("never"), asked("often")), (1, 5));
    fs::write(dir.path().join("never"), "made all the same").unwrap();
    assert_eq!(fs::read(dir.path().join("never")).unwrap(), b"made all the same");
    drop(mounted);
}
