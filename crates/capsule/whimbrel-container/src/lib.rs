//! Container images as machines: what Docker, Podman and others build becomes the disk of a machine and the
//! kernel and initial RAM disk that it boots with.
//!
//! ```text
//! image.rs      an image as a folder, an archive or a registry has it: its program and its layers
//! blobs.rs      where a folder or an archive has the parts of an image
//! program.rs    the program of an image, as a script for the machine
//! compression.rs  layers and disk images without their compression
//! layer.rs      applies one layer to a tree of files
//! tree.rs       a tree of files that nothing leads out of
//! attributes.rs owners and modes of the files, as commands of debugfs(8)
//! guest.rs      what every machine has beside its image: busybox, its first process, qemu-ga
//! kernel.rs     a kernel of this host, and the modules that a machine needs
//! initrd.rs     the initial RAM disk, of these modules
//! cpio.rs       the archive that it is
//! ```
//!
//! Images come from anywhere. Layers are applied by a confined process without rights, in a tree of its own;
//! owners and modes, which it may not set, are written into the finished file system.
//!
//! Sources: the image format and distribution specifications of the Open Container Initiative, 1.1.

mod attributes;
mod blobs;
mod compression;
mod cpio;
mod error;
mod guest;
mod image;
mod initrd;
mod kernel;
mod layer;
mod program;
mod tree;

pub use compression::decompress_disk;
pub use cpio::Archive;
pub use error::ContainerError;
pub use guest::GuestPrograms;
pub use image::{ContainerImage, Descriptor, Layer, Manifest, is_container, manifest_of};
pub use initrd::initrd;
pub use kernel::{Kernel, Modules};
pub use layer::{Applied, COMMANDS, LayerLimits, TREE, apply_layer};

/// Label of the file system that a machine of a container image has as its root.
pub const ROOT_LABEL: &str = "container";
