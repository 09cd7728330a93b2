//! Pack writer: the thread of a capsule writer that appends frames to packs.
//!
//! Frames arrive over a bounded channel and are appended; a full pack is synced by a thread of its own while
//! the next one fills. A flush waits for all syncs, makes the directory durable, then publishes one index
//! over the packs since the last flush. So a flushed object can be found and survives a power failure.
//!
//! The first failure is final for the writer, since frames after it would be elsewhere than thought. Packs
//! that no index covers are removed at its end.

use crate::{
    error::{Result, StoreError},
    file_names::{PACK_HEAD, PACKS, PackId},
    index::{Entry, PackLocation},
    sealed_frame::{OVERHEAD, PackKey},
    store::Inner,
    vfs::Append,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
};
use whimbrel_core::loss::{Loss, is_back};
use whimbrel_image::{ShortDigest, pack_frame::Kind};

/// Size at which a pack is full.
const PACK_BYTES: usize = 64 << 20;
/// Most frames queued for the disk.
const QUEUE: usize = 64;
/// Entries after which an index is published without a flush, to bound memory: 8 GiB of pages.
const MAX_FRAMES_UNPUBLISHED: usize = 1 << 17;

pub(crate) struct NewFrame {
    pub(crate) kind: Kind,
    pub(crate) depth: u8,
    pub(crate) keys: Vec<ShortDigest>,
    pub(crate) bytes: Vec<u8>,
}

/// First error of any thread of a writer.
pub(crate) type Failure = Arc<OnceLock<Arc<StoreError>>>;

pub(crate) enum Message {
    Frame(NewFrame),
    Flush(SyncSender<Result<()>>),
}

struct OpenPack {
    id: PackId,
    /// Key of the pack's frames, if the store is encrypted.
    key: Option<PackKey>,
    file: Box<dyn Append>,
    len: usize,
}

struct Appender {
    inner: Arc<Inner>,
    lease: u64,
    next: u32,
    open: Option<OpenPack>,
    syncing: Vec<JoinHandle<Result<()>>>,
    packs: Vec<(PackId, u32)>,
    entries: Vec<Entry>,
    /// Whether an index over `packs` may have been published already.
    publishing: bool,
    failure: Failure,
    /// Failures of the store before this writer.
    failures: u64,
}

fn new_pack(inner: &Inner, lease: u64, seq: u32) -> Result<OpenPack> {
    let id = PackId { lease, seq };
    let (id, key) = match &inner.objects.pack_keys {
        Some(keys) => (id.sealed(), Some(keys.of(id.sealed()))),
        None => (id, None),
    };
    let key = key.transpose().map_err(|source| StoreError::Seal { source: source.into() })?;
    let file = inner.files.create(&id.path()).map_err(StoreError::io("create", &id.path()))?;
    Ok(OpenPack { id, key, file, len: PACK_HEAD })
}

/// Starts the thread for the writer with GC lease `lease`. It ends when the sender is dropped; frames that
/// were not flushed are lost.
pub(crate) fn start(
    inner: Arc<Inner>,
    lease: u64,
    failure: Failure,
) -> Result<(SyncSender<Message>, JoinHandle<()>)> {
    let (sender, receiver) = sync_channel(QUEUE);
    let (syncing, packs, entries) = Default::default();
    let (failures, open) = (inner.check_latch()?, None);
    let appender = Appender {
        inner,
        lease,
        next: 0,
        open,
        syncing,
        packs,
        entries,
        publishing: false,
        failure,
        failures,
    };
    let thread = thread::Builder::new().spawn(move || appender.run(receiver));
    Ok((sender, thread.map_err(StoreError::io("start a thread of", "a writer"))?))
}

impl Appender {
    fn run(mut self, messages: Receiver<Message>) {
        for message in messages {
            match message {
                Message::Frame(frame) => {
                    // The next flush reports a failure, and frames until then are dropped.
                    let appended = self.check().and_then(|()| self.append(frame));
                    let _ = self.fail_on_error(appended);
                }
                Message::Flush(reply) => {
                    let flushed = self.check().and_then(|()| self.flush());
                    let _ = reply.send(self.fail_on_error(flushed));
                }
            }
        }
        self.abandon();
    }

    /// Fails after a failure of this writer, or of the store since it began.
    fn check(&self) -> Result<()> {
        if let Some(source) = self.failure.get() {
            return Err(StoreError::Writer { source: source.clone() });
        }
        match self.inner.check_latch()? {
            failures if failures == self.failures => Ok(()),
            _ => Err(StoreError::Latched { action: "write" }),
        }
    }

