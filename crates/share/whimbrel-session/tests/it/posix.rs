//! Sessions of root: owners, modes, types of files, times and extended attributes are those of the server.

use crate::common::{Fate, World, back, root, until};
use rustix::{
    fs::{
        AtFlags, CWD, FallocateFlags, FileType, Mode, SeekFrom, StatxFlags, XattrFlags, chown, fallocate,
        getxattr, listxattr, mknodat, removexattr, seek, setxattr, statx,
    },
    io::Errno,
};
use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::Write,
    os::unix::{
        fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, lchown, symlink},
        process::CommandExt,
    },
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::sync::Semaphore;
use whimbrel_session::{
    client::{Policy, SessionOptions},
    proto::{OpCall, WriteCall},
};
use whimbrel_wire::Call;

const POLICIES: [Policy; 2] = [Policy::Through, Policy::Back];

fn world(policy: Policy) -> World {
    World::new(
        |options: &mut SessionOptions| {
            root(options);
            options.settings.policy = policy;
        },
        |server| fs::set_permissions(server, Permissions::from_mode(0o1777)).unwrap(),
    )
}

fn node(path: &Path, kind: FileType, dev: u64) {
    mknodat(CWD, path, kind, Mode::from_raw_mode(0o640), dev).unwrap();
}

/// What everybody must see of a file: type and mode, links, owner, device.
fn seen(path: &Path) -> (u32, u64, u32, u32, u64) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.mode(), meta.nlink(), meta.uid(), meta.gid(), meta.rdev())
}

#[test]
fn files_of_every_type_and_owner_are_the_same_on_both_sides_under_every_policy() {
    for policy in POLICIES {
        let world = world(policy);
        let (mount, server) = (world.mount(), world.server());
        node(&mount.join("fifo"), FileType::Fifo, 0);
        node(&mount.join("socket"), FileType::Socket, 0);
        node(&mount.join("char"), FileType::CharacterDevice, rustix::fs::makedev(1, 3));
        node(&mount.join("block"), FileType::BlockDevice, rustix::fs::makedev(259, 70_000));
        fs::write(mount.join("tool"), "tool").unwrap();
        chown(mount.join("tool"), Some(rustix::fs::Uid::from_raw(1234)), None).unwrap();
        fs::set_permissions(mount.join("tool"), Permissions::from_mode(0o6755)).unwrap();
        fs::hard_link(mount.join("tool"), mount.join("second")).unwrap();
        symlink("nowhere", mount.join("symlink")).unwrap();
        lchown(mount.join("symlink"), Some(77), Some(88)).unwrap();
        fs::create_dir(mount.join("group")).unwrap();
        chown(mount.join("group"), None, Some(rustix::fs::Gid::from_raw(4321))).unwrap();
        fs::set_permissions(mount.join("group"), Permissions::from_mode(0o2777)).unwrap();
        let mut other = Command::new("sh");
        other
            .args(["-c", "umask 022; echo x >group/file; mkdir group/dir; ln -s x group/link; mkfifo fifo2"]);
        assert!(other.current_dir(&mount).uid(4711).gid(4712).status().unwrap().success());
        world.session().flush().unwrap();
        let names = [
            "fifo",
            "socket",
            "char",
            "block",
            "tool",
            "second",
            "symlink",
            "group",
            "group/file",
            "group/dir",
            "group/link",
            "fifo2",
        ];
        for name in names {
            assert_eq!(seen(&mount.join(name)), seen(&server.join(name)), "{name} under {policy}");
        }
        let of = |name: &str| seen(&server.join(name));
        assert_eq!(of("block").4, rustix::fs::makedev(259, 70_000));
        assert_eq!((of("tool").0 & 0o7777, of("tool").1, of("tool").2), (0o6755, 2, 1234));
        assert_eq!((of("symlink").2, of("symlink").3), (77, 88));
        assert_eq!((of("group/file").2, of("group/file").3), (4711, 4321), "{policy}");
        assert_eq!((of("group/dir").0 & 0o7777, of("group/dir").3), (0o2755, 4321), "{policy}");
        assert_eq!((of("fifo2").2, of("fifo2").3), (4711, 4712));
        assert!(fs::symlink_metadata(server.join("fifo")).unwrap().file_type().is_fifo());
        assert_eq!(world.session().status().events, [], "{policy}");
    }
}

