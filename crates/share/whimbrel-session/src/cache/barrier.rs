//! Barriers of the cache: everything written before a barrier is durable after it.
//!
//! Frames are synced first. Then a journal record of the barrier says how many records it covers. After that,
//! frames that only an older record promised are free. Callers that arrive during a barrier share the next
//! one.

use super::{
    block_cache::{BlockCache, CacheError, State, io_error, snapshot},
    journal::Journal,
    journal_record::JournalRecord,
    storage::StoragePart,
};
use std::{io, sync::atomic::Ordering};
use whimbrel_core::lock;

impl BlockCache {
    /// Makes everything durable that was written before this call.
    pub fn sync(&self) -> Result<(), CacheError> {
        let wanted = self.barriers_started.load(Ordering::Acquire) + 1;
        let _turn = lock(&self.barrier);
        if self.barriers_done.load(Ordering::Acquire) >= wanted {
            return Ok(());
        }
        let number = self.barriers_started.fetch_add(1, Ordering::AcqRel) + 1;
        let (barrier, generation, records) = {
            let mut state = self.write_state();
            if let Some(action) = state.latched {
                return Err(CacheError::Latched { action });
            }
            (state.index.start_barrier(), state.journal.generation, state.journal.records)
        };
        // Sync without the lock, so that others can read and write meanwhile.
        let synced = self.storage.sync(StoragePart::Frames);
        let mut state = self.write_state();
        self.latch_on_error(&mut state, synced)?;
        // A journal restarted meanwhile is itself a barrier.
        if state.journal.generation == generation {
            self.log(&mut state, &[JournalRecord::Barrier { records }])?;
        }
        let part = state.journal.part();
        drop(state);
        let synced = self.storage.sync(part);
        let mut state = self.write_state();
        self.latch_on_error(&mut state, synced)?;
        state.index.end_barrier(barrier);
        drop(state);
        self.barriers_done.store(number, Ordering::Release);
        Ok(())
    }

    fn latch_on_error(&self, state: &mut State, synced: io::Result<()>) -> Result<(), CacheError> {
        synced.map_err(|source| {
            state.latched = Some("sync");
            CacheError::Io { action: "sync", source }
        })
    }

    /// Restarts the journal without outdated records. Also acts as a barrier.
    pub(super) fn restart_journal(&self, state: &mut State) -> Result<(), CacheError> {
        let barrier = state.index.start_barrier();
        let synced = self.storage.sync(StoragePart::Frames);
        self.latch_on_error(state, synced)?;
        let all = snapshot(&state.index, &state.files, (state.sent, &state.ops));
        let next = Journal::start(&*self.storage, Some(&state.journal), self.geometry, all);
        match next {
            Ok(journal) => state.journal = journal,
            Err(source) => {
                state.latched = Some("write");
                return Err(CacheError::Io { action: "write", source });
            }
        }
        state.index.end_barrier(barrier);
        Ok(())
    }

    /// Writes the state and these records to the other journal, because an append to this one failed: its
    /// place on the disk may be bad, or there was no room for it to grow. Nothing is promised before that
    /// succeeds.
    pub(super) fn log_elsewhere(
        &self,
        state: &mut State,
        records: &[JournalRecord],
        source: io::Error,
    ) -> Result<(), CacheError> {
        // A record of a barrier counts records of the old journal, and the new journal is a barrier itself.
        let rest: Vec<_> = records
            .iter()
            .filter(|record| !matches!(record, JournalRecord::Barrier { .. }))
            .cloned()
            .collect();
        // Most records are in the state by now; to repeat one changes nothing.
        let appended = self
            .restart_journal(state)
            .and_then(|()| state.journal.append(&*self.storage, &rest).map_err(io_error("write")));
        match appended {
            Ok(()) => {
                tracing::warn!(error = %source, "an append to the journal failed; it goes on in the other place");
                Ok(())
            }
            Err(_) => {
                state.latched = Some("write");
                Err(CacheError::Io { action: "write", source })
            }
        }
    }

    /// Ends the session; the journal is marked as ended if nothing is unsent.
    pub fn end(&self) -> Result<(), CacheError> {
        self.sync()?;
        let mut state = self.write_state();
        if state.index.dirty_pages() == 0 && state.ops.is_empty() {
            self.log(&mut state, &[JournalRecord::End])?;
            let part = state.journal.part();
            let synced = self.storage.sync(part);
            self.latch_on_error(&mut state, synced)?;
        }
        Ok(())
    }
}
