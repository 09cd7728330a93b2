//! GC leases: tell garbage collection which writers are alive and what they pin.
//!
//! A GC lease is a file that its holder keeps locked; the kernel releases the lock when the process dies, so
//! a lease that can be locked is dead. It is created under the shared `gate`, which collection holds
//! exclusively for its last step, and records the collection generation of its birth. `gc` has the argument.

use crate::{
    error::{Result, StoreError},
    file_names::{LEASES, PackId, TEMP, publish, read_checked, set_aside, with_checksum},
    vfs::{Lock, LockMode, LockWait, Vfs},
};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};
use whimbrel_core::Digest;

pub(crate) const GATE: &str = "gate.lock";

/// Objects that a GC lease protects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Objects in any pack that was not condemned at the lease's birth.
    Write,
    /// Only the pinned objects.
    Pin,
}

/// Root whose objects must not be collected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Pinned {
    /// Image tree over this number of pages.
    Image { root: Digest, pages: u64 },
    /// Manifest or blob.
    Object(Digest),
}

/// Generation of garbage collection, and the condemned packs that no new writer may rely on, each with the
/// generation of its condemnation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Condemned {
    pub(crate) generation: u64,
    pub(crate) packs: Vec<(PackId, u64)>,
}

impl Condemned {
    pub(crate) fn read(files: &dyn Vfs) -> Result<Self> {
        let path = crate::file_names::CONDEMNED;
        let Some(text) = read_checked(files, path)? else { return Ok(Self::default()) };
        let parse = || {
            let mut lines = text.lines();
            let generation = lines.next()?.parse().ok()?;
            let pack = |line: &str| {
                let (pack, generation) = line.split_once(' ')?;
                Some((PackId::parse(pack)?, generation.parse().ok()?))
            };
            Some(Self { generation, packs: lines.map(pack).collect::<Option<_>>()? })
        };
        parse().ok_or_else(|| StoreError::SmallFile { path: path.to_owned() })
    }

    /// Begins a new generation if the file is damaged, which is renamed. Packs that were condemned only stay
    /// until a collection condemns them again. The new generation is later than any before: their numbers
    /// grow by one for each collection, and this one by the milliseconds since 1970.
    pub(crate) fn mend(files: &dyn Vfs) -> Result<()> {
        let path = crate::file_names::CONDEMNED;
        match Self::read(files) {
            Err(StoreError::SmallFile { .. }) => {
                tracing::error!(path, "the state of garbage collection is damaged; it begins anew");
                set_aside(files, path)?;
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Self { generation: since.as_millis() as u64, packs: Vec::new() }.write(files)
            }
            other => other.map(drop),
        }
    }

    pub(crate) fn write(&self, files: &dyn Vfs) -> Result<()> {
        let mut text = format!("{}\n", self.generation);
        self.packs.iter().for_each(|(pack, generation)| text += &format!("{pack} {generation}\n"));
        publish(files, "", crate::file_names::CONDEMNED, &with_checksum(&text))
    }

    pub(crate) fn ids(&self) -> HashSet<PackId> {
        self.packs.iter().map(|(pack, _)| *pack).collect()
    }
}

/// Locks the gate: shared to rely on stored objects, exclusive to remove some.
pub(crate) fn gate(files: &dyn Vfs, mode: LockMode) -> Result<Lock> {
    let lock = files.lock(GATE, mode, LockWait::Wait).map_err(StoreError::io("lock", GATE))?;
    lock.ok_or(StoreError::Latched { action: "lock" })
}

/// GC lease that this process holds.
pub(crate) struct GcLease {
    pub(crate) id: u64,
    files: Arc<dyn Vfs>,
    pins: AtomicU32,
    lock: Option<Lock>,
}

impl GcLease {
    /// Creates a lease. The caller has the gate, `generation` is the present one.
    pub(crate) fn new(files: Arc<dyn Vfs>, purpose: Purpose, generation: u64) -> Result<Self> {
        let id = rand::random::<u64>();
        let birth = if purpose == Purpose::Write { generation } else { u64::MAX };
        announce(&*files, &format!("{id:016x}"), &format!("{birth}\n"))?;
        let path = format!("{LEASES}/{id:016x}");
        let mut lease = Self { id, files, pins: AtomicU32::new(0), lock: None };
        // If this fails, dropping the lease removes its file.
        let lock = lease.files.lock(&path, LockMode::Exclusive, LockWait::Wait);
        lease.lock = lock.map_err(StoreError::io("lock", &path))?;
        Ok(lease)
    }

