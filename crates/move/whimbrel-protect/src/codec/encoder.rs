//! Encoder: reduces pages of one array to a batch of what the standby lacks.
//!
//! Every page is in the batch: one whose blocks all seem unchanged is still sent as its digest, so that a
//! hash collision is detected. Each block to send is first looked up among those of this batch (compared byte
//! by byte before it is shared), then offered to the codes in the order of their cost.

use super::{
    BATCH_PAGES_MAX, BlockSize, ByteCounts, CodecOptions, DIGEST_BYTES,
    bit_io::BitWriter,
    block_hashes::{BlockHashes, PageChange},
    page_digest,
    page_references::ReferenceWriter,
    sections::{RAW_PLAIN, RAW_ZSTD, SECTIONS, Section, join},
    shared_pages::{PageReference, SharingMachine},
    sparse, wkdm,
};
use std::{
    collections::{HashMap, HashSet},
    io,
};
use whimbrel_core::{PAGE_SIZE, varint};
use whimbrel_image::compression::{Settings, compress};

pub(super) const PAGE_ZERO: u64 = 0;
pub(super) const PAGE_WHOLE: u64 = 1;
pub(super) const PAGE_BLOCKS: u64 = 2;
pub(super) const PAGE_SAME: u64 = 3;
pub(super) const PAGE_REFERENCE: u64 = 4;
pub(super) const PAGE_BITS: u32 = 3;

pub(super) const BLOCK_RAW: u32 = 0;
pub(super) const BLOCK_SPARSE: u32 = 1;
pub(super) const BLOCK_WORDS: u32 = 2;
pub(super) const BLOCK_SHARED: u32 = 3;

/// zstd's fastest ordinary level: it gets only what no cheaper code could shrink.
const ZSTD_LEVEL: i32 = 1;

/// Index of the array that is the machine's memory.
const MEMORY: u32 = 0;

/// Encodes batches of pages of one protection.
pub struct Encoder {
    coding: CodecOptions,
    hashes: BlockHashes,
    batch: BatchBuilder,
    seeding: bool,
    /// Present if pages of other machines may be referenced.
    member: Option<SharingMachine>,
    /// Pages that the standby got wrong: they are not referenced again.
    not_referenced: HashSet<(u32, u64)>,
}

#[derive(Default)]
struct BatchBuilder {
    pages: Vec<u8>,
    checks: Vec<u8>,
    masks: Vec<u8>,
    kinds: BitWriter,
    shared: Vec<u8>,
    sparse: Vec<u8>,
    words: wkdm::Packer,
    raw: Vec<u8>,
    references: ReferenceWriter,
    /// All blocks of the batch, and for each hash the first block that has it.
    blocks: Vec<u8>,
    first_blocks: HashMap<u64, u32>,
    volume: ByteCounts,
}

impl Encoder {
    /// An encoder whose table of hashes takes at most `hash_bytes_max`.
    pub fn new(coding: CodecOptions, seed: u64, hash_bytes_max: usize) -> Self {
        let hashes = BlockHashes::new(coding.block, seed, hash_bytes_max);
        Self {
            coding,
            hashes,
            batch: BatchBuilder::default(),
            seeding: false,
            member: None,
            not_referenced: HashSet::new(),
        }
    }

    /// From now on, refers to pages that the standby has of this or another machine, if sharing is on.
    pub fn share_with(&mut self, member: SharingMachine) {
        self.member = Some(member).filter(|_| self.coding.compact);
    }

    /// Pages of the last batch that were sent as references; the standby may request them again.
    pub fn referenced(&self) -> &[u64] {
        self.batch.references.pages()
    }

    /// Bytes that the table of hashes takes.
    pub fn hash_bytes(&self) -> usize {
        self.hashes.bytes()
    }

    /// Starts or ends seeding. A start forgets what the standby has. During seeding only hashes of memory are
    /// recorded: most of a disk is never written again, and would displace what is.
    pub fn set_seeding(&mut self, lasts: bool) {
        if lasts {
            self.hashes.forget_all();
        }
        self.seeding = lasts;
    }

    /// Forgets a page that the standby got wrong, so that all of it is sent next.
    pub fn forget(&mut self, array: u32, page: u64) {
        self.hashes.forget(array, page);
        if self.member.is_some() {
            self.not_referenced.insert((array, page));
        }
    }

    /// Encodes a batch of at most [`BATCH_PAGES_MAX`] pages, in ascending order, each with its content.
    pub fn encode<'a>(
        &mut self,
        array: u32,
        pages: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> io::Result<(Vec<u8>, ByteCounts)> {
        self.batch.clear();
        let mut before = 0;
        for (number, content) in pages.take(BATCH_PAGES_MAX) {
            self.page(array, number, number - before, content);
            before = number;
        }
        self.finish()
    }

