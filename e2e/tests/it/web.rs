//! The page for browsers, in a headless Chromium on the host: `web/test` says what is done there.

use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, WEB, command_line};
use whimbrel_testkit::guest::Work;

/// Runs a script of `web/test` on the host, with its settings; fails with what it printed.
fn browse(cluster: &Cluster, host: &HostProcess, script: &str, mut settings: serde_json::Value) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the workspace");
    assert!(
        root.join("web/node_modules/playwright-core").is_dir(),
        "the libraries of web/ are missing: `cargo xtask web` installs them"
    );
    let folder = cluster.disk.path().join("browser");
    fs::create_dir_all(&folder).expect("a folder for the browser");
    if settings["url"].is_null() {
        settings["url"] = format!("http://{WEB}/").into();
    }
    settings["folder"] = folder.to_str().expect("a path in UTF-8").into();
    let (file, log) = (folder.join("settings.json"), folder.join("log"));
    fs::write(&file, settings.to_string()).expect("a file of settings");
    let path = |path: PathBuf| path.to_str().expect("a path in UTF-8").to_owned();
    let (script, file) = (path(root.join("web/test").join(script)), path(file));
    let mut browser = host.start_program("node", &[&script, &file]);
    let deadline = Instant::now() + PATIENCE;
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let ended = loop {
        if let Some(ended) = browser.try_wait().expect("a process to wait for") {
            break ended;
        }
        assert!(Instant::now() < deadline, "{script} does not end:\n{}\n{}", said(), host.log_text());
        std::thread::sleep(Duration::from_millis(100));
    };
    assert!(ended.success(), "{script} failed:\n{}\n{}", said(), host.log_text());
}

fn token(host: &HostProcess, name: &str, role: &str) -> String {
    host.run(&["token", "create", name, "--role", role]).trim().to_owned()
}

#[test]
fn a_browser_does_what_its_token_allows_and_shows_what_happens() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let alpha = cluster.host("alpha");
    // It writes, so that its migration has rounds.
    let work = Work::Dirty { region_mib: 32, pages_per_second: 2000, bytes_per_page: 64 };
    Guest { work, arguments: vec!["--display".to_owned()], ..Guest::small("web") }.run(&cluster, alpha);
    // A text that would be a script if the page took it for one.
    alpha.run(&["checkpoint", "web", "--tag", "before", "--label", "note=<img src=x onerror=alert(1)>"]);
    let settings = json!({
        "operator": token(alpha, "olga", "operator"),
        "viewer": token(alpha, "vera", "viewer"),
        "admin": token(alpha, "adam", "admin"),
    });
    browse(&cluster, alpha, "page.mjs", settings);
    assert_eq!(alpha.machines(), [], "it was migrated");
    cluster.host("beta").wait_state("web", &["running"]);
    let audit = fs::read_to_string(alpha.data().join("audit/audit.jsonl")).expect("an audit log");
    let noted = |who: &str, path: &str, outcome: &str| {
        let texts = [format!("\"{who}\""), format!("/v1/machines/web/{path}\""), format!("\"{outcome}\"")];
        audit.lines().any(|line| texts.iter().all(|text| line.contains(text)))
    };
    assert!(noted("token olga", "console", "done"), "{audit}");
    assert!(noted("token vera", "stop", "refused") && noted("token vera", "console", "refused"), "{audit}");
    assert!(!audit.contains("whimbrel_"), "a token is in the audit log: {audit}");
}

/// A pool with one benefactor and a mounted directory of which something is not sent; prints the manager.
const STORAGE: &str = r#"
key=$(whimbrel pool key --data manager)
whimbrel pool admit --data manager alpha HOST
whimbrel pool admit --data manager b1 "$(whimbrel pool key --data b1)"
whimbrel pool manager --data manager --listen 127.0.0.1:7500 &
whimbrel pool benefactor --name b1 --data b1 --capacity 1G --keep-free 0 --listen 127.0.0.1:7501 \
  --manager "127.0.0.1:7500/$key" &
mkdir files mnt
mine=$(whimbrel session key --keys-dir mine)
theirs=$(whimbrel session key --keys-dir theirs)
whimbrel serve "$PWD/files" --listen 127.0.0.1:7788 --allow "$mine" --keys-dir theirs &
for _ in $(seq 100); do
  whimbrel mount "127.0.0.1:7788:$PWD/files" "$PWD/mnt" --name work --control-dir CONTROL --cache-dir cache \
    --cache-size 64M --write back --write-back-delay never --key "$theirs" --keys-dir mine && break
  sleep 0.1
done >/dev/null 2>&1
head -c 100000 /dev/zero >mnt/two
echo "$key"
"#;

