//! Attaching: what it must never do to the target, and what it says when it cannot.

mod support;

use nix::{
    sys::{
        ptrace,
        signal::{Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use support::*;
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

/// The tracer dies at a different instant each time, from before it seized the target to after it let go. The target
/// checks its registers, its sleeps, its signal mask and (with signals falling in between) its signals.
#[test]
fn a_tracer_killed_at_any_instant_leaves_the_target_running_correctly() {
    for with_signals in [false, true] {
        let mut target = Target::spawn(&["compute"]);
        assert_eq!(target.line(), "ready");
        let memory = stack_of(&target);
        let mut completed = 0;
        for round in 0..120_u64 {
            let mut tracer = Command::new(PROGRAM);
            tracer.args(["attach", &target.pid().to_string(), &memory]);
            let mut tracer = tracer.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            if with_signals {
                (0..3).for_each(|_| signal(&target, Signal::SIGUSR1));
            }
            // Spread evenly over the first 3 ms, where the whole injection lies.
            let start = Instant::now();
            while start.elapsed() < Duration::from_micros(round * 25) {
                std::hint::spin_loop();
            }
            tracer.kill().unwrap();
            tracer.wait().unwrap();
            let fds = fs::read_dir(format!("/proc/{}/fd", target.pid())).unwrap();
            completed =
                fds.filter(|fd| fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(is_userfaultfd)).count();
        }
        signal(&target, Signal::SIGTERM);
        let report = target.line();
        assert!(target.child.wait().unwrap().success(), "{report:?}");
        assert!(completed > 0, "the kills came too early to mean anything");
    }
}

fn is_userfaultfd(link: std::path::PathBuf) -> bool {
    link.as_os_str() == "anon_inode:[userfaultfd]"
}

/// The same without a killer: injected again and again into every kind of blocked call.
#[test]
fn no_call_of_the_target_is_cut_short_by_attaching() {
    let mut target = Target::spawn(&["compute"]);
    assert_eq!(target.line(), "ready");
    let memory = stack_of(&target);
    let (start, bytes) = memory.split_once('+').unwrap();
    let start = u64::from_str_radix(start.trim_start_matches("0x"), 16).unwrap();
    let range = || RamTarget::Range(start, bytes.parse().unwrap());
    for _ in 0..100 {
        Attachment::open(target.pid(), range(), Mode::Track).unwrap().release().unwrap();
    }
    signal(&target, Signal::SIGTERM);
    target.line();
    assert!(target.child.wait().unwrap().success());
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
    let adopted = Attachment::open(target.pid(), by_path(&file), Mode::Track).unwrap();
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
    let refused = attach(&target, &file);
    assert!(
        matches!(refused, Err(AttachError::Traced { by, .. }) if by == std::process::id() as i32),
        "{refused:?}"
    );
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
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let program = tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755));
    let copy = program.tempfile_in("/dev/shm").unwrap().into_temp_path();
    fs::copy(PROGRAM, &copy).unwrap();
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
