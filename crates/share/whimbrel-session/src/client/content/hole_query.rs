//! Hole queries: a large file's holes are requested at open, so that reads and partial writes need not wait
//! for zeros.
//!
//! Nobody waits for the answer either. It is used if the file is still the version that is known here.

use super::fetcher::FetchSubject;
use crate::client::session::Core;
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

/// Smallest file for which holes are requested.
const MIN_FILE_SIZE: u64 = 1 << 20;
/// Number of files remembered as queried.
const MAX_FILES: usize = 4096;

#[derive(Default)]
pub(in crate::client) struct HoleQueries {
    epochs: Mutex<HashMap<FileId, u64>>,
    /// Whether the server does not support the query.
    unsupported: AtomicBool,
}

impl HoleQueries {
    /// Whether a file was not queried in this epoch yet; marks it as queried.
    fn is_new(&self, file: FileId, epoch: u64) -> bool {
        let mut epochs = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        if epochs.len() >= MAX_FILES {
            epochs.clear();
        }
        epochs.insert(file, epoch) != Some(epoch)
    }
}

impl Core {
    /// Requests the holes of a file without waiting, once for each version of its content.
    pub(in crate::client) fn query_holes(&self, id: u64, file: FileId, size: u64) {
        if size < MIN_FILE_SIZE || self.holes.unsupported.load(Ordering::Relaxed) || !self.options.has_cache()
        {
            return;
        }
        if !self.cache.epoch(file).is_some_and(|epoch| self.holes.is_new(file, epoch)) {
            return;
        }
        let (core, mark, source) =
            (self.me.upgrade(), self.cache.content_mark(file), self.fetch_subject(id, file));
        let (Some(core), Some(mark), Some(source)) = (core, mark, source) else { return };
        self.connection.runtime().spawn(async move {
            let wanted: FileRef = source.file_ref.clone();
            match core.connection.send::<HolesCall, _>(wanted, Bytes::new(), None).await.0 {
                Ok((done, payload)) => {
                    let taken =
                        tokio::task::spawn_blocking(move || core.store_holes(&source, mark, &done, &payload));
                    drop(taken.await);
                }
                // An older server lacks `HOLES`.
                Err(fail) if fail.is(Code::UNKNOWN_KIND) => {
                    core.holes.unsupported.store(true, Ordering::Relaxed)
                }
                Err(fail) => tracing::debug!(?fail, "cannot get the holes of a file"),
            }
        });
    }

    fn store_holes(&self, source: &FetchSubject, asked: ContentMark, done: &HolesDone, payload: &[u8]) {
        let Ok(holes) = unpack_holes(payload) else {
            tracing::warn!("the server sent an invalid list of holes");
            return;
        };
        if self.is_same(source, &done.attr) {
            self.cache.set_holes(source.file, asked, &holes);
        }
    }
}
