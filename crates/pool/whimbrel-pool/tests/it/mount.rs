//! Tests of a mounted pool as programs see it. The table of errnos is the one in `docs/operations/pool.md`.

use crate::common::{Cluster, noise, until};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    process::Command,
};
use whimbrel_fuse::{Errno, Mounted};
use whimbrel_pool::{
    chunk::Chunking,
    client::{Pool, WriteMode, WriteOptions},
    mount::{PoolMount, mount},
    policy::Policy,
};

fn mounted(cluster: &Cluster, at: &Path) -> Mounted {
    mounted_as(cluster.fresh_pool(), at)
}

pub(crate) fn mounted_as(pool: Pool, at: &Path) -> Mounted {
    let options = PoolMount {
        source: "pool:test".into(),
        write: WriteOptions::default(),
        others: false,
        read_only: false,
    };
    mount(pool, at, options).unwrap()
}

fn number<T>(done: std::io::Result<T>) -> i32 {
    done.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

#[test]
fn a_checkpoint_written_by_programs_is_visible_at_close_and_not_before() {
    let cluster = Cluster::new(3);
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_first, _second) = (mounted(&cluster, a.path()), mounted(&cluster, b.path()));
    let data = noise(1, 3_000_000);
    let mut file = File::create(a.path().join("app.N1.T1")).unwrap();
    file.write_all(&data).unwrap();
    assert_eq!(file.metadata().unwrap().len(), data.len() as u64);
    assert!(!b.path().join("app.N1.T1").exists(), "nobody else sees it yet");
    drop(file);
    assert!(fs::read(b.path().join("app.N1.T1")).unwrap() == data);
    // Readers of the old version go on.
    let mut old = File::open(b.path().join("app.N1.T1")).unwrap();
    fs::write(a.path().join("app.N1.T1"), b"new").unwrap();
    let mut seen = Vec::new();
    old.read_to_end(&mut seen).unwrap();
    assert!(seen == data);
    assert!(fs::read(b.path().join("app.N1.T1")).unwrap() == b"new");
    let versions = b.path().join(".versions/app.N1.T1");
    assert_eq!(fs::read_dir(&versions).unwrap().count(), 2);
    assert!(fs::read(versions.join("1")).unwrap() == data);
    assert_eq!(fs::read(versions.join("2")).unwrap(), b"new");
}

#[test]
fn a_program_that_is_killed_while_it_writes_leaves_nothing() {
    let cluster = Cluster::new(1);
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    let path = dir.path().join("half");
    let script = format!("exec 3>'{}'; echo something >&3; echo ready; exec sleep 100", path.display());
    let mut child =
        Command::new("sh").args(["-c", &script]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut ready = [0; 6];
    child.stdout.take().unwrap().read_exact(&mut ready).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    until("the name is gone", || !path.exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    // A killed child of the writing program discards nothing.
    let script = format!(
        "exec 3>'{}'; sleep 100 & kill -9 $!; wait $!; echo whole >&3",
        dir.path().join("other").display()
    );
    assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    assert_eq!(fs::read(dir.path().join("other")).unwrap(), b"whole\n");
    // A program that exits by itself keeps what it wrote.
    let script = format!("exec 3>'{}'; echo something >&3", path.display());
    assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    assert_eq!(fs::read(&path).unwrap(), b"something\n");
}

#[test]
fn what_several_programs_write_one_after_the_other_appears_when_the_last_has_ended() {
    let cluster = Cluster::new(1);
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    let path = dir.path().join("log");
    let script = format!("(/bin/echo first; /bin/true; /bin/echo last) >'{}'", path.display());
    assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    assert_eq!(fs::read_to_string(&path).unwrap(), "first\nlast\n");
    assert_eq!(fs::read_dir(dir.path().join(".versions/log")).unwrap().count(), 1, "and never a part of it");
}

/// During exec, the kernel closes files under a lock that readers of the process's `/proc` wait for.
#[test]
fn programs_are_started_and_replaced_while_files_are_open() {
    let cluster = Cluster::new(1);
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    let (open, left) = (dir.path().join("open"), dir.path().join("left"));
    let mut file = File::create(&open).unwrap();
    file.write_all(b"before").unwrap();
    // One starts a program that closes its copy; the other becomes a program and closes its only one.
    let replace = "open(F, '>', $ARGV[0]) or die; syswrite(F, 'all of it'); exec '/bin/true'";
    let mut perl = Command::new("perl");
    perl.args(["-e", replace]).arg(&left);
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let both = [Command::new("true").status(), perl.status()];
        done.send(both.map(|status| status.unwrap().success()))
    });
    let ended = ended.recv_timeout(std::time::Duration::from_secs(60));
    if ended.is_err() {
        // The processes and the mount wait for each other, and no signal would end that.
        rustix::mount::unmount(dir.path(), rustix::mount::UnmountFlags::FORCE).unwrap();
    }
    assert_eq!(ended, Ok([true, true]));
    assert!(File::open(&open).is_err(), "the program that was started has not committed our file");
    file.write_all(b" and after").unwrap();
    drop(file);
    assert_eq!(fs::read(&open).unwrap(), b"before and after");
    until("what was left open is there", || fs::read(&left).is_ok_and(|read| read == b"all of it"));
}

