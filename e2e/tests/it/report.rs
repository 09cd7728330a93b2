//! The report for a person who helps: secrets are planted everywhere, and none is in it.

use std::{fs, path::Path, process::Command};
use whimbrel_e2e::{Cluster, Guest};

/// What is planted. Each would be found as it stands here.
const NOTE: &str = "CANARY-note-7f3a";
const LABEL: &str = "CANARY-label-7f3a";
const APPENDED: &str = "db_password=CANARY-append-7f3a";
const LOGGED: &str = "CANARY-logged-7f3a";
const PEER: &str = "203.0.113.77";

/// Content of all files below a folder, one after another.
fn content(folder: &Path) -> String {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let one = |path: std::path::PathBuf| match path.is_dir() {
        true => content(&path),
        false => String::from_utf8_lossy(&fs::read(path).expect("a file")).into_owned(),
    };
    entries.map(one).collect::<Vec<_>>().join("\n")
}

#[test]
fn no_planted_secret_is_in_a_report_and_what_it_is_for_is() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let arguments = ["--note", NOTE, "--label", &format!("team={LABEL}")].map(str::to_owned).to_vec();
    Guest { arguments, ..Guest::small("web") }.run(&cluster, alpha);
    let token = alpha.run(&["token", "create", "ci", "--role", "viewer"]).trim().to_owned();
    alpha.run(&["checkpoint", "web", "--tag", "before", "--label", &format!("note={LABEL}")]);
    let files = cluster.files();
    let (kernel, initrd) = (files.kernel.to_str().expect("UTF-8"), files.initrd.to_str().expect("UTF-8"));
    let run = ["run", "db", "--memory", "192M", "--kernel", kernel, "--initrd", initrd, "--append", APPENDED];
    alpha.run(&run);
    let log = cluster.disk.path().join("daemon.log");
    let planted =
        format!("{}\nAuthorization: Bearer {token}\npassword={LOGGED} from {PEER}:7400\n", alpha.log_text());
    fs::write(&log, planted).expect("a log");

    let file = cluster.disk.path().join("report.tar.gz");
    let (file, log) = (file.to_str().expect("UTF-8"), log.to_str().expect("UTF-8"));
    alpha.run(&["report", "bundle", file, "--log", log]);
    let unpacked = cluster.disk.path().join("unpacked");
    fs::create_dir(&unpacked).expect("a folder");
    let tar = Command::new("tar").args(["-xzf", file, "-C"]).arg(&unpacked).status().expect("tar");
    assert!(tar.success());
    let whole = content(&unpacked);

    let private = fs::read_to_string(alpha.data().join("api-tokens.json")).expect("digests of tokens");
    let digest = private.split('"').find(|text| text.len() >= 43).expect("a digest");
    let (key, address) = (beta.key(), beta.address());
    let host = address.split(':').next().expect("an address");
    let canaries = [NOTE, LABEL, "CANARY-append", LOGGED, PEER, &token, digest, &key, &alpha.key(), host];
    for canary in canaries {
        let at = whole
            .find(canary)
            .map(|at| whole.get(at.saturating_sub(80)..at + 40).unwrap_or_default().to_owned());
        assert_eq!(at, None, "{canary:?} is in the report");
    }
    for expected in
        ["\"web\"", "\"db\"", "before", "whimbrel_", "machine.json", "\"doctor", "serving host=alpha"]
    {
        let listed = Command::new("tar").args(["-tzf", file]).output().expect("tar").stdout;
        let found =
            whole.contains(expected) || String::from_utf8_lossy(&listed).contains(expected.trim_matches('"'));
        assert!(found, "{expected} is not in the report:\n{}", String::from_utf8_lossy(&listed));
    }
    assert!(alpha.refuse(&["report", "bundle", file]).text.contains("already"));
}

#[test]
fn a_host_is_measured_by_daemons_of_its_own_which_leave_nothing() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let folder = cluster.disk.path().join("measured");
    fs::create_dir(&folder).expect("a folder");
    let measured =
        alpha.json(&["doctor", "--bench", folder.to_str().expect("a path in UTF-8"), "--clones", "10"]);
    let figures = measured["figures"].as_array().expect("figures");
    let all_positive = figures.iter().all(|figure| figure["median"].as_f64() > Some(0.0));
    assert!(figures.len() == 10 && all_positive, "{measured}");
    assert!(measured["host"].as_str().is_some_and(|host| host.contains("QEMU")), "{measured}");
    assert_eq!(fs::read_dir(&folder).expect("the folder").count(), 0, "files are left");
    alpha.exec("sh", &["-c", "! pgrep -f '[b]ench-one'"]);
    assert!(alpha.machines().is_empty());
}
