//! Clients of the API from outside of the workspace: the tests in `clients` say what is done.

use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, HostProcess, PATIENCE, command_line};
use whimbrel_testkit::guest::{GuestOptions, Work};

/// Address of the host's API over TLS; each has the loopback of its own host.
const TLS: &str = "127.0.0.1:7443";

/// Address of the host's API without TLS, for a program that knows no certificate of one's own.
const PLAIN: &str = "127.0.0.1:7480";

/// The folder of a client.
fn client(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("clients").join(name)
}

/// Runs a program of the Python client's environment on the host, in a folder of its own; fails with what it
/// printed, which it returns otherwise.
fn in_environment(cluster: &Cluster, host: &HostProcess, program: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the workspace");
    let programs = root.join("target/clients-venv/bin");
    assert!(programs.exists(), "the Python client is not installed: `cargo xtask clients` does that");
    let folder = cluster.disk.path().join("clients");
    fs::create_dir_all(&folder).expect("a folder for the tests");
    let (file, log) = (folder.join("settings.json"), folder.join("log"));
    fs::write(&file, settings(cluster, host).to_string()).expect("a file of settings");
    let script = format!(
        "cd '{}' && PYTHONDONTWRITEBYTECODE=1 WHIMBREL_TEST_SETTINGS='{}' TMPDIR='{}' '{}'/{program} >'{}' 2>&1",
        folder.display(),
        file.display(),
        folder.display(),
        programs.display(),
        log.display()
    );
    let mut run = host.start_program("sh", &["-c", &script]);
    // Ansible alone starts Python for each task.
    let deadline = Instant::now() + 2 * PATIENCE;
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let ended = loop {
        if let Some(ended) = run.try_wait().expect("a process to wait for") {
            break ended;
        }
        assert!(Instant::now() < deadline, "{program} does not end:\n{}\n{}", said(), host.log_text());
        std::thread::sleep(Duration::from_millis(100));
    };
    let whole = said();
    assert!(ended.success(), "{program} failed:\n{whole}\n{}", host.log_text());
    whole
}

/// Runs tests of a client on the host.
fn pytest(cluster: &Cluster, host: &HostProcess, name: &str, tests: &str, passed: usize) {
    let folder = cluster.disk.path().join("clients/tmp");
    let program = format!(
        "python -m pytest --rootdir='{0}' -c '{0}/pyproject.toml' --basetemp='{1}' '{0}/tests/{tests}'",
        client(name).display(),
        folder.display()
    );
    let whole = in_environment(cluster, host, &program);
    let all = format!("{passed} passed in");
    assert!(whole.contains(&all), "not all of {tests} ran, or there are more now:\n{whole}");
}

/// What the tests use: the host, the program, a guest, and tokens.
fn settings(cluster: &Cluster, host: &HostProcess) -> serde_json::Value {
    let token = |name: &str, role| host.run(&["token", "create", name, "--role", role]).trim().to_owned();
    let log = host.log_text();
    let fingerprint = log.split("fingerprint=").nth(1).and_then(|rest| rest.split_whitespace().next());
    let options = GuestOptions { address: None, buffer_mib: 4, work: Work::Idle };
    let path = |path: &PathBuf| path.to_str().expect("a path in UTF-8").to_owned();
    json!({
        "socket": host.socket(),
        "program": command_line(),
        "guest": {
            "memory": 192u64 << 20,
            "kernel": path(&cluster.files().kernel),
            "initrd": path(&cluster.files().initrd),
            "append": options.to_string(),
        },
        "tls": {
            "url": format!("https://{TLS}"),
            "fingerprint": fingerprint.expect("a fingerprint in the log"),
            "viewer": token("vera", "viewer"),
            "operator": token("olga", "operator"),
        },
    })
}

#[test]
fn the_python_client_launches_saves_suspends_resumes_and_deletes_a_machine() {
    let mut cluster = Cluster::start(&["alpha"]);
    cluster.host_mut("alpha").restart_with(&format!("api_listen = \"{TLS}\"\n"));
    pytest(&cluster, cluster.host("alpha"), "python", "test_host.py", 6);
}

#[test]
fn ansible_makes_changes_and_deletes_machines_and_networks_and_does_nothing_twice() {
    let mut cluster = Cluster::start(&["alpha"]);
    cluster.host_mut("alpha").restart_with(&format!("api_listen = \"{TLS}\"\n"));
    pytest(&cluster, cluster.host("alpha"), "ansible", "test_collection.py", 8);
}

#[test]
fn a_language_model_looks_and_changes_only_with_leave() {
    let mut cluster = Cluster::start(&["alpha"]);
    cluster.host_mut("alpha").restart_with(&format!("api_listen = \"{TLS}\"\n"));
    pytest(&cluster, cluster.host("alpha"), "python", "test_mcp.py", 3);
}

/// Thousands of requests that the document allows or does not, of a token that may change machines: each is
/// answered as the document says.
#[test]
fn schemathesis_finds_no_answer_that_the_document_of_the_api_does_not_have() {
    let mut cluster = Cluster::start(&["alpha"]);
    let both = format!("api_listen = \"{TLS}\"\nweb = \"{PLAIN}\"\n");
    cluster.host_mut("alpha").restart_with(&both);
    let host = cluster.host("alpha");
    let token = host.run(&["token", "create", "tester", "--role", "operator"]);
    let program = format!(
        "schemathesis --config-file '{0}/tests/schemathesis.toml' run '{0}/../../docs/openapi.json' \
         --url http://{PLAIN} -H 'Authorization: Bearer {1}' --phases examples,coverage --seed 1 --workers 2 \
         --request-timeout 90 --suppress-health-check all --no-color",
        client("python").display(),
        token.trim()
    );
    let whole = in_environment(&cluster, host, &program);
    let tried = whole.lines().find_map(|line| line.trim().strip_suffix(" passed")?.split(", ").nth(1));
    let tried: usize = tried.and_then(|tried| tried.parse().ok()).unwrap_or_default();
    assert!(tried > 1000, "{whole}");
    host.run(&["ps"]);
    assert!(host.log_text().contains("machine=web"), "no machine was made");
}