#[test]
fn names_and_attributes_are_those_of_a_file_system() {
    let cluster = Cluster::new(1);
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("app")).unwrap();
    fs::write(at("app/one"), "1").unwrap();
    fs::set_permissions(at("app/one"), fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(at("app/one")).unwrap().mode() & 0o7777, 0o640);
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
    File::options().write(true).open(at("app/one")).unwrap().set_modified(time).unwrap();
    assert_eq!(fs::metadata(at("app/one")).unwrap().modified().unwrap(), time);
    fs::rename(at("app/one"), at("two")).unwrap();
    assert_eq!(fs::read(at("two")).unwrap(), b"1");
    let mut appended = OpenOptions::new().append(true).open(at("two")).unwrap();
    appended.write_all(b"23").unwrap();
    drop(appended);
    assert_eq!(fs::read(at("two")).unwrap(), b"123");
    (0..1500).for_each(|n| drop(File::create(at(&format!("app/f{n}"))).unwrap()));
    assert_eq!(fs::read_dir(at("app")).unwrap().count(), 1500);
    assert_eq!(fs::read(at("app/f77")).unwrap(), b"");
    fs::remove_dir_all(at("app")).unwrap();
    assert!(!at("app").exists());
    let stat = rustix::fs::statvfs(dir.path()).unwrap();
    assert!(stat.f_blocks > 0 && stat.f_bavail > 0);
}

#[test]
fn what_a_pool_does_not_do_has_its_errno() {
    let cluster = Cluster::new(1);
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "x").unwrap();
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("folder/in"), "x").unwrap();
    let open = File::options().read(true).write(true).open(at("file")).unwrap();
    let pending = File::create(at("pending")).unwrap();
    fs::write(at("pinned"), "x").unwrap();
    let pinned = cluster.pool.block(cluster.pool.lookup(1, "pinned")).unwrap();
    cluster.pool.block(cluster.pool.pin(pinned.id, 1, true)).unwrap();
    let new = |name: &str| OpenOptions::new().write(true).create_new(true).open(at(name));
    let mut table: Vec<(&str, i32, Errno)> = vec![
        ("symlink", number(std::os::unix::fs::symlink("a", at("l"))), Errno::EPERM),
        ("hard link", number(fs::hard_link(at("file"), at("l"))), Errno::EPERM),
        ("mkfifo", number(mknod(&at("fifo"))), Errno::EPERM),
        (
            "fallocate",
            number(
                rustix::fs::fallocate(&open, rustix::fs::FallocateFlags::empty(), 0, 9).map_err(Into::into),
            ),
            Errno::ENOTSUP,
        ),
        ("rename exchange", number(exchange(&at("file"), &at("folder/in"))), Errno::EINVAL),
        ("rename what is being written", number(fs::rename(at("pending"), at("b"))), Errno::EBUSY),
        ("make what is there", number(new("file")), Errno::EEXIST),
        ("rmdir of what is not empty", number(fs::remove_dir(at("folder"))), Errno::ENOTEMPTY),
        ("rmdir of a file", number(fs::remove_dir(at("file"))), Errno::ENOTDIR),
        ("unlink of a folder", number(fs::remove_file(at("folder"))), Errno::EISDIR),
        ("open of nothing", number(File::open(at("none"))), Errno::ENOENT),
        ("through a file", number(File::open(at("file/x"))), Errno::ENOTDIR),
        ("a long name", number(new(&"n".repeat(256))), Errno::ENAMETOOLONG),
        (
            "write to a version",
            number(File::options().write(true).open(at(".versions/file/1"))),
            Errno::EROFS,
        ),
        ("make in .versions", number(new(".versions/x")), Errno::EROFS),
        ("make .versions", number(fs::create_dir(at(".versions"))), Errno::EEXIST),
        ("a folder into itself", number(fs::rename(at("folder"), at("folder/deep"))), Errno::EINVAL),
        ("a hole over 16 GiB", number(open.set_len(17 << 30)), Errno::EFBIG),
        (
            "a strange attribute",
            number(
                rustix::fs::setxattr(at("file"), "user.x", b"1", rustix::fs::XattrFlags::empty())
                    .map_err(Into::into),
            ),
            Errno::ENOTSUP,
        ),
        (
            "a bad policy",
            number(
                rustix::fs::setxattr(
                    at("folder"),
                    "user.whimbrel.copies",
                    b"99",
                    rustix::fs::XattrFlags::empty(),
                )
                .map_err(Into::into),
            ),
            Errno::EINVAL,
        ),
    ];
    table.push(("unlink of what is pinned", number(fs::remove_file(at("pinned"))), Errno::EBUSY));
    let document =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/operations/pool.md")).unwrap();
    for (what, found, expected) in table {
        assert_eq!(found, expected.number(), "{what}");
        let line = format!("| {what} | `{expected:?}` |");
        assert!(document.contains(&line), "the document lacks {line}");
    }
    drop(pending);
}

