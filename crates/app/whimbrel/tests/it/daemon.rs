//! The binary as the daemon, with its settings from a file, and as its own client.

use crate::fake::{wait_for, whimbrel};
use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    path::Path,
    process::{Child, Output, Stdio},
};
use tempfile::TempDir;

struct Host {
    child: Child,
    directory: TempDir,
}

impl Host {
    /// Starts a daemon whose settings all stand in a file, and waits until it answers.
    fn start() -> Self {
        // Guest memory must lie on a tmpfs, so all of it does.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = |name: &str| directory.path().join(name);
        let settings = format!(
            "name = \"omega\"\ndata = {:?}\nrun_dir = {:?}\nsocket = {:?}\n",
            at("data"),
            at("run"),
            at("host.sock")
        );
        fs::write(at("host.toml"), settings).unwrap();
        let mut command = whimbrel("host --name alpha --config");
        let child = command.arg(at("host.toml")).stderr(Stdio::null()).spawn().unwrap();
        let mut host = Self { child, directory };
        wait_for("the daemon to answer", || {
            assert_eq!(host.child.try_wait().unwrap(), None, "the daemon ended");
            host.call("key").status.success()
        });
        host
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn call(&self, arguments: &str) -> Output {
        whimbrel(arguments).env("WHIMBREL_SOCKET", self.path().join("host.sock")).output().unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_daemon_takes_its_settings_and_ends_when_it_is_told_to() {
    let mut host = Host::start();
    let key: serde_json::Value = serde_json::from_slice(&host.call("key --json").stdout).unwrap();
    assert_eq!(key["name"], "alpha", "the option wins over the file");
    assert!(host.path().join("data").is_dir());
    assert_eq!(host.call("show nothing").status.code(), Some(3));
    assert_eq!(host.call("verify").status.code(), Some(0));
    kill_process(Pid::from_raw(host.child.id() as i32).unwrap(), Signal::TERM).unwrap();
    assert!(host.child.wait().unwrap().success());
    assert_eq!(host.call("ps").status.code(), Some(5), "nobody listens any more");
}

#[test]
fn behind_ssh_the_daemon_speaks_and_nothing_else_does() {
    let mut host = Host::start();
    for verb in ["dial-stdio", "serve --stdio"] {
        let served = host.call(verb);
        assert!(served.status.success(), "{served:?}");
        assert!(served.stdout.starts_with(b"WHIMBREL"), "a hello comes first: {served:?}");
        assert!(served.stderr.is_empty(), "{served:?}");
    }
    host.child.kill().unwrap();
    host.child.wait().unwrap();
    let nobody = host.call("dial-stdio");
    assert_eq!(nobody.status.code(), Some(5), "what the other host tells an absent daemon by");
    assert!(nobody.stdout.is_empty() && !nobody.stderr.is_empty(), "{nobody:?}");
}

#[test]
fn a_second_daemon_on_the_same_data_is_refused() {
    let host = Host::start();
    let mut second = whimbrel("host --config");
    let output = second.arg(host.path().join("host.toml")).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("error: "), "{text}");
    assert!(host.call("ps").status.success(), "the first one goes on");
}
