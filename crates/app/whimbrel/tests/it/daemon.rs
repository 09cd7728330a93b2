//! The binary as the daemon, with its settings from a file, as its own client, and as the members of a pool.

use crate::fake::{wait_for, whimbrel};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
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
        Self::start_with("alpha", "")
    }

    fn start_with(name: &str, more: &str) -> Self {
        // Guest memory must lie on a tmpfs, so all of it does.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = |name: &str| directory.path().join(name);
        let settings = format!(
            "name = \"omega\"\ndata = {:?}\nrun_dir = {:?}\nsocket = {:?}\n{more}",
            at("data"),
            at("run"),
            at("host.sock")
        );
        fs::write(at("host.toml"), settings).unwrap();
        let mut command = whimbrel(&format!("host --name {name} --config"));
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

/// A process that ends with the test.
struct Member(Child);

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

impl Host {
    /// Calls a verb that must end with this exit code, and returns its result as JSON, or its error.
    fn result(&self, arguments: &str, code: i32) -> Value {
        let output = self.call(&format!("{arguments} --json"));
        assert_eq!(output.status.code(), Some(code), "{arguments}: {output:?}");
        let value: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        value.get("result").cloned().unwrap_or(value)
    }

    fn key(&self) -> String {
        said(&self.call("key"))
    }

    /// Flips a bit in the middle of each pack.
    fn damage(&self) {
        for pack in fs::read_dir(self.path().join("data/store/packs")).unwrap() {
            let path = pack.unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            fs::write(&path, bytes).unwrap();
        }
        self.result("verify", 6);
    }
}

/// Starts a pool for the host, with two benefactors, in `dir`; returns its name.
fn pool_of(host: &Host, dir: &Path) -> (Vec<Member>, String) {
    let at = |name: &str| dir.join(name).display().to_string();
    let run = |arguments: String| {
        let output = whimbrel(&arguments).output().unwrap();
        assert!(output.status.success(), "{arguments}: {output:?}");
        said(&output)
    };
    let admit = |name: &str, key: String| run(format!("pool admit --data {} {name} {key}", at("manager")));
    let spawn = |arguments: String| {
        Member(whimbrel(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    };
    let key = run(format!("pool key --data {}", at("manager")));
    admit("alpha", host.key());
    admit("me", run(format!("pool key --data {}", at("keys"))));
    let listen = free_address();
    let mut members = vec![spawn(format!("pool manager --data {} --listen {listen}", at("manager")))];
    for name in ["b0", "b1"] {
        admit(name, run(format!("pool key --data {}", at(name))));
        members.push(spawn(format!(
            "pool benefactor --name {name} --data {} --capacity 1G --keep-free 0 --listen {} --manager {listen}/{key}",
            at(name),
            free_address()
        )));
    }
    wait_for("two benefactors to be online", || {
        let status = format!("pool status --json --manager {listen}/{key} --keys-dir {}", at("keys"));
        let status = whimbrel(&status).output().unwrap();
        said(&status).matches("\"online\"").count() == 2
    });
    (members, format!("pool:{listen}/{key}/vms"))
}

#[test]
fn a_damaged_store_is_healed_from_another_host_that_allows_it_or_from_a_pool() {
    let address = free_address();
    let alpha = Host::start();
    let beta = Host::start_with("beta", &format!("listen = {address:?}\n"));
    let disk = alpha.path().join("web.raw");
    let pages = (0..512_u64)
        .flat_map(|page| (0..512).map(move |word| (page << 20 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    fs::write(&disk, pages.flat_map(u64::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    alpha.result(&format!("import {} web", disk.display()), 0);
    let copy = alpha.path().join("web.capsule");
    alpha.result(&format!("export web {}", copy.display()), 0);
    beta.result(&format!("import {} vault-web", copy.display()), 0);
    let (_members, pool) = pool_of(&alpha, &alpha.path().join("pool"));
    alpha.result(&format!("push web {pool}"), 0);

    alpha.damage();
    let nobody = alpha.call("repair");
    assert_eq!(nobody.status.code(), Some(6), "{nobody:?}");
    assert!(said(&nobody).contains("still missing") && said(&nobody).contains("--from"), "{nobody:?}");
    alpha.result(&format!("trust add beta {} {address}", beta.key()), 0);
    beta.result(&format!("trust add alpha {} --read other", alpha.key()), 0);
    alpha.result("repair web --from beta", 6);
    beta.result("trust set alpha --read vault-*", 0);
    let healed = alpha.result("repair web --from beta", 0);
    assert_eq!(healed["capsules"][0]["missing"], 0, "{healed}");
    assert!(healed["capsules"][0]["healed"].as_u64() > Some(0), "{healed}");
    assert_eq!(healed["capsules"][0]["names"][0], "web", "{healed}");
    alpha.result("verify", 0);
    assert_eq!(said(&alpha.call("repair")), "nothing is damaged");

    alpha.damage();
    beta.result("trust rm alpha", 0);
    alpha.result(&format!("repair --from {pool}"), 2);
    let healed = alpha.result(&format!("repair web --from {pool}"), 0);
    assert!(healed["capsules"][0]["healed"].as_u64() > Some(0), "{healed}");
    alpha.result("gc", 0);
    alpha.result("verify", 0);
    let out = alpha.path().join("out.raw");
    alpha.result(&format!("export web {} --format raw", out.display()), 0);
    assert!(fs::read(out).unwrap() == fs::read(disk).unwrap());
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

    // Nor does one of other data that only wants the same socket.
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut third = whimbrel("host --name beta --data");
    third.arg(other.path().join("data")).arg("--run-dir").arg(other.path().join("run"));
    let output = third.arg("--socket").arg(host.path().join("host.sock")).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("another daemon already uses"), "{text}");
    assert!(host.call("ps").status.success(), "the first one still has its socket");
}

/// Calls the daemon of `host` over TLS.
fn call_remotely(address: &str, token: &Path, fingerprint: &str, arguments: &str) -> Output {
    let mut command = whimbrel(&format!("{arguments} --host https://{address} --token-file"));
    command.arg(token).arg("--fingerprint").arg(fingerprint).env_remove("WHIMBREL_SOCKET").output().unwrap()
}

#[test]
fn a_token_is_all_that_a_user_elsewhere_needs_until_it_is_revoked() {
    let address = free_address();
    let host = Host::start_with("alpha", &format!("api_listen = {address:?}\n"));
    let token = |name: &str, more: &str| {
        let created = host.call(&format!("token create {name} {more}"));
        assert!(created.status.success(), "{created:?}");
        let file = host.path().join(format!("{name}.token"));
        fs::write(&file, created.stdout).unwrap();
        file
    };
    let admin = token("alice", "--role admin --expires 1h");
    let viewer = token("bob", "--role viewer --machines web*");
    // The refusal of a wrong fingerprint names the right one.
    let wrong = call_remotely(&address, &admin, &"00".repeat(32), "ps");
    let said = String::from_utf8(wrong.stderr).unwrap();
    let at = said.find("sha256:").unwrap_or_else(|| panic!("{said}"));
    let fingerprint = said[at..at + "sha256:".len() + 64].to_owned();
    let call = |token: &Path, arguments: &str| call_remotely(&address, token, &fingerprint, arguments);
    assert_eq!(wrong.status.code(), Some(5));
    assert_eq!(call(&admin, "key").stdout, host.call("key").stdout);
    // An operation is watched by a stream of events, and the protocol between hosts is an upgrade.
    for streaming in ["verify", "gc --json"] {
        let done = call(&admin, streaming);
        assert!(done.status.success() && !done.stdout.is_empty(), "{done:?}");
    }
    assert!(call(&admin, "dial-stdio").stdout.starts_with(b"WHIMBREL"));
    assert_eq!(call(&viewer, "ps").status.code(), Some(0));
    let refused = call(&viewer, "gc");
    assert_eq!(refused.status.code(), Some(5), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("needs the role operator"), "{refused:?}");
    let listed = host.result("token ls", 0);
    assert_eq!((&listed[0]["name"], &listed[1]["role"]), (&"alice".into(), &"viewer".into()), "{listed}");
    host.result("token revoke alice", 0);
    let revoked = call(&admin, "ps");
    assert!(String::from_utf8_lossy(&revoked.stderr).contains("revoked"), "{revoked:?}");
    let audit = fs::read_to_string(host.path().join("data/audit/audit.jsonl")).unwrap();
    assert!(audit.contains("\"who\":\"token bob\"") && audit.contains("/v1/store/gc"), "{audit}");
}

/// The first bytes that a server answers to a request for its web page in the clear.
fn page_in_the_clear(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn the_web_page_is_without_tls_on_loopback_only() {
    let (plain, secure) = (free_address(), free_address());
    let everywhere = secure.replace("127.0.0.1", "0.0.0.0");
    let local = Host::start_with("alpha", &format!("web = {plain:?}\n"));
    let page = page_in_the_clear(&plain);
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("<title>Whimbrel</title>"), "{page}");
    assert!(page.to_ascii_lowercase().contains("content-security-policy: default-src 'none'"), "{page}");
    drop(local);
    let network = Host::start_with("alpha", &format!("web = {everywhere:?}\n"));
    let page = page_in_the_clear(&secure);
    assert!(!page.contains("HTTP/1.1"), "{page}");
    let token = network.path().join("token");
    fs::write(&token, network.call("token create alice --role viewer").stdout).unwrap();
    let wrong = call_remotely(&secure, &token, &"00".repeat(32), "ps");
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("sha256:"), "it speaks TLS: {wrong:?}");
}