#[test]
fn times_keep_their_nanoseconds_and_the_time_of_access_reaches_the_server() {
    for policy in POLICIES {
        let world = world(policy);
        let file = File::create(world.mount().join("file")).unwrap();
        let time = |seconds, nanos| SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
        let times =
            fs::FileTimes::new().set_accessed(time(11, 123_456_789)).set_modified(time(22, 987_654_321));
        file.set_times(times).unwrap();
        drop(file);
        world.session().flush().unwrap();
        for place in [world.mount(), world.server()] {
            let meta = fs::metadata(place.join("file")).unwrap();
            assert_eq!((meta.atime(), meta.atime_nsec()), (11, 123_456_789), "{policy}");
            assert_eq!((meta.mtime(), meta.mtime_nsec()), (22, 987_654_321), "{policy}");
        }
    }
}

#[test]
fn extended_attributes_are_on_the_server_and_do_not_void_what_is_cached() {
    for policy in POLICIES {
        let world = world(policy);
        let path = world.mount().join("file");
        fs::write(&path, "content").unwrap();
        setxattr(&path, "user.colour", b"red", XattrFlags::CREATE).unwrap();
        assert_eq!(setxattr(&path, "user.colour", b"blue", XattrFlags::CREATE), Err(Errno::EXIST));
        setxattr(&path, "trusted.origin", &[7; 3000], XattrFlags::empty()).unwrap();
        world.session().flush().unwrap();
        let theirs = world.server().join("file");
        for place in [&path, &theirs] {
            let mut value = [0; 8];
            assert_eq!(getxattr(place, "user.colour", &mut value[..]), Ok(3));
            assert_eq!(&value[..3], b"red");
        }
        assert_eq!(getxattr(&theirs, "trusted.origin", &mut [0; 4000][..]), Ok(3000));
        let mut names = [0; 200];
        let len = listxattr(&path, &mut names[..]).unwrap();
        let mut names: Vec<_> =
            names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
        names.sort_unstable();
        assert_eq!(names, [&b"trusted.origin"[..], b"user.colour"]);
        let reads = || world.session().status().requests["read"];
        let before = reads();
        removexattr(&path, "user.colour").unwrap();
        assert_eq!(getxattr(&path, "user.colour", &mut [0; 8][..]), Err(Errno::NODATA));
        assert_eq!(fs::read(&path).unwrap(), b"content");
        assert_eq!(reads(), before, "the content is the same under {policy}");
        setxattr(&theirs, "user.whimbrel.write", &[1; 24], XattrFlags::empty()).unwrap();
        assert_eq!(getxattr(&path, "user.whimbrel.write", &mut [0; 24][..]), Err(Errno::OPNOTSUPP));
    }
}

#[test]
fn a_punched_hole_is_a_hole_on_the_server_and_is_found_by_seek() {
    for policy in POLICIES {
        let world = world(policy);
        let path = world.mount().join("disk");
        let mut file = File::create_new(&path).unwrap();
        // A file without holes keeps the space of zeros.
        file.set_len(3 << 19).unwrap();
        file.write_all(&[9; 1 << 20]).unwrap();
        drop(file);
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 256 << 10, 512 << 10)
            .unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, 2 << 20).unwrap();
        assert_eq!(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 4 << 20), Err(Errno::OPNOTSUPP));
        let mut read = [1; 8192];
        file.read_exact_at(&mut read, (256 << 10) - 4096).unwrap();
        assert_eq!((read[4095], read[4096]), (9, 0));
        drop(file);
        world.session().flush().unwrap();
        let theirs = fs::metadata(world.server().join("disk")).unwrap();
        assert_eq!(theirs.len(), 2 << 20);
        assert!(theirs.blocks() * 512 <= 600 << 10, "{} blocks under {policy}", theirs.blocks());
        let file = File::open(&path).unwrap();
        assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(256 << 10));
        assert_eq!(seek(&file, SeekFrom::Data(300 << 10)), Ok(768 << 10));
        assert_eq!(seek(&file, SeekFrom::Data(1 << 20)), Err(Errno::NXIO));
        assert_eq!(seek(&file, SeekFrom::Hole(2 << 20)), Err(Errno::NXIO));
    }
}

