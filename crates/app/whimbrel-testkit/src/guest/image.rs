//! Disk images for tests: raw files with a known pattern, or with a file system.

use super::{GuestError, artifact_cache::run};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    process::Command,
};

/// Creates a raw image of `mib` MiB; every page is different and derived from `seed`.
pub fn patterned(path: &Path, mib: u64, seed: u64) -> Result<(), GuestError> {
    let mut file = BufWriter::new(File::create(path).map_err(GuestError::file("create", path))?);
    for page in 0..mib * 256 {
        file.write_all(&page_of(seed, page)).map_err(GuestError::file("write", path))?;
    }
    file.flush().map_err(GuestError::file("write", path))
}

/// Content of page number `page` of the pattern of `seed`.
pub fn page_of(seed: u64, page: u64) -> [u8; whimbrel_core::PAGE_SIZE] {
    let mut content = [0; whimbrel_core::PAGE_SIZE];
    let mut noise = blake3::Hasher::new();
    noise.update(&seed.to_le_bytes()).update(&page.to_le_bytes());
    noise.finalize_xof().fill(&mut content);
    content
}

/// Creates an empty (sparse) raw image of `mib` MiB.
pub fn empty(path: &Path, mib: u64) -> Result<(), GuestError> {
    let file = File::create(path).map_err(GuestError::file("create", path))?;
    file.set_len(mib << 20).map_err(GuestError::file("resize", path))
}

/// Creates an ext4 image of `mib` MiB, with the tree below `content` if given.
pub fn ext4(path: &Path, mib: u64, content: Option<&Path>) -> Result<(), GuestError> {
    made(path, mib, content, &[])
}

/// Creates an ext4 image with blocks of 4 KiB, which is the default only from 512 MiB on; smaller ones have 1
/// KiB.
pub fn ext4_of_pages(path: &Path, mib: u64, content: Option<&Path>) -> Result<(), GuestError> {
    made(path, mib, content, &["-b", "4096"])
}

fn made(path: &Path, mib: u64, content: Option<&Path>, options: &[&str]) -> Result<(), GuestError> {
    empty(path, mib)?;
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4"]).args(options);
    if let Some(content) = content {
        mke2fs.arg("-d").arg(content);
    }
    run(mke2fs.arg(path)).map(drop)
}
