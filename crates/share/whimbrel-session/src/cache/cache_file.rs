//! A file of the cache, encrypted sector by sector if the cache has a key.
//!
//! A sector is replaced in place. Of one that is written a second time with more in it, as the last one of a
//! journal is, only those 16 bytes change that were not full: XTS encrypts each 16 bytes by themselves. So a
//! crash leaves what it leaves of a file that is not encrypted.

use std::{fs::File, io, os::unix::fs::FileExt};
use whimbrel_block::SectorCipher;

const SECTOR: u64 = SectorCipher::SECTOR as u64;

/// An open file of the cache.
pub(crate) struct CacheFile {
    file: File,
    cipher: Option<SectorCipher>,
}

impl std::fmt::Debug for CacheFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.file.fmt(f)
    }
}

impl CacheFile {
    pub(crate) fn new(file: File, cipher: Option<SectorCipher>) -> Self {
        Self { file, cipher }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// From here on the file, which is empty or encrypted already, is encrypted.
    pub(super) fn encrypt_with(&mut self, cipher: SectorCipher) {
        self.cipher = Some(cipher);
    }

    /// Makes the file long enough for so many bytes, or cuts it to them. What is added reads as zeros.
    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        let unit = if self.cipher.is_some() { SECTOR } else { 1 };
        self.file.set_len(len.next_multiple_of(unit))
    }

    /// Reads as much of `out` as there is from `at` on, and returns the number of bytes. An encrypted file
    /// has zeros up to the end of its last sector.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) -> io::Result<usize> {
        let Some(cipher) = &self.cipher else { return fill(&self.file, out, at) };
        let (start, end) = sectors(at, out.len());
        if (start, end) == (at, at + out.len() as u64) {
            return read_sectors(&self.file, cipher, start, out);
        }
        let mut whole = vec![0; (end - start) as usize];
        let got = read_sectors(&self.file, cipher, start, &mut whole)?;
        let found = whole[..got].get((at - start) as usize..).unwrap_or_default();
        let len = found.len().min(out.len());
        out[..len].copy_from_slice(&found[..len]);
        Ok(len)
    }

    /// Writes all of `data` at `at`. Of an encrypted file, one thread at a time writes into a sector.
    pub(crate) fn write(&self, at: u64, data: &[u8]) -> io::Result<()> {
        let Some(cipher) = &self.cipher else { return self.file.write_all_at(data, at) };
        let (start, end) = sectors(at, data.len());
        let mut whole = vec![0; (end - start) as usize];
        if (start, end) != (at, at + data.len() as u64) {
            read_sectors(&self.file, cipher, start, &mut whole)?;
        }
        whole[(at - start) as usize..][..data.len()].copy_from_slice(data);
        cipher.encrypt(start / SECTOR, &mut whole).map_err(io::Error::other)?;
        self.file.write_all_at(&whole, start)
    }
}

/// Start of the first sector and end of the last one of a range.
fn sectors(at: u64, len: usize) -> (u64, u64) {
    (at / SECTOR * SECTOR, (at + len as u64).next_multiple_of(SECTOR))
}

/// Reads the whole sectors that there are from `start` on, and returns their bytes.
fn read_sectors(file: &File, cipher: &SectorCipher, start: u64, out: &mut [u8]) -> io::Result<usize> {
    let got = fill(file, out, start)? / SectorCipher::SECTOR * SectorCipher::SECTOR;
    cipher.decrypt(start / SECTOR, &mut out[..got]).map_err(io::Error::other)?;
    Ok(got)
}

/// Reads until full or the end of the file, and returns how much there was.
pub(crate) fn fill(file: &File, out: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < out.len() {
        match file.read_at(&mut out[done..], at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encrypted() -> CacheFile {
        let cipher = SectorCipher::new(std::array::from_fn(|at| at as u8));
        CacheFile::new(tempfile::tempfile().unwrap(), Some(cipher))
    }

    #[test]
    fn more_in_the_last_sector_changes_only_what_was_not_full() {
        let file = encrypted();
        file.write(0, &[1; 100]).unwrap();
        let mut before = [0; 512];
        assert_eq!(fill(file.file(), &mut before, 0).unwrap(), 512);
        file.write(100, &[2; 50]).unwrap();
        let mut after = [0; 512];
        fill(file.file(), &mut after, 0).unwrap();
        assert_eq!(before[..96], after[..96]);
        assert_ne!(before[96..112], after[96..112]);
        assert!(!before.windows(16).any(|part| part == [1; 16]), "it is not encrypted");
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_and_the_rest_is_zeros(
            writes in prop::collection::vec((0..5000_u64, 1..2000_usize, any::<u8>()), 1..20),
            reads in prop::collection::vec((0..7000_u64, 0..3000_usize), 1..20),
        ) {
            let (file, mut model) = (encrypted(), Vec::new());
            for (at, len, byte) in writes {
                let end = at as usize + len;
                model.resize(model.len().max(end.next_multiple_of(SectorCipher::SECTOR)), 0);
                model[at as usize..end].fill(byte);
                file.write(at, &vec![byte; len]).unwrap();
            }
            for (at, len) in reads {
                let mut out = vec![9; len];
                let got = file.read(at, &mut out).unwrap();
                let from = model.len().min(at as usize);
                prop_assert_eq!(&out[..got], &model[from..model.len().min(from + len)]);
            }
        }
    }
}
