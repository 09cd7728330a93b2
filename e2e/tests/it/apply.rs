//! A file of machines, applied: once it does something, twice it does nothing, and a wrong line stops all.

use std::fs;
use whimbrel_e2e::{Cluster, HostProcess};

/// What an application of the file did, or would do, with `web`.
fn steps(host: &HostProcess, arguments: &[&str]) -> Vec<String> {
    let outcomes = host.json(arguments);
    let steps = outcomes[0]["steps"].as_array().unwrap_or_else(|| panic!("{outcomes}"));
    steps.iter().map(|step| step.as_str().expect("a word").to_owned()).collect()
}

#[test]
fn a_file_is_applied_once_and_a_wrong_line_stops_all_of_it() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let [disk, file] = ["web.raw", "machines.toml"].map(|name| cluster.disk.path().join(name));
    fs::write(&disk, vec![0; 1 << 20]).expect("a disk");
    let text = format!("[web]\nmemory = \"64M\"\ndisk = [{disk:?}]\nlabel = [\"tier=front\"]\n");
    let write = |text: &str| fs::write(&file, text).expect("a file of machines");
    let apply = ["apply", file.to_str().expect("a path in UTF-8")];
    let dry = [&apply[..], &["--dry-run"]].concat();

    write(&format!("{text}\n[other]\nmemmory = \"64M\"\n"));
    let refusal = alpha.refuse(&apply);
    assert!(refusal.code == 2 && refusal.text.contains("machines.toml:7"), "{refusal:?}");
    assert_eq!(alpha.machines(), []);

    write(&text);
    assert_eq!(steps(alpha, &dry), ["create"]);
    assert_eq!(alpha.machines(), []);
    assert_eq!(steps(alpha, &apply), ["create"]);
    assert_eq!(alpha.machines(), [("web".to_owned(), "running".to_owned())]);
    assert_eq!(steps(alpha, &apply), Vec::<String>::new());

    write(&text.replace("front", "back"));
    alpha.run(&["stop", "web", "--kill"]);
    assert_eq!(steps(alpha, &apply), ["change its settings", "start"]);
    assert_eq!(alpha.json(&["inspect", "web"])["settings"]["labels"]["tier"], "back");
    assert_eq!(steps(alpha, &apply), Vec::<String>::new());

    write(&text.replace("64M", "128M"));
    let refusal = alpha.refuse(&apply);
    assert!(refusal.code == 2 && refusal.text.contains("machines.toml:1"), "{refusal:?}");
}
