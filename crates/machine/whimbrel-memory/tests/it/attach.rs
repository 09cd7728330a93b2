//! Attachment: it must never disturb the target, and reports why it failed.

use crate::support::*;
use nix::{
    sys::{
        ptrace,
        signal::{Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::Command,
    thread,
    time::{Duration, Instant},
};
use whimbrel_machine::PageArray;
use whimbrel_memory::{AttachError, Attachment, Mode, RamTarget, probe};

const PAGES: u64 = 64;

fn attach(target: &Target, path: &tempfile::TempPath) -> Result<Attachment, AttachError> {
    Attachment::attach(target.pid(), by_path(path), Mode::Track)
}

fn serving() -> (Target, tempfile::TempPath) {
    let file = ram_file("attach", PAGES);
    (Target::serving("shared", text(&file), PAGES), file)
}

fn signal(target: &Target, signal: Signal) {
    kill(Pid::from_raw(target.pid()), signal).unwrap();
}

fn stack_of(target: &Target) -> String {
    let maps = fs::read_to_string(format!("/proc/{}/maps", target.pid())).unwrap();
    let line = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
    let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
    let number = |text| u64::from_str_radix(text, 16).unwrap();
    format!("0x{start}+{}", number(end) - number(start))
}

fn wait_for_state(target: &Target, letter: char) {
    let deadline = Instant::now() + Duration::from_secs(10);
    let path = format!("/proc/{}/status", target.pid());
    while !fs::read_to_string(&path).unwrap().contains(&format!("State:\t{letter}")) {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Tracers that kill themselves at an instant that moves through the complete attachment, from before the
/// target is seized to after it was released. Each time the target checks its registers, its sleeps, its
/// signal mask and its signals.
#[test]
fn a_tracer_killed_at_any_instant_leaves_the_target_running_correctly() {
    for with_signals in [false, true] {
        let ends: Vec<_> =
            (0..150_u64).map(|round| attach_and_die(&(round * 10).to_string(), with_signals)).collect();
        assert!(ends.contains(&Injected::Nothing), "no tracer died early: {ends:?}");
    }
}

/// Tracers that the kernel kills at chosen points, before they make this request.
#[test]
fn a_tracer_killed_between_two_requests_leaves_the_target_running_correctly() {
    let ptrace = |request: u32| format!("{}:0:{request}", libc::SYS_ptrace);
    let ioctl = |request: u32| format!("{}:1:{request}", libc::SYS_ioctl);
    let points = [
        ("the interrupt", ptrace(libc::PTRACE_INTERRUPT), Injected::Nothing),
        ("looking at the stop", ptrace(libc::PTRACE_GETSIGINFO), Injected::Nothing),
        ("reading the registers", ptrace(libc::PTRACE_GETREGSET), Injected::Nothing),
        ("writing the code", ptrace(libc::PTRACE_POKEDATA), Injected::Nothing),
        ("setting the registers", ptrace(libc::PTRACE_SETREGSET), Injected::Nothing),
        ("starting the detour", ptrace(libc::PTRACE_SYSCALL), Injected::Descriptor),
        ("the entry of the call", ptrace(libc::PTRACE_GET_SYSCALL_INFO), Injected::Descriptor),
        ("letting go", ptrace(libc::PTRACE_DETACH), Injected::Descriptor),
        ("fetching the descriptor", format!("{}:2:0", libc::SYS_pidfd_getfd), Injected::Descriptor),
        ("the handshake", ioctl(linux_raw_sys::ioctl::UFFDIO_API), Injected::Descriptor),
        ("the registration", ioctl(linux_raw_sys::ioctl::UFFDIO_REGISTER), Injected::Descriptor),
        ("arming", ioctl(linux_raw_sys::ioctl::UFFDIO_WRITEPROTECT), Injected::Descriptor),
    ];
    for (point, when, expected) in points {
        for round in 0..4 {
            assert_eq!(attach_and_die(&when, round % 2 == 1), expected, "before {point}");
        }
    }
}

/// Tracers that survive: no call is interrupted, no register disturbed.
#[test]
fn a_target_computes_and_sleeps_on_undisturbed_when_it_is_attached() {
    for with_signals in [false, true] {
        for _ in 0..40 {
            assert_eq!(attach_and_die("1000000", with_signals), Injected::Complete);
        }
    }
}

/// Progress of an attachment.
#[derive(Debug, PartialEq, Eq)]
enum Injected {
    Nothing,
    Descriptor,
    Complete,
}

fn attach_and_die(when: &str, with_signals: bool) -> Injected {
    let mut target = Target::spawn(&["compute"]);
    assert_eq!(target.line(), "ready");
    let args = ["attach-until", &target.pid().to_string(), &stack_of(&target), when];
    let mut tracer = Target::spawn(&args);
    if with_signals {
        (0..20).for_each(|_| {
            signal(&target, Signal::SIGUSR1);
            thread::yield_now();
        });
    }
    // End of output without a line means that the tracer died.
    let complete = tracer.line().starts_with("attached");
    drop(tracer);
    // The target executes a stub that the tracer left behind now; sixteen rounds of checks suffice to detect
    // it.
    target.send("go on");
    assert_eq!(target.line(), "gone on", "tracer dead at {when}");
    let fds = fs::read_dir(format!("/proc/{}/fd", target.pid())).unwrap();
    let has_descriptor =
        fds.map(|fd| fs::read_link(fd.unwrap().path())).any(|link| link.is_ok_and(is_userfaultfd));
    signal(&target, Signal::SIGTERM);
    let report = target.line();
    assert!(target.child.wait().unwrap().success(), "tracer dead at {when}: {report:?}");
    match (has_descriptor, complete) {
        (_, true) => Injected::Complete,
        (true, false) => Injected::Descriptor,
        (false, false) => Injected::Nothing,
    }
}

fn is_userfaultfd(link: std::path::PathBuf) -> bool {
    link.as_os_str() == "anon_inode:[userfaultfd]"
}

#[test]
fn a_target_that_does_not_stop_is_given_up_in_time() {
    let mut target = Target::spawn(&["vfork"]);
    assert_eq!(target.line(), "waiting");
    wait_for_state(&target, 'D');
    let refused = Attachment::attach(target.pid(), RamTarget::Range(1 << 20, PAGE as u64), Mode::Track);
    assert!(matches!(refused, Err(AttachError::TimedOut { .. })), "{refused:?}");
    let status = fs::read_to_string(format!("/proc/{}/status", target.pid())).unwrap();
    assert!(status.contains("TracerPid:\t0\n"), "and let go");
}

#[test]
fn an_attached_process_is_adopted_and_not_attached_twice() {
    let (mut target, file) = serving();
    let missing = Attachment::adopt(target.pid(), by_path(&file), Mode::Track);
    assert!(matches!(missing, Err(AttachError::NothingToAdopt { .. })));
    let mut daemon = Target::spawn(&["attach", &target.pid().to_string(), text(&file)]);
    assert_eq!(daemon.line(), format!("attached {PAGES}"));
    target.write(7, 1);
    drop(daemon);
    assert!(matches!(attach(&target, &file), Err(AttachError::Attached { .. })));
    let adopted = Attachment::open(target.pid(), by_path(&file)).unwrap();
    let dirty = adopted.ram().unwrap().take_dirty().unwrap();
    assert_eq!(dirty.iter().collect::<Vec<_>>(), [7], "what was written meanwhile is not lost");
    adopted.release().unwrap();
    target.write(8, 1);
    let mut ram = attach(&target, &file).unwrap().ram().unwrap();
    assert!(ram.take_dirty().unwrap().is_empty(), "attached anew, armed anew");
}

#[test]
fn a_stopped_target_is_refused_at_once_and_runs_on_when_continued() {
    let (mut target, file) = serving();
    signal(&target, Signal::SIGSTOP);
    wait_for_state(&target, 'T');
    assert!(matches!(attach(&target, &file), Err(AttachError::Stopped { .. })));
    signal(&target, Signal::SIGCONT);
    target.write(1, 1);
    attach(&target, &file).unwrap();
}

#[test]
fn a_traced_target_is_refused_by_name_and_left_to_its_tracer() {
    let (mut target, file) = serving();
    let pid = Pid::from_raw(target.pid());
    ptrace::seize(pid, ptrace::Options::empty()).unwrap();
    let (own, refused) = (nix::unistd::gettid().as_raw(), attach(&target, &file));
    assert!(matches!(refused, Err(AttachError::Traced { by, .. }) if by == own), "{refused:?}");
    target.write(1, 1);
    ptrace::interrupt(pid).unwrap();
    waitpid(pid, Some(WaitPidFlag::__WALL)).unwrap();
    ptrace::detach(pid, None).unwrap();
    attach(&target, &file).unwrap();
}

#[test]
fn a_process_that_ended_is_gone_whether_or_not_it_was_waited_for() {
    let (mut target, file) = serving();
    target.child.kill().unwrap();
    wait_for_state(&target, 'Z');
    assert!(matches!(attach(&target, &file), Err(AttachError::Gone { .. })));
    target.child.wait().unwrap();
    assert!(matches!(attach(&target, &file), Err(AttachError::Gone { .. })));
    for pid in [0, -1, i32::MAX] {
        let refused = Attachment::attach(pid, by_path(&file), Mode::Track);
        assert!(matches!(refused, Err(AttachError::Gone { .. })), "{pid}");
    }
}

#[test]
fn another_users_process_is_refused() {
    let (target, file) = serving();
    fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    let copy = folder.path().join("tracer");
    // Copied by another program: a writable descriptor here could be inherited by the child of a concurrent
    // test, and the copy could not be started then.
    assert!(Command::new("cp").arg(PROGRAM).arg(&copy).status().unwrap().success());
    let mut tracer = Command::new(&copy);
    tracer.args(["attach", &target.pid().to_string(), text(&file)]).uid(65534).gid(65534);
    let output = tracer.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("Denied"), "{said}");
}

#[test]
fn memory_that_is_not_there_is_refused_before_the_target_is_touched() {
    let (target, file) = serving();
    let other = ram_file("other", 1);
    let refused = Attachment::attach(target.pid(), by_path(&other), Mode::Track);
    assert!(matches!(refused, Err(AttachError::NoMapping { .. })));
    for (start, bytes) in [(1, 4096), (4096, 0), (4096, 1), (u64::MAX - 4095, 8192), (0, u64::MAX - 4095)] {
        let refused = Attachment::attach(target.pid(), RamTarget::Range(start, bytes), Mode::Track);
        assert!(matches!(refused, Err(AttachError::BadRange { .. })), "{start:#x} {bytes}");
    }
    let range = RamTarget::Range(target.base, PAGES * PAGE as u64);
    let refused = Attachment::attach(target.pid(), range, Mode::Lazy);
    assert!(matches!(refused, Err(AttachError::LazyNeedsFile { .. })));
    attach(&target, &file).unwrap();
}

#[test]
fn this_machine_can_do_what_the_tests_just_did() {
    for finding in probe() {
        assert!(finding.met && finding.fix.is_none(), "{finding:?}");
    }
}
