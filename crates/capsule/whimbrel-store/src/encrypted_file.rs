//! Encrypted file: a stream of bytes, such as an exported capsule, under a key of its own.
//!
//! ```text
//! "WHENCR" 0 1, salt (32 bytes), then pieces: AES-256-GCM of up to 64 KiB, and its tag (16 bytes)
//! ```
//!
//! Each file has a key that is derived from the given one and the salt. The nonce of a piece is its number
//! and whether it is the last one, so that pieces can be neither left out nor exchanged, and the end cannot
//! be cut off (the construction STREAM: Hoang et al., "Online Authenticated-Encryption and its Nonce-Reuse
//! Misuse-Resistance", CRYPTO 2015). `docs/formats/encrypted-file.md` has every byte.

use crate::keys::aead_key;
use aws_lc_rs::aead::{Aad, LessSafeKey, NONCE_LEN, Nonce};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use whimbrel_core::FileKey;

const MAGIC: [u8; 8] = *b"WHENCR\x00\x01";
const SALT: usize = 32;
const PIECE: usize = 64 << 10;
const TAG: usize = 16;
const CONTEXT: &str = "whimbrel encrypted file 2026-11-28";

/// Key of one file, and the number of the next piece.
struct Pieces {
    key: LessSafeKey,
    next: u64,
}

impl Pieces {
    fn new(key: &FileKey, salt: &[u8; SALT]) -> io::Result<Self> {
        let both = [&key.0[..], salt].concat();
        let key = aead_key(&blake3::derive_key(CONTEXT, &both)).ok_or_else(|| refused("make a key of"))?;
        Ok(Self { key, next: 0 })
    }

    fn nonce(&mut self, is_last: bool) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&self.next.to_be_bytes());
        nonce[NONCE_LEN - 1] = u8::from(is_last);
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

fn refused(what: &str) -> io::Error {
    io::Error::other(format!("the library for encryption does not {what} these bytes"))
}

/// Encrypts what is written to it. Without [`EncryptingWriter::finish`] the file is refused as cut off.
pub struct EncryptingWriter<W> {
    out: W,
    pieces: Pieces,
    /// Not written yet: it may be the last piece.
    piece: Vec<u8>,
}

impl<W: Write> EncryptingWriter<W> {
    /// Begins a file under `key`.
    pub fn new(mut out: W, key: &FileKey) -> io::Result<Self> {
        let mut salt = [0; SALT];
        aws_lc_rs::rand::fill(&mut salt).map_err(|_| refused("draw"))?;
        out.write_all(&MAGIC)?;
        out.write_all(&salt)?;
        Ok(Self { out, pieces: Pieces::new(key, &salt)?, piece: Vec::with_capacity(PIECE + TAG) })
    }

    fn seal(&mut self, is_last: bool) -> io::Result<()> {
        let nonce = self.pieces.nonce(is_last);
        let sealed = self.pieces.key.seal_in_place_append_tag(nonce, Aad::empty(), &mut self.piece);
        sealed.map_err(|_| refused("encrypt"))?;
        self.out.write_all(&self.piece)?;
        self.piece.clear();
        Ok(())
    }

    /// Writes the last piece.
    pub fn finish(mut self) -> io::Result<()> {
        self.seal(true)?;
        self.out.flush()
    }
}

impl<W: Write> Write for EncryptingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.piece.len() == PIECE && !bytes.is_empty() {
            self.seal(false)?;
        }
        let taken = bytes.len().min(PIECE - self.piece.len());
        self.piece.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    /// A piece that is not full stays here until the next bytes or the end.
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Reads an encrypted file. Bytes that were changed, left out or cut off are an error before any of their
/// piece is returned.
pub struct DecryptingReader<R> {
    input: BufReader<R>,
    pieces: Pieces,
    piece: Vec<u8>,
    read: usize,
    is_over: bool,
}

/// Whether a file that begins with these bytes is encrypted.
pub fn is_encrypted(beginning: &[u8]) -> bool {
    beginning.starts_with(&MAGIC[..6])
}

