//! Disk images in the formats of QEMU and others: recognised by their content, and converted by `qemu-img`;
//! and file systems of container images.
//!
//! An image comes from anywhere, so its format is never left to `qemu-img` to find out, and an image that
//! names other files is refused. `qemu-img` itself is confined, and has no path to any file: it reads and
//! writes through sockets in its directory.

mod compressed;
mod confined_tool;
mod conversion;
mod file_system;
mod format;

pub use compressed::decompressed;
pub use conversion::Conversion;
pub use file_system::{NewFileSystem, UnpackedTree};
pub use format::ImageFormat;

use std::{io, time::Duration};

/// An image cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file could not be read.
    #[error("cannot read the image")]
    Read(#[source] io::Error),
    /// The format is not supported.
    #[error("images in the format {format} cannot be read")]
    Unsupported {
        /// Name of the format.
        format: &'static str,
    },
    /// Part of its content is in another file.
    #[error("the image needs another file, its {role} {name:?}")]
    NeedsFile {
        /// What the other file is: `backing file`, `data file`, …
        role: &'static str,
        /// Name of the file as the image has it; empty if unknown.
        name: String,
    },
    /// The header is invalid or incomplete.
    #[error("the header of the image is invalid: {what}")]
    Header {
        /// What is wrong.
        what: &'static str,
    },
    /// The disk in it is larger than any that can be stored.
    #[error("the image is of a disk of {bytes} bytes; the limit is {max}")]
    TooLarge {
        /// Size of the disk.
        bytes: u64,
        /// Greatest size that is read.
        max: u64,
    },
    /// The program could not be started.
    #[error("cannot start a program that reads images")]
    Start(#[source] io::Error),
    /// A program rejects the image.
    #[error("{tool} rejects the image: {words}")]
    Rejected {
        /// Name of the program.
        tool: String,
        /// Error output of the program.
        words: String,
    },
    /// The program took too long.
    #[error("reading the image took longer than {after:?}")]
    TimedOut {
        /// Time that it had.
        after: Duration,
    },
    /// The caller gave up.
    #[error("the conversion was cancelled")]
    Cancelled,
}
