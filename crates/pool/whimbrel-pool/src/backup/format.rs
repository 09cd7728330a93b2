//! The file of a backup; `docs/formats/pool.md` has its layout.
//!
//! Records are gathered into frames, each compressed and, with a secret, encrypted. The end of the file is a
//! digest of everything before it, so a file that was cut off or changed is refused. Without a secret, this
//! finds damage but no forgery.

use super::{BackupError, Result};
use crate::{client::Secret, meta::Value};
use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};

const MAGIC: &[u8; 4] = b"WHPB";
const VERSION: u8 = 1;
const HEAD: usize = 24;
/// Bytes of records after which a frame is written.
const FULL: usize = 1 << 20;
/// Longest frame, raw and stored: a full one with the longest row, which has a chunk map, behind it.
const FRAME_MAX: usize = 16 << 20;
/// Level of compression: most bytes are digests, which do not shrink.
const LEVEL: i32 = 1;

/// One record of a backup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum BackupRecord {
    /// The first record.
    Head {
        /// Number of the pool.
        pool: u64,
        /// Version of the database schema.
        schema: i64,
    },
    /// Rows of this table follow, with values of these columns.
    Table { name: String, columns: Vec<String> },
    /// A row of the last table.
    Row(Vec<Value>),
    /// A file of the manager's folder.
    File { name: String, content: Vec<u8> },
}

/// The keys of an encrypted backup.
struct Keys {
    seal: LessSafeKey,
    end: [u8; 32],
}

impl Keys {
    /// Keys of the backup with this salt, so that no nonce is used twice.
    fn derive(secret: &Secret, salt: &[u8; 16]) -> Option<Self> {
        let material = [&secret.backup_key()[..], salt].concat();
        let key = blake3::derive_key("whimbrel pool 2026-11-25 backup frame", &material);
        let seal = LessSafeKey::new(UnboundKey::new(&AES_256_GCM_SIV, &key).ok()?);
        let end = blake3::derive_key("whimbrel pool 2026-11-25 backup end", &material);
        Some(Self { seal, end })
    }

    fn nonce(frame: u64) -> Nonce {
        let mut bytes = [0; NONCE_LEN];
        bytes[..8].copy_from_slice(&frame.to_le_bytes());
        Nonce::assume_unique_for_key(bytes)
    }

    fn hasher(keys: Option<&Self>) -> blake3::Hasher {
        keys.map_or_else(blake3::Hasher::new, |keys| blake3::Hasher::new_keyed(&keys.end))
    }
}

/// Writes the records of a backup.
pub(crate) struct BackupWriter<W> {
    out: W,
    keys: Option<Keys>,
    digest: blake3::Hasher,
    frames: u64,
    raw: Vec<u8>,
}

impl<W: Write> BackupWriter<W> {
    /// Starts a backup, encrypted if there is a secret.
    pub(crate) fn new(out: W, secret: Option<&Secret>) -> io::Result<Self> {
        let random = |_| io::Error::other("no random numbers are available");
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(MAGIC);
        head[4] = VERSION;
        head[5] = secret.is_some().into();
        aws_lc_rs::rand::fill(&mut head[8..]).map_err(random)?;
        let salt = head.last_chunk::<16>().copied().unwrap_or_default();
        let keys = match secret {
            Some(secret) => Some(Keys::derive(secret, &salt).ok_or(io::ErrorKind::InvalidData)?),
            None => None,
        };
        let digest = Keys::hasher(keys.as_ref());
        let mut writer = Self { out, keys, digest, frames: 0, raw: Vec::new() };
        writer.write(&head)?;
        Ok(writer)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.digest.update(bytes);
        self.out.write_all(bytes)
    }

    pub(crate) fn push(&mut self, record: &BackupRecord) -> io::Result<()> {
        let raw = std::mem::take(&mut self.raw);
        self.raw = postcard::to_extend(record, raw).map_err(io::Error::other)?;
        if self.raw.len() >= FULL { self.end_frame() } else { Ok(()) }
    }

    fn end_frame(&mut self) -> io::Result<()> {
        if self.raw.is_empty() {
            return Ok(());
        }
        let mut frame = zstd::bulk::compress(&self.raw, LEVEL)?;
        self.raw.clear();
        if let Some(keys) = &self.keys {
            let sealed =
                keys.seal.seal_in_place_append_tag(Keys::nonce(self.frames), Aad::empty(), &mut frame);
            sealed.map_err(|_| io::Error::other("the frame cannot be encrypted"))?;
        }
        let length = u32::try_from(frame.len()).ok().filter(|length| *length as usize <= FRAME_MAX);
        let length = length.ok_or(io::ErrorKind::FileTooLarge)?;
        self.frames += 1;
        self.write(&length.to_le_bytes())?;
        self.write(&frame)
    }

    /// Writes the rest and the digest of all.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.end_frame()?;
        self.write(&0_u32.to_le_bytes())?;
        let digest = self.digest.finalize();
        self.out.write_all(digest.as_bytes())?;
        self.out.flush()?;
        Ok(self.out)
    }
}

/// Reads the records of a backup. What it returned may be used once it has returned the end.
pub(crate) struct BackupReader<R> {
    input: R,
    keys: Option<Keys>,
    digest: blake3::Hasher,
    frames: u64,
    raw: Vec<u8>,
    at: usize,
    ended: bool,
}

fn damaged(what: &'static str) -> BackupError {
    BackupError::Damaged { what }
}

