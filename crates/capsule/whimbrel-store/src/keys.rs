//! Keys of an encrypted store, and the file that has them.
//!
//! A random *data key* seals everything; file `keys` has it, wrapped by the *master key*, which is never
//! stored here. A new master key wraps the same data key again, so no pack is rewritten. Pure: bytes in, keys
//! out. `docs/formats/store.md` has every byte.
//!
//! Both keys are 32 random bytes, so derivation needs no slow hash. Ids are digests or random numbers that
//! reveal nothing about a key; they let a wrong key be refused by name.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use std::{fmt, str::FromStr};
use whimbrel_core::Digest;

const FIRST_LINE: &str = "whimbrel store keys 1";
const KEY: usize = 32;
const TAG: usize = 16;
/// Nonce, encrypted data key and tag.
const WRAPPED: usize = NONCE_LEN + KEY + TAG;

/// Name of a key: 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyId(pub(crate) u64);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl KeyId {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let id = Self(u64::from_str_radix(text, 16).ok()?);
        (id.to_string() == text).then_some(id)
    }
}

/// Key that wraps the data key of a store: 64 hexadecimal digits in a file or from a command.
#[derive(Clone, PartialEq, Eq)]
pub struct MasterKey([u8; KEY]);

/// Error for a text that is no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a key is 64 hexadecimal digits")]
pub struct MasterKeyError;

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MasterKey({})", self.id())
    }
}

impl FromStr for MasterKey {
    type Err = MasterKeyError;

    fn from_str(text: &str) -> Result<Self, MasterKeyError> {
        let Digest(bytes) = text.trim().parse().map_err(|_| MasterKeyError)?;
        // Zeros are what a forgotten template gives.
        if bytes == [0; KEY] { Err(MasterKeyError) } else { Ok(Self(bytes)) }
    }
}

impl MasterKey {
    /// Name of the key, which reveals nothing about it.
    pub fn id(&self) -> KeyId {
        let digest = blake3::derive_key("whimbrel store 2026-11-25 master key id", &self.0);
        KeyId(u64::from_be_bytes(std::array::from_fn(|i| digest[i])))
    }

    fn wrapping_key(&self) -> Option<LessSafeKey> {
        let key = blake3::derive_key("whimbrel store 2026-11-25 data key wrap", &self.0);
        aead_key(&key)
    }
}

/// An AES-256-GCM key.
pub(crate) fn aead_key(bytes: &[u8; KEY]) -> Option<LessSafeKey> {
    UnboundKey::new(&AES_256_GCM, bytes).ok().map(LessSafeKey::new)
}

/// Key of everything in a store, unwrapped.
#[derive(Clone, PartialEq, Eq)]
pub struct DataKey {
    pub(crate) id: KeyId,
    bytes: [u8; KEY],
}

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataKey({})", self.id)
    }
}

impl FromStr for DataKey {
    type Err = MasterKeyError;

    /// Reads the output of [`DataKey::reveal`].
    fn from_str(text: &str) -> Result<Self, MasterKeyError> {
        let (id, bytes) = text.split_once(' ').ok_or(MasterKeyError)?;
        let Digest(bytes) = bytes.parse().map_err(|_| MasterKeyError)?;
        Ok(Self { id: KeyId::parse(id).ok_or(MasterKeyError)?, bytes })
    }
}

impl DataKey {
    /// Creates a random key.
    pub(crate) fn random() -> Option<Self> {
        let (mut bytes, mut id) = ([0; KEY], [0; 8]);
        aws_lc_rs::rand::fill(&mut bytes).ok()?;
        aws_lc_rs::rand::fill(&mut id).ok()?;
        Some(Self { id: KeyId(u64::from_be_bytes(id)), bytes })
    }

    /// Name of the key, which reveals nothing about it.
    pub fn id(&self) -> KeyId {
        self.id
    }

    /// Name and bytes of the key, for a process of this host that opens the store too, and never for a file.
    pub fn reveal(&self) -> String {
        format!("{} {}", self.id, Digest(self.bytes))
    }

    /// Key for one purpose, from which the data key and other derived keys do not follow.
    pub(crate) fn derive(&self, purpose: &str) -> [u8; KEY] {
        blake3::derive_key(purpose, &self.bytes)
    }
}

/// Content of file `keys`: the data key, wrapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFile {
    /// Name of the master key that opens it.
    pub master: KeyId,
    /// Name of the data key.
    pub data: KeyId,
    wrapped: [u8; WRAPPED],
}