    fn fail_on_error(&self, result: Result<()>) -> Result<()> {
        match result {
            Err(error) if self.failure.get().is_none() => {
                let source = self.failure.get_or_init(|| Arc::new(error)).clone();
                Err(StoreError::Writer { source })
            }
            other => other,
        }
    }

    fn append(&mut self, frame: NewFrame) -> Result<()> {
        let inner = self.inner.clone();
        let (pack, offset, len) = inner.latching(self.write(&frame.bytes))?;
        let (kind, depth) = (frame.kind, frame.depth);
        self.entries.push(Entry { frame: PackLocation { pack, offset, len, kind, depth }, keys: frame.keys });
        if self.entries.len() >= MAX_FRAMES_UNPUBLISHED { self.flush() } else { Ok(()) }
    }

    /// Appends a frame, sealed if the store is encrypted. Returns its pack, offset and length.
    fn write(&mut self, bytes: &[u8]) -> Result<(PackId, u32, u32)> {
        let full = |open: &OpenPack| open.len + bytes.len() + OVERHEAD > PACK_BYTES && open.len > PACK_HEAD;
        if self.open.as_ref().is_some_and(full) {
            self.close_pack()?;
        }
        let open = match &mut self.open {
            Some(open) => open,
            None => {
                let open = new_pack(&self.inner, self.lease, self.next)?;
                self.next += 1;
                let open = self.open.insert(open);
                let head = open.id.head(self.inner.data_key().map(|key| key.id));
                open.file.append(&head).map_err(StoreError::io("append to", &open.id.path()))?;
                open
            }
        };
        let offset = open.len as u32;
        let sealed = open.key.as_ref().map(|key| key.seal(offset, bytes)).transpose();
        let sealed = sealed.map_err(|source| StoreError::Seal { source: source.into() })?;
        let bytes = sealed.as_deref().unwrap_or(bytes);
        open.file.append(bytes).map_err(StoreError::io("append to", &open.id.path()))?;
        open.len += bytes.len();
        Ok((open.id, offset, bytes.len() as u32))
    }

    fn close_pack(&mut self) -> Result<()> {
        let Some(OpenPack { id, mut file, len, .. }) = self.open.take() else { return Ok(()) };
        self.packs.push((id, len as u32));
        let sync = move || match is_back(Loss::PackNotSynced) {
            true => Ok(()),
            false => file.sync().map_err(StoreError::io("sync", &id.path())),
        };
        let started = thread::Builder::new().spawn(sync);
        self.syncing.push(started.map_err(StoreError::io("start a thread of", "a writer"))?);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.close_pack()?;
        let inner = self.inner.clone();
        for syncing in self.syncing.drain(..) {
            let synced = syncing.join().unwrap_or(Err(StoreError::Latched { action: "sync" }));
            inner.latching(synced)?;
        }
        if self.packs.is_empty() {
            return Ok(());
        }
        if !is_back(Loss::PackNameNotSynced) {
            inner.latching(inner.files.sync_dir(PACKS).map_err(StoreError::io("sync", PACKS)))?;
        }
        self.publishing = true;
        inner.latching(inner.objects.indexes.publish(&self.packs, &self.entries))?;
        self.publishing = false;
        self.packs.clear();
        self.entries.clear();
        Ok(())
    }

    /// Removes packs that are in no index, so that a writer that filled the disk frees the space. If it is
    /// not known whether an index was published, they stay for the next garbage collection.
    fn abandon(mut self) {
        let open = self.open.take().map(|open| open.id);
        self.syncing.drain(..).for_each(|syncing| drop(syncing.join()));
        let Some(published) = self.published() else { return };
        for id in self.packs.iter().map(|(id, _)| *id).chain(open) {
            if !published.contains_key(&id) {
                let _ = self.inner.files.remove(&id.path());
            }
        }
    }

    /// Packs that an index covers, after an attempt to publish one; none if that is not known.
    fn published(&self) -> Option<BTreeMap<PackId, u32>> {
        if !self.publishing {
            return Some(BTreeMap::new());
        }
        let indexes = &self.inner.objects.indexes;
        self.inner.check_latch().and_then(|_| indexes.refresh_whole()).ok().map(|()| indexes.packs())
    }
}
