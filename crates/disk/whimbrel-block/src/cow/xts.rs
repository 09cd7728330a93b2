//! Sector cipher: AES-256-XTS over sectors of 512 bytes, as IEEE 1619 has it. One of the two modules of this
//! crate with `unsafe`: the safe interface of the library lacks this mode, so it calls the C functions.
//!
//! A ciphertext has the length of its sector, so sectors are replaced in place and a power failure leaves the
//! old one or the new one, like a disk. An authenticated cipher would need a tag elsewhere, which a power
//! failure separates from its sector. Price: who changes a ciphertext garbles the 16 bytes in the same place,
//! and who has two copies of a sector sees which 16 bytes differ.

use aws_lc_sys::{
    EVP_CIPHER_CTX, EVP_CIPHER_CTX_free, EVP_CIPHER_CTX_new, EVP_DecryptInit_ex, EVP_DecryptUpdate,
    EVP_EncryptInit_ex, EVP_EncryptUpdate, EVP_aes_256_xts,
};
use std::{
    ptr::{NonNull, null, null_mut},
    sync::{Mutex, PoisonError},
};

/// Bytes of a sector, the unit of encryption.
pub(super) const SECTOR: usize = 512;
/// Bytes of the two keys of XTS.
const KEYS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Encrypt,
    Decrypt,
}

/// Error of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the cipher of the disk refused to work")]
pub struct CipherError;

/// State of the library for one direction, with its keys.
struct Context(NonNull<EVP_CIPHER_CTX>);

// SAFETY: a context is memory of the heap that no thread owns; functions change it only through the pointer,
// and `&mut self` lets one thread at a time do that.
unsafe impl Send for Context {}

impl Context {
    fn new(keys: &[u8; KEYS], direction: Direction) -> Result<Self, CipherError> {
        // SAFETY: takes no arguments; null means that there is no memory.
        let context = Self(NonNull::new(unsafe { EVP_CIPHER_CTX_new() }).ok_or(CipherError)?);
        let init = match direction {
            Direction::Encrypt => EVP_EncryptInit_ex,
            Direction::Decrypt => EVP_DecryptInit_ex,
        };
        // SAFETY: the context is new and alive, the cipher is static, the engine may be null, `keys` has the
        // 64 bytes that this cipher reads, and a null tweak leaves it for later.
        let done = unsafe { init(context.0.as_ptr(), EVP_aes_256_xts(), null_mut(), keys.as_ptr(), null()) };
        if done == 1 { Ok(context) } else { Err(CipherError) }
    }

    /// Encrypts or decrypts a sector in place.
    fn sector(
        &mut self,
        direction: Direction,
        number: u64,
        sector: &mut [u8; SECTOR],
    ) -> Result<(), CipherError> {
        let (mut tweak, mut written) = ([0; 16], 0);
        tweak[..8].copy_from_slice(&number.to_le_bytes());
        let (init, update): (
            unsafe extern "C" fn(_, _, _, _, _) -> _,
            unsafe extern "C" fn(_, _, _, _, _) -> _,
        ) = match direction {
            Direction::Encrypt => (EVP_EncryptInit_ex, EVP_EncryptUpdate),
            Direction::Decrypt => (EVP_DecryptInit_ex, EVP_DecryptUpdate),
        };
        let (context, bytes) = (self.0.as_ptr(), sector.as_mut_ptr());
        // SAFETY: the context is alive and has its cipher and keys, which null arguments keep; `tweak` has
        // the 16 bytes that this cipher reads.
        let begun = unsafe { init(context, null(), null_mut(), null(), tweak.as_ptr()) };
        // SAFETY: the context has its tweak. XTS writes as many bytes as it reads, at once, and may do so in
        // place: both pointers are to the 512 bytes of `sector`, which nothing else borrows.
        let done = begun == 1 && unsafe { update(context, bytes, &mut written, bytes, SECTOR as i32) } == 1;
        if done && written == SECTOR as i32 { Ok(()) } else { Err(CipherError) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `EVP_CIPHER_CTX_new` and is freed here only.
        unsafe { EVP_CIPHER_CTX_free(self.0.as_ptr()) };
    }
}

/// Cipher of one file. Threads take contexts from it, so that each works with its own.
pub struct SectorCipher {
    keys: [u8; KEYS],
    encrypting: Mutex<Vec<Context>>,
    decrypting: Mutex<Vec<Context>>,
}

impl SectorCipher {
    /// Bytes of a sector, the unit of encryption.
    pub const SECTOR: usize = SECTOR;

    /// Cipher with these two keys of 32 bytes. No two files may have the same.
    pub fn new(keys: [u8; KEYS]) -> Self {
        Self { keys, encrypting: Mutex::default(), decrypting: Mutex::default() }
    }

    /// Encrypts complete sectors, of which `first` is the number of the first.
    pub fn encrypt(&self, first: u64, bytes: &mut [u8]) -> Result<(), CipherError> {
        self.each(Direction::Encrypt, first, bytes)
    }

    /// Decrypts complete sectors. One of zeros stays so: that is a hole of the file, as no text has a
    /// ciphertext of zeros that anybody could find.
    pub fn decrypt(&self, first: u64, bytes: &mut [u8]) -> Result<(), CipherError> {
        self.each(Direction::Decrypt, first, bytes)
    }

    fn each(&self, direction: Direction, first: u64, bytes: &mut [u8]) -> Result<(), CipherError> {
        let pool = match direction {
            Direction::Encrypt => &self.encrypting,
            Direction::Decrypt => &self.decrypting,
        };
        let idle = pool.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut context = idle.map_or_else(|| Context::new(&self.keys, direction), Ok)?;
        for (number, sector) in (first..).zip(bytes.as_chunks_mut::<SECTOR>().0) {
            if direction == Direction::Encrypt || *sector != [0; SECTOR] {
                context.sector(direction, number, sector)?;
            }
        }
        pool.lock().unwrap_or_else(PoisonError::into_inner).push(context);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = hex.as_bytes().as_chunks::<2>().0.iter();
        digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    #[test]
    fn a_sector_is_encrypted_as_the_standard_says() {
        // IEEE 1619-2007, annex B, vector 10.
        let keys = "2718281828459045235360287471352662497757247093699959574966967627\
                    3141592653589793238462643383279502884197169399375105820974944592";
        let cipher = SectorCipher::new(bytes(keys).try_into().unwrap());
        let plain: Vec<u8> = (0..SECTOR).map(|i| i as u8).collect();
        let mut sector = plain.clone();
        cipher.encrypt(0xff, &mut sector).unwrap();
        assert_eq!(sector[..32], bytes("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b"));
        cipher.decrypt(0xff, &mut sector).unwrap();
        assert_eq!(sector, plain);
    }

    #[test]
    fn a_hole_is_zeros_and_equal_sectors_differ_by_their_place() {
        let cipher = SectorCipher::new(std::array::from_fn(|i| i as u8));
        let mut hole = vec![0; 2 * SECTOR];
        cipher.decrypt(7, &mut hole).unwrap();
        assert_eq!(hole, vec![0; 2 * SECTOR]);
        let mut zeros = vec![0; 2 * SECTOR];
        cipher.encrypt(7, &mut zeros).unwrap();
        assert_ne!(zeros[..SECTOR], zeros[SECTOR..]);
        assert_ne!(zeros[..SECTOR], [0; SECTOR]);
        cipher.decrypt(7, &mut zeros).unwrap();
        assert_eq!(zeros, hole);
    }
}