impl KeyFile {
    /// Wraps a data key; none without random numbers.
    pub(crate) fn wrap(data: &DataKey, master: &MasterKey) -> Option<Self> {
        let mut wrapped = [0; WRAPPED];
        let (nonce, rest) = wrapped.split_at_mut(NONCE_LEN);
        let (key, tag) = rest.split_at_mut(KEY);
        aws_lc_rs::rand::fill(nonce).ok()?;
        key.copy_from_slice(&data.bytes);
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let context = Aad::from(context(master.id(), data.id));
        let sealed = master.wrapping_key()?.seal_in_place_separate_tag(nonce, context, key).ok()?;
        tag.copy_from_slice(sealed.as_ref());
        Some(Self { master: master.id(), data: data.id, wrapped })
    }

    /// The data key; none if the file was changed or another master key wrapped it.
    pub(crate) fn unwrap(&self, master: &MasterKey) -> Option<DataKey> {
        let (nonce, rest) = self.wrapped.split_at(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let context = Aad::from(context(self.master, self.data));
        let mut rest: [u8; KEY + TAG] = rest.try_into().ok()?;
        let key = master.wrapping_key()?.open_in_place(nonce, context, &mut rest).ok()?;
        Some(DataKey { id: self.data, bytes: (&*key).try_into().ok()? })
    }

    /// Lines of the file, without the checksum that every small file has.
    pub fn encode(&self) -> String {
        let wrapped: String = self.wrapped.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{FIRST_LINE}\nmaster {}\ndata {} {wrapped}\n", self.master, self.data)
    }

    /// Decodes the output of [`KeyFile::encode`].
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix('\n')?.split('\n');
        if lines.next()? != FIRST_LINE {
            return None;
        }
        let master = KeyId::parse(lines.next()?.strip_prefix("master ")?)?;
        let (data, wrapped) = lines.next()?.strip_prefix("data ")?.split_once(' ')?;
        let file = Self { master, data: KeyId::parse(data)?, wrapped: unhex(wrapped)? };
        (lines.next().is_none()).then_some(file)
    }
}

fn context(master: KeyId, data: KeyId) -> String {
    format!("{FIRST_LINE} {master} {data}")
}

/// Bytes of lower-case hexadecimal digits.
fn unhex(text: &str) -> Option<[u8; WRAPPED]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * WRAPPED {
        return None;
    }
    let mut bytes = [0; WRAPPED];
    for (byte, pair) in bytes.iter_mut().zip(digits.as_chunks::<2>().0) {
        if !pair.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn master(byte: u8) -> MasterKey {
        Digest([byte; 32]).to_string().parse().unwrap()
    }

    #[test]
    fn only_the_master_key_that_wrapped_it_opens_a_data_key() {
        let data = DataKey::random().unwrap();
        let file = KeyFile::wrap(&data, &master(1)).unwrap();
        let read = KeyFile::parse(&file.encode()).unwrap();
        assert!(read == file && read.unwrap(&master(1)).unwrap() == data);
        assert!(read.unwrap(&master(2)).is_none());
        assert_ne!(master(1).id(), master(2).id());
        let text = file.encode();
        assert!(!text.contains(&Digest(data.bytes).to_string()));
    }

    #[test]
    fn a_data_key_passes_as_text_and_is_not_printed_by_accident() {
        let data = DataKey::random().unwrap();
        let text = data.reveal();
        assert_eq!(text.parse::<DataKey>().unwrap(), data);
        let bytes = text.split_once(' ').unwrap().1;
        assert!(!format!("{data:?}").contains(bytes));
        for wrong in ["", " ", &text[1..], &text[..text.len() - 1], &text.to_uppercase()] {
            assert!(wrong.parse::<DataKey>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_changed_character_of_a_key_file_opens() {
        let (data, key) = (DataKey::random().unwrap(), master(1));
        let text = KeyFile::wrap(&data, &key).unwrap().encode();
        for at in 0..text.len() {
            for with in [b'0', b'7', b'a', b' ', b'\n'] {
                let mut bytes = text.clone().into_bytes();
                if bytes[at] == with {
                    continue;
                }
                bytes[at] = with;
                let read = KeyFile::parse(std::str::from_utf8(&bytes).unwrap());
                assert!(read.is_none_or(|file| file.unwrap(&key).is_none()), "character {at}");
            }
        }
    }

    #[test]
    fn what_is_no_key_is_refused_and_a_key_is_never_printed() {
        for text in ["", "00", &"0".repeat(64), &"1".repeat(63), &"g".repeat(64)] {
            assert!(text.parse::<MasterKey>().is_err(), "{text}");
        }
        let key: MasterKey = format!("{}\n", "ab".repeat(32)).parse().unwrap();
        assert!(!format!("{key:?}").contains("abab"));
    }
}