#[test]
fn sessions_and_pools_are_shown_as_they_are() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let home = cluster.disk.path().join("home");
    fs::create_dir(&home).expect("a folder");
    let control = alpha.socket().parent().expect("a folder").join("sessions");
    let script = STORAGE.replace("HOST", &alpha.key()).replace("CONTROL", control.to_str().expect("a path"));
    let made = alpha.shell(&script, &home);
    let said = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(made.status.success(), "{said}\n{}", String::from_utf8_lossy(&made.stderr));
    let key = said.lines().last().expect("a key").to_owned();
    let pools = format!("pools = [\"127.0.0.1:7500/{key}\", \"127.0.0.1:7599/{key}\"]");
    cluster.host_mut("alpha").restart_with(&pools);
    let alpha = cluster.host("alpha");
    let mount = home.join("mnt");
    let settings = json!({ "admin": token(alpha, "adam", "admin"), "key": key, "mount": mount });
    browse(&cluster, alpha, "storage.mjs", settings);
    alpha.exec("umount", &["-l", mount.to_str().expect("a path")]);
}

/// `whimbrel web` on alpha, of alpha itself, beta, a host that is not there and one that knows not its token.
#[test]
fn one_page_shows_several_hosts_and_acts_on_each_with_its_own_token() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let far = format!("{}:7443", cluster.lab.host("beta").address());
    cluster.host_mut("beta").restart_with(&format!("api_listen = \"{far}\"\n"));
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    Guest { address: None, ..Guest::small("far") }.run(&cluster, beta);
    let folder = cluster.disk.path().join("page");
    fs::create_dir(&folder).expect("a folder");
    fs::write(folder.join("good.token"), token(beta, "olga", "operator")).expect("a file");
    fs::write(folder.join("stale.token"), "whimbrel_nobody\n").expect("a file");
    let log = beta.log_text();
    let print = log.split("fingerprint=").nth(1).and_then(|rest| rest.split_whitespace().next());
    let print = format!("fingerprint={}", print.expect("a fingerprint in the log"));
    let gone = far.replace("7443", "7999");
    let script = format!(
        "cd '{}' && '{}' --json --socket '{}' web local 'beta=https://{far},token=good.token,{print}' \
         'gone=https://{gone},token=good.token' 'stale=https://{far},token=stale.token,{print}' >said 2>&1",
        folder.display(),
        command_line().display(),
        alpha.socket().display()
    );
    let _page = alpha.start_program("sh", &["-c", &script]);
    let deadline = Instant::now() + PATIENCE;
    let served: serde_json::Value = loop {
        let said = fs::read_to_string(folder.join("said")).unwrap_or_default();
        match serde_json::from_str(&said) {
            Ok(served) => break served,
            Err(_) => assert!(Instant::now() < deadline, "no page: {said}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(served["hosts"].as_array().map(Vec::len), Some(4), "{served}");
    assert!(!served.to_string().contains("whimbrel_"), "a token of a host is shown: {served}");
    let settings = json!({ "url": served["address"], "password": served["password"] });
    browse(&cluster, alpha, "hosts.mjs", settings);
    assert!(beta.run(&["ls"]).contains("from-afar"));
    let audit = fs::read_to_string(beta.data().join("audit/audit.jsonl")).expect("an audit log");
    assert!(audit.lines().any(|line| line.contains("token olga") && line.contains("checkpoint")), "{audit}");
}

#[test]
fn a_thousand_machines_are_listed_and_the_first_load_is_small() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    Guest { address: None, ..Guest::small("web") }.run(&cluster, alpha);
    alpha.run(&["stop", "web", "--kill"]);
    let (machines, admin) = (alpha.data().join("machines"), token(alpha, "adam", "admin"));
    let record = fs::read(machines.join("web/machine.json")).expect("a record");
    let mut record: serde_json::Value = serde_json::from_slice(&record).expect("a record as JSON");
    // A record that was written by hand has no checksum.
    record.as_object_mut().expect("an object").remove("check");
    let mut add = |numbers: std::ops::Range<u32>| {
        for number in numbers {
            let folder = machines.join(format!("web-{number}"));
            fs::create_dir(&folder).expect("a folder for a machine");
            record["name"] = format!("web-{number}").into();
            fs::write(folder.join("machine.json"), record.to_string()).expect("a record");
        }
    };
    for (many, range) in [(200, 1..200), (1000, 200..1000)] {
        cluster.host_mut("alpha").kill_daemon();
        add(range);
        cluster.host_mut("alpha").start_daemon();
        let alpha = cluster.host("alpha");
        assert_eq!(alpha.machines().len(), many);
        browse(&cluster, alpha, "many.mjs", json!({ "admin": admin, "machines": many }));
    }
}
