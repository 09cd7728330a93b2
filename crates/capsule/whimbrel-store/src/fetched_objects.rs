//! Fetched objects: objects that came from other hosts and are not in packs yet.
//!
//! They are readable at once, from memory. A thread writes them to packs in batches, each with its own
//! writer, because a writer that never ends would hold back garbage collection. A crash loses at most the
//! last batch, which is fetched again. Nothing here is acknowledged: a full or failing disk does not stop
//! readers, and past [`LIMIT`] objects that cannot be written are dropped.

use crate::{
    error::Result,
    store::{Inner, Store},
};
use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    thread,
    time::Duration,
};
use whimbrel_core::{Digest, lock};
use whimbrel_image::pack_frame::Kind;

/// Bytes after which a batch is written.
const BATCH: usize = 8 << 20;
/// Longest time before an object is written.
const MAX_DELAY: Duration = Duration::from_secs(1);
/// Most bytes in memory while the disk does not accept them.
const LIMIT: usize = 256 << 20;

#[derive(Default)]
struct State {
    pending: HashMap<Digest, (Kind, Arc<[u8]>)>,
    bytes: usize,
    running: bool,
}

#[derive(Default)]
pub(crate) struct FetchedObjects {
    state: Mutex<State>,
    wakeup: Condvar,
    /// Lock that allows one batch to be written at a time.
    writing: Mutex<()>,
}

impl FetchedObjects {
    pub(crate) fn has(&self, digest: &Digest) -> bool {
        lock(&self.state).pending.contains_key(digest)
    }

    pub(crate) fn get(&self, digest: &Digest) -> Option<Arc<[u8]>> {
        lock(&self.state).pending.get(digest).map(|(_, bytes)| bytes.clone())
    }

    /// Adds objects whose digests were checked.
    pub(crate) fn store(
        &self,
        inner: &Inner,
        kind: Kind,
        objects: impl IntoIterator<Item = (Digest, Vec<u8>)>,
    ) {
        let mut state = lock(&self.state);
        for (digest, bytes) in objects {
            if state.bytes + bytes.len() > LIMIT {
                tracing::warn!("dropping fetched objects, because the store cannot write them");
                state.pending.clear();
                state.bytes = 0;
            }
            state.bytes += bytes.len();
            if let Some((_, old)) = state.pending.insert(digest, (kind, bytes.into())) {
                state.bytes -= old.len();
            }
        }
        if !state.running && !state.pending.is_empty() {
            state.running = start(inner.weak_self.clone());
        }
        if state.bytes >= BATCH {
            self.wakeup.notify_all();
        }
    }

    fn write(&self, store: &Store) -> Result<()> {
        let _one = lock(&self.writing);
        let mut batch: Vec<(Digest, Kind, Arc<[u8]>)> = lock(&self.state)
            .pending
            .iter()
            .map(|(digest, (kind, bytes))| (*digest, *kind, bytes.clone()))
            .collect();
        if batch.is_empty() {
            return Ok(());
        }
        batch.sort_unstable_by_key(|(_, kind, _)| *kind as u8);
        let writer = store.writer()?;
        for kinds in batch.chunk_by(|a, b| a.1 == b.1) {
            let objects: Vec<&[u8]> = kinds.iter().map(|(_, _, bytes)| &**bytes).collect();
            writer.put_objects(kinds[0].1, &objects, group(kinds[0].1))?;
        }
        writer.flush()?;
        let mut state = lock(&self.state);
        for (digest, _, bytes) in &batch {
            if state.pending.remove(digest).is_some() {
                state.bytes -= bytes.len();
            }
        }
        Ok(())
    }
}

/// Objects in a frame.
pub(crate) fn group(kind: Kind) -> usize {
    match kind {
        Kind::Pages => 16,
        Kind::Nodes => 8,
        _ => 1,
    }
}

/// Starts the thread that writes batches; it ends with the store, or after some idle time.
fn start(inner: Weak<Inner>) -> bool {
    thread::Builder::new().name(String::from("store-shadow")).spawn(move || run(&inner)).is_ok()
}

fn run(inner: &Weak<Inner>) {
    let mut idle = 0;
    while let Some(inner) = inner.upgrade() {
        {
            let waits = |state: &mut State| state.bytes < BATCH;
            let state = lock(&inner.fetched.state);
            let (mut state, _) = inner
                .fetched
                .wakeup
                .wait_timeout_while(state, MAX_DELAY, waits)
                .unwrap_or_else(PoisonError::into_inner);
            idle = if state.pending.is_empty() { idle + 1 } else { 0 };
            if idle > 5 {
                state.running = false;
                return;
            }
        }
        let store = Store { inner };
        if let Err(error) = store.inner.fetched.write(&store) {
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot write fetched objects yet");
            thread::sleep(MAX_DELAY);
        }
    }
}

/// Stores objects that were fetched other than by reading an image, such as a capsule that is pulled
/// completely.
#[derive(Clone)]
pub struct FetchedObjectsWriter {
    store: Store,
}

impl Store {
    /// Returns a writer for fetched objects.
    pub fn fetched_objects_writer(&self) -> FetchedObjectsWriter {
        FetchedObjectsWriter { store: self.clone() }
    }
}

impl FetchedObjectsWriter {
    /// Stores objects under digests computed here. They are readable at once and durable after a flush.
    pub fn store(&self, kind: Kind, objects: &[&[u8]]) -> Result<()> {
        let inner = &self.store.inner;
        inner.check_latch()?;
        let objects = objects.iter().map(|bytes| (Digest::of(bytes), bytes.to_vec()));
        inner.fetched.store(inner, kind, objects);
        if lock(&inner.fetched.state).bytes > 4 * BATCH {
            // More than the disk accepts: the fetching thread waits for it.
            self.flush()?;
        }
        Ok(())
    }

    /// Waits until all stored objects are durable.
    pub fn flush(&self) -> Result<()> {
        self.store.inner.fetched.write(&self.store)
    }
}

whimbrel_core::opaque_debug!(FetchedObjectsWriter);
