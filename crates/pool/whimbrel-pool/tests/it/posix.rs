//! POSIX tests of files, folders, names and times, case by case as in pjdfstest, on a real mount.
//!
//! Each line is a call and its expected result. `mount.rs` has a table of what a pool lacks (links, devices);
//! pjdfstest's cases of these do not apply.

use crate::common::Cluster;
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT},
    io::{Errno, Result},
};
use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use whimbrel_fuse::Mounted;
use whimbrel_pool::{
    client::WriteOptions,
    mount::{PoolMount, mount},
};

/// A mounted pool; it is unmounted before the pool stops.
struct Place {
    dir: tempfile::TempDir,
    _mounted: Mounted,
    _cluster: Cluster,
}

impl Place {
    fn new() -> Self {
        let cluster = Cluster::new(1);
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let options = PoolMount {
            source: "pool:posix".into(),
            write: WriteOptions::default(),
            others: true,
            read_only: false,
        };
        let mounted = mount(cluster.fresh_pool(), dir.path(), options).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        Self { dir, _mounted: mounted, _cluster: cluster }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        let path = self.at(name);
        fs::write(&path, "content").unwrap();
        path
    }

    fn folder(&self, name: &str) -> PathBuf {
        let path = self.at(name);
        fs::create_dir(&path).unwrap();
        path
    }
}

fn open(path: &Path, flags: OFlags) -> Result<rustix::fd::OwnedFd> {
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))
}

fn mkdir(path: &Path) -> Result<()> {
    rustix::fs::mkdir(path, Mode::from_raw_mode(0o755))
}

/// Truncates by path; open files use another call.
fn truncate(path: &Path, length: i64) -> Result<()> {
    let script = "truncate($ARGV[0], $ARGV[1]) or exit($! + 0)";
    let done = Command::new("perl").args(["-e", script]).arg(path).arg(length.to_string()).status().unwrap();
    match done.code().unwrap() {
        0 => Ok(()),
        errno => Err(Errno::from_raw_os_error(errno)),
    }
}

fn utimes(path: &Path) -> Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    rustix::fs::utimensat(
        CWD,
        path,
        &Timestamps { last_access: now, last_modification: now },
        AtFlags::empty(),
    )
}

fn chmod(path: &Path) -> Result<()> {
    rustix::fs::chmod(path, Mode::from_raw_mode(0o600))
}