impl<R: Read> DecryptingReader<R> {
    /// Begins to read a file. Its first piece is read, so that a wrong key is found here.
    ///
    /// # Errors
    /// With `InvalidData` if this is no encrypted file, or not one of this key.
    pub fn new(input: R, key: &FileKey) -> io::Result<Self> {
        let mut input = BufReader::with_capacity(PIECE + TAG, input);
        let (mut magic, mut salt) = ([0; MAGIC.len()], [0; SALT]);
        let head = input.read_exact(&mut magic).and_then(|()| input.read_exact(&mut salt));
        if !is_encrypted(&magic) || head.is_err() {
            return Err(invalid("it is not an encrypted file"));
        }
        if magic != MAGIC {
            return Err(invalid("a later version of Whimbrel has written it"));
        }
        let pieces = Pieces::new(key, &salt)?;
        let mut reader = Self { input, pieces, piece: Vec::new(), read: 0, is_over: false };
        reader.open_next()?;
        Ok(reader)
    }

    fn open_next(&mut self) -> io::Result<()> {
        self.piece.clear();
        self.read = 0;
        (&mut self.input).take((PIECE + TAG) as u64).read_to_end(&mut self.piece)?;
        let is_last = self.input.fill_buf()?.is_empty();
        let nonce = self.pieces.nonce(is_last);
        let opened = self.pieces.key.open_in_place(nonce, Aad::empty(), &mut self.piece);
        let length = opened.map_err(|_| invalid("this is not its key, or it is damaged"))?.len();
        self.piece.truncate(length);
        self.is_over = is_last;
        Ok(())
    }
}

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

impl<R: Read> Read for DecryptingReader<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.read == self.piece.len() && !self.is_over {
            self.open_next()?;
        }
        let rest = &self.piece[self.read..];
        let taken = rest.len().min(bytes.len());
        bytes[..taken].copy_from_slice(&rest[..taken]);
        self.read += taken;
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: FileKey = FileKey([7; 32]);

    fn encrypted(content: &[u8]) -> Vec<u8> {
        let mut file = Vec::new();
        let mut writer = EncryptingWriter::new(&mut file, &KEY).unwrap();
        // Pieces do not depend on how they are written.
        content.chunks(50_001).for_each(|part| writer.write_all(part).unwrap());
        writer.finish().unwrap();
        file
    }

    fn decrypted(file: &[u8], key: &FileKey) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        DecryptingReader::new(file, key)?.read_to_end(&mut content)?;
        Ok(content)
    }

    #[test]
    fn a_file_of_any_length_comes_back_and_shows_nothing_of_its_content() {
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 300_000] {
            let content: Vec<u8> = b"canary".iter().copied().cycle().take(length).collect();
            let file = encrypted(&content);
            assert_eq!(file.len(), 40 + length + TAG * length.div_ceil(PIECE).max(1));
            assert_eq!(decrypted(&file, &KEY).unwrap(), content, "{length}");
            assert!(!file.windows(6).any(|bytes| bytes == b"canary"));
            assert_ne!(file, encrypted(&content), "the same key seals two files alike");
        }
    }

    #[test]
    fn what_was_changed_exchanged_or_cut_off_is_refused_and_so_is_another_key() {
        let file = encrypted(&vec![1; 3 * PIECE]);
        assert!(decrypted(&file, &FileKey([8; 32])).is_err());
        for at in [0, 7, 8, 39, 40, 40 + PIECE, file.len() - 1] {
            let mut changed = file.clone();
            changed[at] ^= 1;
            assert!(decrypted(&changed, &KEY).is_err(), "byte {at}");
        }
        let piece = PIECE + TAG;
        for end in [0, 8, 40, 41, 40 + piece, 40 + 2 * piece, file.len() - 1] {
            assert!(decrypted(&file[..end], &KEY).is_err(), "{end} bytes");
        }
        let exchanged =
            [&file[..40], &file[40 + piece..40 + 2 * piece], &file[40..40 + piece], &file[40 + 2 * piece..]];
        assert!(decrypted(&exchanged.concat(), &KEY).is_err());
        assert!(decrypted(&[&file[..], b"more"].concat(), &KEY).is_err());
    }
}
