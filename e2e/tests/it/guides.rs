//! Guides: every block of commands of `docs/guides` is run, as it stands, on the host that it names.
//!
//! A block begins with three backquotes and `sh`, and the name of its host if that is not alpha. The small
//! guest is published as `debian/12`, so what a guide does inside of the guest is told in its text and not
//! run. Each host has a home and a `/srv` of its own, and knows the others by name. Files of keys and
//! addresses, which a guide tells its reader to copy, are copied after each block.

use crate::images::{Server, sources};
use std::{
    fs,
    path::{Path, PathBuf},
};
use whimbrel_e2e::{Cluster, HostProcess};
use whimbrel_testkit::guest::PublishedImage;

/// A block of commands.
struct Block {
    host: String,
    line: usize,
    commands: String,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/guides")
}

/// Blocks of commands of a page, in order. Other blocks show text.
fn blocks(page: &str) -> Vec<Block> {
    let text = fs::read_to_string(folder().join(page)).expect("a page");
    let (mut blocks, mut open) = (Vec::new(), None);
    for (number, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(kind), None) => {
                let host = match kind.split_whitespace().collect::<Vec<_>>()[..] {
                    ["sh"] => Some("alpha".to_owned()),
                    ["sh", host] => Some(host.to_owned()),
                    ["text"] => None,
                    _ => panic!("{page}:{}: a block of {kind:?}", number + 1),
                };
                open = Some((host, Block { host: String::new(), line: number + 1, commands: String::new() }));
            }
            (Some(_), Some(_)) => {
                if let Some((Some(host), block)) = open.take() {
                    blocks.push(Block { host, ..block });
                }
            }
            (None, Some((_, block))) => {
                block.commands.push_str(line);
                block.commands.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{page}: a block without an end");
    blocks
}

/// Runs a page on hosts of these names.
fn follow(page: &str, hosts: &[&str]) {
    let mut cluster = Cluster::start(hosts);
    let server = Server::start(&cluster);
    let image = PublishedImage::small().expect("an image of the small guest");
    server.publish("debian", &image);
    let files = format!("user = \"me\"\nfiles = {{ \"12\" = {:?} }}", image.file);
    let settings = sources(&cluster, &[("debian", "folder", &files)]);
    cluster.host_mut("alpha").restart_with(&settings);
    let homes = tempfile::tempdir().expect("a directory");
    cluster.hosts.iter().for_each(|host| settle(host, &cluster, homes.path()));
    for name in ["alpha/old.qcow2", "alpha/old-data.qcow2"] {
        let image = image.folder.join(&image.file);
        fs::copy(image, homes.path().join(name)).expect("an image of another program");
    }
    let blocks = blocks(page);
    assert!(!blocks.is_empty(), "{page} has no commands");
    for block in &blocks {
        let output = cluster.host(&block.host).shell(&block.commands, &homes.path().join(&block.host));
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "docs/guides/{page}:{} failed:\n{}{}{}",
            block.line,
            said(&output.stdout),
            said(&output.stderr),
            cluster.hosts.iter().map(HostProcess::log_text).collect::<String>(),
        );
        carry(&homes.path().join(&block.host), homes.path());
    }
    println!("{} command blocks run", blocks.len());
}

/// Gives a host its home, a `/srv`, and the addresses of all hosts by their names.
fn settle(host: &HostProcess, cluster: &Cluster, homes: &Path) {
    let home = homes.join(host.name());
    fs::create_dir(&home).expect("a home");
    let line = |host: &HostProcess| {
        let address = host.address();
        format!("{} {}\n", address.split(':').next().expect("an address"), host.name())
    };
    let names = home.join(".hosts");
    fs::write(&names, cluster.hosts.iter().map(line).collect::<String>()).expect("a file of names");
    host.exec("mount", &["--bind", names.to_str().expect("a path in UTF-8"), "/etc/hosts"]);
    host.exec("mount", &["-t", "tmpfs", "srv", "/srv"]);
}

/// Copies files of keys and addresses from one home to all others.
fn carry(from: &Path, homes: &Path) {
    let is_carried = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "key" || kind == "address");
    let files = fs::read_dir(from).expect("a home").flatten().map(|entry| entry.path());
    for file in files.filter(is_carried) {
        let name = file.file_name().expect("a name");
        let others = fs::read_dir(homes).expect("the homes").flatten().map(|entry| entry.path().join(name));
        for other in others.filter(|other| *other != file) {
            fs::copy(&file, other).expect("a copied file");
        }
    }
}

#[test]
fn the_guide_of_the_first_hour_works() {
    follow("first-hour.md", &["alpha"]);
}

#[test]
fn the_guide_of_two_hosts_works() {
    follow("two-hosts.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_a_protected_database_works() {
    follow("protect-a-database.md", &["alpha", "beta", "gamma"]);
}

#[test]
fn the_guide_of_backups_works() {
    follow("backups.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_sandboxes_works() {
    follow("sandboxes.md", &["alpha"]);
}

#[test]
fn the_guide_of_home_and_office_works() {
    follow("home-and-office.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_a_pool_for_a_lab_works() {
    follow("lab-pool.md", &["alpha", "beta", "gamma"]);
}

#[test]
fn the_guide_from_libvirt_works() {
    follow("from-libvirt.md", &["alpha"]);
}

#[test]
fn the_guide_of_a_host_that_others_use_works() {
    follow("security.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_a_host_with_kvm_works() {
    follow("kvm.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_troubleshooting_works() {
    follow("troubleshooting.md", &["alpha"]);
}

#[test]
fn no_guide_is_left_out_of_the_list_or_of_the_tests() {
    let list = fs::read_to_string(folder().join("README.md")).expect("the list");
    let this = include_str!("guides.rs");
    for entry in fs::read_dir(folder()).expect("the guides") {
        let name = entry.expect("a guide").file_name().into_string().expect("a name in UTF-8");
        if name != "README.md" {
            assert!(list.contains(&format!("({name})")), "{name} is not in docs/guides/README.md");
            assert!(this.contains(&format!("follow({name:?}")), "{name} is not run");
        }
    }
}
