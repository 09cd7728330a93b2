//! Encryption of a store: its keys, a new master key, and sealing what was written before.
//!
//! Sealing the rest is garbage collection that takes plain packs for emptied ones: live frames are copied to
//! sealed packs, and a plain pack is removed when nothing can rely on it any more. So a crash at any point
//! leaves what a collection leaves (`gc` has the argument), and every object can be read meanwhile.

use crate::{
    error::{Result, StoreError},
    file_names::PackId,
    gc::GcRoots,
    gc_lease::Condemned,
    keys::{KeyId, MasterKey},
    layout,
    store::Store,
};
use std::collections::BTreeMap;
use whimbrel_core::{ByteSize, CapsuleId};

/// How a store is encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encryption {
    /// Name of the master key, under which the data key is wrapped.
    pub master: KeyId,
    /// Name of the data key, which seals the content.
    pub data: KeyId,
    /// Bytes of packs that are not sealed yet.
    pub plain: ByteSize,
}

/// Result of [`Store::seal_rest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SealReport {
    /// Bytes of plain packs that are gone.
    pub removed: ByteSize,
    /// Bytes of plain packs that are still there: damaged, in use by a writer, or without room to copy them.
    pub left: ByteSize,
}

impl Store {
    /// How the store is encrypted; none if it is not.
    pub fn encryption(&self) -> Result<Option<Encryption>> {
        let Some(data) = self.inner.data_key() else { return Ok(None) };
        let lost = StoreError::Keys { reason: "`keys` is missing or damaged" };
        let master = layout::master(&*self.inner.files)?.ok_or(lost)?;
        self.inner.objects.indexes.refresh()?;
        Ok(Some(Encryption { master, data: data.id, plain: ByteSize(self.plain_bytes()) }))
    }

    /// Wraps the data key with another master key, which alone opens the store from then on. Packs and open
    /// handles stay as they are. A crash leaves the old master key or the new one.
    pub fn change_master_key(&self, master: &MasterKey) -> Result<()> {
        let inner = &self.inner;
        inner.check_latch()?;
        inner.layout.check(&*inner.files)?;
        let data = inner.data_key().ok_or(StoreError::NotEncrypted)?;
        inner.latching(layout::rewrap(&*inner.files, data, master))
    }

    /// Key for `purpose`, derived from the data key; none if the store is not encrypted. It lasts as long as
    /// the store and changes with no master key.
    pub fn derived_key(&self, purpose: &str) -> Option<[u8; 32]> {
        self.inner.data_key().map(|key| key.derive(purpose))
    }

    /// Seals what was written before the store was encrypted, and collects garbage, like
    /// [`Store::gc_retaining`]. `progress` gets the bytes sealed and the bytes in total, and returns whether
    /// to go on; what was sealed before a cancel stays.
    pub fn seal_rest(
        &self,
        keep: GcRoots,
        also: &[CapsuleId],
        mut progress: impl FnMut(u64, u64) -> bool,
    ) -> Result<SealReport> {
        let inner = &self.inner;
        inner.data_key().ok_or(StoreError::NotEncrypted)?;
        // Packs without an index count, too.
        self.reindex()?;
        let (total, mut left) = (self.plain_bytes(), self.uncondemned()?);
        while left > 0 {
            if !progress(total.saturating_sub(left), total) {
                return Err(StoreError::Cancelled);
            }
            self.gc_retaining(keep, also)?;
            let before = std::mem::replace(&mut left, self.uncondemned()?);
            if left >= before {
                break;
            }
        }
        if self.plain_bytes() > 0 {
            // Packs that were condemned above may go now, if no writer relies on them any more.
            self.gc_retaining(keep, also)?;
        }
        inner.latching(inner.objects.indexes.hide_rest())?;
        let left = self.plain_bytes();
        progress(total.saturating_sub(left), total);
        Ok(SealReport { removed: ByteSize(total.saturating_sub(left)), left: ByteSize(left) })
    }

    /// Packs that are not sealed, if the store is encrypted.
    pub(crate) fn plain_packs(&self) -> BTreeMap<PackId, u32> {
        let mut packs = match self.inner.data_key() {
            Some(_) => self.inner.objects.indexes.packs(),
            None => BTreeMap::new(),
        };
        packs.retain(|pack, _| !pack.is_sealed());
        packs
    }

    fn plain_bytes(&self) -> u64 {
        self.plain_packs().values().map(|len| u64::from(*len)).sum()
    }

    /// Bytes of plain packs whose objects are still to be copied.
    fn uncondemned(&self) -> Result<u64> {
        let condemned = Condemned::read(&*self.inner.files)?.ids();
        let packs = self.plain_packs();
        let rest = packs.iter().filter(|(pack, _)| !condemned.contains(pack));
        Ok(rest.map(|(_, len)| u64::from(*len)).sum())
    }
}

/// The first of the plain `packs`, up to the one that reaches `most` bytes: a collection seals their frames.
pub(crate) fn batch(packs: impl Iterator<Item = (PackId, u64)>, most: u64) -> impl Iterator<Item = PackId> {
    let mut bytes = 0;
    let within = packs.take_while(move |(_, len)| {
        let goes = bytes < most;
        bytes += len;
        goes
    });
    within.map(|(pack, _)| pack)
}
