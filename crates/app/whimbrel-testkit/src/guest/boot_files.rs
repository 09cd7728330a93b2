//! Boot files of the small guest: kernel, and initial RAM disk with busybox, modules, test agent and guest
//! agent. Boots in two to three seconds without hardware virtualisation.

use super::{
    GuestError,
    artifact_cache::{once, run, workspace},
    kernel::{Flavour, Kernel},
};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};
use whimbrel_container::Archive;

const INIT: &str = include_str!("init.sh");
const BUSYBOX: &str = "/bin/busybox";
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Files with which QEMU starts a small guest: `-kernel`, `-initrd`.
#[derive(Debug)]
pub struct GuestFiles {
    /// Path of the kernel.
    pub kernel: PathBuf,
    /// Path of the initial RAM disk.
    pub initrd: PathBuf,
}

impl GuestFiles {
    /// Returns the files. They are built on the first use and whenever the test agent or the recipe changed.
    /// Later uses, in this process or another, cost a few milliseconds.
    ///
    /// # Panics
    /// If they cannot be built, since no test can run then.
    pub fn get() -> &'static GuestFiles {
        static FILES: OnceLock<GuestFiles> = OnceLock::new();
        FILES.get_or_init(|| Self::of(Flavour::Cloud))
    }

    /// Files of that guest with a kernel that has drivers for the devices of real computers too.
    ///
    /// # Panics
    /// If they cannot be built.
    pub fn generic() -> GuestFiles {
        Self::of(Flavour::Generic)
    }

    fn of(flavour: Flavour) -> Self {
        Self::build(flavour).unwrap_or_else(|error| panic!("cannot build a guest: {error:?}"))
    }

    fn build(flavour: Flavour) -> Result<Self, GuestError> {
        let kernel = Kernel::get(flavour)?;
        let busybox = read(Path::new(BUSYBOX))?;
        let name = format!("initrd-{flavour:?}-{}", key(&[&busybox])?);
        let place = once("guest-files", &name, |place| {
            let helper = build("whimbrel-guest-agent", "whimbrel-guest")?;
            let initrd = archive(&kernel, &busybox, &read(&build_test_agent()?)?, &read(&helper)?)?;
            let path = place.join("initrd");
            fs::write(&path, initrd).map_err(GuestError::file("write", &path))
        })?;
        Ok(Self { kernel: kernel.image, initrd: place.join("initrd") })
    }
}

/// Short digest of all inputs that are not downloaded: the recipe, the sources of the agents, `more`.
pub(super) fn key(more: &[&[u8]]) -> Result<String, GuestError> {
    let mut hasher = blake3::Hasher::new();
    let mut sources = Vec::new();
    for package in ["guest/test-agent", "guest/agent", "crates/machine/whimbrel-guest-protocol"] {
        let package = workspace().join(package);
        sources.push(package.join("Cargo.toml"));
        files_below(&package.join("src"), &mut sources)?;
    }
    sources.sort();
    for source in sources {
        hasher.update(blake3::hash(&read(&source)?).as_bytes());
    }
    for text in
        [INIT.as_bytes(), include_bytes!("boot_files.rs"), include_bytes!("kernel.rs")].iter().chain(more)
    {
        hasher.update(blake3::hash(text).as_bytes());
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

fn files_below(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), GuestError> {
    let entries = fs::read_dir(directory).map_err(GuestError::file("list", directory))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() { files_below(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

/// Compiles the test agent as a static program and returns its path.
pub(super) fn build_test_agent() -> Result<PathBuf, GuestError> {
    build("whimbrel-test-agent", "whimbrel-test-agent")
}

/// Compiles a package of the workspace as a static program and returns the path of `binary`.
fn build(package: &str, binary: &str) -> Result<PathBuf, GuestError> {
    let target_dir = workspace().join("target/guest");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(workspace());
    // The flags of the surrounding build do not apply to the guest.
    cargo
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_BOOTSTRAP")
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    cargo.args(["build", "--quiet", "--release", "--package", package, "--target", TARGET]);
    cargo.args(["--config", "profile.release.opt-level='s'", "--config", "profile.release.strip=true"]);
    run(cargo.arg("--target-dir").arg(&target_dir))?;
    Ok(target_dir.join(TARGET).join("release").join(binary))
}

/// Builds the initial RAM disk. Uncompressed: the few MiB load faster than a guest without hardware
/// virtualisation could decompress them.
fn archive(kernel: &Kernel, busybox: &[u8], witness: &[u8], helper: &[u8]) -> Result<Vec<u8>, GuestError> {
    let mut archive = Archive::new();
    for directory in ["bin", "proc", "sys", "dev", "mnt"] {
        archive.directory(directory);
    }
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("bin/busybox", 0o755, busybox);
    archive.file("bin/witness", 0o755, witness);
    archive.file("bin/whimbrel-guest", 0o755, helper);
    archive.symlink("bin/muncher", "witness");
    kernel.add_modules(&mut archive)?;
    Ok(archive.finish())
}

fn read(path: &Path) -> Result<Vec<u8>, GuestError> {
    fs::read(path).map_err(GuestError::file("read", path))
}