type Call = (&'static str, fn(&Path) -> Result<()>);

/// Calls that look a name up.
const CALLS: &[Call] = &[
    ("open", |path| open(path, OFlags::RDONLY).map(drop)),
    ("open to write", |path| open(path, OFlags::WRONLY).map(drop)),
    ("open to cut", |path| open(path, OFlags::WRONLY | OFlags::TRUNC).map(drop)),
    ("stat", |path| rustix::fs::stat(path).map(drop)),
    ("truncate", |path| truncate(path, 3)),
    ("chmod", chmod),
    ("chown", |path| rustix::fs::chown(path, Some(rustix::fs::Uid::ROOT), None)),
    ("utimensat", utimes),
    ("unlink", |path| rustix::fs::unlink(path)),
    ("rmdir", |path| rustix::fs::rmdir(path)),
    ("rename from", |path| rustix::fs::rename(path, path.ancestors().nth(2).unwrap().join("other"))),
    ("link", |path| rustix::fs::link(path, path.ancestors().nth(2).unwrap().join("other"))),
];

/// Calls that create a name.
const MAKERS: &[Call] =
    &[("create", |path| open(path, OFlags::WRONLY | OFlags::CREATE).map(drop)), ("mkdir", mkdir)];

fn check(case: &str, (name, call): &Call, path: &Path, expected: Errno) {
    assert_eq!(call(path), Err(expected), "{name}: {case}");
}

#[test]
fn a_path_that_leads_nowhere_has_its_errno_in_every_call() {
    let place = Place::new();
    let (file, folder) = (place.file("file"), place.folder("folder"));
    for call in CALLS {
        check("of a name that is not there", call, &folder.join("none"), Errno::NOENT);
    }
    for call in CALLS.iter().chain(MAKERS) {
        check("through a folder that is not there", call, &place.at("none/x"), Errno::NOENT);
        check("through a file", call, &file.join("x"), Errno::NOTDIR);
        check("a name of 256 bytes", call, &folder.join("n".repeat(256)), Errno::NAMETOOLONG);
        check("through a name of 256 bytes", call, &place.at(&"n".repeat(256)).join("x"), Errno::NAMETOOLONG);
        check("a path of 4096 bytes", call, &folder.join("x/".repeat(2100)), Errno::NAMETOOLONG);
    }
    let long = folder.join("n".repeat(255));
    fs::write(&long, "x").unwrap();
    assert_eq!(fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path(), long);
    assert_eq!(rustix::fs::rename(&file, folder.join("n".repeat(256))), Err(Errno::NAMETOOLONG));
    assert_eq!(rustix::fs::rename(&file, place.at("none/x")), Err(Errno::NOENT));
    assert_eq!(rustix::fs::rename(&file, long.join("x")), Err(Errno::NOTDIR));
}

#[test]
fn links_that_lead_here_from_elsewhere_are_followed_and_circles_of_them_are_not() {
    let place = Place::new();
    let outside = tempfile::tempdir().unwrap();
    let link = |name: &str, to: &Path| {
        let path = outside.path().join(name);
        std::os::unix::fs::symlink(to, &path).unwrap();
        path
    };
    place.file("file");
    place.folder("folder");
    let (good, folder, none) = (
        link("good", &place.at("file")),
        link("folder", &place.at("folder")),
        link("none", &place.at("none")),
    );
    assert_eq!(fs::read(&good).unwrap(), b"content");
    fs::write(folder.join("through"), "a link").unwrap();
    assert_eq!(fs::read(place.at("folder/through")).unwrap(), b"a link");
    assert_eq!(open(&good, OFlags::RDONLY | OFlags::NOFOLLOW).unwrap_err(), Errno::LOOP);
    let exclusive = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    assert_eq!(open(&none, exclusive).unwrap_err(), Errno::EXIST);
    fs::write(&none, "made").unwrap();
    assert_eq!(fs::read(place.at("none")).unwrap(), b"made");
    let (a, b) = (outside.path().join("a"), outside.path().join("b"));
    std::os::unix::fs::symlink(&b, &a).unwrap();
    std::os::unix::fs::symlink(&a, &b).unwrap();
    for call in CALLS.iter().chain(MAKERS) {
        check("through links in a circle", call, &a.join("x"), Errno::LOOP);
    }
}

#[test]
fn a_file_and_a_folder_are_not_taken_for_each_other() {
    let place = Place::new();
    let (file, folder) = (place.file("file"), place.folder("folder"));
    let (inner, empty) = (place.file("folder/in"), place.folder("empty"));
    let rename = |from: &Path, to: &Path| rustix::fs::rename(from, to);
    for (what, found, expected) in [
        ("open a folder to write", open(&folder, OFlags::WRONLY).map(drop), Errno::ISDIR),
        ("open a folder for both", open(&folder, OFlags::RDWR).map(drop), Errno::ISDIR),
        ("cut a folder", open(&folder, OFlags::WRONLY | OFlags::TRUNC).map(drop), Errno::ISDIR),
        ("create over a folder", open(&folder, OFlags::RDONLY | OFlags::CREATE).map(drop), Errno::ISDIR),
        ("open a file as a folder", open(&file, OFlags::RDONLY | OFlags::DIRECTORY).map(drop), Errno::NOTDIR),
        (
            "create what is there",
            open(&file, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL).map(drop),
            Errno::EXIST,
        ),
        (
            "create over a folder, only new",
            open(&folder, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL).map(drop),
            Errno::EXIST,
        ),
        ("mkdir of a folder", mkdir(&folder), Errno::EXIST),
        ("mkdir of a file", mkdir(&file), Errno::EXIST),
        ("rmdir of a file", rustix::fs::rmdir(&file), Errno::NOTDIR),
        ("rmdir of what is not empty", rustix::fs::rmdir(&folder), Errno::NOTEMPTY),
        ("rmdir of `.`", rustix::fs::rmdir(folder.join(".")), Errno::INVAL),
        ("rmdir of `..`", rustix::fs::rmdir(folder.join("..")), Errno::NOTEMPTY),
        ("rmdir of what is mounted", rustix::fs::rmdir(place.dir.path()), Errno::BUSY),
        ("unlink of a folder", rustix::fs::unlink(&folder), Errno::ISDIR),
        ("truncate a folder", truncate(&folder, 0), Errno::ISDIR),
        ("truncate to less than nothing", truncate(&file, -1), Errno::INVAL),
        ("a file over a folder", rename(&file, &empty), Errno::ISDIR),
        ("a folder over a file", rename(&empty, &file), Errno::NOTDIR),
        ("a folder over one that is not empty", rename(&empty, &folder), Errno::NOTEMPTY),
        ("a folder into itself", rename(&folder, &folder.join("deep")), Errno::INVAL),
        ("something over the folder it is in", rename(&inner, &folder), Errno::NOTEMPTY),
        ("`.` to elsewhere", rename(&folder.join("."), &place.at("x")), Errno::BUSY),
        ("to another file system", rename(&file, Path::new("/proc/self/x")), Errno::XDEV),
        (
            "no replacing",
            rustix::fs::renameat_with(CWD, &file, CWD, &inner, rustix::fs::RenameFlags::NOREPLACE),
            Errno::EXIST,
        ),
    ] {
        assert_eq!(found, Err(expected), "{what}");
    }
    rename(&file, &file).unwrap();
    rename(&folder, &empty).unwrap();
    assert!(!folder.exists() && fs::read(empty.join("in")).unwrap() == b"content");
    rename(&file, &empty.join("in")).unwrap();
    assert!(!file.exists() && fs::read_dir(&empty).unwrap().count() == 1);
}

/// Times of a path in nanoseconds: last change of content, and last change of anything.
fn times(path: &Path) -> (i64, i64) {
    let found = fs::metadata(path).unwrap();
    let all = |seconds: i64, nanoseconds: i64| seconds * 1_000_000_000 + nanoseconds;
    (all(found.mtime(), found.mtime_nsec()), all(found.ctime(), found.ctime_nsec()))
}

/// Checks that `done` advances the times. File times tick in milliseconds here.
fn moves(what: &str, path: &Path, done: impl FnOnce()) {
    let before = times(path);
    std::thread::sleep(Duration::from_millis(5));
    done();
    let after = times(path);
    assert!(after.0 > before.0 && after.1 > before.1, "{what}: {before:?}, then {after:?}");
}

#[test]
fn what_is_made_in_a_folder_and_goes_from_it_moves_its_times() {
    let place = Place::new();
    let (folder, other) = (place.folder("folder"), place.folder("other"));
    moves("a file is made", &folder, || drop(place.file("folder/file")));
    moves("a folder is made", &folder, || drop(place.folder("folder/deep")));
    moves("a file leaves", &folder, || fs::rename(folder.join("file"), other.join("file")).unwrap());
    moves("a file comes", &folder, || fs::rename(other.join("file"), folder.join("file")).unwrap());
    moves("where a file came from", &other, || {
        fs::rename(folder.join("file"), other.join("file")).unwrap();
        fs::rename(other.join("file"), folder.join("file")).unwrap();
    });
    moves("a file is removed", &folder, || fs::remove_file(folder.join("file")).unwrap());
    moves("a folder is removed", &folder, || fs::remove_dir(folder.join("deep")).unwrap());
    let before = times(&folder);
    assert!(fs::remove_dir(folder.join("none")).is_err() && mkdir(&place.at("other")).is_err());
    assert_eq!(times(&folder), before, "what fails moves nothing");
}

#[test]
fn content_modes_and_times_of_a_file_move_what_posix_says() {
    let place = Place::new();
    let file = place.file("file");
    moves("cut by name", &file, || truncate(&file, 3).unwrap());
    moves("grown by name", &file, || truncate(&file, 1000).unwrap());
    let zeros = fs::read(&file).unwrap();
    assert!(zeros.len() == 1000 && zeros.starts_with(b"con") && zeros[3..].iter().all(|byte| *byte == 0));
    moves("opened to cut", &file, || drop(open(&file, OFlags::WRONLY | OFlags::TRUNC).unwrap()));
    assert_eq!(fs::metadata(&file).unwrap().len(), 0);
    moves("written", &file, || fs::write(&file, "new").unwrap());
    let before = times(&file);
    std::thread::sleep(Duration::from_millis(5));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
    chown(&file, Some(12), Some(34)).unwrap();
    let found = fs::metadata(&file).unwrap();
    assert_eq!((found.uid(), found.gid(), found.len()), (12, 34, 3));
    assert!(times(&file).0 == before.0 && times(&file).1 > before.1, "only the time of change");
    let at = |seconds, nanoseconds| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let stamps = Timestamps { last_access: at(0, UTIME_OMIT), last_modification: at(1_000_000, 123_456_789) };
    rustix::fs::utimensat(CWD, &file, &stamps, AtFlags::empty()).unwrap();
    assert_eq!(times(&file).0, 1_000_000_123_456_789);
    let omit = Timestamps { last_access: at(5, 0), last_modification: at(0, UTIME_OMIT) };
    rustix::fs::utimensat(CWD, &file, &omit, AtFlags::empty()).unwrap();
    assert_eq!(times(&file).0, 1_000_000_123_456_789);
    moves("touched", &file, || utimes(&file).unwrap());
    let read = File::open(&file).unwrap();
    assert_eq!(rustix::fs::ftruncate(&read, 0), Err(Errno::INVAL), "not open to be written");
    assert_eq!(rustix::io::write(&read, b"x"), Err(Errno::BADF));
    let write = open(&file, OFlags::WRONLY).unwrap();
    assert_eq!(rustix::io::read(&write, &mut [0; 9]), Err(Errno::BADF));
}

#[test]
fn modes_are_those_that_were_asked_for_less_the_mask_and_owners_those_who_made_it() {
    let place = Place::new();
    // The mask belongs to a process, so another process sets it.
    let sh = |script: &str| {
        let done = Command::new("setpriv")
            .args(["--reuid", "65534", "--regid", "65533", "--clear-groups", "sh", "-c", script])
            .current_dir(place.dir.path())
            .output()
            .unwrap();
        (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    for (mask, mode) in [("022", 0o644), ("077", 0o600), ("000", 0o666), ("151", 0o626)] {
        let (done, error) = sh(&format!("umask {mask}; : >f{mask}; mkdir d{mask}"));
        assert!(done, "{error}");
        let found = fs::metadata(place.at(&format!("f{mask}"))).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (mode, 65534, 65533), "{mask}");
        let folder = fs::metadata(place.at(&format!("d{mask}"))).unwrap();
        assert_eq!(folder.mode() & 0o7777, 0o777 & !u32::from_str_radix(mask, 8).unwrap(), "{mask}");
    }
    let file = place.file("root's");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let folder = place.folder("closed");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(folder.join("in"), "x").unwrap();
    for script in [
        "cat \"root's\"",
        "echo x >>\"root's\"",
        "chmod 644 \"root's\"",
        "chown 65534 \"root's\"",
        "touch -d @5 \"root's\"",
        "cat closed/in",
        "ls closed",
        "rm -f closed/in",
        "mkdir closed/x",
    ] {
        let (done, error) = sh(script);
        let refused = error.contains("denied") || error.contains("not permitted");
        assert!(!done && refused, "{script}: {error}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"content");
    // In a sticky folder only owners remove.
    let sticky = place.folder("sticky");
    fs::set_permissions(&sticky, fs::Permissions::from_mode(0o1777)).unwrap();
    fs::write(sticky.join("root's"), "x").unwrap();
    assert!(sh(": >sticky/own && rm sticky/own").0);
    assert!(!sh("rm -f \"sticky/root's\"").0 && !sh("mv \"sticky/root's\" sticky/x").0);
}

#[test]
fn a_file_that_was_removed_is_still_one_for_who_has_it_open() {
    let place = Place::new();
    let path = place.at("file");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(b"nobody else").unwrap();
    fs::remove_file(&path).unwrap();
    assert!(!path.exists());
    let mut read = String::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_string(&mut read).unwrap();
    assert_eq!((read.as_str(), file.metadata().unwrap().nlink()), ("nobody else", 0));
    file.write_all(b" sees this").unwrap();
    drop(file);
    assert!(!path.exists(), "and it is not there afterwards");
    let old = place.file("read");
    let reader = File::open(&old).unwrap();
    fs::remove_file(&old).unwrap();
    fs::write(&old, "another").unwrap();
    let mut bytes = [0; 7];
    reader.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"content");
}
