//! Encryption of chunks: a client encrypts before sending and decrypts after it has checked the digest.
//!
//! An encrypted chunk is `nonce, 12 bytes | AES-256-GCM-SIV of the frame of its raw bytes | tag, 16 bytes`,
//! with associated data that says that it may be used in files with a sealed chunk map only (`map_seal`).
//! Earlier versions sealed no maps and wrote chunks without associated data; these are read in any file.
//!
//! Benefactors store it, check it and name it by its digest, so they can tell without the secret whether a
//! copy is right. The nonce is a digest of the raw bytes under a second key, so equal chunks with the same
//! secret are encrypted equally and stored once; nobody without the secret can test a guess of the content.
//! With GCM-SIV, two contents with one nonce would reveal no more than that. Names, sizes and times of files
//! are not encrypted.

use crate::protocol::MAX_CHUNK;
use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use std::{fmt, fs, io, path::Path};
use whimbrel_image::pack_frame::{Encoder, Kind, PackFrame, PackFrameHeader};
use whimbrel_wire::atomic_file;

/// Most bytes that encryption adds, including the head of the inner frame.
pub(crate) const OVERHEAD: usize = 128;
const TAG: usize = 16;

/// Associated data of chunks that are used in files with a sealed map only.
const IN_SEALED_MAP: &[u8] = b"sealed map";

/// The secret with which chunks are encrypted and decrypted, and chunk maps are sealed.
pub struct Secret {
    nonce_key: [u8; 32],
    key: LessSafeKey,
    map_key: [u8; 32],
    backup_key: [u8; 32],
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Error for a chunk that was encrypted with another secret, or forged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the chunk is not encrypted with this secret")]
pub(crate) struct WrongSecret;

impl Secret {
    /// Derives the keys from 32 bytes.
    pub fn new(bytes: &[u8; 32]) -> io::Result<Self> {
        let key = blake3::derive_key("whimbrel pool 2026-11-21 chunk encryption", bytes);
        let key = UnboundKey::new(&AES_256_GCM_SIV, &key).map_err(|_| io::ErrorKind::InvalidData)?;
        let naming = blake3::derive_key("whimbrel pool 2026-11-21 chunk nonce", bytes);
        let map_key = blake3::derive_key("whimbrel pool 2026-11-24 chunk map seal", bytes);
        let backup_key = blake3::derive_key("whimbrel pool 2026-11-25 backup", bytes);
        Ok(Self { nonce_key: naming, key: LessSafeKey::new(key), map_key, backup_key })
    }

    /// The key of the seals of chunk maps.
    pub(super) fn map_key(&self) -> &[u8; 32] {
        &self.map_key
    }

    /// The key from which those of backups are derived.
    pub(crate) fn backup_key(&self) -> &[u8; 32] {
        &self.backup_key
    }

    /// Reads a file made by [`Secret::create`]: 64 hexadecimal digits.
    pub fn load(path: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(path)?;
        let bytes: whimbrel_core::Digest = text.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        Self::new(&bytes.0)
    }

    /// Creates a file with a new secret, readable only by its owner. Without the secret its chunks are lost.
    pub fn create(path: &Path) -> io::Result<()> {
        let mut bytes = [0; 32];
        aws_lc_rs::rand::fill(&mut bytes).map_err(|_| io::Error::other("no random numbers are available"))?;
        atomic_file::create(path, format!("{}\n", whimbrel_core::Digest(bytes)).as_bytes())
    }

    /// Encrypts raw bytes; `encoder` compresses them first, because encrypted bytes do not shrink.
    pub(crate) fn encrypt(&self, raw: &[u8], encoder: &mut Encoder) -> Option<Vec<u8>> {
        self.encrypt_with(IN_SEALED_MAP, raw, encoder)
    }

    /// Encrypts raw bytes as earlier versions did, for files without a seal.
    #[cfg(test)]
    pub(crate) fn encrypt_unbound(&self, raw: &[u8], encoder: &mut Encoder) -> Option<Vec<u8>> {
        self.encrypt_with(&[], raw, encoder)
    }

    fn encrypt_with(&self, context: &[u8], raw: &[u8], encoder: &mut Encoder) -> Option<Vec<u8>> {
        let nonce = *blake3::keyed_hash(&self.nonce_key, raw).as_bytes().first_chunk::<NONCE_LEN>()?;
        let frame = encoder.encode(Kind::Blob, raw, &[raw.len()]).ok()?;
        let mut sealed = Vec::with_capacity(NONCE_LEN + frame.len() + TAG);
        sealed.extend(nonce);
        sealed.extend(frame);
        let inner = &mut sealed[NONCE_LEN..];
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(context), inner);
        sealed.extend(tag.ok()?.as_ref());
        Some(sealed)
    }

