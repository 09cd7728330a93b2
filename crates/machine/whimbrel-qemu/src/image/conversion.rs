//! Conversion of an image by a confined `qemu-img`.
//!
//! The caller serves the image and the room for the disk with NBD, on sockets in a directory of the tool. So
//! the tool needs no path to either, paths in an image lead nowhere that it may read, and what it writes ends
//! where the room ends.

use super::{
    ImageError, ImageFormat,
    confined_tool::{ConfinedTool, PATIENCE, Run, patience_for},
};
use serde_json::{Value, json};
use std::{path::Path, time::Duration};

const PROGRAM: &str = "qemu-img";
/// Greatest disk: 16 TiB, where the usual file systems end.
pub(super) const DISK_MAX: u64 = 16 << 40;
/// Longest file that the tool can write.
const FILE_MAX: u64 = 64 << 10;
/// Unit of sizes of QEMU's block layer.
const SECTOR: u64 = 512;

/// Conversion of one image to the bytes of its disk.
#[derive(Debug)]
pub struct Conversion<'a> {
    tool: ConfinedTool<'a>,
    format: ImageFormat,
    length: u64,
}

impl<'a> Conversion<'a> {
    /// Socket in the directory on which the caller serves the image.
    pub const INPUT: &'static str = "input";
    /// Socket in the directory on which the caller serves the room for the disk.
    pub const OUTPUT: &'static str = "output";

    /// A conversion in the directory `dir`, which has the sockets and nothing else; it becomes the tool's.
    /// The image has `length` bytes, and the caller has had it checked with [`ImageFormat::check_alone`].
    pub fn new(dir: &'a Path, format: ImageFormat, length: u64) -> Result<Self, ImageError> {
        Ok(Self { tool: ConfinedTool::new(dir, FILE_MAX)?, format, length })
    }

    /// Size of the disk in bytes, at most 16 TiB.
    pub fn disk_size(&self, cancelled: &dyn Fn() -> bool) -> Result<u64, ImageError> {
        self.tool.give(&self.tool.dir.join(Self::INPUT))?;
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
        self.tool.give(&self.tool.dir.join(Self::OUTPUT))?;
        let output = format!("driver=nbd,server.type=unix,server.path={}", Self::OUTPUT);
        let source = self.source();
        let arguments = ["convert", "-n", "--target-is-zero", "--target-image-opts", &source, &output];
        self.run(&arguments, patience_for(size), cancelled).map(drop)
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

    fn run(
        &self,
        arguments: &[&str],
        patience: Duration,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<u8>, ImageError> {
        let arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
        let run = Run { program: Path::new(PROGRAM), arguments, input: None, patience };
        self.tool.run(run, cancelled).map(|(printed, _)| printed)
    }
}