fn mknod(path: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).map_err(Into::into)
}

fn exchange(a: &Path, b: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).map_err(Into::into)
}

#[test]
fn attributes_tell_versions_and_set_policies() {
    let cluster = Cluster::new(1);
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    fs::create_dir(dir.path().join("app")).unwrap();
    let folder = dir.path().join("app");
    let none = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&folder, "user.whimbrel.copies", b"1", none).unwrap();
    fs::write(folder.join("f"), "1").unwrap();
    fs::write(folder.join("f"), "2").unwrap();
    let get = |path: &Path, name: &str| {
        let mut value = [0; 500];
        let length = rustix::fs::getxattr(path, format!("user.whimbrel.{name}"), &mut value).unwrap();
        String::from_utf8(value[..length].to_vec()).unwrap()
    };
    assert_eq!(get(&folder.join("f"), "version"), "2");
    assert_eq!(get(&folder.join("f"), "versions"), "2");
    assert_eq!(get(&folder.join("f"), "copies"), "1");
    assert!(get(&folder, "policy").contains("\"copies\":1"));
}

/// fio writes blocks in random order with a checksum in each and reads all of them back: an independent
/// check.
#[test]
fn fio_reads_back_what_it_wrote() {
    let cluster = Cluster::new(2);
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    for way in ["write", "randwrite"] {
        let args = [
            "--name=verify",
            "--size=8M",
            "--bs=4k-64k",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--fallocate=none",
            "--verify_state_save=0",
        ];
        let fio = Command::new("fio")
            .args(args)
            .arg(format!("--rw={way}"))
            .arg(format!("--filename={}", dir.path().join(way).display()))
            .output()
            .expect("fio, which scripts/bootstrap installs");
        assert!(fio.status.success(), "{way}: {}", String::from_utf8_lossy(&fio.stderr));
    }
}

#[test]
fn a_full_pool_is_enospc() {
    let mut cluster = Cluster::new(0);
    cluster.add_benefactor(2 << 20);
    cluster.wait_online(1);
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    let mut file = File::create(dir.path().join("large")).unwrap();
    let failed =
        (0..200).find_map(|n| file.write_all(&noise(n, 1 << 20)).and_then(|()| file.sync_all()).err());
    assert_eq!(failed.unwrap().raw_os_error(), Some(Errno::ENOSPC.number()));
    drop(file);
    assert!(!dir.path().join("large").exists());
}

