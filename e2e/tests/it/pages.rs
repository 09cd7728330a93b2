//! Pages of the manual whose blocks of commands are run, as they stand, on the hosts that they name.
//!
//! | A block that begins with | is |
//! |---|---|
//! | three backquotes and `sh`, and the name of a host if it is not the first | run on that host |
//! | three backquotes and `text`, and `not run:` with a reason if it has commands | shown |
//! | three backquotes and another word | the content of a file |
//! | `<!-- prepare`, and the name of a host, up to a line `-->` | run there, and not shown |
//!
//! The small guest is published as `debian/12`, so what a page does inside of the guest is told in its text
//! and not run. Each host has a home, a `/srv` and a `/mnt` of its own, knows the others by name, and gets to
//! them by ssh if the page does. `store` is a server with a bucket `vault`, for pages that name it. Variables
//! of a block are there in the next one on that host, as in a shell that stays open. Files of keys and
//! addresses, which a page tells its reader to copy, are copied after each block.

use crate::{
    bucket::S3,
    containers,
    images::{Server, sources},
};
use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};
use whimbrel_e2e::{Cluster, HostProcess, Ssh};
use whimbrel_testkit::guest::{GuestFiles, PublishedImage};

/// Variables that a block sets are kept for the next one.
const SHELL: &str = "set -a\nif [ -e .variables ]; then . ./.variables; fi\n\
                     trap 'cd \"$HOME\" && export -p >.variables' EXIT\n";
/// Programs whose name at the beginning of a line makes it a command.
const PROGRAMS: &[&str] = &[
    "whimbrel",
    "apt-get",
    "cargo",
    "cp",
    "curl",
    "openssl",
    "pip",
    "qemu-system-x86_64",
    "ssh",
    "systemctl",
];

/// What a block is for.
#[derive(Clone, Debug, PartialEq)]
enum Use {
    /// Commands of a host: the first, if none is named.
    Run(Option<String>),
    /// Commands of a host that the page does not show.
    Prepare(Option<String>),
    /// Shown; with a reason if it has commands.
    Show(Option<String>),
}

/// A block of a page.
struct Block {
    purpose: Use,
    line: usize,
    text: String,
}

/// Hosts that a page begins with.
#[derive(Clone, Copy)]
pub(crate) enum Hosts<'a> {
    /// Their daemons run and trust each other.
    Running(&'a [&'a str]),
    /// The page starts the daemons, whose folders are at the usual places.
    Bare(&'a [&'a str]),
}

impl<'a> Hosts<'a> {
    fn names(self) -> &'a [&'a str] {
        match self {
            Self::Running(names) | Self::Bare(names) => names,
        }
    }
}

/// The folder of the manual.
pub(crate) fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// What the first line of a block says of it; none if the line begins no block.
fn purpose(line: &str) -> Option<Result<Use, String>> {
    if let Some(host) = line.strip_prefix("<!-- prepare") {
        return Some(Ok(Use::Prepare(host.split_whitespace().next().map(str::to_owned))));
    }
    let kind = line.strip_prefix("```")?;
    let (word, rest) = kind.split_once(' ').unwrap_or((kind, ""));
    Some(match (word, rest.strip_prefix("not run: ")) {
        ("sh", None) if rest.is_empty() => Ok(Use::Run(None)),
        ("sh", None) => Ok(Use::Run(Some(rest.to_owned()))),
        ("text", Some(reason)) => Ok(Use::Show(Some(reason.to_owned()))),
        ("text" | "toml" | "json" | "python" | "yaml" | "ini", None) if rest.is_empty() => {
            Ok(Use::Show(None))
        }
        _ => Err(format!("a block of {kind:?}")),
    })
}

/// Blocks of a page, in order.
fn blocks(page: &str) -> Vec<Block> {
    let text = fs::read_to_string(docs().join(page)).expect("a page");
    let (mut blocks, mut open) = (Vec::new(), None::<Block>);
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        match open.take() {
            Some(block) if line == "-->" || line.starts_with("```") => blocks.push(block),
            Some(block) => open = Some(Block { text: block.text + line + "\n", ..block }),
            None => {
                let purpose =
                    purpose(line).map(|said| said.unwrap_or_else(|no| panic!("{page}:{number}: {no}")));
                assert!(!line.starts_with("    "), "{page}:{number}: a block without backquotes");
                open = purpose.map(|purpose| Block { purpose, line: number, text: String::new() });
            }
        }
    }
    assert!(open.is_none(), "{page}: a block without an end");
    blocks
}

/// Whether a text has a line that a reader would take for a command.
fn has_commands(text: &str) -> bool {
    text.lines().any(|line| line.split_whitespace().next().is_some_and(|word| PROGRAMS.contains(&word)))
}

/// Pages of a folder that show commands and do not say why these are not run.
pub(crate) fn silent(page: &str) -> Vec<String> {
    let shown = blocks(page).into_iter().filter(|block| block.purpose == Use::Show(None));
    shown.filter(|block| has_commands(&block.text)).map(|block| format!("{page}:{}", block.line)).collect()
}

/// Whether a page has commands that are run.
pub(crate) fn is_run(page: &str) -> bool {
    blocks(page).iter().any(|block| matches!(block.purpose, Use::Run(_)))
}

