//! Locks of programs: two hosts never have one at once, and neither do a host and a program of the server.

use crate::common::{World, until};
use nix::fcntl::{FcntlArg, fcntl};
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::unix::fs::FileExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};
use whimbrel_session::server::Limits;

fn two(limits: Limits) -> (World, World) {
    let one = World::leased(limits, |_| {}, |server| fs::write(server.join("disk.raw"), "disk").unwrap());
    let other = World::beside(&one, |_| {});
    (one, other)
}

fn open(dir: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(dir.join("disk.raw")).unwrap()
}

fn try_flock(file: &File) -> Result<(), Errno> {
    flock(file, FlockOperation::NonBlockingLockExclusive)
}

/// Sets a lock of the process, as lockf(3) does.
fn lock_range(file: &File, kind: i32, start: i64, len: i64) -> Result<(), nix::errno::Errno> {
    let (l_type, l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    let range = libc::flock { l_type, l_whence, l_start: start, l_len: len, l_pid: 0 };
    fcntl(file, FcntlArg::F_SETLK(&range)).map(drop)
}

#[test]
fn two_hosts_never_have_a_lock_of_one_image_at_once() {
    let (one, other) = two(Limits::default());
    let (here, there) = (open(&one.mount()), open(&other.mount()));
    try_flock(&here).unwrap();
    assert_eq!(try_flock(&there), Err(Errno::AGAIN));
    // What was written under the lock is there for whoever gets it next.
    here.write_all_at(b"DISK", 0).unwrap();
    flock(&here, FlockOperation::Unlock).unwrap();
    try_flock(&there).unwrap();
    let mut seen = [0; 4];
    there.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(&seen, b"DISK");
    assert_eq!(try_flock(&here), Err(Errno::AGAIN));
    drop(there);
    until("a closed file is unlocked", || try_flock(&here).is_ok());
}

#[test]
fn ranges_are_locked_each_for_itself_and_shared_locks_are_shared() {
    let (one, other) = two(Limits::default());
    let (here, there) = (open(&one.mount()), open(&other.mount()));
    lock_range(&here, libc::F_WRLCK, 0, 100).unwrap();
    lock_range(&there, libc::F_WRLCK, 100, 100).unwrap();
    assert!(lock_range(&there, libc::F_RDLCK, 50, 1).is_err());
    lock_range(&here, libc::F_RDLCK, 0, 100).unwrap();
    lock_range(&there, libc::F_RDLCK, 50, 1).unwrap();
    lock_range(&here, libc::F_UNLCK, 0, 0).unwrap();
    lock_range(&there, libc::F_WRLCK, 0, 0).unwrap();
    assert!(lock_range(&here, libc::F_RDLCK, 1 << 40, 1).is_err(), "beyond the end of the file, too");
}

/// A process of the server that locks a file as QEMU does (an open file description lock), until its input
/// ends.
fn locker(world: &World) -> std::process::Child {
    let script = "import fcntl, struct, sys\n\
                  f = open('disk.raw', 'r+b')\n\
                  fcntl.fcntl(f, 37, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))\n\
                  print('locked', flush=True)\n\
                  sys.stdin.read()\n";
    let mut python = Command::new("python3");
    python.args(["-c", script]).current_dir(world.server()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = python.spawn().unwrap();
    let mut said = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"locked");
    child
}

#[test]
fn a_program_of_the_server_that_has_locked_an_image_excludes_the_hosts() {
    let (one, _other) = two(Limits::default());
    let mut child = locker(&one);
    let file = open(&one.mount());
    assert!(lock_range(&file, libc::F_WRLCK, 0, 0).is_err());
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    lock_range(&file, libc::F_WRLCK, 0, 0).unwrap();
}

#[test]
fn who_waits_for_a_lock_gets_it_when_it_is_free_and_can_be_killed_before() {
    let (one, other) = two(Limits::default());
    let here = open(&one.mount());
    try_flock(&here).unwrap();
    let waiting = || {
        let mut flock = Command::new("flock");
        flock.arg(other.mount().join("disk.raw")).args(["echo", "mine"]).stdout(Stdio::piped());
        flock.spawn().unwrap()
    };
    let (mut first, mut second) = (waiting(), waiting());
    until("both have asked", || other.session().status().requests["lock"] >= 2);
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(second.try_wait().unwrap().is_none());
    flock(&here, FlockOperation::Unlock).unwrap();
    assert!(second.wait().unwrap().success());
}

#[test]
fn the_lock_of_a_host_that_is_gone_is_free_after_its_term_and_it_finds_out() {
    let (one, gone) = two(Limits { lease_term: Duration::from_secs(2), ..Limits::default() });
    let (here, mut there) = (open(&one.mount()), open(&gone.mount()));
    try_flock(&there).unwrap();
    // A connection that breaks and is restored loses nothing.
    gone.wire.cut(false);
    until("the session is back", || gone.session().status().broken > 0 && gone.session().status().connected);
    assert_eq!(try_flock(&here), Err(Errno::AGAIN));
    gone.wire.cut(true);
    until("the term is over", || try_flock(&here).is_ok());
    gone.wire.mend();
    until("it is told", || {
        gone.session().status().events.iter().any(|event| event.text.contains("lock is lost"))
    });
    assert_eq!(there.write_all(b"late").unwrap_err().raw_os_error(), Some(5), "who had it may not write");
    drop(there);
    open(&gone.mount()).write_all_at(b"anew", 0).unwrap();
}
