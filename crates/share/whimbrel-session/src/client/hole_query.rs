//! Holes of the server's files: asked for when a large file is opened, so that nobody waits for zeros,
//! neither who reads them nor who writes a part of a page among them.
//!
//! Nobody waits for the answer either. It is believed as content is: if the file is the one that is known
//! here.

use super::{fetcher::FetchSubject, session::Core};
use crate::{
    cache::{ContentMark, FileId},
    proto::{FileRef, HolesCall, HolesDone, unpack_holes},
};
use bytes::Bytes;
use std::{
    collections::HashMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use whimbrel_wire::Code;

/// Smaller files are not worth the question.
const LEAST: u64 = 1 << 20;
/// Files of which it is known that they were asked about.
const FILES: usize = 4096;

/// What was asked.
#[derive(Default)]
pub(super) struct HoleQueries {
    /// Each file's count when it was asked about.
    epochs: Mutex<HashMap<FileId, u64>>,
    /// The server says nothing of holes.
    mute: AtomicBool,
}

impl HoleQueries {
    /// Whether a file of this count was not asked about yet; from now on it was.
    fn is_new(&self, file: FileId, epoch: u64) -> bool {
        let mut epochs = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        if epochs.len() >= FILES {
            epochs.clear();
        }
        epochs.insert(file, epoch) != Some(epoch)
    }
}

impl Core {
    /// Has the holes of a file on their way, once for each content of it.
    pub(super) fn learn_holes(&self, id: u64, file: FileId, size: u64) {
        if size < LEAST || self.holes.mute.load(Ordering::Relaxed) || !self.options.has_cache() {
            return;
        }
        if !self.cache.epoch(file).is_some_and(|epoch| self.holes.is_new(file, epoch)) {
            return;
        }
        let (core, mark, source) = (self.me.upgrade(), self.cache.mark(file), self.source(id, file));
        let (Some(core), Some(mark), Some(source)) = (core, mark, source) else { return };
        self.link.runtime().spawn(async move {
            let wanted: FileRef = source.wanted.clone();
            match core.link.ask::<HolesCall, _>(wanted, Bytes::new(), None).await.0 {
                Ok((done, payload)) => {
                    let taken =
                        tokio::task::spawn_blocking(move || core.take_holes(&source, mark, &done, &payload));
                    drop(taken.await);
                }
                // An older server.
                Err(fail) if fail.is(Code::UNKNOWN_KIND) => core.holes.mute.store(true, Ordering::Relaxed),
                Err(fail) => tracing::debug!(?fail, "holes of a file are not known"),
            }
        });
    }

    fn take_holes(&self, source: &FetchSubject, asked: ContentMark, done: &HolesDone, payload: &[u8]) {
        let Ok(holes) = unpack_holes(payload) else {
            tracing::warn!("the server said holes that cannot be");
            return;
        };
        if self.is_same(source, &done.attr) {
            self.cache.set_holes(source.file, asked, &holes);
        }
    }
}
