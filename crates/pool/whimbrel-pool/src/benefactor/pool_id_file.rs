//! The file `DATA/pool`: id of the pool to which a benefactor's chunks belong.
//!
//! It is written atomically and durably before it is relied on. Unreadable content is an error, because
//! treating it as "no pool yet" would let chunks of one pool into another.

use std::{fs, io, path::Path};
use whimbrel_wire::atomic_file;

const NAME: &str = "pool";

/// Reads the pool id; none if there is no file.
pub(super) fn read(data: &Path) -> io::Result<Option<u64>> {
    let text = match fs::read_to_string(data.join(NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read?,
    };
    let number = u64::from_str_radix(text.trim(), 16).ok().filter(|number| *number > 0);
    number.map(Some).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

pub(super) fn save(data: &Path, pool: u64) -> io::Result<()> {
    atomic_file::replace(&data.join(NAME), format!("{pool:016x}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_comes_back_and_a_damaged_one_is_not_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        save(dir.path(), 7).unwrap();
        save(dir.path(), u64::MAX).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(u64::MAX));
        for damaged in ["", "0", "not a number"] {
            fs::write(dir.path().join(NAME), damaged).unwrap();
            assert!(read(dir.path()).is_err(), "{damaged:?}");
        }
    }
}
