//! The console on a real pseudo terminal: raw while it lasts, restored however it ends.

use crate::fake::{Daemon, wait_for};
use rustix::{
    fs::{Mode, OFlags, open},
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, tcgetattr},
};
use std::{
    fs::File,
    io::{Read, Write},
    os::fd::OwnedFd,
    process::{Child, Stdio},
};

struct Session {
    keyboard: File,
    terminal: OwnedFd,
    child: Child,
}

impl Session {
    /// Attaches to `web` and waits until the guest has greeted.
    fn start(daemon: &Daemon) -> Self {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let path = ptsname(&keyboard, Vec::new()).unwrap();
        let terminal = open(&path, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let mut command = daemon.command("console web");
        command.stdin(terminal.try_clone().unwrap()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut session = Self { keyboard: keyboard.into(), terminal, child: command.spawn().unwrap() };
        session.expect("login: ");
        assert!(!session.is_cooked(), "raw before the first byte is shown");
        session
    }

    fn expect(&mut self, text: &str) {
        let mut got = vec![0; text.len()];
        self.child.stdout.as_mut().unwrap().read_exact(&mut got).unwrap();
        assert_eq!(String::from_utf8_lossy(&got), text);
    }

    fn is_cooked(&self) -> bool {
        tcgetattr(&self.terminal).unwrap().local_modes.contains(LocalModes::ICANON | LocalModes::ECHO)
    }

    fn ends_cooked(&mut self) {
        let mut status = None;
        wait_for("the console to end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.unwrap().success(), "{status:?}");
        assert!(self.is_cooked(), "the terminal is left raw");
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn ctrl_bracket_leaves_and_the_terminal_is_as_before() {
    let daemon = Daemon::start(0);
    let mut session = Session::start(&daemon);
    session.keyboard.write_all(b"ls\x03").unwrap();
    session.expect("ls\x03");
    session.keyboard.write_all(b"\x1d").unwrap();
    session.ends_cooked();
}

#[test]
fn tilde_dot_leaves_at_the_beginning_of_a_line() {
    let daemon = Daemon::start(0);
    let mut session = Session::start(&daemon);
    session.keyboard.write_all(b"x~.\r").unwrap();
    session.expect("x~.\r");
    session.keyboard.write_all(b"~.").unwrap();
    session.ends_cooked();
}

#[test]
fn a_machine_that_ends_gives_the_terminal_back() {
    let daemon = Daemon::start(0);
    let mut session = Session::start(&daemon);
    session.keyboard.write_all(b"exit\n").unwrap();
    session.ends_cooked();
}

#[test]
fn a_signal_gives_the_terminal_back_too() {
    let daemon = Daemon::start(0);
    let mut session = Session::start(&daemon);
    kill_process(Pid::from_raw(session.child.id() as i32).unwrap(), Signal::TERM).unwrap();
    session.ends_cooked();
}

#[test]
fn what_is_piped_in_is_sent_as_it_is() {
    let daemon = Daemon::start(0);
    let mut command = daemon.command("console web");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"~.\x1d|exit\n").unwrap();
    let output = child.wait_with_output().unwrap();
    // The scripted guest ends at `exit` without answering that piece.
    assert_eq!(
        (output.status.code(), String::from_utf8_lossy(&output.stdout).as_ref()),
        (Some(0), "login: ")
    );
}
