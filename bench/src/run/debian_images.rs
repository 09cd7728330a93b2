//! `launch.cached` and `image.store`: images of Debian as people use them. A launch counts until sshd in the
//! guest greets; a store, the bytes that it keeps of images that share a release.
//!
//! The images are made of Debian's packages, once, which takes minutes each.

use super::Context;
use crate::harness::{Goal, Row, Samples};
use crate::hosts::{Daemon, Hosts, allocated};
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::io::Read as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_testkit::guest::PublishedImage;
use whimbrel_testkit::lab::Namespace;

/// Five images of one release: the plain one, and what people add to it.
const IMAGES: [(&str, &[&str]); 5] = [
    ("plain", &[]),
    ("web", &["nginx-light"]),
    ("code", &["git", "python3-venv"]),
    ("store", &["redis-server", "sqlite3"]),
    ("work", &["build-essential"]),
];
const PATIENCE: Duration = Duration::from_secs(900);
const PAUSE: Duration = Duration::from_millis(50);
/// First bytes that sshd sends (RFC 4253, section 4.2).
const GREETING: &[u8] = b"SSH-";

/// The row of launches.
pub(super) fn launch(context: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha"])?;
    let (alpha, place) = (hosts.get("alpha")?, hosts.lab.host("alpha"));
    let image = PublishedImage::debian()?;
    let file = image.folder.join(&image.file);
    alpha.run(&["import", text(&file)?, "image.debian.12"])?;
    let key = hosts.disk().join("id_ed25519");
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key).status()?;
    ensure!(made.success(), "ssh-keygen failed");
    let key = key.with_extension("pub");
    let mut seconds = Vec::new();
    for _ in 0..context.times(5, 1) {
        let begun = Instant::now();
        alpha.run(&["launch", "debian/12", "web", "--disk-size", "4G", "--ssh-key", text(&key)?])?;
        wait_for_sshd(alpha, place)?;
        seconds.push(begun.elapsed().as_secs_f64());
        alpha.discard("web")?;
    }
    let row = Row::new("launch.cached", "Debian 12, until sshd greets", "s", &Samples::new(seconds));
    Ok(vec![row.goal(Goal::AtMost(25.0))])
}

/// The row of stored images.
pub(super) fn store(_: &Context) -> Result<Vec<Row>> {
    let hosts = Hosts::start(&["alpha"])?;
    let alpha = hosts.get("alpha")?;
    let kept = || allocated(&alpha.data().join("store"));
    let (before, mut files) = (kept()?, 0);
    for (name, packages) in IMAGES {
        let image = PublishedImage::debian_with(name, packages)?;
        let file = image.folder.join(&image.file);
        files += fs::metadata(&file)?.len();
        alpha.run(&["import", text(&file)?, &format!("image.debian.{name}")])?;
    }
    let mb = |bytes: u64| Samples::new(vec![bytes as f64 / 1e6]);
    let case = format!("{} images of Debian 12", IMAGES.len());
    let row = Row::new("image.store", case, "MB", &mb(kept()? - before));
    Ok(vec![row.against("their qcow2 files", &mb(files)).goal(Goal::PeerAtMost(0.45))])
}

fn wait_for_sshd(alpha: &Daemon, place: &Namespace) -> Result<()> {
    let network = alpha.json(&["network", "show", "lan0"])?;
    let address = network["machines"][0]["address"].as_str().context("a machine without an address")?;
    let (address, deadline) = (format!("{address}:22").parse::<SocketAddr>()?, Instant::now() + PATIENCE);
    loop {
        if let Ok(mut stream) = place.connect(address, Duration::from_secs(1)) {
            let mut greeting = [0; GREETING.len()];
            stream.set_read_timeout(Some(PATIENCE))?;
            if stream.read_exact(&mut greeting).is_ok() && greeting == GREETING {
                return Ok(());
            }
        }
        ensure!(Instant::now() < deadline, "nobody takes connections at {address}");
        sleep(PAUSE);
    }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}
