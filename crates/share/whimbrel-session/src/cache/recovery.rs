//! Recovery: replays the journal after a crash and checks it against the frames.
//!
//! The last durable barrier promises the newest record of each block before it. Later records may lack their
//! content. They are tried from the newest on, and one is valid if each dirty page has a checksum that some
//! record of that frame gave it. A promised page is therefore always found. For an unsynced page, that page
//! or an older one is found, or its loss is reported.

use super::{
    block_cache::{CacheError, LostWrite, io_error, page_sum},
    block_index::{Block, BlockIndex, Geometry, Key, ZERO},
    journal::Journal,
    journal_record::{FileId, FileRecord, JournalRecord, MergedChanges},
    storage::{Storage, StoragePart},
};
use crate::proto::{Op, PAGE};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
};

#[derive(Debug, Clone)]
struct BlockRecord {
    number: u64,
    frame: Option<u32>,
    valid: u64,
    dirty: u64,
    sums: Box<[u32]>,
}

/// State of a cache according to its journal.
pub(super) struct Replayed {
    pub(super) index: BlockIndex,
    pub(super) files: HashMap<FileId, FileRecord>,
    pub(super) ops: BTreeMap<u64, Op>,
    pub(super) next_file: FileId,
    pub(super) next_op: u64,
    /// Changes below this number may have been sent.
    pub(super) sent: u64,
    pub(super) lost: Vec<LostWrite>,
    /// Whether the previous session ended in order.
    pub(super) ended: bool,
}

impl Replayed {
    /// Whether there is anything that the server does not have.
    pub(super) fn has_unsent(&self) -> bool {
        self.index.dirty_pages() > 0
            || !self.ops.is_empty()
            || self.files.values().any(|record| record.dirty && !record.removed)
    }
}

/// Whether a closed cache has anything that the server does not have. Changes nothing.
pub fn has_unsent(medium: &dyn Storage) -> Result<bool, CacheError> {
    let Some((_, geometry, records)) = Journal::read(medium).map_err(io_error("open"))? else {
        return Ok(false);
    };
    Ok(replay(medium, geometry, records).map_err(io_error("open"))?.has_unsent())
}

/// State according to the records alone, before any frame is read.
#[derive(Default)]
struct ReplayState {
    blocks: HashMap<Key, Vec<BlockRecord>>,
    files: HashMap<FileId, FileRecord>,
    ops: BTreeMap<u64, Op>,
    next_file: FileId,
    next_op: u64,
    sent: Option<u64>,
    barrier: u64,
    ended: bool,
}

impl ReplayState {
    fn apply(&mut self, number: u64, record: JournalRecord, geometry: Geometry) {
        self.ended = record == JournalRecord::End;
        match record {
            JournalRecord::Block { file, block, frame, valid, dirty, sums } => {
                let Some(sums) = sums_by_page(valid, &sums, geometry) else { return };
                let sound = dirty & !valid == 0 && frame.is_none_or(|frame| frame < geometry.frames);
                if sound {
                    let said = BlockRecord { number, frame, valid, dirty, sums };
                    self.blocks.entry(Key { file, block }).or_default().push(said);
                }
            }
            JournalRecord::NoBlock { file, block } => {
                let nothing = BlockRecord { number, frame: None, valid: 0, dirty: 0, sums: Box::default() };
                self.blocks.entry(Key { file, block }).or_default().push(nothing);
            }
            JournalRecord::File { file, record } => {
                self.next_file = self.next_file.max(file.saturating_add(1));
                self.files.insert(file, record);
            }
            JournalRecord::NoFile { file } => drop(self.files.remove(&file)),
            JournalRecord::Op { number, op } => {
                self.apply_op(&op);
                self.next_op = self.next_op.max(number.saturating_add(1));
                self.ops.insert(number, op);
            }
            JournalRecord::OpDone { number } => drop(self.ops.remove(&number)),
            JournalRecord::Barrier { records } => self.barrier = self.barrier.max(records),
            JournalRecord::End => {}
            JournalRecord::Sent { below } => self.sent = self.sent.max(Some(below)),
            JournalRecord::Folded(folded) => self.merge(folded),
        }
    }
}

impl ReplayState {
    fn merge(&mut self, folded: MergedChanges) {
        let makes: HashMap<u64, Option<u64>> = folded.makes.into_iter().collect();
        self.files.retain(|_, record| {
            let made = record.made_by.and_then(|by| makes.get(&by).copied());
            record.made_by = made.unwrap_or(record.made_by);
            made != Some(None)
        });
        folded.gone.iter().for_each(|number| _ = self.ops.remove(number));
        self.ops.extend(folded.now);
    }

