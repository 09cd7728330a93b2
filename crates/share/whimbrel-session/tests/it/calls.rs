//! File system calls other than reading and writing, and the errors of unsupported ones: see the table in
//! `docs/operations/sessions.md`.

use crate::common::World;
use rustix::{
    fs::{
        AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, SeekFrom, XattrFlags,
        copy_file_range, fallocate, getxattr, linkat, mknodat, open, renameat_with, seek, setxattr, statvfs,
    },
    io::Errno,
};
use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::Path,
};
use whimbrel_session::client::Policy;

type Asked = Result<(), Errno>;

fn system(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap()
}

fn space(file: &File, flags: FallocateFlags) -> Asked {
    fallocate(file, flags, 0, 1 << 16)
}

fn direct(path: &Path) -> Asked {
    let flags = OFlags::DIRECT.bits() as i32;
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).map_err(|e| system(&e))?;
    // In whole blocks, like a virtual machine monitor without a cache of its own.
    let block = vec![5; 8192];
    let at = block.as_ptr().align_offset(4096);
    file.write_all_at(&block[at..at + 4096], 4096).map_err(|e| system(&e))
}

fn answers(mount: &Path) -> Vec<(&'static str, Asked)> {
    let path = mount.join("file");
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let other = File::create(mount.join("copy")).unwrap();
    let dev = rustix::fs::makedev(1, 3);
    let node = |name: &str, kind, dev| mknodat(CWD, mount.join(name), kind, Mode::RUSR, dev);
    let renamed = |flags| renameat_with(CWD, mount.join("copy"), CWD, &path, flags);
    vec![
        ("statfs", statvfs(mount).map(|room| assert!(room.f_blocks > 0))),
        ("hard link", linkat(CWD, &path, CWD, mount.join("second"), AtFlags::empty())),
        ("O_DIRECT", direct(&path)),
        ("O_APPEND", {
            let appended =
                OpenOptions::new().append(true).open(&path).and_then(|mut file| file.write_all(b"end"));
            appended.map_err(|error| system(&error))
        }),
        ("O_TMPFILE", open(mount, OFlags::TMPFILE | OFlags::WRONLY, Mode::RUSR).map(drop)),
        ("flock", file.lock().map_err(|error| system(&error))),
        ("fcntl lock", rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::LockExclusive)),
        ("fallocate", space(&file, FallocateFlags::empty())),
        ("fallocate KEEP_SIZE", space(&file, FallocateFlags::KEEP_SIZE)),
        ("fallocate PUNCH_HOLE", space(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE)),
        ("fallocate ZERO_RANGE", space(&file, FallocateFlags::ZERO_RANGE)),
        (
            "copy_file_range",
            copy_file_range(&file, None, &other, None, 4096).map(|copied| assert_eq!(copied, 4096)),
        ),
        ("SEEK_DATA", seek(&file, SeekFrom::Data(0)).map(drop)),
        ("SEEK_HOLE", seek(&file, SeekFrom::Hole(0)).map(drop)),
        ("setxattr", setxattr(&path, "user.x", b"y", XattrFlags::empty())),
        ("getxattr", getxattr(&path, "user.x", &mut [0; 8][..]).map(drop)),
        ("fifo", node("fifo", FileType::Fifo, 0)),
        ("socket", node("socket", FileType::Socket, 0)),
        ("device", node("device", FileType::CharacterDevice, dev)),
        ("RENAME_EXCHANGE", renamed(RenameFlags::EXCHANGE)),
        ("RENAME_WHITEOUT", renamed(RenameFlags::WHITEOUT)),
        ("RENAME_NOREPLACE", renamed(RenameFlags::NOREPLACE)),
    ]
}

/// Unsupported calls; all others succeed.
const REFUSED: [(&str, Errno); 7] = [
    ("O_TMPFILE", Errno::OPNOTSUPP),
    ("fallocate KEEP_SIZE", Errno::OPNOTSUPP),
    ("setxattr", Errno::OPNOTSUPP),
    ("getxattr", Errno::OPNOTSUPP),
    ("RENAME_EXCHANGE", Errno::INVAL),
    ("RENAME_WHITEOUT", Errno::INVAL),
    ("RENAME_NOREPLACE", Errno::EXIST),
];

#[test]
fn what_is_not_supported_is_refused_with_the_errors_that_programs_know() {
    for policy in [Policy::Through, Policy::Back] {
        let world = World::new(
            |options| options.settings.policy = policy,
            |server| fs::write(server.join("file"), vec![3; 1 << 17]).unwrap(),
        );
        for (what, answer) in answers(&world.mount()) {
            let refused = REFUSED.iter().find(|(known, _)| *known == what).map(|(_, errno)| *errno);
            assert_eq!(answer.err(), refused, "{what} under {policy}");
        }
        world.session().flush().unwrap();
        let server = world.server();
        let mut content = vec![3; 1 << 17];
        content[..1 << 16].fill(0);
        content.extend(b"end");
        assert!(fs::read(server.join("file")).unwrap() == content, "{policy}");
        assert_eq!(fs::metadata(server.join("second")).unwrap().nlink(), 2);
        assert!(fs::read(server.join("copy")).unwrap() == vec![0; 4096], "{policy}");
        assert_eq!(world.session().status().events, [], "{policy}");
    }
}
