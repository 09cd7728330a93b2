//! Layout of a store: whether its content is encrypted, and how that begins.
//!
//! The marker file decides: without a data key in it, everything is as it was before there was encryption.
//! A store becomes encrypted in this order, each step durable before the next: the wrapped key and its copy,
//! then the marker. So a marker that names a key has the key beside it, and until then nothing was sealed.
//! Keys that are there are never replaced by new ones, whatever the marker says: somebody may need them.

use crate::{
    error::{Result, StoreError},
    file_names::{
        INDEX, KEYS, KEYS_COPY, LEASES, MARKER, PACKS, PARTIAL, REFS, TEMP, publish, read_checked, set_aside,
        with_checksum,
    },
    gc_lease::{gate, live_leases},
    keys::{DataKey, KeyFile, KeyId, MasterKey},
    vfs::{LockMode, LockWait, Vfs},
};
use std::io;

const PLAIN: &str = "whimbrel store 1\n";
const ENCRYPTED: &str = "whimbrel store 2 ";
const KEYS_LOCK: &str = "keys.lock";

/// How content lies in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    Plain,
    /// Sealed by the data key of this name; packs from before may be plain.
    Encrypted(KeyId),
}

impl Layout {
    /// Content of the marker file.
    pub(crate) fn marker(&self) -> String {
        match self {
            Self::Plain => PLAIN.to_owned(),
            Self::Encrypted(key) => format!("{ENCRYPTED}{key}\n"),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        if text == PLAIN {
            return Some(Self::Plain);
        }
        KeyId::parse(text.strip_prefix(ENCRYPTED)?.strip_suffix('\n')?).map(Self::Encrypted)
    }

    /// Reads the marker file; none if there is none.
    pub(crate) fn read(files: &dyn Vfs) -> Result<Option<Self>> {
        let file = match files.open(MARKER) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(StoreError::io("open", MARKER))?,
        };
        let mut text = vec![0; file.size().map_err(StoreError::io("size", MARKER))?.min(80) as usize];
        file.read_at(0, &mut text).map_err(StoreError::io("read", MARKER))?;
        let text = String::from_utf8_lossy(&text);
        Self::parse(&text).map(Some).ok_or_else(|| StoreError::Layout { found: text.into_owned() })
    }

    /// Fails if the marker is no longer that of this layout.
    pub(crate) fn check(&self, files: &dyn Vfs) -> Result<()> {
        match Self::read(files)? {
            // A marker that is missing was lost, and is made again by the next opening.
            None => Ok(()),
            Some(found) if found == *self => Ok(()),
            Some(_) => Err(StoreError::LayoutChanged),
        }
    }
}

/// Opens the layout of a store, or creates it; encrypts a store that is not, if there is a key.
pub(crate) fn open(
    files: &dyn Vfs,
    create: bool,
    master: Option<&MasterKey>,
) -> Result<(Layout, Option<DataKey>)> {
    let layout = match Layout::read(files) {
        Err(StoreError::Layout { found }) if !is_later(&found) => {
            tracing::error!(found, "the marker of the store is damaged; it is made again");
            set_aside(files, MARKER)?;
            None
        }
        other => other?,
    };
    match (layout, master) {
        (None, _) if !create => Err(StoreError::NoStore { path: String::from(".") }),
        (None, master) => make(files, master),
        (Some(Layout::Plain), None) => Ok((Layout::Plain, None)),
        (Some(Layout::Plain), Some(master)) => encrypt(files, master),
        (Some(Layout::Encrypted(data)), master) => {
            let key = match unlock(files, Some(data), master) {
                Err(StoreError::Keys { .. }) if is_wrong(files, data)? => {
                    let key = unlock(files, None, master)?;
                    tracing::error!("a byte of the store's marker is damaged; it is made again");
                    set_aside(files, MARKER)?;
                    publish(files, "", MARKER, Layout::Encrypted(key.id).marker().as_bytes())?;
                    key
                }
                other => other?,
            };
            Ok((Layout::Encrypted(key.id), Some(key)))
        }
    }
}