    /// Applies a change of names to the files known so far, in case of a crash before their own records were
    /// written. A file that takes a name is recorded under it before the change is.
    fn apply_op(&mut self, op: &Op) {
        let op = op.plain();
        if let Op::Unlink { path, .. } | Op::Rename { path, .. } = &op {
            self.files.retain(|_, record| record.removed || record.path != *path);
        }
        let Op::Rename { from, path, .. } = &op else { return };
        for record in self.files.values_mut().filter(|record| !record.removed) {
            if let Some(moved) = record.path.moved(from, path) {
                record.path = moved;
            }
        }
    }
}

fn sums_by_page(valid: u64, sums: &[u32], geometry: Geometry) -> Option<Box<[u32]>> {
    if valid & !geometry.all() != 0 || valid.count_ones() as usize != sums.len() {
        return None;
    }
    let mut rest = sums.iter();
    let of = |page: u32| if valid >> page & 1 == 1 { rest.next().copied() } else { None };
    Some((0..geometry.pages).map(of).map(Option::unwrap_or_default).collect())
}

pub(super) fn replay(
    medium: &dyn Storage,
    geometry: Geometry,
    records: Vec<JournalRecord>,
) -> io::Result<Replayed> {
    let mut words = ReplayState::default();
    for (number, record) in records.into_iter().enumerate() {
        words.apply(number as u64, record, geometry);
    }
    let mut index = BlockIndex::new(geometry);
    let (mut lost, mut taken, mut clean) = (Vec::new(), HashSet::new(), Vec::new());
    for (key, said) in words.blocks {
        let Some(file) = words.files.get(&key.file).filter(|file| !file.removed) else { continue };
        // The newest record before the barrier is promised; older ones are outdated.
        let from = said.iter().rposition(|said| said.number < words.barrier).unwrap_or(0);
        let window = &said[from..];
        let Some(newest) = window.last() else { continue };
        if newest.dirty == 0 {
            clean.push((key, newest.clone()));
            continue;
        }
        match newest_valid(medium, geometry, window)? {
            Some(block) if block.dirty != 0 => {
                taken.extend(block.frame);
                index.restore_block(key, block);
            }
            Some(_) | None => lost.push(LostWrite {
                path: file.path.clone(),
                offset: key.block.saturating_mul(geometry.block()),
                pages: newest.dirty.count_ones(),
            }),
        }
    }
    // If several clean blocks claim one frame, the newest record is right.
    clean.sort_by_key(|(_, said)| std::cmp::Reverse(said.number));
    for (key, said) in clean {
        if said.valid != 0 && said.frame.is_none_or(|frame| taken.insert(frame)) {
            index.restore_block(key, block_of(&said, said.sums.clone()));
        }
    }
    index.finish_restore();
    let ReplayState { files, ops, next_file, next_op, sent, ended, .. } = words;
    // A journal without a `Sent` record is older than this rule: any change may have been sent.
    let sent = if ops.is_empty() { 0 } else { sent.unwrap_or(next_op) };
    Ok(Replayed { index, files, ops, next_file, next_op, sent, lost, ended })
}

fn block_of(said: &BlockRecord, sums: Box<[u32]>) -> Block {
    let BlockRecord { frame, valid, dirty, .. } = *said;
    Block { frame, valid, dirty, sums, generation: u32::from(dirty != 0), frozen: dirty != 0 }
}

/// The newest record whose dirty pages are in the frame.
fn newest_valid(
    medium: &dyn Storage,
    geometry: Geometry,
    window: &[BlockRecord],
) -> io::Result<Option<Block>> {
    for said in window.iter().rev() {
        if said.valid == 0 {
            return Ok(None);
        }
        if let Some(block) = verify(medium, geometry, said, window)? {
            return Ok(Some(block));
        }
    }
    Ok(None)
}

fn verify(
    medium: &dyn Storage,
    geometry: Geometry,
    said: &BlockRecord,
    window: &[BlockRecord],
) -> io::Result<Option<Block>> {
    let mut sums = said.sums.clone();
    let Some(frame) = said.frame else { return Ok(Some(block_of(said, sums))) };
    let (mut page_bytes, start) = ([0; PAGE], u64::from(frame) * geometry.block());
    for page in (0..geometry.pages as usize).filter(|page| said.dirty >> page & 1 == 1) {
        let at = start + (page * PAGE) as u64;
        let whole = medium.read(StoragePart::Frames, at, &mut page_bytes)? == PAGE;
        let found = whole.then(|| page_sum(&page_bytes));
        // Any of several writes to the same frame may have reached the disk. Zeros are never stored: if the
        // frame holds nothing recorded after them, the page is zeros.
        let others = window.iter().rev();
        let others = others.filter(|other| other.frame == said.frame && other.valid >> page & 1 == 1);
        let mut there =
            others.map(|other| other.sums[page]).filter(|sum| *sum == ZERO || Some(*sum) == found);
        match there.next() {
            Some(sum) => sums[page] = sum,
            None => return Ok(None),
        }
    }
    Ok(Some(block_of(said, sums)))
}
