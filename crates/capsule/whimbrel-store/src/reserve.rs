//! Reserve: bytes set aside so that garbage collection works on a full disk.
//!
//! A collection needs room for a GC lease, the list of condemned packs and one rewritten index. The files of
//! the reserve have at least that many bytes of noise, which no file system compresses. Collection removes
//! them when the disk is full, and makes them again at its end. They need not be durable: a commit notices
//! what is missing.

use crate::{
    error::{Result, StoreError},
    file_names::RESERVE,
    vfs::Vfs,
};
use rand::RngCore;

/// Room beside that for the largest index.
const SMALL_FILES: u64 = 1 << 20;
const NOISE: usize = 1 << 20;

/// Bytes of the reserve.
pub(crate) fn size(files: &dyn Vfs) -> Result<u64> {
    let sizes = names(files)?.into_iter().map(|name| {
        let path = format!("{RESERVE}/{name}");
        files.open(&path).and_then(|file| file.size()).map_err(StoreError::io("size", &path))
    });
    sizes.sum()
}

fn names(files: &dyn Vfs) -> Result<Vec<String>> {
    match files.list(RESERVE) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other.map_err(StoreError::io("list", RESERVE)),
    }
}

/// Gives the reserve up.
pub(crate) fn release(files: &dyn Vfs) -> Result<()> {
    for name in names(files)? {
        let path = format!("{RESERVE}/{name}");
        match files.remove(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            other => other.map_err(StoreError::io("remove", &path))?,
        }
    }
    Ok(())
}

/// Makes the reserve large enough for an index of `largest` bytes, and a quarter more, so that this is rare.
pub(crate) fn refill(files: &dyn Vfs, largest: u64) -> Result<()> {
    let (wanted, present) = (SMALL_FILES + largest, size(files)?);
    if present >= wanted {
        return Ok(());
    }
    files.make_dir(RESERVE).map_err(StoreError::io("create", RESERVE))?;
    let path = format!("{RESERVE}/{:016x}", rand::random::<u64>());
    let filled = fill(files, &path, wanted + wanted / 4 - present);
    if filled.is_err() {
        let _ = files.remove(&path);
    }
    filled.map_err(StoreError::io("append to", &path))
}

fn fill(files: &dyn Vfs, path: &str, mut bytes: u64) -> std::io::Result<()> {
    let mut file = files.create(path)?;
    let mut noise = vec![0; NOISE.min(bytes as usize)];
    while bytes > 0 {
        rand::rng().fill_bytes(&mut noise);
        let part = bytes.min(noise.len() as u64);
        file.append(&noise[..part as usize])?;
        bytes -= part;
    }
    Ok(())
}