/// Opens the layout of an encrypted store for a process that was given its data key.
pub(crate) fn open_with(files: &dyn Vfs, data: &DataKey) -> Result<(Layout, Option<DataKey>)> {
    match Layout::read(files)? {
        Some(layout) if layout == Layout::Encrypted(data.id) => Ok((layout, Some(data.clone()))),
        _ => Err(StoreError::Keys { reason: "the data key is that of another store" }),
    }
}

/// Whether a marker is one of a later version, and not damaged.
fn is_later(marker: &str) -> bool {
    let version = marker.strip_prefix("whimbrel store ").and_then(|rest| rest.strip_suffix('\n'));
    let number = version.and_then(|version| version.split(' ').next()?.parse::<u32>().ok());
    number.is_some_and(|number| number > 2)
}

/// Whether a byte of the marker's key is damaged: both copies of the keys name one data key, which differs
/// from it in one byte. Keys that differ in more are those of another store.
pub(crate) fn is_wrong(files: &dyn Vfs, data: KeyId) -> Result<bool> {
    Ok(match [read_copy(files, KEYS)?, read_copy(files, KEYS_COPY)?] {
        [Some(one), Some(other)] => one.data == other.data && differing_bytes(one.data, data) == 1,
        _ => false,
    })
}

fn differing_bytes(one: KeyId, other: KeyId) -> usize {
    (one.0 ^ other.0).to_be_bytes().into_iter().filter(|byte| *byte != 0).count()
}

/// Makes a store. The marker comes last, so a store with a marker has its directories.
fn make(files: &dyn Vfs, master: Option<&MasterKey>) -> Result<(Layout, Option<DataKey>)> {
    if master.is_none() && has_keys(files)? {
        // The marker of an encrypted store was lost.
        unlock(files, None, master)?;
    }
    for dir in [PACKS, INDEX, REFS, LEASES, PARTIAL, TEMP] {
        files.make_dir(dir).map_err(StoreError::io("create", dir))?;
    }
    files.sync_dir("").map_err(StoreError::io("sync", "."))?;
    let key = master.map(|master| first_key(files, master)).transpose()?;
    let layout = key.as_ref().map_or(Layout::Plain, |key| Layout::Encrypted(key.id));
    publish(files, "", MARKER, layout.marker().as_bytes())?;
    Ok((layout, key))
}

/// Makes a plain store encrypted: what is written from now on is sealed.
fn encrypt(files: &dyn Vfs, master: &MasterKey) -> Result<(Layout, Option<DataKey>)> {
    // A handle from before would go on writing plain packs and take sealed ones for damage.
    let _gate = gate(files, LockMode::Exclusive)?;
    if live_leases(files, 0, false)?.oldest != u64::MAX {
        return Err(StoreError::InUse);
    }
    let key = match Layout::read(files)? {
        Some(Layout::Encrypted(data)) => unlock(files, Some(data), Some(master))?,
        _ => first_key(files, master)?,
    };
    let layout = Layout::Encrypted(key.id);
    publish(files, "", MARKER, layout.marker().as_bytes())?;
    Ok((layout, Some(key)))
}

/// The data key that is there, or a new one, durable under both names.
fn first_key(files: &dyn Vfs, master: &MasterKey) -> Result<DataKey> {
    if has_keys(files)? {
        return unlock(files, None, Some(master));
    }
    let none = || StoreError::Keys { reason: "there are no random numbers" };
    let key = DataKey::random().ok_or_else(none)?;
    write(files, &KeyFile::wrap(&key, master).ok_or_else(none)?)?;
    Ok(key)
}

fn has_keys(files: &dyn Vfs) -> Result<bool> {
    for name in [KEYS, KEYS_COPY] {
        match files.open(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // One that cannot be opened is there all the same.
            _ => return Ok(true),
        }
    }
    Ok(false)
}