    /// Pins an object until the lease ends. The caller has the gate and knows it to be complete.
    pub(crate) fn pin(&self, pinned: Pinned) -> Result<()> {
        let number = self.pins.fetch_add(1, Ordering::Relaxed);
        let text = match pinned {
            Pinned::Image { root, pages } => format!("image {root} {pages}\n"),
            Pinned::Object(digest) => format!("object {digest}\n"),
        };
        announce(&*self.files, &format!("{:016x}.{number}", self.id), &text)
    }
}

/// Publishes a lease file without a sync: a power failure ends the process and with it the lease.
fn announce(files: &dyn Vfs, name: &str, text: &str) -> Result<()> {
    let (temp, path) = (format!("{TEMP}/{:016x}", rand::random::<u64>()), format!("{LEASES}/{name}"));
    let announced = files
        .create(&temp)
        .and_then(|mut file| file.append(&with_checksum(text)))
        .map_err(StoreError::io("create", &temp))
        .and_then(|()| files.rename(&temp, &path).map_err(StoreError::io("rename", &path)));
    if announced.is_err() {
        let _ = files.remove(&temp);
    }
    announced
}

impl Drop for GcLease {
    fn drop(&mut self) {
        // The next collection removes what cannot be removed now: the lock is released in any case. The first
        // pin goes last: it names the capsule whose images the others are of, so that a collection in between
        // knows whether these may lack pages.
        for number in (0..self.pins.load(Ordering::Relaxed)).rev() {
            let _ = self.files.remove(&format!("{LEASES}/{:016x}.{number}", self.id));
        }
        let _ = self.files.remove(&format!("{LEASES}/{:016x}", self.id));
        drop(self.lock.take());
    }
}

/// GC leases whose holders are alive.
#[derive(Debug, Default)]
pub(crate) struct LiveGcLeases {
    pub(crate) ids: HashSet<u64>,
    pub(crate) pins: Vec<Pinned>,
    /// Birth generation of the oldest lease of a writer, except `own`.
    pub(crate) oldest: u64,
}

/// Reads all leases. Removes dead ones if `bury`, for which the caller must have the exclusive gate.
pub(crate) fn live_leases(files: &dyn Vfs, own: u64, bury: bool) -> Result<LiveGcLeases> {
    let mut living = LiveGcLeases { oldest: u64::MAX, ..LiveGcLeases::default() };
    let names = files.list(LEASES).map_err(StoreError::io("list", LEASES))?;
    for name in names.iter().filter(|name| !name.contains('.')) {
        let Ok(id) = u64::from_str_radix(name, 16) else { continue };
        let path = format!("{LEASES}/{name}");
        if id != own && is_dead(files, &path)? {
            if bury {
                let theirs = names.iter().filter(|other| other.split('.').next() == Some(name));
                theirs.for_each(|file| drop(files.remove(&format!("{LEASES}/{file}"))));
            }
            continue;
        }
        living.ids.insert(id);
        if let Some(text) = read_checked(files, &path)?.filter(|_| id != own) {
            living.oldest = living.oldest.min(text.trim().parse().unwrap_or(0));
        }
    }
    // Pins of dead leases are not read: a power failure may have torn them.
    for name in &names {
        let holder = name.split_once('.').and_then(|(id, _)| u64::from_str_radix(id, 16).ok());
        if holder.is_some_and(|id| living.ids.contains(&id)) {
            living.pins.extend(read_pin(files, &format!("{LEASES}/{name}"))?);
        }
    }
    Ok(living)
}

fn is_dead(files: &dyn Vfs, path: &str) -> Result<bool> {
    // An open fails if the lease just ended; locking would create the file again.
    match files.open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
        other => other.map_err(StoreError::io("open", path))?,
    };
    let lock = files.lock(path, LockMode::Exclusive, LockWait::Try).map_err(StoreError::io("lock", path))?;
    Ok(lock.is_some())
}

fn read_pin(files: &dyn Vfs, path: &str) -> Result<Option<Pinned>> {
    let Some(text) = read_checked(files, path)? else { return Ok(None) };
    let words: Vec<&str> = text.split_whitespace().collect();
    let pinned = match words[..] {
        ["image", root, pages] => {
            root.parse().ok().zip(pages.parse().ok()).map(|(root, pages)| Pinned::Image { root, pages })
        }
        ["object", digest] => digest.parse().ok().map(Pinned::Object),
        _ => None,
    };
    pinned.map(Some).ok_or_else(|| StoreError::SmallFile { path: path.to_owned() })
}