/// Reads, writes, truncates, closes and opens at random against a model in memory, as fsx does.
fn exercise(seed: u64, cutting: Chunking) {
    let cluster = Cluster::new(2);
    let policy = Policy { copies: 1, cutting, ..Policy::default() };
    cluster.pool.block(cluster.pool.set_policy(1, Some(policy))).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let _mounted = mounted(&cluster, dir.path());
    // Other tests of this process have files open, and a file of the same name could be this one.
    let path = dir.path().join(format!("fsx{seed}"));
    let open = || {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(0)
            .open(&path)
            .unwrap()
    };
    let (mut file, mut model, mut random) = (open(), Vec::<u8>::new(), StdRng::seed_from_u64(seed));
    const MOST: usize = 300_000;
    for step in 0..300 {
        let (at, length) = (random.random_range(0..MOST), random.random_range(1..40_000));
        match random.random_range(0..100) {
            0..40 => {
                let data = noise(random.random(), length);
                file.write_all_at(&data, at as u64).unwrap();
                model.resize(model.len().max(at + length), 0);
                model[at..at + length].copy_from_slice(&data);
            }
            40..50 => {
                let data = noise(random.random(), length);
                file.seek(SeekFrom::End(0)).unwrap();
                file.write_all(&data).unwrap();
                model.extend(data);
            }
            50..80 => {
                let mut found = vec![0; length];
                let read = file.read_at(&mut found, at as u64).unwrap();
                let expected = &model[at.min(model.len())..(at + length).min(model.len())];
                assert!(found[..read] == *expected, "seed {seed} step {step}: read {at}+{length}");
            }
            80..90 => {
                file.set_len(at as u64).unwrap();
                model.resize(at, 0);
            }
            90..94 => file.sync_all().unwrap(),
            _ => {
                drop(file);
                assert!(fs::read(&path).unwrap() == model, "seed {seed} step {step}: after close");
                file = open();
            }
        }
        assert_eq!(file.metadata().unwrap().len(), model.len() as u64, "seed {seed} step {step}");
    }
    drop(file);
    assert!(fs::read(&path).unwrap() == model, "seed {seed}");
}

#[test]
fn random_work_gives_what_memory_gives_with_content_defined_chunks() {
    exercise(1, Chunking::Content { average: 8 << 10 });
}

#[test]
fn random_work_gives_what_memory_gives_with_fixed_chunks() {
    exercise(2, Chunking::Fixed { size: 4096 });
}

#[test]
fn random_work_gives_what_memory_gives_with_pages() {
    exercise(3, Chunking::Pages { average: 4 });
}

#[test]
fn closed_files_of_complete_local_write_outlive_an_unmount_without_a_manager() {
    let mut cluster = Cluster::new(1);
    let (dir, spool) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mounted = |cluster: &Cluster| {
        let write = WriteOptions {
            mode: WriteMode::CompleteLocal,
            spool: spool.path().to_owned(),
            ..WriteOptions::default()
        };
        let options = PoolMount { source: "pool:test".into(), write, others: false, read_only: false };
        mount(cluster.impatient_pool(), dir.path(), options).unwrap()
    };
    let left = || fs::read_dir(spool.path()).unwrap().count();
    let (small, large) = (noise(1, 5000), noise(2, 5_000_000));
    let mut first = mounted(&cluster);
    fs::write(dir.path().join("known"), &small).unwrap();
    first.unmount().unwrap();
    assert_eq!(left(), 0);
    assert!(cluster.read("known") == small, "an unmount waits for what was closed");

    let mut second = mounted(&cluster);
    let mut open = File::create(dir.path().join("state")).unwrap();
    open.write_all(&large).unwrap();
    fs::write(dir.path().join("other"), &small).unwrap();
    until("one is in the pool", || left() == 0);
    cluster.kill_manager();
    drop(open);
    second.unmount().unwrap();
    assert_eq!(left(), 1, "it could not be sent, and waits for the next mount");
    cluster.start_manager();
    cluster.wait_online(1);
    let third = mounted(&cluster);
    until("the next mount has sent it", || left() == 0);
    assert!(cluster.read("state") == large && cluster.read("other") == small);
    drop(third);
    assert_eq!(cluster.pool.block(cluster.pool.status()).unwrap().versions, 3);
}
