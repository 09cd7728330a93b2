//! Tests of the ssh transport through a real sshd on loopback, with its own keys, configuration and port.

use crate::hosts::*;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};
use whimbrel_wire::{ConnectError, HelloError, PeerIdentity, SshCommand, connect_ssh};

const SSHD: &str = "/usr/sbin/sshd";
/// An sshd of our own.
struct Sshd {
    child: Child,
    dir: tempfile::TempDir,
}

impl Drop for Sshd {
    fn drop(&mut self) {
        // The process may have exited already; it is reaped in both cases.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn keygen(path: &Path) {
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(path).status();
    assert!(made.unwrap().success());
}

impl Sshd {
    async fn start() -> Option<Self> {
        if !Path::new(SSHD).exists() {
            println!("skipped: {SSHD} is not installed");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        keygen(&dir.path().join("host"));
        keygen(&dir.path().join("user"));
        fs::copy(path("user.pub"), path("authorized")).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        // Where sshd drops its privileges to; a machine without a running sshd may lack it.
        fs::create_dir_all("/run/sshd").unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\n\
             PermitRootLogin yes\nUsePAM no\nPasswordAuthentication no\nLogLevel ERROR\n",
            path("host"),
            path("authorized"),
        );
        fs::write(path("sshd_config"), server).unwrap();
        let client = format!(
            "Host test\n HostName 127.0.0.1\n Port {port}\n User root\n IdentityFile {}\n IdentitiesOnly yes\n \
             BatchMode yes\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n",
            path("user"),
        );
        fs::write(path("ssh_config"), client).unwrap();
        let child =
            Command::new(SSHD).args(["-D", "-e", "-f", &path("sshd_config")]).stderr(Stdio::null()).spawn();
        let sshd = Self { child: child.unwrap(), dir };
        until("sshd listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()).await;
        Some(sshd)
    }

    fn command(&self, remote: &str) -> SshCommand {
        let config = self.dir.path().join("ssh_config");
        let options = vec!["-F".into(), config.into()];
        SshCommand { options, remote: remote.to_owned(), ..SshCommand::new("test") }
    }
}

/// The far end of these tests, a program of its own: the stream must carry nothing but frames.
fn remote_command() -> String {
    format!("exec {}", env!("CARGO_BIN_EXE_wire-remote"))
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_cross_a_real_ssh_both_small_and_large() {
    let Some(sshd) = Sshd::start().await else { return };
    let connection = soon(connect_ssh(&sshd.command(&remote_command()), &endpoint("near"))).await.unwrap();
    assert_eq!(connection.peer().identity, PeerIdentity::Ssh("test".to_owned()));
    assert_eq!(connection.peer().name.as_str(), "remote");
    for len in [0, 1, 100_000, 8 << 20] {
        let payload = vec![len as u8; len];
        let reply = soon(connection.call(request(ECHO, b"x", payload.clone()))).await.unwrap();
        assert!(reply.payload == payload);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ssh_or_a_login_script_says_ends_up_in_the_error() {
    let Some(sshd) = Sshd::start().await else { return };
    let absent = soon(connect_ssh(&sshd.command("no-such-program-here"), &endpoint("near"))).await;
    match absent {
        Err(ConnectError::Ssh { status, stderr, .. }) => {
            assert_eq!(status.code(), Some(127));
            assert!(stderr.contains("no-such-program-here"), "{stderr}");
        }
        other => panic!("{other:?}"),
    }
    let chatty =
        soon(connect_ssh(&sshd.command("echo Welcome to server 7, have a nice day"), &endpoint("near")))
            .await;
    match chatty {
        Err(ConnectError::Hello { source: HelloError::NotWhimbrel { start } }) => {
            assert!(start.starts_with("Welcome to server 7"), "{start}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_is_an_option_is_refused() {
    let hostile = SshCommand::new("-oProxyCommand=touch /tmp/owned");
    let refused = soon(connect_ssh(&hostile, &endpoint("near"))).await;
    assert!(matches!(refused, Err(ConnectError::Destination { .. })), "{refused:?}");
}
