//! Conversion of an image by a confined `qemu-img`.
//!
//! The caller serves the image and the room for the disk with NBD, on sockets in a directory of the tool. So
//! the tool needs no path to either, paths in an image lead nowhere that it may read, and what it writes ends
//! where the room ends.

use super::{ImageError, ImageFormat};
use crate::{
    confinement::{Confinement, tool_user},
    process::Reaped,
};
use rustix::{
    fs::{MemfdFlags, memfd_create},
    process::Resource,
};
use serde_json::{Value, json};
use std::{
    env,
    fs::File,
    io::{self, Read, Seek},
    os::unix::fs::chown,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

const PROGRAM: &str = "qemu-img";
/// Greatest disk: 16 TiB, where the usual file systems end.
const DISK_MAX: u64 = 16 << 40;
/// Address space of the tool, of which stacks of its threads take most.
const ADDRESS_SPACE: u64 = 4 << 30;
/// Longest file that the tool can write, so also its longest output.
const FILE_MAX: u64 = 64 << 10;
const FILES_MAX: u64 = 64;
/// Time for the description of an image, and for a conversion beyond that of its bytes.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes a second that the slowest disk takes.
const SLOWEST: u64 = 5 << 20;
/// Unit of sizes of QEMU's block layer.
const SECTOR: u64 = 512;
const POLL: Duration = Duration::from_millis(10);

/// Conversion of one image to the bytes of its disk.
#[derive(Debug)]
pub struct Conversion<'a> {
    dir: &'a Path,
    format: ImageFormat,
    length: u64,
    user: u32,
}

impl<'a> Conversion<'a> {
    /// Socket in the directory on which the caller serves the image.
    pub const INPUT: &'static str = "input";
    /// Socket in the directory on which the caller serves the room for the disk.
    pub const OUTPUT: &'static str = "output";

    /// A conversion in the directory `dir`, which has the sockets and nothing else; it becomes the tool's.
    /// The image has `length` bytes, and the caller has had it checked with [`ImageFormat::check_alone`].
    pub fn new(dir: &'a Path, format: ImageFormat, length: u64) -> Result<Self, ImageError> {
        let user = tool_user();
        let conversion = Self { dir, format, length, user };
        conversion.give(dir)?;
        Ok(conversion)
    }

    /// Size of the disk in bytes, at most 16 TiB.
    pub fn disk_size(&self, cancelled: &dyn Fn() -> bool) -> Result<u64, ImageError> {
        self.give(&self.dir.join(Self::INPUT))?;
        let text = self.run(&["info", "--output=json", &self.source()], PATIENCE, cancelled)?;
        let found: Value = serde_json::from_slice(&text)
            .map_err(|_| ImageError::Header { what: "it cannot be described" })?;
        // The header was checked before, by us; QEMU may see more in it.
        if let Some(name) = found["backing-filename"].as_str() {
            return Err(ImageError::NeedsFile { role: "backing file", name: name.to_owned() });
        }
        match found["virtual-size"].as_u64() {
            Some(bytes) if bytes > DISK_MAX => Err(ImageError::TooLarge { bytes, max: DISK_MAX }),
            Some(bytes @ 1..) => Ok(bytes),
            _ => Err(ImageError::Header { what: "it has no size" }),
        }
    }

    /// Writes the disk to its room, which has at least `size` bytes and reads as zeros.
    pub fn write(&self, size: u64, cancelled: &dyn Fn() -> bool) -> Result<(), ImageError> {
        self.give(&self.dir.join(Self::OUTPUT))?;
        let output = format!("driver=nbd,server.type=unix,server.path={}", Self::OUTPUT);
        let source = self.source();
        let arguments = ["convert", "-n", "--target-is-zero", "--target-image-opts", &source, &output];
        let patience = PATIENCE + Duration::from_secs(size / SLOWEST);
        self.run(&arguments, patience, cancelled).map(drop)
    }

    /// The image as QEMU is to open it: in this format, and without any other file.
    fn source(&self) -> String {
        let server = json!({"type": "unix", "path": Self::INPUT});
        let served = json!({"driver": "nbd", "server": server});
        // What is served is padded to whole pages, and the footer of a VHD is found from the end.
        let file = match self.length > 0 && self.length.is_multiple_of(SECTOR) {
            true => json!({"driver": "raw", "size": self.length, "file": served}),
            false => served,
        };
        format!("json:{}", json!({"driver": self.format.driver(), "backing": null, "file": file}))
    }

    fn give(&self, path: &Path) -> Result<(), ImageError> {
        chown(path, Some(self.user), Some(self.user)).map_err(ImageError::Start)
    }

    /// Runs the tool and returns what it prints.
    fn run(
        &self,
        arguments: &[&str],
        patience: Duration,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<u8>, ImageError> {
        let memory = |name: &str| memfd_create(name, MemfdFlags::CLOEXEC).map(File::from);
        let start = |error: io::Error| ImageError::Start(error);
        let (mut printed, mut words) = (
            memory("qemu-img-output").map_err(|errno| start(errno.into()))?,
            memory("qemu-img-errors").map_err(|errno| start(errno.into()))?,
        );
        let limits = vec![
            (Resource::As, ADDRESS_SPACE),
            (Resource::Cpu, patience.as_secs()),
            (Resource::Fsize, FILE_MAX),
            (Resource::Nofile, FILES_MAX),
            (Resource::Core, 0),
        ];
        let dir = File::open(self.dir).map_err(start)?;
        let mut command = Command::new(PROGRAM);
        let confinement = Confinement::of_tool(self.user, dir.into(), limits);
        confinement.with_files_of(Path::new(PROGRAM)).map_err(start)?.apply_to(&mut command);
        // The environment of a daemon may have secrets in it.
        command.env_clear().env("PATH", env::var_os("PATH").unwrap_or_default());
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(printed.try_clone().map_err(start)?)
            .stderr(words.try_clone().map_err(start)?);
        let child = Reaped(command.spawn().map_err(start)?);
        let status = ended(child, patience, cancelled)?;
        if status.success() {
            return all_of(&mut printed).map_err(ImageError::Read);
        }
        let words = String::from_utf8_lossy(&all_of(&mut words).unwrap_or_default()).trim().to_owned();
        Err(ImageError::Rejected { words: if words.is_empty() { status.to_string() } else { words } })
    }
}

/// Waits for the end of the tool, which is killed when that takes too long or the caller gives up.
fn ended(
    mut child: Reaped,
    patience: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<ExitStatus, ImageError> {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(status) = child.0.try_wait().map_err(ImageError::Start)? {
            return Ok(status);
        }
        if cancelled() {
            return Err(ImageError::Cancelled);
        }
        if Instant::now() > deadline {
            return Err(ImageError::TimedOut { after: patience });
        }
        thread::sleep(POLL);
    }
}

/// Content of a file that the tool could not make long.
fn all_of(file: &mut File) -> io::Result<Vec<u8>> {
    file.rewind()?;
    let mut content = Vec::new();
    file.take(FILE_MAX).read_to_end(&mut content)?;
    Ok(content)
}
