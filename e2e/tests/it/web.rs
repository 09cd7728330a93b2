//! The page for browsers, in a headless Chromium on the host: `web/test` says what is done there.

use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use whimbrel_e2e::{Cluster, Guest, HostProcess, PATIENCE, WEB};
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
    settings["url"] = format!("http://{WEB}/").into();
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
