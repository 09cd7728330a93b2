//! Memory of the guest: the kernel's figures, and filling its page cache.

use std::{
    fs::{self, File},
    io::{self, Read, Seek},
    sync::{Mutex, PoisonError},
};

/// Disk that stays open, because the cache of a block device ends with its last user.
static DISK: Mutex<Option<File>> = Mutex::new(None);

/// Reads the complete disk, as a file system would: it stays in the cache while there is memory.
pub(crate) fn fill_cache() -> io::Result<()> {
    let mut disk = DISK.lock().unwrap_or_else(PoisonError::into_inner);
    let disk = match &mut *disk {
        Some(disk) => disk,
        none => none.insert(File::open("/dev/vda")?),
    };
    disk.rewind()?;
    let mut piece = vec![0; 1 << 16];
    while disk.read(&mut piece)? > 0 {}
    Ok(())
}

/// Figures of `/proc/meminfo` in KiB: `total=… free=… available=… buffers=… cached=…`.
pub(crate) fn describe() -> String {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let figure = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()).unwrap_or("0").to_owned()
    };
    let fields = ["MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached"].map(figure);
    let [total, free, available, buffers, cached] = fields;
    format!("total={total} free={free} available={available} buffers={buffers} cached={cached}")
}
