//! Durable records of a simulated host: one small file, replaced as a whole.

use crate::report::violation;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
    thread,
    time::Duration,
};
use whimbrel_wire::atomic_file;

/// Replaces a record. After an error either version may be on the disk.
pub(crate) fn write<T: Serialize>(host: usize, name: &str, value: &T) -> io::Result<()> {
    let (temporary, path) = (format!("/sim/h{host}/{name}.new"), format!("/sim/h{host}/{name}"));
    let mut file = File::create(&temporary)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()?;
    fs::rename(&temporary, &path)?;
    File::open(format!("/sim/h{host}"))?.sync_all()
}

/// Reads a record; the default if there is none. Whoever wrote it may have been killed before it was durable,
/// so it is made so first.
pub(crate) fn read<T: DeserializeOwned + Default>(host: usize, name: &str) -> T {
    let path = format!("/sim/h{host}/{name}");
    while atomic_file::make_durable(Path::new(&format!("/sim/h{host}"))).is_err() {
        thread::sleep(Duration::from_millis(500));
    }
    match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => T::default(),
        Err(error) => violation("comes_back", &format!("{path} cannot be read: {error}")),
        Ok(bytes) => serde_json::from_slice(&bytes)
            .unwrap_or_else(|error| violation("comes_back", &format!("{path} is damaged: {error}"))),
    }
}