/// Runs a page, which is named as from `docs`.
pub(crate) fn follow(page: &str, hosts: Hosts<'_>) {
    let mut cluster = Cluster::start(hosts.names());
    let server = Server::start(&cluster);
    let image = PublishedImage::small().expect("an image of the small guest");
    server.publish("debian", &image);
    let files = format!("user = \"me\"\nfiles = {{ \"12\" = {:?} }}", image.file);
    let mut settings = sources(&cluster, &[("debian", "folder", &files)]);
    let homes = tempfile::tempdir().expect("a directory");
    disks(&image, homes.path());
    cluster.hosts.iter().for_each(|host| settle(host, &cluster, homes.path()));
    let blocks = blocks(page);
    let has = |word: &str| blocks.iter().any(|block| block.text.contains(word));
    if has("image import app.tar") {
        settings = containers::kernel_settings() + &settings;
    }
    let _ssh = has("ssh ").then(|| Ssh::everywhere(&cluster));
    let _store = has("//store:").then(|| S3::start(&cluster));
    match hosts {
        Hosts::Running(names) => cluster.host_mut(names[0]).restart_with(&settings),
        Hosts::Bare(names) => names.iter().for_each(|name| bare(cluster.host_mut(name), &settings)),
    }
    let mut run = 0;
    for block in blocks {
        let (host, shown) = match block.purpose {
            Use::Run(host) => (host, 1),
            Use::Prepare(host) => (host, 0),
            Use::Show(_) => continue,
        };
        let host = cluster.host(host.as_deref().unwrap_or(hosts.names()[0]));
        let home = homes.path().join(host.name());
        let socket = if matches!(hosts, Hosts::Bare(_)) { "unset WHIMBREL_SOCKET\n" } else { "" };
        let output = host.shell(&format!("{SHELL}{socket}{}", block.text), &home);
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "docs/{page}:{} failed:\n{}{}{}",
            block.line,
            said(&output.stdout),
            said(&output.stderr),
            cluster.hosts.iter().map(HostProcess::log_text).collect::<String>(),
        );
        carry(&home, homes.path());
        run += shown;
    }
    assert!(run > 0, "{page} has no commands");
    println!("{run} command blocks run");
}

/// Disks of the small guest by the names that pages have for them, in a folder that all homes share.
fn disks(image: &PublishedImage, homes: &Path) {
    let folder = homes.join("disks");
    fs::create_dir(&folder).expect("a folder");
    let (packed, raw) = (image.folder.join(&image.file), folder.join("disk.raw"));
    let mut convert = std::process::Command::new("qemu-img");
    convert.args(["convert", "-O", "raw"]).arg(&packed).arg(&raw);
    assert!(convert.status().expect("qemu-img").success());
    for name in ["old.qcow2", "old-data.qcow2", "disk.qcow2", "debian-12-generic-amd64.qcow2"] {
        fs::copy(&packed, folder.join(name)).expect("an image of another program");
    }
    for name in ["web.img", "debian.iso", "rescue.iso", "drivers.iso"] {
        fs::hard_link(&raw, folder.join(name)).expect("another name");
    }
    let boot = GuestFiles::with_qemu_ga().expect("qemu-ga on this host: scripts/bootstrap installs it");
    for (file, name) in [(&boot.kernel, "vmlinux"), (&boot.initrd, "initrd")] {
        fs::copy(file, folder.join(name)).expect("a file to boot from");
    }
}

/// Gives a host its home, folders of its own, and the addresses of all hosts by their names.
fn settle(host: &HostProcess, cluster: &Cluster, homes: &Path) {
    let home = homes.join(host.name());
    fs::create_dir(&home).expect("a home");
    for file in fs::read_dir(homes.join("disks")).expect("the disks").flatten() {
        symlink(file.path(), home.join(file.file_name())).expect("a disk in the home");
    }
    let line = |host: &HostProcess| {
        let address = host.address();
        format!("{} {}\n", address.split(':').next().expect("an address"), host.name())
    };
    let names = home.join(".hosts");
    let local = "127.0.0.1 localhost\n".to_owned();
    let store = format!("{} store\n", cluster.lab.host("client").address());
    let all = cluster.hosts.iter().map(line).chain([local, store]).collect::<String>();
    fs::write(&names, all).expect("a file of names");
    host.exec("mount", &["--bind", names.to_str().expect("a path in UTF-8"), "/etc/hosts"]);
    // Sockets of sessions are there, for all of root's of a machine.
    host.exec("mkdir", &["-p", "/run/whimbrel"]);
    for place in ["/srv", "/mnt", "/run/whimbrel", "/var/cache"] {
        host.exec("mount", &["-t", "tmpfs", "whimbrel", place]);
    }
}

/// Ends the daemon of a host, and gives the host places of its own for the next one and for its settings.
fn bare(host: &mut HostProcess, settings: &str) {
    host.stop_daemon();
    let script = "mkdir /mnt/etc && cp -a /etc/. /mnt/etc && cp /etc/hosts /mnt/etc/hosts\n\
                  mount --bind /mnt/etc /etc && mkdir -p /etc/whimbrel\n\
                  mkdir /mnt/run && mount --bind /mnt/run /run && mkdir /run/whimbrel\n\
                  mount -t tmpfs whimbrel /mnt && mount -t tmpfs whimbrel /var/lib && mount -t tmpfs whimbrel /dev/shm";
    host.exec("sh", &["-euc", script]);
    host.exec("sh", &["-euc", "echo \"$1\" >/etc/whimbrel/host.toml", "sh", settings]);
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