/// The fear: the answer to a write has the mode from before, and comes after the new mode was set.
#[test]
fn a_mode_that_changes_while_content_is_sent_stays_changed() {
    let world = World::new(back, |_| {});
    let (path, theirs) = (world.mount().join("file"), world.server().join("file"));
    fs::write(&path, "first").unwrap();
    world.session().flush().unwrap();
    fs::write(&path, "second").unwrap();
    let (content, names) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (of_content, of_names) = (content.clone(), names.clone());
    world.wire.decide(move |request| match request.kind {
        WriteCall::KIND => Fate::Held(of_content.clone()),
        OpCall::KIND => Fate::Held(of_names.clone()),
        _ => Fate::Answered,
    });
    let session = world.session().clone();
    let flushing = std::thread::spawn(move || session.flush());
    until("the content is there", || fs::read_to_string(&theirs).is_ok_and(|text| text == "second"));
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    content.add_permits(1);
    until("the mode is there", || fs::metadata(&theirs).unwrap().mode() & 0o777 == 0o640);
    // Not what the kernel remembers.
    let asked = statx(CWD, &path, AtFlags::STATX_FORCE_SYNC, StatxFlags::MODE).unwrap();
    assert_eq!(asked.stx_mode & 0o777, 0o640);
    names.add_permits(1);
    flushing.join().unwrap().unwrap();
    assert_eq!(seen(&path).0, seen(&theirs).0);
}

#[test]
fn a_size_that_the_server_cannot_hold_is_refused_at_once() {
    for policy in POLICIES {
        let world = world(policy);
        // What the server's own file system says of the same sizes.
        let (ours, theirs) = (world.mount().join("ours"), world.server().join("theirs"));
        let (ours, theirs) = (File::create_new(ours).unwrap(), File::create_new(theirs).unwrap());
        for size in [1 << 40, (1 << 44) - 4096, (1 << 44) - 1, 1 << 44, 1 << 45, 1 << 62, i64::MAX as u64] {
            let told = |set: std::io::Result<()>| set.map_err(|error| error.raw_os_error());
            assert_eq!(told(ours.set_len(size)), told(theirs.set_len(size)), "{size} bytes under {policy}");
        }
        let size = theirs.metadata().unwrap().len();
        assert_eq!(ours.metadata().unwrap().len(), size);
        if size < i64::MAX as u64 {
            let late = ours.write_at(b"over", size).unwrap_err();
            assert_eq!(late.raw_os_error(), Some(Errno::FBIG.raw_os_error()));
        }
        drop(ours);
        world.session().flush().unwrap();
        assert_eq!(fs::metadata(world.server().join("ours")).unwrap().len(), size);
    }
}

#[test]
fn directories_below_one_another_deeper_than_one_call_of_the_system_can_name_are_used() {
    let world = world(Policy::Through);
    let script = "d=$(printf 'x%.0s' $(seq 200)); for i in $(seq 24); do mkdir $d && cd -P $d || exit 1; done; \
                  echo deep >file && cat file && rm file && ls -la >/dev/null";
    let done = Command::new("bash").args(["-c", script]).current_dir(world.mount()).output().unwrap();
    assert_eq!(done.stdout, b"deep\n", "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn a_removed_file_that_is_open_has_no_links_and_keeps_its_new_mode() {
    let world = world(Policy::Through);
    let path = world.mount().join("file");
    let mut file = File::create(&path).unwrap();
    fs::remove_file(&path).unwrap();
    file.set_permissions(Permissions::from_mode(0o400)).unwrap();
    file.write_all(b"still").unwrap();
    let meta = file.metadata().unwrap();
    assert_eq!((meta.nlink(), meta.mode() & 0o7777, meta.len()), (0, 0o400, 5));
}

/// Runs the public suite whose folder `tests` and program `pjdfstest` are in `WHIMBREL_PJDFSTEST`; with
/// `WHIMBREL_PJDFSTEST_CASES`, these of its folders only.
#[test]
#[ignore = "needs the suite pjdfstest, as its authors publish it, and some minutes"]
fn the_public_suite_of_posix_passes_on_a_root_session() {
    let suite = std::env::var("WHIMBREL_PJDFSTEST").unwrap();
    let cases = std::env::var("WHIMBREL_PJDFSTEST_CASES").unwrap_or_default();
    let policy =
        std::env::var("WHIMBREL_PJDFSTEST_POLICY").map_or(Policy::Through, |name| name.parse().unwrap());
    let world = world(policy);
    let folders: Vec<String> = match cases.is_empty() {
        true => vec![format!("{suite}/tests")],
        false => cases.split(' ').map(|case| format!("{suite}/tests/{case}")).collect(),
    };
    let done =
        Command::new("prove").args(["-Q", "-r"]).args(&folders).current_dir(world.mount()).output().unwrap();
    println!("{}\n{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    println!("{:#?}", world.session().status().events);
    assert!(done.status.success());
}