impl<R: Read> BackupReader<R> {
    pub(crate) fn new(mut input: R, secret: Option<&Secret>) -> Result<Self> {
        let mut head = [0; HEAD];
        input.read_exact(&mut head).map_err(|_| damaged("its head"))?;
        if &head[..4] != MAGIC {
            return Err(damaged("this file is none"));
        }
        if head[4] != VERSION {
            return Err(BackupError::Newer);
        }
        let salt = head.last_chunk::<16>().copied().unwrap_or_default();
        let keys = match (head[5], secret) {
            (0, _) => None,
            (1, Some(secret)) => Some(Keys::derive(secret, &salt).ok_or(BackupError::Secret)?),
            (1, None) => return Err(BackupError::Secret),
            _ => return Err(damaged("its head")),
        };
        let mut digest = Keys::hasher(keys.as_ref());
        digest.update(&head);
        Ok(Self { input, keys, digest, frames: 0, raw: Vec::new(), at: 0, ended: false })
    }

    /// The next record; none at the end of a complete backup.
    pub(crate) fn next(&mut self) -> Result<Option<BackupRecord>> {
        while self.at == self.raw.len() {
            if self.ended || !self.next_frame()? {
                return Ok(None);
            }
        }
        let (record, rest) =
            postcard::take_from_bytes(&self.raw[self.at..]).map_err(|_| damaged("a record"))?;
        self.at = self.raw.len() - rest.len();
        Ok(Some(record))
    }

    fn next_frame(&mut self) -> Result<bool> {
        let mut length = [0; 4];
        self.input.read_exact(&mut length).map_err(|_| damaged("it is cut off"))?;
        self.digest.update(&length);
        let length = u32::from_le_bytes(length) as usize;
        if length == 0 {
            return self.check_end().map(|()| false);
        }
        if length > FRAME_MAX {
            return Err(damaged("the length of a frame"));
        }
        let mut frame = vec![0; length];
        self.input.read_exact(&mut frame).map_err(|_| damaged("it is cut off"))?;
        self.digest.update(&frame);
        let plain = match &self.keys {
            None => &frame[..],
            Some(keys) => keys
                .seal
                .open_in_place(Keys::nonce(self.frames), Aad::empty(), &mut frame)
                .map_err(|_| BackupError::Secret)?,
        };
        self.frames += 1;
        self.raw = zstd::bulk::decompress(plain, FRAME_MAX).map_err(|_| damaged("a frame"))?;
        self.at = 0;
        Ok(true)
    }

    fn check_end(&mut self) -> Result<()> {
        let (mut found, mut more) = ([0; 32], [0]);
        self.input.read_exact(&mut found).map_err(|_| damaged("it is cut off"))?;
        // The comparison takes the same time for any digest.
        if self.digest.finalize() != blake3::Hash::from_bytes(found) {
            return Err(damaged("its digest"));
        }
        if self.input.read(&mut more).map_err(|_| damaged("its end"))? > 0 {
            return Err(damaged("bytes behind its end"));
        }
        self.ended = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<BackupRecord> {
        let name = |name: &str| String::from(name);
        let mut all = vec![
            BackupRecord::Head { pool: 7, schema: 5 },
            BackupRecord::Table { name: name("chunk"), columns: vec![name("id"), name("map"), name("text")] },
        ];
        for number in 0..60_000 {
            let text = (number % 2 == 0).then(|| format!("row {number}"));
            let bytes = blake3::hash(&i64::to_le_bytes(number)).as_bytes().to_vec();
            all.push(BackupRecord::Row(vec![Value::Number(number), Value::Bytes(bytes), Value::Text(text)]));
        }
        all.push(BackupRecord::File { name: name("roles"), content: vec![1, 2, 3] });
        all
    }

    fn written(secret: Option<&Secret>) -> Vec<u8> {
        let mut writer = BackupWriter::new(Vec::new(), secret).unwrap();
        records().iter().for_each(|record| writer.push(record).unwrap());
        writer.finish().unwrap()
    }

    fn read(bytes: &[u8], secret: Option<&Secret>) -> Result<Vec<BackupRecord>> {
        let mut reader = BackupReader::new(bytes, secret)?;
        let mut all = Vec::new();
        while let Some(record) = reader.next()? {
            all.push(record);
        }
        Ok(all)
    }

    #[test]
    fn records_come_back_and_a_torn_or_changed_backup_is_refused() {
        let ours = Secret::new(&[7; 32]).unwrap();
        for secret in [None, Some(&ours)] {
            let bytes = written(secret);
            assert!(read(&bytes, secret).unwrap() == records());
            for cut in [0, 10, HEAD, HEAD + 4, bytes.len() / 2, bytes.len() - 33, bytes.len() - 1] {
                assert!(read(&bytes[..cut], secret).is_err(), "cut at {cut}");
            }
            for at in [4, 5, 9, HEAD, HEAD + 2000, bytes.len() / 2, bytes.len() - 34, bytes.len() - 1] {
                let mut changed = bytes.clone();
                changed[at] ^= 1;
                assert!(read(&changed, secret).is_err(), "changed at {at}");
            }
            assert!(read(&[&bytes[..], b"x"].concat(), secret).is_err());
        }
    }

    #[test]
    fn nobody_reads_an_encrypted_backup_without_its_secret() {
        let (ours, other) = (Secret::new(&[7; 32]).unwrap(), Secret::new(&[8; 32]).unwrap());
        let bytes = written(Some(&ours));
        assert!(!bytes.windows(5).any(|window| window == b"chunk"));
        for wrong in [None, Some(&other)] {
            assert!(matches!(read(&bytes, wrong), Err(BackupError::Secret)));
        }
    }
}
