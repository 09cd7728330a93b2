//! Pending changes of names: those that the server has yet to make, whether queued, sent or merged.

use super::{
    block_cache::{BlockCache, CacheError, State},
    journal_record::{JournalRecord, MergedChanges},
};
use crate::proto::Op;
use std::collections::HashMap;

impl BlockCache {
    /// Adds a change for the server and returns its number.
    pub fn add_op(&self, op: Op) -> Result<u64, CacheError> {
        let mut state = self.write_state();
        let number = state.next_op;
        state.next_op += 1;
        state.ops.insert(number, op.clone());
        self.log(&mut state, &[JournalRecord::Op { number, op }])?;
        Ok(number)
    }

    /// Removes a change that the server has made or that was given up.
    pub fn op_done(&self, number: u64) -> Result<(), CacheError> {
        let mut state = self.write_state();
        if state.ops.remove(&number).is_none() {
            return Ok(());
        }
        self.log(&mut state, &[JournalRecord::OpDone { number }])
    }

    /// Records that changes below this number may be sent from now on; durable after the next
    /// [`BlockCache::sync`].
    pub fn mark_sent_below(&self, below: u64) -> Result<(), CacheError> {
        let mut state = self.write_state();
        if below <= state.sent {
            return Ok(());
        }
        state.sent = below;
        self.log(&mut state, &[JournalRecord::Sent { below }])
    }

    /// First number of a change that was never sent.
    pub fn first_unsent_op(&self) -> u64 {
        self.read_state().sent
    }

    /// Replaces unsent changes by merged ones. A file that no change creates any more is removed, unless it
    /// is known to be removed and in use.
    pub fn merge_ops(&self, folded: MergedChanges) -> Result<(), CacheError> {
        let mut lost = Vec::new();
        let makes: HashMap<u64, Option<u64>> = folded.makes.iter().copied().collect();
        {
            let mut state = self.write_state();
            let State { files, ops, .. } = &mut *state;
            for (file, held) in files.iter_mut() {
                match held.record.made_by.and_then(|by| makes.get(&by)) {
                    Some(Some(by)) => held.record.made_by = Some(*by),
                    Some(None) if !held.record.removed => lost.push(*file),
                    _ => {}
                }
            }
            folded.gone.iter().for_each(|number| _ = ops.remove(number));
            ops.extend(folded.now.iter().cloned());
            self.log(&mut state, &[JournalRecord::Folded(folded)])?;
        }
        lost.into_iter().try_for_each(|file| self.remove_file(file))
    }

    /// The first `most` changes that `are` wanted.
    pub(crate) fn first_ops(&self, most: usize, are: impl Fn(&u64) -> bool) -> Vec<(u64, Op)> {
        let state = self.read_state();
        let wanted = state.ops.iter().filter(|(number, _)| are(number)).take(most);
        wanted.map(|(number, op)| (*number, op.clone())).collect()
    }

    /// Pending changes in order.
    pub fn ops(&self) -> Vec<(u64, Op)> {
        self.read_state().ops.iter().map(|(number, op)| (*number, op.clone())).collect()
    }
}