/// Publishes the wrapped key under both names. It counts once the first is there.
fn write(files: &dyn Vfs, keys: &KeyFile) -> Result<()> {
    let bytes = with_checksum(&keys.encode());
    publish(files, "", KEYS, &bytes)?;
    publish(files, "", KEYS_COPY, &bytes)
}

/// Reads one copy of the wrapped key; none if it is missing or damaged, or the disk does not give it.
fn read_copy(files: &dyn Vfs, name: &str) -> Result<Option<KeyFile>> {
    match read_checked(files, name) {
        Ok(text) => Ok(text.as_deref().and_then(KeyFile::parse)),
        Err(error) => {
            tracing::error!(
                name,
                error = &error as &dyn std::error::Error,
                "a copy of the keys cannot be read"
            );
            Ok(None)
        }
    }
}

/// Unwraps the data key of the store, which should have the name `data`. Writes nothing before that
/// succeeded.
fn unlock(files: &dyn Vfs, data: Option<KeyId>, master: Option<&MasterKey>) -> Result<DataKey> {
    let copies = [read_copy(files, KEYS)?, read_copy(files, KEYS_COPY)?];
    let lost = StoreError::Keys { reason: "`keys` and `keys.copy` are missing or damaged" };
    let is_ours = |keys: &&KeyFile| data.is_none_or(|data| data == keys.data);
    let keys = match copies.iter().flatten().find(is_ours) {
        Some(keys) => keys,
        None if copies.iter().flatten().next().is_none() => return Err(lost),
        None => return Err(StoreError::Keys { reason: "`keys` is that of another store" }),
    };
    let Some(master) = master else { return Err(StoreError::KeyNeeded { master: keys.master }) };
    if keys.master != master.id() {
        return Err(StoreError::WrongKey { wanted: keys.master, given: master.id() });
    }
    let key = keys.unwrap(master).ok_or(StoreError::Keys { reason: "`keys` was changed by somebody" })?;
    let is_old = |copy: &Option<KeyFile>| copy.as_ref().is_none_or(|c| c != keys && c.data == keys.data);
    if copies.iter().any(is_old)
        && let Err(error) = heal(files, keys)
    {
        tracing::warn!(error = &error as &dyn std::error::Error, "cannot renew a copy of the keys");
    }
    Ok(key)
}

/// Writes both copies again after one was damaged, or left behind by a rotation that was killed.
fn heal(files: &dyn Vfs, keys: &KeyFile) -> Result<()> {
    let _lock = lock_keys(files)?;
    // Somebody may have wrapped the key again meanwhile.
    match read_copy(files, KEYS)? {
        Some(newer) if newer != *keys => Ok(()),
        _ => write(files, keys),
    }
}

fn lock_keys(files: &dyn Vfs) -> Result<Option<crate::vfs::Lock>> {
    files.lock(KEYS_LOCK, LockMode::Exclusive, LockWait::Wait).map_err(StoreError::io("lock", KEYS_LOCK))
}

/// Wraps the data key with another master key. From the moment that the first file has its name, only the new
/// one opens the store.
pub(crate) fn rewrap(files: &dyn Vfs, key: &DataKey, master: &MasterKey) -> Result<()> {
    let _lock = lock_keys(files)?;
    let cannot = StoreError::Keys { reason: "there are no random numbers" };
    let keys = KeyFile::wrap(key, master).ok_or(cannot)?;
    if keys.unwrap(master).as_ref() != Some(key) {
        return Err(StoreError::Keys { reason: "the key that was wrapped does not come back" });
    }
    write(files, &keys)
}

/// Name of the master key that opens the store.
pub(crate) fn master(files: &dyn Vfs) -> Result<Option<KeyId>> {
    Ok(read_copy(files, KEYS)?.map(|keys| keys.master))
}
