//! An S3 server in a process of its own, for a pool's tier: the one that the pool's tests use, with a log of
//! the requests.
//!
//! Its program is an example of `whimbrel-pool`, which nothing else here builds; so it is built when it is
//! needed, in the profile of this program and beside it.

use crate::hosts::program;
use anyhow::{Context as _, Result, ensure};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use whimbrel_testkit::lab::{Namespace, Process};

const BUCKET: &str = "bucket";
/// What the server asks for, as the environment of who comes to it.
pub(super) const SETTINGS: [(&str, &str); 2] =
    [("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test-secret")];

/// The server; ends with the value.
pub(super) struct S3 {
    dir: PathBuf,
    address: String,
    _process: Process,
}

/// The server's program.
fn server() -> Result<PathBuf> {
    let program = program()?;
    let folder = program.parent().context("the program lies nowhere")?;
    let target = folder.parent().context("the program lies in no target folder")?;
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args([
        "build",
        "--quiet",
        "--locked",
        "-p",
        "whimbrel-pool",
        "--example",
        "s3_server",
        "--target-dir",
    ]);
    cargo.arg(target).current_dir(env!("CARGO_MANIFEST_DIR"));
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    ensure!(cargo.status().context("cargo")?.success(), "the S3 server was not built");
    Ok(folder.join("examples/s3_server"))
}

impl S3 {
    /// Starts one on the loopback device of a namespace; what it keeps is below `dir`.
    pub(super) fn start(namespace: &Namespace, dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir.join("root").join(BUCKET))?;
        let mut command = Command::new(server()?);
        command.arg(dir.join("root")).arg("127.0.0.1:0").arg(dir.join("log"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = namespace.start(command)?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().context("no output")?).read_line(&mut line)?;
        ensure!(!line.is_empty(), "the S3 server ended");
        Ok(Self { dir: dir.to_owned(), address: line.trim().to_owned(), _process: process })
    }

    /// How it is named by the benefactor called `name`.
    pub(super) fn url(&self, name: &str) -> String {
        format!("s3://{BUCKET}/{name}?endpoint=http://{}", self.address)
    }

    /// Requests so far.
    pub(super) fn requests(&self) -> Result<usize> {
        Ok(fs::read_to_string(self.dir.join("log"))?.lines().count())
    }

    /// Bytes of the packs that a benefactor has there.
    pub(super) fn packed(&self, name: &str) -> Result<u64> {
        segments(&self.dir.join("root").join(BUCKET).join(name)).map(|all| all.iter().sum())
    }
}

/// Lengths of the segments in a folder, if there is one, the newest last.
pub(super) fn segments(dir: &Path) -> Result<Vec<u64>> {
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        // One that was removed meanwhile is none.
        let Ok(about) = entry.metadata() else { continue };
        if entry.path().extension().is_some_and(|extension| extension == "seg") {
            found.insert(entry.file_name(), about.len());
        }
    }
    Ok(found.into_values().collect())
}
