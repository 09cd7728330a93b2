//! A real etcd that wants TLS, certificates of its clients, and a password.

use super::*;
use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
};

const PATIENCE: Duration = Duration::from_secs(30);

/// An etcd on this machine; ended when it is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sh(folder: &Path, script: &str) -> bool {
    let quiet =
        || Stdio::from(fs::File::options().create(true).append(true).open(folder.join("log")).unwrap());
    let mut shell = Command::new("sh");
    let done = shell.current_dir(folder).args(["-ec", script]).stdout(quiet()).stderr(quiet()).status();
    done.unwrap().success()
}

/// An authority, a server certificate for 127.0.0.1 and one for clients. Those have no common name: an etcd
/// that knows users refuses one over HTTP.
fn make_certificates(folder: &Path) {
    let script = "
        ec='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
        openssl req -x509 $ec -keyout ca.key -out ca.pem -days 2 -subj /CN=ca
        for of in server client; do
            openssl req $ec -keyout $of.key -out $of.csr -subj /
            echo 'subjectAltName=IP:127.0.0.1' >$of.ext
            openssl x509 -req -in $of.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile $of.ext -out $of.pem
        done";
    assert!(sh(folder, script), "{}", fs::read_to_string(folder.join("log")).unwrap());
}

/// Free ports. Another process may take them before they are used: then the start is retried.
fn ports() -> [u16; 2] {
    [(); 2]
        .map(|()| TcpListener::bind("127.0.0.1:0").unwrap())
        .map(|socket| socket.local_addr().unwrap().port())
}

fn start(folder: &Path) -> (Server, String) {
    let ctl = |address: &str, words: &str| {
        let files = "--cacert ca.pem --cert client.pem --key client.key";
        sh(folder, &format!("ETCDCTL_API=3 etcdctl --endpoints=https://{address} {files} {words}"))
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        let [port, peers] = ports();
        let (address, quiet) = (format!("127.0.0.1:{port}"), Stdio::null);
        let mut etcd = Command::new("etcd");
        etcd.current_dir(folder).args([
            "--data-dir",
            "data",
            "--client-cert-auth",
            "--trusted-ca-file",
            "ca.pem",
        ]);
        etcd.args(["--cert-file", "server.pem", "--key-file", "server.key"]);
        for option in ["--listen-client-urls", "--advertise-client-urls"] {
            etcd.args([option, &format!("https://{address}")]);
        }
        etcd.args(["--listen-peer-urls", &format!("http://127.0.0.1:{peers}")]);
        let mut server = Server(etcd.stdout(quiet()).stderr(quiet()).spawn().unwrap());
        while server.0.try_wait().unwrap().is_none() {
            if ctl(&address, "endpoint health") {
                let words =
                    ["user add root:se:cret", "role add root", "user grant-role root root", "auth enable"];
                words.iter().for_each(|words| assert!(ctl(&address, words), "{words}"));
                return (server, address);
            }
            assert!(Instant::now() < deadline, "{}", fs::read_to_string(folder.join("log")).unwrap());
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(Instant::now() < deadline, "no etcd starts");
    }
}

#[test]
fn an_etcd_with_tls_and_a_password_is_asked_by_who_has_both_and_by_nobody_else() {
    let place = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    make_certificates(place.path());
    let (server, address) = start(place.path());
    let shown = tempfile::tempdir().unwrap();
    let etcd = || {
        let (id, term) = (ProtectionId([7; 16]), Duration::from_secs(5));
        let login = Credentials::of(shown.path());
        Etcd::with(runtime.handle().clone(), login, vec![address.clone()], id, "alpha".into(), term)
    };
    let register = WitnessQuery::Register { standby: "beta".parse().unwrap(), term_ms: 5000 };
    let copy = |file: &str| fs::copy(place.path().join(file), shown.path().join(file)).map(drop).unwrap();

    assert_eq!(etcd().ask(&register, PATIENCE), None, "without TLS");
    copy("ca.pem");
    assert_eq!(etcd().ask(&register, PATIENCE), None, "without a certificate");
    copy("client.pem");
    assert_eq!(etcd().ask(&register, PATIENCE), None, "a certificate without its key");
    copy("client.key");
    assert_eq!(etcd().ask(&register, PATIENCE), None, "without a password");
    fs::write(shown.path().join("user"), "root:secret\n").unwrap();
    assert_eq!(etcd().ask(&register, PATIENCE), None, "with another password");
    fs::write(shown.path().join("user"), "root:se:cret\n").unwrap();
    let known = etcd();
    assert!(known.ask(&register, PATIENCE).is_some());
    // A token that the etcd does not know, as after its restart, is requested again.
    *lock(&known.token) = Some("gone.1".to_owned());
    assert!(known.ask(&WitnessQuery::Close, PATIENCE).is_some());
    assert_ne!(lock(&known.token).as_deref(), Some("gone.1"));
    fs::copy(place.path().join("client.pem"), shown.path().join("ca.pem")).unwrap();
    assert_eq!(etcd().ask(&WitnessQuery::Close, PATIENCE), None, "of an authority that is not trusted");
    drop(server);
}
