//! Clients of the API from outside of the workspace: `clients/python/tests` says what is done.

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

/// Runs tests of the Python package on the host; fails with what they printed.
fn pytest(cluster: &Cluster, host: &HostProcess, tests: &str, passed: usize) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the workspace");
    let python = root.join("target/clients-venv/bin/python");
    assert!(python.exists(), "the Python client is not installed: `cargo xtask clients` does that");
    let folder = cluster.disk.path().join("clients");
    fs::create_dir_all(&folder).expect("a folder for the tests");
    let (file, log) = (folder.join("settings.json"), folder.join("log"));
    fs::write(&file, settings(cluster, host).to_string()).expect("a file of settings");
    let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
    let script = format!(
        "cd '{}' && PYTHONDONTWRITEBYTECODE=1 WHIMBREL_TEST_SETTINGS='{}' '{}' -m pytest \
         --basetemp='{}' tests/{tests} >'{}' 2>&1",
        text(&root.join("clients/python")),
        text(&file),
        text(&python),
        text(&folder.join("tmp")),
        text(&log)
    );
    let mut run = host.start_program("sh", &["-c", &script]);
    let deadline = Instant::now() + PATIENCE;
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let ended = loop {
        if let Some(ended) = run.try_wait().expect("a process to wait for") {
            break ended;
        }
        assert!(Instant::now() < deadline, "{tests} does not end:\n{}\n{}", said(), host.log_text());
        std::thread::sleep(Duration::from_millis(100));
    };
    let whole = said();
    assert!(ended.success(), "{tests} failed:\n{whole}\n{}", host.log_text());
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
    pytest(&cluster, cluster.host("alpha"), "test_host.py", 6);
}

#[test]
fn a_language_model_looks_and_changes_only_with_leave() {
    let mut cluster = Cluster::start(&["alpha"]);
    cluster.host_mut("alpha").restart_with(&format!("api_listen = \"{TLS}\"\n"));
    pytest(&cluster, cluster.host("alpha"), "test_mcp.py", 3);
}