    fn page(&mut self, array: u32, number: u64, distance: u64, content: &[u8]) {
        let piece = &mut self.batch;
        piece.volume.pages += 1;
        piece.volume.dirty += PAGE_SIZE as u64;
        let change = match self.seeding && array != MEMORY {
            true => PageChange::New,
            false => self.hashes.change(array, number, content),
        };
        let block = self.coding.block;
        // Remus mode sends what it finds, zeros too.
        if self.coding != CodecOptions::REMUS && whimbrel_core::is_zero(content) {
            return varint::put(&mut piece.pages, distance << PAGE_BITS | PAGE_ZERO);
        }
        if change == PageChange::New
            && let Some(name) = self.reference(array, number, content)
        {
            return self.batch.push_reference(number, distance, name, content);
        }
        let piece = &mut self.batch;
        let (kind, mask) = match change {
            PageChange::New => (PAGE_WHOLE, u64::MAX),
            PageChange::Blocks(0) => (PAGE_SAME, 0),
            PageChange::Blocks(mask) => (PAGE_BLOCKS, mask),
        };
        varint::put(&mut piece.pages, distance << PAGE_BITS | kind);
        if kind != PAGE_WHOLE {
            piece.checks.extend(page_digest(content));
        }
        if kind == PAGE_BLOCKS {
            piece.masks.extend(&mask.to_le_bytes()[..mask_bytes(block)]);
        }
        for (index, bytes) in content.chunks_exact(block.bytes()).enumerate() {
            if mask >> index & 1 == 1 {
                piece.block(&self.coding, bytes);
            }
        }
    }

    /// A reference by which the standby probably has all of this page.
    fn reference(&mut self, array: u32, number: u64, content: &[u8]) -> Option<PageReference> {
        let member = self.member.as_ref()?;
        let plain = self.not_referenced.remove(&(array, number));
        // Without blocks, every page counts as new in every epoch; only during seeding do most pages stay as
        // recorded.
        if self.coding.block == BlockSize::Page && !self.seeding && !plain {
            return None;
        }
        let name = member.find_or_record(array, number, content, plain)?;
        self.batch.references.has_room(&name).then_some(name)
    }

    fn finish(&mut self) -> io::Result<(Vec<u8>, ByteCounts)> {
        let piece = &self.batch;
        let compressed = match self.coding.compact && !piece.raw.is_empty() {
            true => compress(&piece.raw, &[], Settings::level(ZSTD_LEVEL), Vec::new())?,
            false => Vec::new(),
        };
        let pays = !compressed.is_empty() && compressed.len() < piece.raw.len();
        let (raw_code, raw) = if pays { (RAW_ZSTD, &compressed) } else { (RAW_PLAIN, &piece.raw) };
        let raw_length = (piece.raw.len() as u32).to_le_bytes();
        let words = piece.words.streams();
        let words = match words.iter().all(|stream| stream.is_empty()) {
            true => Vec::new(),
            false => {
                let lengths = words.iter().flat_map(|stream| (stream.len() as u32).to_le_bytes());
                lengths.chain(words.iter().flat_map(|stream| stream.iter().copied())).collect()
            }
        };
        let mut parts = [&[][..]; SECTIONS];
        parts[Section::Pages as usize] = &piece.pages;
        parts[Section::Checks as usize] = &piece.checks;
        parts[Section::Masks as usize] = &piece.masks;
        parts[Section::Kinds as usize] = piece.kinds.bytes();
        parts[Section::Shared as usize] = &piece.shared;
        parts[Section::Sparse as usize] = &piece.sparse;
        parts[Section::Words as usize] = &words;
        parts[Section::RawLength as usize] = &raw_length;
        parts[Section::Raw as usize] = raw;
        let raw_code = [raw_code];
        parts[Section::RawCode as usize] = &raw_code;
        let names = piece.references.encoded();
        parts[Section::References as usize] = &names;
        let payload = join(parts);
        let volume = ByteCounts { sent: payload.len() as u64, ..piece.volume };
        Ok((payload, volume))
    }
}

impl BatchBuilder {
    fn clear(&mut self) {
        for part in [&mut self.pages, &mut self.checks, &mut self.masks, &mut self.shared, &mut self.sparse] {
            part.clear();
        }
        self.kinds.clear();
        self.words.clear();
        self.raw.clear();
        self.blocks.clear();
        self.first_blocks.clear();
        self.references.clear();
        self.volume = ByteCounts::default();
    }

    fn push_reference(&mut self, number: u64, distance: u64, name: PageReference, content: &[u8]) {
        varint::put(&mut self.pages, distance << PAGE_BITS | PAGE_REFERENCE);
        self.checks.extend(page_digest(content));
        self.references.push(number, name);
        self.volume.changed += PAGE_SIZE as u64;
    }

    fn block(&mut self, coding: &CodecOptions, block: &[u8]) {
        self.volume.changed += block.len() as u64;
        let index = (self.blocks.len() / block.len()) as u32;
        if coding.compact {
            let hash = xxhash_rust::xxh3::xxh3_64(block);
            match self.first_blocks.get(&hash) {
                Some(first) if self.blocks[*first as usize * block.len()..][..block.len()] == *block => {
                    varint::put(&mut self.shared, u64::from(index - first));
                    self.kinds.push(BLOCK_SHARED, 2);
                    self.blocks.extend_from_slice(block);
                    return;
                }
                Some(_) => {}
                None => {
                    self.first_blocks.insert(hash, index);
                }
            }
            self.blocks.extend_from_slice(block);
        }
        self.volume.unshared += block.len() as u64;
        let kind = if coding.compact && sparse::encode(block, &mut self.sparse) {
            BLOCK_SPARSE
        } else if coding.compact && self.words.push(block) {
            BLOCK_WORDS
        } else {
            self.raw.extend_from_slice(block);
            BLOCK_RAW
        };
        self.kinds.push(kind, 2);
    }
}

pub(super) const fn mask_bytes(block: BlockSize) -> usize {
    block.in_page().div_ceil(8)
}

/// Most bytes of a batch of `pages` pages beside its blocks.
pub const fn overhead_max(pages: usize) -> usize {
    pages * (DIGEST_BYTES + 8 + 10)
}