    /// Decrypts a chunk and returns its raw bytes. Chunks that belong into a sealed map are refused unless
    /// they come from one.
    pub(crate) fn decrypt(&self, sealed: &[u8], from_sealed_map: bool) -> Result<Vec<u8>, WrongSecret> {
        let (nonce, inner) = sealed.split_first_chunk::<NONCE_LEN>().ok_or(WrongSecret)?;
        let (inner, tag) = inner.split_at_checked(inner.len().wrapping_sub(TAG)).ok_or(WrongSecret)?;
        let mut frame = vec![0; inner.len()];
        let mut open = |context: &[u8]| {
            let nonce = Nonce::assume_unique_for_key(*nonce);
            self.key.open_separate_gather(nonce, Aad::from(context), inner, tag, &mut frame).is_ok()
        };
        // A file of an earlier version may have been changed since, so its chunks may be in a sealed map.
        if !((from_sealed_map && open(IN_SEALED_MAP)) || open(&[])) {
            return Err(WrongSecret);
        }
        // The sender had the secret, but the limits apply nevertheless.
        let head = PackFrameHeader::parse(&frame).map_err(|_| WrongSecret)?;
        if head.raw > MAX_CHUNK || head.bases > 0 {
            return Err(WrongSecret);
        }
        PackFrame::parse(&frame).and_then(|frame| frame.decode(&[])).map_err(|_| WrongSecret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_chunk_comes_back_to_those_with_the_secret_only() {
        let (ours, theirs) = (Secret::new(&[1; 32]).unwrap(), Secret::new(&[2; 32]).unwrap());
        let mut encoder = Encoder::new(1);
        let text = b"a checkpoint of something secret ".repeat(400);
        let sealed = ours.encrypt(&text, &mut encoder).unwrap();
        assert_eq!(ours.decrypt(&sealed, true).unwrap(), text);
        assert_eq!(theirs.decrypt(&sealed, true), Err(WrongSecret));
        assert_eq!(ours.encrypt(&text, &mut encoder).unwrap(), sealed, "equal chunks are kept once");
        assert_ne!(theirs.encrypt(&text, &mut encoder).unwrap(), sealed, "others cannot guess");
        assert!(sealed.len() < text.len() && !sealed.windows(6).any(|window| window == b"secret"));
        for at in [0, 13, sealed.len() - 1] {
            let mut bent = sealed.clone();
            bent[at] ^= 1;
            assert_eq!(ours.decrypt(&bent, true), Err(WrongSecret), "{at}");
        }
        assert_eq!(ours.decrypt(&sealed[..20], true), Err(WrongSecret));
    }

    #[test]
    fn a_chunk_of_a_sealed_map_is_refused_elsewhere_and_an_old_one_is_read_in_both() {
        let (secret, mut encoder) = (Secret::new(&[1; 32]).unwrap(), Encoder::new(1));
        let new = secret.encrypt(b"new", &mut encoder).unwrap();
        assert_eq!(secret.decrypt(&new, false), Err(WrongSecret), "its map lost its seal");
        let old = secret.encrypt_unbound(b"old", &mut encoder).unwrap();
        for from_sealed_map in [false, true] {
            assert_eq!(secret.decrypt(&old, from_sealed_map).unwrap(), b"old");
        }
    }

    #[test]
    fn the_longest_chunk_that_does_not_shrink_fits() {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as u8
        };
        let raw: Vec<u8> = (0..MAX_CHUNK).map(|_| next()).collect();
        let secret = Secret::new(&[1; 32]).unwrap();
        let sealed = secret.encrypt(&raw, &mut Encoder::new(1)).unwrap();
        assert!(sealed.len() <= MAX_CHUNK + OVERHEAD, "{}", sealed.len() - MAX_CHUNK);
        assert!(secret.decrypt(&sealed, true).unwrap() == raw);
    }

    #[test]
    fn a_secret_is_made_once_and_nobody_else_reads_it() {
        use std::os::unix::fs::MetadataExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        Secret::create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(Secret::create(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        Secret::load(&path).unwrap();
        fs::write(&path, "not a secret").unwrap();
        assert!(Secret::load(&path).is_err());
    }
}
