//! The programs that people use instead, over the same link: rsync from its daemon, zstd.

use super::sites::{ALPHA, Sites};
use anyhow::{Context as _, Result, ensure};
use std::fs::{self, File};
use std::io::{BufWriter, Read as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use whimbrel_core::{PAGE_SIZE, is_zero};
use whimbrel_testkit::lab::Process;

const RSYNC_PORT: u16 = 8730;
const PATIENCE: Duration = Duration::from_secs(10);

/// An rsync daemon at alpha that offers a folder.
pub(super) struct Rsync {
    _daemon: Process,
}

impl Rsync {
    /// Offers `folder` at alpha.
    pub(super) fn serve(sites: &Sites, folder: &Path) -> Result<Self> {
        let config = sites.disk().join("rsyncd.conf");
        let folder = folder.display();
        let pid = sites.disk().join("rsyncd.pid");
        let text = format!(
            "pid file = {}\nuse chroot = no\nuid = 0\ngid = 0\n[images]\npath = {folder}\nread only = yes\n",
            pid.display()
        );
        fs::write(&config, text)?;
        let mut command = Command::new("rsync");
        command.args(["--daemon", "--no-detach", &format!("--port={RSYNC_PORT}")]);
        command.arg(format!("--address={ALPHA}")).arg(format!("--config={}", config.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let daemon = sites.program("alpha", command)?;
        let (address, deadline) = (SocketAddr::from((ALPHA, RSYNC_PORT)), Instant::now() + PATIENCE);
        while sites.network("alpha").connect(address, PATIENCE).is_err() {
            ensure!(Instant::now() < deadline, "rsync does not listen; scripts/bootstrap bench installs it");
            sleep(Duration::from_millis(20));
        }
        Ok(Self { _daemon: daemon })
    }

    /// Fetches the folder `version` of what is offered, at beta, compressed, as difference to the files in
    /// `basis` if there is one. What came is thrown away.
    pub(super) fn fetch(
        &self,
        sites: &Sites,
        version: &str,
        basis: Option<&Path>,
        block: Option<u32>,
    ) -> Result<()> {
        let to = tempfile::Builder::new().prefix("rsync").tempdir_in(sites.disk())?;
        let mut words = vec!["-rzS".to_owned(), "--ignore-times".into(), "--no-whole-file".into()];
        words.extend(block.map(|block| format!("--block-size={block}")));
        words.extend(basis.map(|basis| format!("--compare-dest={}", basis.display())));
        words.push(format!("rsync://{ALPHA}:{RSYNC_PORT}/images/{version}/"));
        words.push(to.path().display().to_string());
        sites
            .network("beta")
            .spawn(move || run(Command::new("rsync").args(words)))
            .join()
            .ok()
            .context("rsync")?
    }
}

/// Runs a program to its end.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output =
        output.with_context(|| format!("cannot start {program}; scripts/bootstrap bench installs it"))?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} failed: {}", words.trim());
    Ok(())
}

/// Bytes of `file` compressed by `zstd -3`.
pub(super) fn zstd_bytes(file: &Path) -> Result<u64> {
    let packed = file.with_extension("zst");
    run(Command::new("zstd").args(["-q", "-f", "-3"]).arg(file).arg("-o").arg(&packed))?;
    let bytes = fs::metadata(&packed)?.len();
    fs::remove_file(packed)?;
    Ok(bytes)
}

/// A file beside `image` with the pages of it that are not zero.
pub(super) fn without_zeros(image: &Path) -> Result<PathBuf> {
    let path = image.with_extension("pages");
    let (mut from, mut to) = (File::open(image)?, BufWriter::new(File::create(&path)?));
    let mut chunk = vec![0; PAGE_SIZE << 8];
    loop {
        let len = from.read(&mut chunk)?;
        if len == 0 {
            to.flush()?;
            return Ok(path);
        }
        for page in chunk[..len].chunks(PAGE_SIZE).filter(|page| !is_zero(page)) {
            to.write_all(page)?;
        }
    }
}

/// A store of casync's: chunks of a file cut by its content.
pub(super) struct Casync {
    folder: TempDir,
}

impl Casync {
    /// An empty store in `folder`.
    pub(super) fn new(folder: &Path) -> Result<Self> {
        Ok(Self { folder: tempfile::Builder::new().prefix("casync").tempdir_in(folder)? })
    }

    /// Keeps a file; how many bytes that adds, packed chunks and the list of all of them: what another host
    /// would fetch.
    pub(super) fn keep(&self, file: &Path) -> Result<u64> {
        let (store, index) = (self.folder.path().join("store.castr"), self.folder.path().join("index.caibx"));
        let before = tree_bytes(&store)?;
        let mut command = Command::new("casync");
        command.arg("make").arg(format!("--store={}", store.display())).arg(&index).arg(file);
        run(&mut command)?;
        Ok(tree_bytes(&store)? - before + fs::metadata(index)?.len())
    }
}

/// Bytes of all files below `folder`, none if there is no such folder.
fn tree_bytes(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    if folder.is_dir() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            bytes += if metadata.is_dir() { tree_bytes(&entry.path())? } else { metadata.len() };
        }
    }
    Ok(bytes)
}
